"""The options of parameter groups as numbers beside the tensors, for the fused steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Options:
    """The options of the groups as a float64 table with one column per tensor, on the tensors' device.

        table (len(names), tensors)    options["weight_decay"] is a row; "lr" is the first

    `names` are those of the rows, `line_of` gives a group's numbers in that order. The table keeps its address, so that
    a captured graph reads what is in it at replay. `lr` is its first row, or made anew each step where the rate of a
    group is a tensor: that one is read on the device.
    """

    def __init__(self, names: Sequence[str], line_of: Callable[[dict[str, Any]], list[float]]) -> None:
        self._row_of = {name: row for row, name in enumerate(names)}
        self._line_of = line_of
        self._key: Any = None
        self.table = torch.empty(0)

    def __getitem__(self, name: str) -> Tensor:
        """One number per tensor."""
        return self.lr if name == "lr" else self._rows[self._row_of[name]]

    def take(self, groups_of_tensors: Sequence[dict[str, Any]], device: torch.device) -> None:
        """Read the groups again; unchanged numbers stay on the device, changed ones go there without a wait."""
        groups = list({id(group): group for group in groups_of_tensors}.values())
        lines = [self._line_of(group) for group in groups]
        key = (lines, [id(group) for group in groups_of_tensors], device)
        if key != self._key:
            index = {id(group): i for i, group in enumerate(groups)}
            places = torch.tensor([index[id(group)] for group in groups_of_tensors])
            table = torch.tensor(lines, dtype=torch.float64).T[:, places].contiguous()
            if self.table.shape != table.shape or self.table.device != device:
                self.table = torch.empty_like(table, device=device)
                self._rows = self.table.unbind()
            to_device_(self.table, table)
            self._places = torch.empty_like(places, device=device)
            to_device_(self._places, places)
            self._key = key
        self.lr = self._rows[0]
        if any(isinstance(group["lr"], Tensor) for group in groups):
            rates = torch.stack([_on_device(group["lr"], device) for group in groups])
            self.lr = rates.index_select(0, self._places)


_LARS = ("lr", "momentum", "weight_decay", "trust_coefficient", "eps", "trust_clip", "excluded_lr_mult")
_FORMS = ("lr_inside", "lr_outside", "ratio_outside")
_LAMB = ("lr", "weight_decay", "eps", "trust_clip", "excluded_lr_mult")


def lars_options() -> Options:
    """The options of LARS: numbers; then momentum_form (0, 1, 2), trust_ratio, -1 to climb, nesterov."""
    return Options((*_LARS, "momentum_form", "trust_ratio", "sign", "nesterov"), _lars_line)


def _lars_line(group: dict[str, Any]) -> list[float]:
    # Without momentum all forms agree; "lr_outside" multiplies as SGD does.
    form = _FORMS.index(group["momentum_form"]) if group["momentum"] != 0 else 1
    return [*_numbers(group, _LARS), form, *_switches(group), float(group["nesterov"])]


def lamb_options() -> Options:
    """The options of LAMB: numbers; then trust_ratio, -1 to climb, both betas, bias_correction."""
    return Options((*_LAMB, "trust_ratio", "sign", "beta1", "beta2", "bias_correction"), _lamb_line)


def _lamb_line(group: dict[str, Any]) -> list[float]:
    return [*_numbers(group, _LAMB), *_switches(group), *map(float, group["betas"]), float(group["bias_correction"])]


def _numbers(group: dict[str, Any], names: Sequence[str]) -> list[float]:
    return [number(group[name]) for name in names]


def _switches(group: dict[str, Any]) -> list[float]:
    return [float(group["trust_ratio"]), -1.0 if group["maximize"] else 1.0]


def number(value: Any) -> float:
    """An option as a number: none is inf, a bound that binds nothing; a tensor is 0, as it is read on the device.

    >>> number(None), number(0.5), number(torch.tensor(0.5))
    (inf, 0.5, 0.0)
    """
    if isinstance(value, Tensor):
        return 0.0
    return torch.inf if value is None else float(value)


def to_device_(target: Tensor, values: Tensor) -> None:
    """Copy CPU `values` into `target` without making the host wait."""
    target.copy_(values.pin_memory() if target.device.type == "cuda" else values, non_blocking=True)


def _on_device(value: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64, non_blocking=True)
    return torch.full((), value, dtype=torch.float64, device=device)
