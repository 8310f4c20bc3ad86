"""Which gradients were divided by the loss scale: none is divided twice, and what outlives its step can go back."""

from __future__ import annotations

import torch
from torch import Tensor


class UnscaledGradients:
    """Fp32 gradients in ``p.grad`` that were divided by a loss scale.

    >>> unscaled, parameter = UnscaledGradients(), torch.nn.Parameter(torch.zeros(1))
    >>> parameter.grad = torch.tensor([2.0])
    >>> unscaled.add(parameter, parameter.grad, torch.tensor(8.0))
    >>> unscaled.has(parameter)
    True
    >>> unscaled.take_back()
    >>> parameter.grad, unscaled.has(parameter)
    (tensor([16.]), False)
    """

    def __init__(self) -> None:
        # parameter id -> (parameter, its gradient, what that was divided by)
        self._held: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}

    def add(self, parameter: Tensor, gradient: Tensor, divided_by: Tensor | None) -> None:
        """``gradient`` is about to be, or has been, divided; None: it needs no scale."""
        self._held[id(parameter)] = (parameter, gradient, divided_by)

    def has(self, parameter: Tensor) -> bool:
        """Whether ``p.grad`` is one of them, and not another gradient since."""
        held = self._held.get(id(parameter))
        return held is not None and held[1] is parameter.grad

    @torch.no_grad()
    def take_back(self) -> None:
        """Make gradients that outlived their step ready for another backward to be added to them.

        Usually ``zero_grad`` removed them. Where it did not (``set_to_none=False``, or a manual loop that adds up),
        they return to the parameter's dtype and to the scale.
        """
        for parameter, gradient, divided_by in self._held.values():
            if parameter.grad is gradient:
                if divided_by is not None:
                    gradient.mul_(divided_by)
                parameter.grad = gradient.to(parameter.dtype)
        self._held.clear()

    def clear(self) -> None:
        """Forget all."""
        self._held.clear()
