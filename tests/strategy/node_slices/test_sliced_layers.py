"""Layers cut over the ranks of a node, held against whole layers under DistributedDataParallel."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_hybrid.strategy.node_slices import slice_exchange
from lightning_hybrid.strategy.node_slices.sliced_linear import SlicedHead
from tests import toy
from tests.scenes import fit


def head_of(whole):
    return SlicedHead.cut_(copy.deepcopy(whole), group=dist.group.WORLD)


def head_on_extremes(dtype):
    """Losses and gradients of features for logits far apart, cut and whole; targets on either rank, and one on none."""
    torch.manual_seed(0)
    whole = nn.Linear(5, 6).to(dtype)
    with torch.no_grad():
        whole.weight.mul_(60)
    head = head_of(whole)
    features = torch.randn(5, 5, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)
    targets = torch.tensor([0, 5, -100, 2, 3])
    found = []
    for is_cut in (True, False):
        x = features.clone().requires_grad_()
        losses = head(x, targets) if is_cut else F.cross_entropy(whole(x).float(), targets, reduction="none")
        losses.mul(torch.arange(1.0, 6.0)).sum().backward()
        found.append((losses.detach(), x.grad.float()))
    return found


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 2**-8)], ids=str)
def test_the_heads_losses_are_those_of_cross_entropy(two_ranks, dtype, bound):
    for (losses, gradients), (expected, expected_gradients) in two_ranks.run(head_on_extremes, dtype):
        assert losses.dtype is torch.float32
        assert (losses - expected).abs().max() <= 1e-5 * expected.abs().max()  # of the same logits, in fp32
        assert (gradients - expected_gradients).abs().max() <= bound * expected_gradients.abs().max()


def head_over_tokens():
    torch.manual_seed(0)
    whole = nn.Linear(5, 6)
    head = head_of(whole)
    features = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    targets = torch.randint(6, (4, 3), generator=torch.Generator().manual_seed(dist.get_rank()))
    found = []
    for layer in (head, whole):
        x = features.clone().requires_grad_()
        logits = layer(x)
        F.cross_entropy(logits.transpose(1, 2), targets).backward()  # a gradient with gaps in memory
        losses = F.cross_entropy(whole(x).transpose(1, 2), targets, reduction="none")
        found.append((logits.detach(), x.grad, (head(features, targets) if layer is head else losses).detach()))
    head.gather()
    found.append((head(features).detach(), found[0][1], head(features, targets).detach()))
    return found


def test_a_head_over_tokens_gives_logits_and_losses_of_each(two_ranks):
    for *cut, (logits, _, losses) in two_ranks.run(head_over_tokens):
        expected = cut[1]
        for one in (cut[0], (logits, expected[1], losses)):
            for got, wanted in zip(one, expected, strict=True):
                assert got.shape == wanted.shape
                assert (got - wanted).abs().max() < 1e-6


def sum_of_halves():
    parts = torch.full((4, 7), [2048.0, 1.0, 1.0, 0.0][dist.get_rank()], dtype=torch.float16)
    return slice_exchange.sum_to_own_images(parts, dist.group.WORLD)


def test_halves_are_summed_in_fp32_and_rounded_once(four_ranks):
    """In fp16 2048 + 1 is 2048 again."""
    assert all(torch.equal(found, torch.full((1, 7), 2050.0).half()) for found in four_ranks.run(sum_of_halves))


class Cut(toy.Toy):
    def configure_model(self):
        self.last = head_of(nn.Linear(3, 4))


def test_the_strategy_refuses_slices(two_ranks):
    """It would take a slice for the whole, in overflow, trust ratios and checkpoints."""
    for seen in fit(two_ranks, Cut, raises=True):
        assert seen.error.startswith("ValueError: `last` (=SlicedHead) must be a whole layer")


def refusals():
    calls = [
        (head_of(nn.Linear(5, 6)), torch.zeros(2, 5), torch.tensor([0, 6])),
        (head_of, nn.Linear(4, 5)),
        (head_of(nn.Linear(3, 4)), torch.zeros(2 + dist.get_rank(), 3)),
    ]
    return [toy.error_of(*call) for call in calls]


def test_a_class_that_there_is_not_and_what_does_not_divide_are_errors_on_all(two_ranks):
    for targets, features, batch in two_ranks.run(refusals):
        assert "`targets` (=0 to 6) must be classes from 0 to 5" in targets
        assert features.startswith("ValueError: `out_features` (=5) must be a multiple of the 2 ranks of the group")
        assert "must have the same size on all ranks that share a layer, and they have [2, 3]" in batch
