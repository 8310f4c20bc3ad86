"""Plain half-precision model without masters and without loss scaling, for comparison with masters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.plugins.precision import HalfPrecision

from lightning_hybrid.precision.fp16_emulation import Fp16MatmulEmulation


class PlainHalfModel(HalfPrecision):
    """Lightning's own `"16-true"`, with matrix products on a CPU as tensor cores compute them.

    Everything of the model is fp16: weights, gradients, normalisation and its statistics, and an optimizer of torch
    keeps fp16 state as well (our LARS computes in fp32, with a fp32 buffer, and rounds the weight). Lightning's plugin
    is this without the mode: on a CPU it then computes each product in native fp16, tens of times slower and, unlike a
    GPU, summed in fp16.

    For `+trainer.plugins`, with `precision=null` and a stock strategy.
    """

    def __init__(self) -> None:
        super().__init__("16-true")

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Return Lightning's context, and the mode."""
        with super().forward_context(), Fp16MatmulEmulation():
            yield
