"""Residuals of rounding: errors that do not add up, steps that were skipped, loss scales, inf and nan, padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.comm.codec.block_format import BLOCK
from lightning_hybrid.comm.codec.codec import Codec, Coder
from lightning_hybrid.comm.codec.encoder import Blocks
from lightning_hybrid.comm.codec.error_feedback import ErrorFeedback
from lightning_hybrid.comm.codec.padded_bucket import PaddedBucket
from lightning_hybrid.strategy.feedback_state import share_of_node

CPU = torch.device("cpu")
NUMELS = (300, 1000)
NUM_BLOCKS = 6
BITS = pytest.mark.parametrize("bits", [8, 4])


class OneNode:
    """A node of one rank that sends its gradients, in one bucket."""

    def __init__(self, bits=4, *, may_skip=True):
        self.coder = Coder(Codec(bits=bits, error_feedback=True), CPU)
        self.padded = PaddedBucket(NUMELS, [0, 2], dtype=torch.float32, device=CPU)
        self.feedback = ErrorFeedback(NUM_BLOCKS, device=CPU, add_up_=None, is_leader=True)
        self.feedback.may_skip = may_skip

    def send(self, gradients, *, scale=None, is_skipped=False, cut=()):
        """What other nodes decode of `gradients`, multiplied by `scale`; without it."""
        factor = 1.0 if scale is None else scale
        self.feedback.begin_step(None if scale is None else torch.tensor(scale))
        wire = self.padded.load(gradients * factor, before=1)
        bucket = self.feedback.bucket(0, self.padded, cut=cut, divisor=1, is_last=True)
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
    steps = [gradients(seed) for seed in range(20)]
    sent = sum(node.send(one).double() for one in steps)
    owed = node.residual.split([2 * BLOCK, 4 * BLOCK])
    owed = torch.cat([row[:numel] for row, numel in zip(owed, NUMELS, strict=True)])
    total = sum(one.double() for one in steps)
    # Each step rounds e, Q(e) and their difference to float32: 3 times 2^-24 of numbers below 16.
    assert float((total - sent - owed).abs().max()) < 20 * 3 * 16 * 2**-24
    step = gradients(0).abs().max() / (127 if bits == 8 else 7)
    assert 0 < float(owed.abs().max()) < 4 * step  # and it does not grow


@BITS
def test_a_skipped_step_leaves_the_residual_as_it_was(bits):
    node, other = OneNode(bits), OneNode(bits)
    for seed in (0, 1):
        node.send(gradients(seed), scale=8.0)
        other.send(gradients(seed), scale=8.0)
    before = node.residual
    node.send(gradients(2), scale=8.0, is_skipped=True)
    assert torch.equal(node.residual, before)
    bad = gradients(3)
    bad[5] = torch.inf
    node.send(bad, scale=8.0, is_skipped=True)
    assert torch.equal(node.residual, before)
    assert torch.equal(node.send(gradients(4), scale=4.0), other.send(gradients(4), scale=4.0))
    assert torch.equal(node.residual, other.residual)


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
    """Scales are powers of two: all bits are those of a constant one."""
    node, other = OneNode(bits), OneNode(bits)
    for seed, scale in enumerate((1024.0, 2048.0, 1.0, 2.0**20)):
        assert torch.equal(node.send(gradients(seed), scale=scale), other.send(gradients(seed), scale=16.0))
        assert torch.equal(node.residual, other.residual)


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


@BITS
def test_a_bucket_that_is_cut_or_made_otherwise_takes_its_residuals_along(bits):
    node, other = OneNode(bits), OneNode(bits)
    for seed in range(4):
        sent = node.send(gradients(seed), scale=2.0**seed, cut=(seed // 2,), is_skipped=seed == 1)
        assert torch.equal(sent, other.send(gradients(seed), scale=2.0**seed, is_skipped=seed == 1))
        node.padded = PaddedBucket(NUMELS, [0, 2], dtype=torch.float32, device=CPU)
    assert torch.equal(node.residual, other.residual)
    assert len(list(node.feedback._of_earlier_sums())) == 1


@BITS
def test_what_was_saved_goes_on_to_the_bit(bits):
    node, other = OneNode(bits), OneNode(bits)
    for seed in range(3):
        node.send(gradients(seed), scale=8.0)
    other.feedback.load(node.residual)
    assert torch.equal(other.residual, node.residual)  # before its first step, too
    assert torch.equal(other.send(gradients(3), scale=2.0), node.send(gradients(3), scale=2.0))
    assert torch.equal(other.residual, node.residual)


NODES = st.lists(st.integers(1, 9), min_size=2, max_size=6)


@given(NODES, st.integers(0, 2**32))
def test_the_sum_over_nodes_is_kept_over_other_numbers_of_nodes(counts, seed):
    """To one unit in the last place of the sum for each division; there and back as well."""
    rows = torch.randn(counts[0], 40, generator=torch.Generator().manual_seed(seed))
    expected = rows.double().sum(0)
    for num_nodes in counts[1:]:
        rows = torch.stack([share_of_node(rows, node=n, num_nodes=num_nodes, growth=1.0) for n in range(num_nodes)])
        error = (rows.double().sum(0) - expected).abs()
        unit = torch.finfo(torch.float32).eps * expected.abs()
        assert bool((error <= unit * len(counts) + 1e-45).all())


def test_as_many_nodes_take_their_own_residuals():
    rows = torch.randn(3, 5)
    assert all(torch.equal(share_of_node(rows, node=n, num_nodes=3, growth=1.0), rows[n]) for n in range(3))
    assert torch.equal(share_of_node(rows, node=1, num_nodes=3, growth=2.0), 2 * rows[1])
