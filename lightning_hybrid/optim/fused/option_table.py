"""The options of parameter groups as tables of numbers on the tensors' device, for the fused steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class OptionTable:
    """The options of a tensor group: a float64 table with one column per tensor, filled by `OptionTables`.

        table (len(names), tensors)    options["weight_decay"] is a row; "lr" is the first

    If the learning rate of a group is a tensor, it is read on the device. The row `lr` is then made in each step.

    Args:
        names: Names of the rows.
        column_of: Function that returns the numbers of a parameter group, in the order of `names`.
    """

    def __init__(
        self, names: Sequence[str], column_of: Callable[[dict[str, Any]], list[float]]
    ) -> None:
        self._row_indices = {name: row for row, name in enumerate(names)}
        self.column_of = column_of
        self.table = torch.empty(0)
        self.lr = torch.empty(0)
        self.rows: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self._row_indices)

    def __getitem__(self, name: str) -> Tensor:
        if name == "lr":
            return self.lr
        return self.rows[self._row_indices[name]]


class OptionTables:
    """The tables of all tensor groups of one device in one block of memory, so that a change is one copy.

    Tables stay at their addresses, because a captured graph reads their content when it is replayed.

    Args:
        tensor_groups: The table of each tensor group, and the parameter group of each of its tensors.
        device: Device of the tables.
    """

    def __init__(
        self,
        tensor_groups: Sequence[tuple[OptionTable, Sequence[dict[str, Any]]]],
        device: torch.device,
    ) -> None:
        self._device = device
        self._columns: list[list[list[float]]] = []
        self._slots: list[_Slot] = []
        num_numbers = 0
        for options, groups_of_tensors in tensor_groups:
            slot = _Slot(options, groups_of_tensors, begin=num_numbers)
            self._slots.append(slot)
            # Tables begin at even indices, which are multiples of 16 bytes.
            num_numbers += slot.size + slot.size % 2

        self._memory = torch.empty(num_numbers, dtype=torch.float64, device=device)
        for slot in self._slots:
            slot.options.table = slot.view_in(self._memory)
            slot.options.rows = slot.options.table.unbind()

    def refresh(self) -> None:
        """Read the parameter groups again. Only changed numbers go to the device, and the host does not wait."""
        # One comparison of Python numbers per step decides whether anything goes to the device at all.
        columns = [slot.read_columns() for slot in self._slots]
        if columns != self._columns:
            self._write(columns)

        # Rates that are tensors may change between steps without the host's knowing: they are gathered on the device.
        for slot in self._slots:
            slot.options.lr = slot.options.rows[0]
            if any(isinstance(group["lr"], Tensor) for group in slot.groups):
                slot.options.lr = slot.gather_rates(self._device)

    def _write(self, columns: list[list[list[float]]]) -> None:
        """Send the columns of all tables to the device."""
        if is_capturing():
            raise RuntimeError(
                "`lr` or another option of `param_groups` changed inside a CUDA-graph capture: replays would read "
                "host memory that no longer exists. Do a step with these options before the capture. An `lr` that "
                "must change between replays has to be a tensor."
            )
        on_host = torch.zeros(self._memory.shape, dtype=torch.float64)
        for slot, columns_of_groups in zip(self._slots, columns, strict=True):
            by_group = torch.tensor(columns_of_groups, dtype=torch.float64).T
            slot.view_in(on_host).copy_(by_group[:, slot.group_indices])
        to_device_(self._memory, on_host)
        self._columns = columns


class _Slot:
    """One table within the memory of `OptionTables`, and the parameter groups from which it is filled.

    Args:
        options: The table.
        groups_of_tensors: The parameter group of each tensor.
        begin: Index of the table's first number in the memory.

    Attributes:
        groups: The distinct parameter groups.
        group_indices: For each tensor, the index of its parameter group in `groups`.
    """

    def __init__(
        self, options: OptionTable, groups_of_tensors: Sequence[dict[str, Any]], begin: int
    ) -> None:
        self.options = options
        self.groups: list[dict[str, Any]] = []
        self._begin = begin
        self._indices_on_device: Tensor | None = None

        index_of_group: dict[int, int] = {}  # by `id`, since dicts cannot be keys
        group_indices: list[int] = []
        for group in groups_of_tensors:
            if id(group) not in index_of_group:
                index_of_group[id(group)] = len(self.groups)
                self.groups.append(group)
            group_indices.append(index_of_group[id(group)])
        self.group_indices = torch.tensor(group_indices)
        self.size = len(options) * len(group_indices)

    def read_columns(self) -> list[list[float]]:
        """Return the column of each parameter group, as its options are now."""
        return [self.options.column_of(group) for group in self.groups]

    def view_in(self, memory: Tensor) -> Tensor:
        """Return the table as a view of `memory`: (options, tensors)."""
        num_tensors = len(self.group_indices)
        return memory[self._begin : self._begin + self.size].view(len(self.options), num_tensors)

    def gather_rates(self, device: torch.device) -> Tensor:
        """Return the learning rate of each tensor from parameter groups of which some have a tensor as rate."""
        rates = torch.stack([_on_device(group["lr"], device) for group in self.groups])
        if self._indices_on_device is None:
            self._indices_on_device = torch.empty(
                self.group_indices.shape, dtype=self.group_indices.dtype, device=device
            )
            to_device_(self._indices_on_device, self.group_indices)
        return rates.index_select(0, self._indices_on_device)


def is_capturing() -> bool:
    """Return True if the current stream is captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


_LARS_NUMBERS = (
    "lr",
    "momentum",
    "weight_decay",
    "trust_coefficient",
    "eps",
    "trust_clip",
    "excluded_lr_mult",
)
_LARS_NAMES = (*_LARS_NUMBERS, "momentum_form", "trust_ratio", "sign", "nesterov")
_MOMENTUM_FORMS = ("lr_inside", "lr_outside", "ratio_outside")
_LAMB_NUMBERS = ("lr", "weight_decay", "eps", "trust_clip", "excluded_lr_mult")
_LAMB_NAMES = (
    *_LAMB_NUMBERS,
    "trust_ratio",
    "sign",
    "beta1",
    "beta2",
    "bias_correction",
    "low",
    "high",
)


def lars_options() -> OptionTable:
    """Make the table of LARS: numbers, then momentum_form (0, 1, 2), trust_ratio, -1 to climb, nesterov."""
    return OptionTable(_LARS_NAMES, _lars_column)


def _lars_column(group: dict[str, Any]) -> list[float]:
    # Without momentum all forms agree. "lr_outside" multiplies as SGD does.
    momentum_form = "lr_outside"
    if group["momentum"] != 0:
        momentum_form = group["momentum_form"]

    column = [number(group[name]) for name in _LARS_NUMBERS]
    column.append(_MOMENTUM_FORMS.index(momentum_form))
    column.append(float(group["trust_ratio"]))
    column.append(_sign(group))
    column.append(float(group["nesterov"]))
    return column


def lamb_options() -> OptionTable:
    """Make the table of LAMB: numbers, then trust_ratio, -1 to climb, both betas, bias_correction, bounds of |w|."""
    return OptionTable(_LAMB_NAMES, _lamb_column)


def _lamb_column(group: dict[str, Any]) -> list[float]:
    beta1, beta2 = group["betas"]
    low, high = group["weight_norm_bounds"] or (0.0, torch.inf)

    column = [number(group[name]) for name in _LAMB_NUMBERS]
    column.append(float(group["trust_ratio"]))
    column.append(_sign(group))
    column.append(float(beta1))
    column.append(float(beta2))
    column.append(float(group["bias_correction"]))
    column.append(float(low))
    column.append(float(high))
    return column


def _sign(group: dict[str, Any]) -> float:
    """Return the factor on gradients: -1 to climb the objective, 1 to descend."""
    if group["maximize"]:
        return -1.0
    return 1.0


def number(value: Any) -> float:
    """Convert an option: None to inf, a bound that binds nothing, and a tensor to 0, as it is read on the device.

    >>> number(None), number(0.5), number(torch.tensor(0.5))
    (inf, 0.5, 0.0)
    """
    if isinstance(value, Tensor):
        return 0.0
    if value is None:
        return torch.inf
    return float(value)


def to_device_(target: Tensor, values: Tensor) -> None:
    """Copy CPU `values` into `target` without making the host wait."""
    # From pageable memory the copy would wait for the device.
    if target.device.type == "cuda":
        values = values.pin_memory()
    target.copy_(values, non_blocking=True)


def _on_device(value: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64, non_blocking=True)
    return torch.full((), value, dtype=torch.float64, device=device)
