"""Layers cut over the ranks of a node, held against whole layers under DistributedDataParallel."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_hybrid.strategy.node_slices import slice_exchange
from lightning_hybrid.strategy.node_slices.sliced_fit import cut_
from lightning_hybrid.strategy.node_slices.sliced_linear import SlicedHead
from tests import toy

NUM_IMAGES, NUM_CLASSES = 6, 8


class Net(nn.Module):
    """Two layers as fc6 and fc7, and a head."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.fc6, self.fc7, self.fc8 = nn.Linear(10, 16), nn.Linear(16, 14), nn.Linear(14, NUM_CLASSES)


def cut(net):
    cut_(net, [("fc6", "fc7"), ("fc8",)], dist.group.WORLD)
    return net


def head_of(whole):
    head = copy.deepcopy(whole)
    head = SlicedHead.cut_(head, group=dist.group.WORLD)
    return head


def loaded():
    """Whether a state dict goes from whole to sliced layers, and back, to the bit."""
    whole = Net()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(1)
    other = cut(Net())
    result = other.load_state_dict(whole.state_dict())
    state = other.state_dict()
    again = Net()
    again.load_state_dict(state)
    return [*result.missing_keys, *result.unexpected_keys], all(
        map(torch.equal, again.state_dict().values(), whole.state_dict().values())
    )


def test_state_dicts_go_between_whole_and_sliced_layers(two_ranks):
    assert two_ranks.run(loaded) == [([], True)] * 2


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
    """Logits, losses and gradients of a head on `[b, t, n]`, cut, whole, and cut but gathered."""
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


def unknown_class():
    head = head_of(nn.Linear(5, 6))
    return toy.error_of(head, torch.zeros(2, 5), torch.tensor([0, 6]))


def test_a_class_that_there_is_not_is_an_error_on_all(two_ranks):
    assert all("`targets` (=0 to 6) must be classes from 0 to 5" in error for error in two_ranks.run(unknown_class))


def bytes_sent_by_a_pair():
    """In forward and backward, by what is handed to collectives: each rank's share goes to every other."""
    sent, size = [], dist.get_world_size()
    gather, exchange = slice_exchange.all_gather, dist.all_to_all_single
    with pytest.MonkeyPatch.context() as patch:

        def gathers(whole, own, group):
            sent.append((size - 1) * own.numel() * own.element_size())
            gather(whole, own, group=group)

        def exchanges(arrived, parts, group):
            sent.append((size - 1) * parts.numel() * parts.element_size() // size)
            exchange(arrived, parts, group=group)

        patch.setattr(slice_exchange, "all_gather", gathers)
        patch.setattr(dist, "all_to_all_single", exchanges)
        net = cut(Net())
        net.fc7(net.fc6(torch.randn(NUM_IMAGES, 10, requires_grad=True)).relu()).sum().backward()
    return sum(sent)


def test_a_pair_sends_the_images_and_not_the_weights(four_ranks):
    expected = 2 * (4 - 1) * NUM_IMAGES * (10 + 14) * 4
    count = 3 * 8  # of images, to refuse other sizes
    assert four_ranks.run(bytes_sent_by_a_pair) == [expected + count] * 4


def test_alexnet_of_64_images_on_8_ranks_sends_5_4_times_fewer_bytes():
    """All gradients of fc6, fc7 and fc8 against features around fc6 and fc7, and the gradients of a whole fc8; fp16."""
    pair, fc8 = 9216 * 4096 + 4096 + 4096 * 4096 + 4096, 4096 * 1000 + 1000
    whole = 2 * 7 / 8 * 2 * (pair + fc8)
    cut = 2 * 7 * 64 * (9216 + 4096) * 2 + 2 * 7 / 8 * 2 * fc8
    assert (round(whole / 1e6), round(cut / 1e6)) == (205, 38)
    assert round(whole / cut, 1) == 5.4


class Cut(toy.Toy):
    def configure_model(self):
        self.last = head_of(nn.Linear(3, 4))


def fit_of_slices():
    return toy.error_of(toy.trainer().fit, Cut(), toy.loader())


def test_the_strategy_refuses_slices(two_ranks):
    """It would take a slice for the whole, in overflow, trust ratios and checkpoints."""
    for text in two_ranks.run(fit_of_slices):
        assert text.startswith("ValueError: `last` (=SlicedHead) must be a whole layer"), text


def refusals():
    images = torch.zeros(2 + dist.get_rank(), 3)
    return toy.error_of(head_of, nn.Linear(4, 5)), toy.error_of(head_of(nn.Linear(3, 4)), images)


def test_what_does_not_divide_is_refused(two_ranks):
    for features, batch in two_ranks.run(refusals):
        assert features.startswith("ValueError: `out_features` (=5) must be a multiple of the 2 ranks of the group")
        assert "must have the same size on all ranks that share a layer, and they have [2, 3]" in batch
