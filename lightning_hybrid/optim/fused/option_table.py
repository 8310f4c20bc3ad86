"""Device tensors that hold the options of parameter groups, for the fused optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class OptionTable:
    """Device tensor that holds the options of a group of tensors, with one column per tensor.

    `OptionTables` fills it.

        table (len(names), tensors)    float64; options["weight_decay"] is a row, and "lr" is the first row

    If the learning rate of a group is a tensor, it is read on the device, and the row `lr` is computed in each step.

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
    """Collection of all option tables on one device, which share one block of memory.

    When options change, a single copy updates all tables. The addresses of the tables never change, because a
    captured graph reads the tables when it is replayed.

    Args:
        tensor_groups: Table of each tensor group, with the parameter group of each of its tensors.
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
        """Copy the current options of the parameter groups to the device if they have changed.

        The host does not wait for the device.
        """
        columns = [slot.read_columns() for slot in self._slots]
        if columns != self._columns:
            self._write(columns)

        # Learning rates that are tensors are gathered on the device, because the host does not know if they change.
        for slot in self._slots:
            slot.options.lr = slot.options.rows[0]
            if any(isinstance(group["lr"], Tensor) for group in slot.groups):
                slot.options.lr = slot.gather_rates(self._device)

    def _write(self, columns: list[list[list[float]]]) -> None:
        """Copy the option values of all tables to the device."""
        if is_capturing():
            raise RuntimeError(
                "`lr` or another option of `param_groups` must not change inside a CUDA graph capture, because "
                "replays would read host memory that no longer exists. Run a step with the new options before "
                "the capture. If `lr` changes between replays, use a tensor for it."
            )
        on_host = torch.zeros(self._memory.shape, dtype=torch.float64)
        for slot, columns_of_groups in zip(self._slots, columns, strict=True):
            by_group = torch.tensor(columns_of_groups, dtype=torch.float64).T
            slot.view_in(on_host).copy_(by_group[:, slot.group_indices])
        to_device_(self._memory, on_host)
        self._columns = columns


class _Slot:
    """Position of one option table in the memory of `OptionTables`, with its parameter groups.

    Args:
        options: Table.
        groups_of_tensors: Parameter group of each tensor.
        begin: Index of the table's first number in the memory.

    Attributes:
        groups: Distinct parameter groups.
        group_indices: Index in `groups` of each tensor's parameter group.
    """

    def __init__(
        self, options: OptionTable, groups_of_tensors: Sequence[dict[str, Any]], begin: int
    ) -> None:
        self.options = options
        self.groups: list[dict[str, Any]] = []
        self._begin = begin
        self._indices_on_device: Tensor | None = None

        index_of_group: dict[int, int] = {}  # by `id`, because dicts are not hashable
        group_indices: list[int] = []
        for group in groups_of_tensors:
            if id(group) not in index_of_group:
                index_of_group[id(group)] = len(self.groups)
                self.groups.append(group)
            group_indices.append(index_of_group[id(group)])
        self.group_indices = torch.tensor(group_indices)
        self.size = len(options) * len(group_indices)

    def read_columns(self) -> list[list[float]]:
        """Return the current option values of each parameter group as a table column."""
        return [self.options.column_of(group) for group in self.groups]

    def view_in(self, memory: Tensor) -> Tensor:
        """Return this table as a view of `memory`, of shape (options, tensors)."""
        num_tensors = len(self.group_indices)
        return memory[self._begin : self._begin + self.size].view(len(self.options), num_tensors)

    def gather_rates(self, device: torch.device) -> Tensor:
        """Return the learning rates of all tensors as a device tensor.

        This is needed if the learning rates of some parameter groups are tensors.
        """
        rates = torch.stack([_on_device(group["lr"], device) for group in self.groups])
        if self._indices_on_device is None:
            self._indices_on_device = torch.empty(
                self.group_indices.shape, dtype=self.group_indices.dtype, device=device
            )
            to_device_(self._indices_on_device, self.group_indices)
        return rates.index_select(0, self._indices_on_device)


def is_capturing() -> bool:
    """Return whether the current stream is being captured into a CUDA graph."""
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
    """Create an empty option table for LARS."""
    return OptionTable(_LARS_NAMES, _lars_column)


def _lars_column(group: dict[str, Any]) -> list[float]:
    # Without momentum all forms agree. "lr_outside" has the order of operations of SGD.
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
    """Create an empty option table for LAMB."""
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
    """Return the sign applied to gradients: -1 if the group maximizes the objective, else 1."""
    if group["maximize"]:
        return -1.0
    return 1.0


def number(value: Any) -> float:
    """Convert the value of an option to a float.

    None means no bound and becomes inf. A tensor becomes 0, because it is read on the device.

    >>> number(None), number(0.5), number(torch.tensor(0.5))
    (inf, 0.5, 0.0)
    """
    if isinstance(value, Tensor):
        return 0.0
    if value is None:
        return torch.inf
    return float(value)


def to_device_(target: Tensor, values: Tensor) -> None:
    """Copy CPU `values` into `target` without waiting for the device."""
    # A copy from pageable memory would wait for the device.
    if target.device.type == "cuda":
        values = values.pin_memory()
    target.copy_(values, non_blocking=True)


def _on_device(value: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64, non_blocking=True)
    return torch.full((), value, dtype=torch.float64, device=device)
