"""Losses over the pairs of all ranks, against their definition on all pairs at once."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from lightning_hybrid.contrastive import BarlowTwins, InfoNCE, SigLIP

PAIRS, FEATURES, BLOCK = 32, 8, 4


def clip(loss, a, b):
    a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
    scale = loss.logit_scale.exp() if loss.temperature is None else 1 / loss.temperature
    target = torch.arange(len(a))
    return (F.cross_entropy(scale * a @ b.T, target) + F.cross_entropy(scale * b @ a.T, target)) / 2


def simclr(loss, a, b):
    z = F.normalize(torch.cat([a, b]), dim=1)
    logits = (z @ z.T / loss.temperature).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, torch.arange(len(z)).roll(len(a)))


def siglip(loss, a, b):
    logits = loss.logit_scale.exp() * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T + loss.logit_bias
    return -F.logsigmoid(logits * (2 * torch.eye(len(a)) - 1)).sum() / len(a)


def barlow_twins(loss, a, b):
    norm = nn.BatchNorm1d(a.shape[1], affine=False, dtype=a.dtype)
    c = norm(a).T @ norm(b) / len(a)
    return (
        ((1 - c.diagonal()) ** 2).sum()
        + loss.off_diagonal * (c**2).sum()
        - loss.off_diagonal * (c.diagonal() ** 2).sum()
    )


LOSSES = {
    "CLIP": (lambda: InfoNCE(0.1, block=BLOCK), clip),
    "CLIP, its temperature is learnt": (lambda: InfoNCE(None, block=BLOCK), clip),
    "SimCLR": (lambda: InfoNCE(0.1, both_views=True, block=BLOCK), simclr),
    "SigLIP": (lambda: SigLIP(block=BLOCK), siglip),
    "Barlow Twins": (lambda: BarlowTwins(block=BLOCK), barlow_twins),
}


def views(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(PAIRS, FEATURES, generator=generator, dtype=dtype) for _ in range(2)]


def of_share(rank, world, name, dtype=torch.float32):
    """Loss and gradients at a rank's share; of parameters, whose mean over ranks DDP takes, those of this rank."""
    loss = LOSSES[name][0]().to(dtype)
    a, b = (view.chunk(world)[rank].clone().requires_grad_() for view in views(dtype))
    value = loss(a, b)
    grads = torch.autograd.grad(value, [a, b, *loss.parameters()])
    return value.detach(), *(grad / world for grad in grads)


def on_rank(name, dtype=torch.float32):
    return of_share(dist.get_rank(), dist.get_world_size(), name, dtype)


def joined(shares):
    values, a, b, *own = zip(*shares, strict=True)
    assert all(torch.equal(value, values[0]) for value in values)
    while own and len(own[0]) > 1:
        own = [[one + other for one, other in zip(each[::2], each[1::2], strict=True)] for each in own]
    return [values[0], torch.cat(a), torch.cat(b), *(each[0] for each in own)]


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_those_of_all_pairs_at_once(name):
    make, definition = LOSSES[name]
    loss = make().double()
    inputs = [view.requires_grad_() for view in views(torch.float64)]
    expected = definition(loss, *inputs)
    found, *grads = of_share(0, 1, name, torch.float64)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        grads, list(torch.autograd.grad(expected, [*inputs, *loss.parameters()])), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("name", LOSSES)
def test_two_and_four_ranks_have_the_bits_of_one(name, two_ranks, four_ranks):
    one = of_share(0, 1, name)
    for ranks in (two_ranks, four_ranks):
        assert all(torch.equal(own, whole) for own, whole in zip(joined(ranks.run(on_rank, name)), one, strict=True))


def test_the_loss_of_three_ranks_is_that_of_all_pairs(three_ranks):
    """PAIRS do not divide by three: each rank takes 8 of the first 24."""
    found = three_ranks.run(first_24)
    a, b = (view[:24] for view in views())
    torch.testing.assert_close(found[0], clip(InfoNCE(0.1), a, b), rtol=1e-6, atol=0)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def first_24():
    a, b = (view[:24].chunk(3)[dist.get_rank()] for view in views())
    return InfoNCE(0.1, block=3)(a, b)


def short_on_the_last(missing):
    rows = PAIRS // 2 - missing * dist.get_rank()
    try:
        InfoNCE()(*(view[:rows] for view in views()))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(("missing", "shapes"), [(1, "16x8, 15x8"), (PAIRS // 2, "16x8, 0x0")])
def test_other_numbers_of_pairs_or_none_are_refused_on_every_rank(missing, shapes, two_ranks):
    for said in two_ranks.run(short_on_the_last, missing, timeout_s=30):
        assert said.startswith(f"the embeddings of all ranks must have one shape, and have {shapes}")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: InfoNCE(0.0), r"`temperature` \(=0.0\) must be above 0"),
        (lambda: SigLIP(block=0), r"`block` \(=0\) must be a whole number, 1 or more"),
        (lambda: InfoNCE()(torch.ones(3, 2), torch.ones(2, 2)), "`a` and `b` .* must be two matrices of one shape"),
        (lambda: InfoNCE()(torch.ones(0, 2), torch.ones(0, 2)), "`a` and `b` .* must be two matrices of one shape"),
    ],
)
def test_what_cannot_be_compared_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_similarities_beyond_what_exponentials_hold_are_finite():
    a = torch.eye(4)
    loss = InfoNCE(1e-3, block=2)(a, a.roll(1, 0))  # each row's partner is the least similar
    assert math.isclose(loss.item(), 1000, rel_tol=1e-6)
