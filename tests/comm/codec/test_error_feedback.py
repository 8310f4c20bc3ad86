"""Error feedback: errors that do not accumulate, skipped steps, loss scales, inf and nan, padding."""

import pytest
import torch

from lightning_hybrid.comm.codec.block_format import BLOCK
from lightning_hybrid.comm.codec.codec import Codec, Coder
from lightning_hybrid.comm.codec.encoder import Blocks
from lightning_hybrid.comm.codec.error_feedback import ErrorFeedback
from lightning_hybrid.comm.codec.padded_bucket import PaddedBucket
from lightning_hybrid.comm.hook import from_wire, to_wire

CPU = torch.device("cpu")
NUMELS = (300, 1000)
NUM_BLOCKS = 6
BITS = pytest.mark.parametrize("bits", [8, 4])


class OneNode:
    def __init__(self, bits=4, *, may_skip=True):
        self.coder = Coder(Codec(bits=bits, error_feedback=True), CPU)
        self.padded = PaddedBucket(NUMELS, [0, 2], dtype=torch.float32, device=CPU)
        self.feedback = ErrorFeedback(NUM_BLOCKS, device=CPU, add_up_=None, is_leader=True)
        self.feedback.may_skip = may_skip

    def send(self, gradients, *, scale=None, is_skipped=False, cut=()):
        """Send `gradients` multiplied by `scale`, and return the values that other nodes decode, divided by `scale`."""
        if scale is None:
            factor = 1.0
            self.feedback.begin_step(None)
        else:
            factor = scale
            self.feedback.begin_step(torch.tensor(scale))
        wire = self.padded.load(gradients * factor, before=1)
        bucket = self.feedback.bucket(0, self.padded, split_rule=cut, divisor=1, is_last=True)
        message = torch.empty(self.coder.codec.message_bytes(wire.numel()), dtype=torch.uint8)
        Blocks.of(self.coder, wire, self.padded.ids, bucket).encode(wire, message, sender=0)
        self.coder.add(message[None], wire)
        self.feedback.end_step(torch.tensor(is_skipped))
        return self.padded.store(wire, buffer=torch.empty(sum(NUMELS)), after=factor)

    @property
    def residual(self):
        return self.feedback.share(0, NUM_BLOCKS, CPU)


def gradients(seed):
    return torch.randn(sum(NUMELS), generator=torch.Generator().manual_seed(seed))


@BITS
@pytest.mark.parametrize("may_skip", [False, True])
def test_all_that_was_sent_is_all_gradients_but_for_one_residual(bits, may_skip):
    node = OneNode(bits, may_skip=may_skip)
    sent = torch.zeros(sum(NUMELS), dtype=torch.float64)
    total = torch.zeros(sum(NUMELS), dtype=torch.float64)
    for seed in range(20):
        sent += node.send(gradients(seed))
        total += gradients(seed)
    first, second = node.residual.split([2 * BLOCK, 4 * BLOCK])
    owed = torch.cat([first[: NUMELS[0]], second[: NUMELS[1]]])
    # Each step rounds e, Q(e) and their difference to float32: 3 times 2^-24 of numbers below 16.
    assert float((total - sent - owed).abs().max()) < 20 * 3 * 16 * 2**-24
    largest_code = 127 if bits == 8 else 7
    step = gradients(0).abs().max() / largest_code
    assert 0 < float(owed.abs().max()) < 4 * step  # and it does not grow


def test_a_sum_whose_outcome_nobody_has_said_counts_for_nothing():
    node = OneNode()
    node.send(gradients(0))
    before = node.residual
    for cut in ((), ("otherwise",), ("otherwise",)):
        node.send(gradients(1), cut=cut)
        node.feedback._step.is_skipped = None
        assert torch.equal(node.residual, before)


@BITS
def test_residuals_follow_the_loss_scale(bits):
    """With scales that are powers of two, all bits equal those at a constant scale."""
    node = OneNode(bits)
    at_constant_scale = OneNode(bits)
    for seed, scale in enumerate((1024.0, 2048.0, 1.0, 2.0**20)):
        sent = node.send(gradients(seed), scale=scale)
        expected = at_constant_scale.send(gradients(seed), scale=16.0)
        assert torch.equal(sent, expected), f"scale {scale}"
        assert torch.equal(node.residual, at_constant_scale.residual), f"scale {scale}"


@BITS
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_inf_and_nan_are_sent_and_not_kept(bits, bad):
    node = OneNode(bits, may_skip=False)
    node.send(gradients(0))
    wrong = gradients(1)
    wrong[700] = bad
    sent = node.send(wrong)
    assert not sent[700].isfinite()
    assert node.residual.isfinite().all()
    assert node.send(gradients(2)).isfinite().all()


def test_what_fills_a_block_up_keeps_no_residual():
    node = OneNode(4)
    for seed in range(3):
        node.send(gradients(seed))
    first, second = node.residual.split([2 * BLOCK, 4 * BLOCK])
    assert not first[300:].any()
    assert not second[1000:].any()
    assert first[:300].all()


@pytest.mark.parametrize("wire", [torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_padded_bucket_divides_and_rounds_as_the_hook_does_without_a_codec(dtype, wire):
    values = torch.randn(3 + 256 + 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    bucket = PaddedBucket([3, 256, 300], [0, 1, 2], dtype=wire, device=CPU)
    buffer = values.clone()
    plain = values.clone()
    padded = bucket.load(buffer, before=2)
    expected = to_wire(plain, wire, before=2)
    gradients = torch.cat([padded[:3], padded[256:512], padded[512:812]])
    assert torch.equal(gradients, expected)
    assert bucket.store(padded, buffer=buffer, after=1.5) is buffer
    assert torch.equal(buffer, from_wire(expected, buffer=plain, after=1.5))
