"""The options of parameter groups as numbers beside the tensors, for the fused steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class OptionTable:
    """The options of the groups as a float64 table with one column per tensor, on the tensors' device.

        table (len(names), tensors)    options["weight_decay"] is a row; "lr" is the first

    `names` are those of the rows, `line_of` gives a group's numbers in that order. `OptionTables` fills it. `lr` is its
    first row, or made anew each step where the rate of a group is a tensor: that one is read on the device.
    """

    def __init__(self, names: Sequence[str], line_of: Callable[[dict[str, Any]], list[float]]) -> None:
        self._row_of = {name: row for row, name in enumerate(names)}
        self.line_of = line_of
        self.table = self.lr = torch.empty(0)
        self.rows: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self._row_of)

    def __getitem__(self, name: str) -> Tensor:
        """One number per tensor."""
        return self.lr if name == "lr" else self.rows[self._row_of[name]]


class OptionTables:
    """The tables of several kinds of tensors of one device, in one stretch of memory: a change is one copy.

    `kinds`: of each the options, and the group of each tensor. Tables keep their addresses, so that a captured graph
    reads what is in them at replay.
    """

    def __init__(self, kinds: Sequence[tuple[OptionTable, Sequence[dict[str, Any]]]], device: torch.device) -> None:
        self._device, self._lines = device, list[Any]()
        self._kinds: list[tuple[OptionTable, list[dict[str, Any]], Tensor]] = []
        self._rate_places: list[Tensor | None] = [None] * len(kinds)
        for options, groups_of_tensors in kinds:
            groups = list({id(group): group for group in groups_of_tensors}.values())
            index = {id(group): i for i, group in enumerate(groups)}
            self._kinds.append((options, groups, torch.tensor([index[id(group)] for group in groups_of_tensors])))
        self._memory = torch.empty(self._ends()[-1], dtype=torch.float64, device=device)
        for (options, _, _), table in zip(self._kinds, self._parts(self._memory), strict=True):
            options.table, options.rows = table, table.unbind()

    def take(self) -> None:
        """Read the groups again; unchanged numbers stay on the device, changed ones go there without a wait."""
        lines = [[options.line_of(group) for group in groups] for options, groups, _ in self._kinds]
        if lines != self._lines:
            on_host = torch.zeros(self._memory.shape, dtype=torch.float64)
            for (_, _, places), some, part in zip(self._kinds, lines, self._parts(on_host), strict=True):
                part.copy_(torch.tensor(some, dtype=torch.float64).T[:, places])
            to_device_(self._memory, on_host)
            self._lines = lines
        for kind, (options, groups, places) in enumerate(self._kinds):
            options.lr = options.rows[0]
            if any(isinstance(group["lr"], Tensor) for group in groups):
                rates = torch.stack([_on_device(group["lr"], self._device) for group in groups])
                options.lr = rates.index_select(0, self._places_on_device(kind, places))

    def _ends(self) -> list[int]:
        """Where the tables begin and the last one ends: at even places, which are multiples of 16 bytes."""
        sizes = [len(options) * len(places) for options, _, places in self._kinds]
        return [0, *itertools.accumulate(size + size % 2 for size in sizes)]

    def _parts(self, memory: Tensor) -> Iterator[Tensor]:
        for begin, (options, _, places) in zip(self._ends(), self._kinds, strict=False):
            rows, columns = len(options), len(places)
            yield memory[begin : begin + rows * columns].view(rows, columns)

    def _places_on_device(self, kind: int, places: Tensor) -> Tensor:
        if (known := self._rate_places[kind]) is None:
            known = self._rate_places[kind] = torch.empty(places.shape, dtype=places.dtype, device=self._device)
            to_device_(known, places)
        return known


_LARS = ("lr", "momentum", "weight_decay", "trust_coefficient", "eps", "trust_clip", "excluded_lr_mult")
_FORMS = ("lr_inside", "lr_outside", "ratio_outside")
_LAMB = ("lr", "weight_decay", "eps", "trust_clip", "excluded_lr_mult")


def lars_options() -> OptionTable:
    """The options of LARS: numbers; then momentum_form (0, 1, 2), trust_ratio, -1 to climb, nesterov."""
    return OptionTable((*_LARS, "momentum_form", "trust_ratio", "sign", "nesterov"), _lars_line)


def _lars_line(group: dict[str, Any]) -> list[float]:
    # Without momentum all forms agree; "lr_outside" multiplies as SGD does.
    form = _FORMS.index(group["momentum_form"]) if group["momentum"] != 0 else 1
    return [*_numbers(group, _LARS), form, *_switches(group), float(group["nesterov"])]


def lamb_options() -> OptionTable:
    """The options of LAMB: numbers; then trust_ratio, -1 to climb, both betas, bias_correction."""
    return OptionTable((*_LAMB, "trust_ratio", "sign", "beta1", "beta2", "bias_correction"), _lamb_line)


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
