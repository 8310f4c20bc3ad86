"""Sliced heads, embeddings and attention compared with whole layers, and errors within a step."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_hybrid.strategy.node_slices.slice_exchange import NodeRanks
from lightning_hybrid.strategy.node_slices.sliced_fit import cut_
from lightning_hybrid.strategy.node_slices.sliced_layers import Entrance
from lightning_hybrid.strategy.node_slices.vocabulary import token_losses
from tests import toy


def cut(whole, *names):
    """Return a copy of a layer of which each rank has a slice. It is copied once more, as user code may do in a fit."""
    layers = nn.ModuleDict({"layer": copy.deepcopy(whole)})
    group = tuple(f"layer{name}" for name in names or [""])
    cut_(layers, [group], NodeRanks(dist.group.WORLD))
    return copy.deepcopy(layers["layer"])


def head_on_extremes(dtype):
    """Return losses and gradients, sliced and whole, for extreme logits. One target belongs to no rank."""
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
    for rank, (cut_head, whole_head) in enumerate(two_ranks.run(head_on_extremes, dtype)):
        losses, gradients = cut_head
        expected, expected_gradients = whole_head
        assert losses.dtype is torch.float32, f"rank {rank}"
        # Computed from the same logits in fp32.
        assert (losses - expected).abs().max() <= 1e-5 * expected.abs().max(), f"rank {rank}"
        error = (gradients - expected_gradients).abs().max()
        assert error <= bound * expected_gradients.abs().max(), f"rank {rank}"


def head_over_tokens():
    """Return logits, gradients and losses of a head on `[b, t, n]`, sliced and whole."""
    torch.manual_seed(0)
    whole = nn.Linear(5, 7)
    head = cut(whole)
    features = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    targets = torch.randint(7, (4, 3), generator=torch.Generator().manual_seed(dist.get_rank()))
    results = []
    for layer in (head, whole):
        x = features.clone().requires_grad_()
        logits = layer(x)
        # This gradient is not contiguous.
        F.cross_entropy(logits.transpose(1, 2), targets).backward()
        results.append((logits.detach(), x.grad, token_losses(layer, features, targets).detach()))
    return results


def test_a_cut_head_over_tokens_has_the_logits_gradients_and_losses_of_a_whole_one(two_ranks):
    for rank, (cut_head, whole_head) in enumerate(two_ranks.run(head_over_tokens)):
        for result, expected in zip(cut_head, whole_head, strict=True):
            assert result.shape == expected.shape, f"rank {rank}"
            assert (result - expected).abs().max() < 1e-6, f"rank {rank}"


def embeddings():
    """Return the rows of an embedding and the gradient of all its rows, first sliced and then whole."""
    torch.manual_seed(0)
    whole = nn.Embedding(7, 4, padding_idx=5)
    tokens = torch.tensor([[0, 5], [3, 6 - dist.get_rank()]])
    nn.init.ones_(whole.weight)
    layer = cut(whole)
    rows = layer(tokens)
    rows.sum().backward()
    gradient = vars(layer)["sliced"].slices["weight"].gather_whole(layer.weight.grad)

    expected_rows = whole(tokens)
    expected_rows.sum().backward()
    expected_gradient = whole.weight.grad / 2  # averaged over both ranks, as in DDP
    dist.all_reduce(expected_gradient)
    return rows.detach(), gradient, expected_rows.detach(), expected_gradient


def test_a_cut_embedding_has_the_rows_and_gradients_of_a_whole_one(two_ranks):
    """The padding row gets no gradient."""
    for rank, result in enumerate(two_ranks.run(embeddings)):
        rows, gradient, expected_rows, expected_gradient = result
        assert torch.equal(rows, expected_rows), f"rank {rank}"
        assert torch.equal(gradient, expected_gradient), f"rank {rank}"


def sum_of_halves():
    parts = torch.full((4, 7), [2048.0, 1.0, 1.0, 0.0][dist.get_rank()], dtype=torch.float16)
    return NodeRanks(dist.group.WORLD).reduce_scatter(parts)


def test_halves_are_summed_in_fp32_and_rounded_once(four_ranks):
    """Halves are added in fp32. In fp16, 2048 + 1 would be 2048."""
    expected = torch.full((1, 7), 2050.0).half()
    for rank, result in enumerate(four_ranks.run(sum_of_halves)):
        assert torch.equal(result, expected), f"rank {rank}"


MASKS = [
    {},
    {"attn_mask": torch.ones(3, 3).triu(1).bool()},
    {"key_padding_mask": torch.tensor([[False, False, True]] * 2)},
]


def attentions():
    """Return output and gradient of an attention, sliced and whole, for each mask. Dimension 0 is the sequence."""
    torch.manual_seed(0)
    whole = nn.MultiheadAttention(8, 4)
    attention = cut(whole, "", ".out_proj")
    generator = torch.Generator().manual_seed(dist.get_rank())
    query = torch.randn(3, 2, 8, generator=generator)
    memory = torch.randn(3, 2, 8, generator=generator)

    def output_and_gradient(module, masks):
        x = query.clone().requires_grad_()
        out, _ = module(x, memory, memory, need_weights=False, **masks)
        out.square().sum().backward()
        return out.detach(), x.grad

    return [
        (output_and_gradient(attention, masks), output_and_gradient(whole, masks))
        for masks in (*MASKS, MASKS[1] | MASKS[2], MASKS[1] | {"is_causal": True})
    ]


def test_a_cut_attention_has_the_outputs_and_gradients_of_a_whole_one(two_ranks):
    for rank, pairs in enumerate(two_ranks.run(attentions)):
        for mask, (cut_attention, whole_attention) in enumerate(pairs):
            for result, expected in zip(cut_attention, whole_attention, strict=True):
                error = (result - expected).abs().max()
                assert error < 2e-6, f"mask {mask} on rank {rank}"


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
        (Entrance(NodeRanks(dist.group.WORLD)).gather, (x, torch.tensor(1.0))),
    ]
    return [toy.error_of(*call) for call in calls]


def test_inputs_that_ranks_cannot_compute_together_are_an_error_on_every_rank(two_ranks):
    for errors in two_ranks.run(refusals):
        targets, tokens, batch, weights, heads, alone, part, scalar = errors
        assert "`targets` or tokens (from 0 to 7) must be from 0 to 5, or -100" in targets
        assert "`targets` or tokens (from 0 to 7) must be from 0 to 6. Check" in tokens
        assert "has different sizes on the ranks that share a layer ([2, 3])" in batch
        assert weights.startswith(
            "ValueError: A sliced attention layer supports only need_weights=False (got True)"
        )
        assert heads.startswith(
            "ValueError: A sliced attention layer supports only need_weights=False (got False)"
        )
        assert "must have the same shapes on all ranks of a node" in alone
        assert part.startswith(
            "ValueError: An input (of shape (3, 1, 1, 3)) of layers in `node_slices` cannot"
        )
        assert scalar.startswith("ValueError: An input (of shape ()) of layers in `node_slices`")
