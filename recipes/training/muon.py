"""torch's Muon on flattened kernels, SGD for the rest: an arm of the study, next to `direction="orthogonal"`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Muon, Optimizer


class MuonWithSGD(Optimizer):
    """`torch.optim.Muon` on weights, as matrices [out, in * height * width], and `torch.optim.SGD` on the others.

    torch's Muon takes matrices only. Its parameters here are views of the kernels: a step moves the kernels. State is
    kept by both optimizers and saved with `state_dict`. For `precision=32-true`: views know of no fp32 masters.

    Args:
        params: Groups as of `param_groups`: excluded ones, with `trust_ratio=False`, go to SGD.
        lr: Rate of Muon.
        momentum: Of both.
        weight_decay: Of weights: a factor 1 - lr * weight_decay per step, as Muon has it.
        excluded_lr_mult: Rate of SGD, in parts of `lr`.
    """

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.95, weight_decay: float = 0.0, excluded_lr_mult: float = 1.0
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust_ratio": True}
        super().__init__(params, defaults)
        self.excluded_lr_mult = excluded_lr_mult
        self._parts: list[tuple[Optimizer, int]] = []  # with the number of the group: loading replaces the groups
        self._views: dict[nn.Parameter, nn.Parameter] = {}
        for index, group in enumerate(self.param_groups):
            options = {name: group[name] for name in ("lr", "momentum", "weight_decay")}
            kernels = [param for param in group["params"] if group["trust_ratio"] and param.dim() > 1]
            others = [param for param in group["params"] if param not in set(kernels)]
            self._views |= {param: nn.Parameter(param.detach().view(param.shape[0], -1)) for param in kernels}
            if kernels:
                self._parts.append((Muon([self._views[param] for param in kernels], **options), index))
            if others:
                self._parts.append((SGD(others, **options), index))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step both with the present rates."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for param, view in self._views.items():
            view.grad = None if param.grad is None else param.grad.reshape(view.shape)
        for part, index in self._parts:
            group = self.param_groups[index]
            factor = self.excluded_lr_mult if isinstance(part, SGD) else 1.0
            part.param_groups[0] |= {"lr": group["lr"] * factor, "momentum": group["momentum"]}
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both."""
        return super().state_dict() | {"parts": [part.state_dict() for part, _ in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of both."""
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "parts"})
        for (part, _), state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
