"""Checks that contrastive losses are computed in fp32 inside autocast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_hybrid.contrastive import BarlowTwins, InfoNCE, SigLIP
from recipes.gpu.runner import CheckRequest, Details

NUM_PAIRS = 256
NUM_FEATURES = 128
LOSSES: dict[str, Callable[[], nn.Module]] = {
    "InfoNCE": lambda: InfoNCE(0.07),
    "SigLIP": SigLIP,
    "BarlowTwins": BarlowTwins,
}


def contrastive(request: CheckRequest) -> Details:
    """Check that contrastive losses are bit-identical with and without autocast, and close to fp64."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(NUM_PAIRS, NUM_FEATURES, generator=generator)
    second = first + torch.randn(NUM_PAIRS, NUM_FEATURES, generator=generator)
    pair = first.to(request.device), second.to(request.device)
    farthest = 0.0
    for name, make in LOSSES.items():
        loss = make().to(request.device)
        plain = _loss_and_gradients(loss, *pair)
        exact = _loss_and_gradients(
            make().to(request.device, torch.float64), *(view.double() for view in pair)
        )
        for dtype in (torch.float16, torch.bfloat16):
            with torch.autocast(request.device, dtype=dtype):
                inside = loss(*_leaves(*pair))
            assert inside.dtype is torch.float32, (
                f"`{name}` must be fp32 inside autocast, but is {inside.dtype}."
            )
            results = _loss_and_gradients(loss, *pair, autocast=dtype)
            for tensor, expected in zip(results, plain, strict=True):
                assert torch.equal(tensor, expected), (
                    f"`{name}` changes inside autocast to {dtype}."
                )
        for tensor, expected in zip(plain, exact, strict=True):
            distance = float((tensor.double() - expected).norm() / expected.norm())
            farthest = max(farthest, distance)
            assert distance < 1e-4, (
                f"`{name}` differs from fp64 by {distance:.1e} of its norm, more than 1e-4."
            )
    return {
        "message": f"{', '.join(LOSSES)} are fp32 inside autocast, and differ from fp64 by at most {farthest:.0e}."
    }


def _leaves(*views: Tensor) -> list[Tensor]:
    return [view.clone().requires_grad_() for view in views]


def _loss_and_gradients(
    loss: nn.Module, first: Tensor, second: Tensor, *, autocast: torch.dtype | None = None
) -> list[Tensor]:
    a, b = _leaves(first, second)
    with torch.autocast(
        a.device.type, dtype=autocast or torch.bfloat16, enabled=autocast is not None
    ):
        value = loss(a, b)
    value.backward()
    assert a.grad is not None
    assert b.grad is not None
    return [value.detach(), a.grad, b.grad]
