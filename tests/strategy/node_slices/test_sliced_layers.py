"""Heads and attention cut over the ranks of a node, held against whole ones. And what is refused in a step."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_hybrid.strategy.node_slices.slice_exchange import NodeRanks
from lightning_hybrid.strategy.node_slices.sliced_fit import cut_
from lightning_hybrid.strategy.node_slices.vocabulary import token_losses
from tests import toy


def cut(whole, *names):
    """A copy of which each rank has a slice. Copied once more, as a user may in a fit."""
    layers = nn.ModuleDict({"one": copy.deepcopy(whole)})
    cut_(layers, [tuple(f"one{name}" for name in names or [""])], NodeRanks(dist.group.WORLD))
    return copy.deepcopy(layers["one"])


def head_on_extremes(dtype):
    """Losses and gradients of features for logits far apart, cut and whole. Targets on either rank, and one on none."""
    torch.manual_seed(0)
    whole = nn.Linear(5, 7).to(dtype)
    with torch.no_grad():
        whole.weight.mul_(60)
    head = cut(whole)
    features = torch.randn(5, 5, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)
    targets = torch.tensor([0, 6, -100, 2, 3])
    results = []
    for is_cut in (True, False):
        x = features.clone().requires_grad_()
        losses = token_losses(head if is_cut else whole, x, targets)
        if not is_cut:
            assert torch.equal(losses, F.cross_entropy(whole(x).float(), targets, reduction="none"))
        losses.mul(torch.arange(1.0, 6.0)).sum().backward()
        results.append((losses.detach(), x.grad.float()))
    return results


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 2**-8)], ids=str
)
def test_the_heads_losses_are_those_of_cross_entropy(two_ranks, dtype, bound):
    for (losses, gradients), (expected, expected_gradients) in two_ranks.run(
        head_on_extremes, dtype
    ):
        assert losses.dtype is torch.float32
        assert (
            losses - expected
        ).abs().max() <= 1e-5 * expected.abs().max()  # of the same logits, in fp32
        assert (
            gradients - expected_gradients
        ).abs().max() <= bound * expected_gradients.abs().max()


def head_over_tokens():
    """Logits, losses and gradients of a head on `[b, t, n]`, cut and whole."""
    torch.manual_seed(0)
    whole = nn.Linear(5, 7)
    head = cut(whole)
    features = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    targets = torch.randint(7, (4, 3), generator=torch.Generator().manual_seed(dist.get_rank()))
    results = []
    for layer in (head, whole):
        x = features.clone().requires_grad_()
        logits = layer(x)
        F.cross_entropy(
            logits.transpose(1, 2), targets
        ).backward()  # a gradient with gaps in memory
        results.append((logits.detach(), x.grad, token_losses(layer, features, targets).detach()))
    return results


def test_a_head_over_tokens_gives_logits_and_losses_of_each(two_ranks):
    for result, expected in two_ranks.run(head_over_tokens):
        for got, wanted in zip(result, expected, strict=True):
            assert got.shape == wanted.shape
            assert (got - wanted).abs().max() < 1e-6


def embeddings():
    """Rows of an embedding, cut and whole, and the gradient of all its rows."""
    torch.manual_seed(0)
    whole = nn.Embedding(7, 4, padding_idx=5)
    tokens = torch.tensor([[0, 5], [3, 6 - dist.get_rank()]])
    nn.init.ones_(whole.weight)
    layer = cut(whole)
    results = []
    for one in (layer, whole):
        rows = one(tokens)
        rows.sum().backward()
        results.append((rows.detach(), one.weight.grad))
    sums = results[1][1] / 2  # over both ranks, as DDP averages
    dist.all_reduce(sums)
    return (
        results[0][0],
        vars(layer)["sliced"].slices["weight"].gather_whole(results[0][1]),
        results[1][0],
        sums,
    )


def test_an_embedding_by_tokens_gives_padding_no_gradient(two_ranks):
    for rows, gradient, *expected in two_ranks.run(embeddings):
        assert torch.equal(rows, expected[0])
        assert torch.equal(gradient, expected[1])


def sum_of_halves():
    parts = torch.full((4, 7), [2048.0, 1.0, 1.0, 0.0][dist.get_rank()], dtype=torch.float16)
    return NodeRanks(dist.group.WORLD).reduce_scatter(parts)


def test_halves_are_summed_in_fp32_and_rounded_once(four_ranks):
    """In fp16 2048 + 1 is 2048 again."""
    assert all(
        torch.equal(result, torch.full((1, 7), 2050.0).half())
        for result in four_ranks.run(sum_of_halves)
    )


MASKS = [
    {},
    {"attn_mask": torch.ones(3, 3).triu(1).bool()},
    {"key_padding_mask": torch.tensor([[False, False, True]] * 2)},
]


def attentions():
    """Outputs and gradients of an attention, cut and whole, for each mask. The sequence is first, keys are apart."""
    torch.manual_seed(0)
    whole = nn.MultiheadAttention(8, 4)
    results = []
    attention = cut(whole, "", ".out_proj")
    generator = torch.Generator().manual_seed(dist.get_rank())
    query, memory = (torch.randn(3, 2, 8, generator=generator) for _ in range(2))
    for masks in (*MASKS, MASKS[1] | MASKS[2], MASKS[1] | {"is_causal": True}):
        for one in (attention, whole):
            x = query.clone().requires_grad_()
            out, _ = one(x, memory, memory, need_weights=False, **masks)
            out.square().sum().backward()
            results.append((out.detach(), x.grad))
    return results


def test_attention_by_heads_is_that_of_all_heads(two_ranks):
    for result in two_ranks.run(attentions):
        for cut_one, whole_one in zip(result[::2], result[1::2], strict=True):
            for got, wanted in zip(cut_one, whole_one, strict=True):
                assert (got - wanted).abs().max() < 2e-6


def refusals():
    attention = cut(nn.MultiheadAttention(8, 4, batch_first=True), "", ".out_proj")
    rank = dist.get_rank()
    tokens = torch.tensor([0, 6 + rank])
    x = torch.zeros(2, 3, 8)
    masks = [
        {"attn_mask": torch.zeros(8, 3, 3)},
        {"attn_mask": torch.zeros(3, 3) if rank else None},
    ]
    calls = [
        (token_losses, cut(nn.Linear(5, 6)), torch.zeros(2, 5), tokens),
        (cut(nn.Embedding(7, 4)), tokens),
        (cut(nn.Linear(3, 4)), torch.zeros(2 + rank, 3)),
        (attention, x, x, x),
        *((partial(attention, need_weights=False, **mask), x, x, x) for mask in masks),
        (partial(attention, need_weights=False, key_padding_mask=torch.zeros(3, 3)), x, x, x),
    ]
    return [toy.error_of(*call) for call in calls]


def test_what_ranks_cannot_compute_together_is_an_error_on_all_of_them(two_ranks):
    for targets, tokens, batch, weights, heads, alone, part in two_ranks.run(refusals):
        assert "`targets` or tokens (=0 to 7) must be from 0 to 5, or -100" in targets
        assert "`targets` or tokens (=0 to 7) must be from 0 to 6. Check" in tokens
        assert "must have the same size on all ranks that share a layer (they have [2, 3])" in batch
        assert weights.startswith("ValueError: `need_weights` (=True) must be False")
        assert heads.startswith("ValueError: `need_weights` (=False) must be False")
        assert "must have the same shapes on all ranks of a node" in alone
        assert part.startswith(
            "ValueError: An input (of shape (3, 1, 1, 3)) of layers in `node_slices` must have one"
        )
