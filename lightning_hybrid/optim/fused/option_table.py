"""The options of parameter groups as tables of numbers on the tensors' device, for the fused steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class OptionTable:
    """The options of a tensor group: a float64 table with one column per tensor. `OptionTables` fills it.

        table (len(names), tensors)    options["weight_decay"] is a row; "lr" is the first

    Where the rate of a group is a tensor, the row `lr` is made each step, as that rate is read on the device.

    Args:
        names: The names of the rows.
        column_of: Gives the numbers of a parameter group in the order of `names`.
    """

    def __init__(
        self, names: Sequence[str], column_of: Callable[[dict[str, Any]], list[float]]
    ) -> None:
        self._row_of = {name: row for row, name in enumerate(names)}
        self.column_of = column_of
        self.table = self.lr = torch.empty(0)
        self.rows: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self._row_of)

    def __getitem__(self, name: str) -> Tensor:
        return self.lr if name == "lr" else self.rows[self._row_of[name]]


class OptionTables:
    """The tables of all tensor groups of one device, in one block of memory: a change is one copy.

    Tables stay at their addresses: a captured graph reads what is in them at replay.

    Args:
        tensor_groups: The table of each tensor group, and the parameter group of each of its tensors.
        device: Where the tables are.
    """

    def __init__(
        self,
        tensor_groups: Sequence[tuple[OptionTable, Sequence[dict[str, Any]]]],
        device: torch.device,
    ) -> None:
        self._device, self._columns = device, list[Any]()
        # Per tensor group: its table, its distinct parameter groups, and the index of each tensor's among these.
        self._tables: list[tuple[OptionTable, list[dict[str, Any]], Tensor]] = []
        self._indices_on_device: list[Tensor | None] = [None] * len(tensor_groups)
        for options, groups_of_tensors in tensor_groups:
            groups = list({id(group): group for group in groups_of_tensors}.values())
            index = {id(group): i for i, group in enumerate(groups)}
            self._tables.append(
                (options, groups, torch.tensor([index[id(group)] for group in groups_of_tensors]))
            )
        self._memory = torch.empty(self._ends()[-1], dtype=torch.float64, device=device)
        for (options, _, _), table in zip(self._tables, self._parts(self._memory), strict=True):
            options.table, options.rows = table, table.unbind()

    def take(self) -> None:
        """Read the parameter groups again; only changed numbers go to the device, and the host does not wait."""
        # One comparison of Python numbers per step decides whether anything goes to the device at all.
        columns = [
            [options.column_of(group) for group in groups] for options, groups, _ in self._tables
        ]
        if columns != self._columns:
            if is_capturing():
                raise RuntimeError(
                    "`lr` or another option of `param_groups` changed inside a CUDA-graph capture: replays would read "
                    "host memory that is gone. Do a step with these options before it; an `lr` that is to change "
                    "between replays must be a tensor."
                )
            on_host = torch.zeros(self._memory.shape, dtype=torch.float64)
            for (_, _, indices), some, part in zip(
                self._tables, columns, self._parts(on_host), strict=True
            ):
                part.copy_(torch.tensor(some, dtype=torch.float64).T[:, indices])
            to_device_(self._memory, on_host)
            self._columns = columns
        # Rates that are tensors may change between steps without the host's knowing: they are gathered on the device.
        for place, (options, groups, indices) in enumerate(self._tables):
            options.lr = options.rows[0]
            if any(isinstance(group["lr"], Tensor) for group in groups):
                rates = torch.stack([_on_device(group["lr"], self._device) for group in groups])
                options.lr = rates.index_select(0, self._on_device_once(place, indices))

    def _ends(self) -> list[int]:
        # Where the tables begin and the last one ends: at even indices, which are multiples of 16 bytes.
        sizes = [len(options) * len(indices) for options, _, indices in self._tables]
        return [0, *itertools.accumulate(size + size % 2 for size in sizes)]

    def _parts(self, memory: Tensor) -> Iterator[Tensor]:
        for begin, (options, _, indices) in zip(self._ends(), self._tables, strict=False):
            rows, columns = len(options), len(indices)
            yield memory[begin : begin + rows * columns].view(rows, columns)

    def _on_device_once(self, place: int, indices: Tensor) -> Tensor:
        if (known := self._indices_on_device[place]) is None:
            known = torch.empty(indices.shape, dtype=indices.dtype, device=self._device)
            self._indices_on_device[place] = known
            to_device_(known, indices)
        return known


def is_capturing() -> bool:
    """Return whether the current stream is captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


_LARS = (
    "lr",
    "momentum",
    "weight_decay",
    "trust_coefficient",
    "eps",
    "trust_clip",
    "excluded_lr_mult",
)
_FORMS = ("lr_inside", "lr_outside", "ratio_outside")
_LAMB = ("lr", "weight_decay", "eps", "trust_clip", "excluded_lr_mult")


def lars_options() -> OptionTable:
    """Make the table of LARS: numbers; then momentum_form (0, 1, 2), trust_ratio, -1 to climb, nesterov."""
    return OptionTable((*_LARS, "momentum_form", "trust_ratio", "sign", "nesterov"), _lars_column)


def _lars_column(group: dict[str, Any]) -> list[float]:
    # Without momentum all forms agree; "lr_outside" multiplies as SGD does.
    form = _FORMS.index(group["momentum_form"]) if group["momentum"] != 0 else 1
    return [*_numbers(group, _LARS), form, *_switches(group), float(group["nesterov"])]


def lamb_options() -> OptionTable:
    """Make the table of LAMB: numbers; then trust_ratio, -1 to climb, both betas, bias_correction, bounds of |w|."""
    names = (*_LAMB, "trust_ratio", "sign", "beta1", "beta2", "bias_correction", "low", "high")
    return OptionTable(names, _lamb_column)


def _lamb_column(group: dict[str, Any]) -> list[float]:
    others = [
        *group["betas"],
        group["bias_correction"],
        *(group["weight_norm_bounds"] or (0.0, torch.inf)),
    ]
    return [*_numbers(group, _LAMB), *_switches(group), *map(float, others)]


def _numbers(group: dict[str, Any], names: Sequence[str]) -> list[float]:
    return [number(group[name]) for name in names]


def _switches(group: dict[str, Any]) -> list[float]:
    return [float(group["trust_ratio"]), -1.0 if group["maximize"] else 1.0]


def number(value: Any) -> float:
    """Convert an option: None to inf, a bound that binds nothing; a tensor to 0, as it is read on the device.

    >>> number(None), number(0.5), number(torch.tensor(0.5))
    (inf, 0.5, 0.0)
    """
    if isinstance(value, Tensor):
        return 0.0
    return torch.inf if value is None else float(value)


def to_device_(target: Tensor, values: Tensor) -> None:
    """Copy CPU `values` into `target` without making the host wait."""
    # From pageable memory the copy would wait for the device.
    target.copy_(values.pin_memory() if target.device.type == "cuda" else values, non_blocking=True)


def _on_device(value: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64, non_blocking=True)
    return torch.full((), value, dtype=torch.float64, device=device)
