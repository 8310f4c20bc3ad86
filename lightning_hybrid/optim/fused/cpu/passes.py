"""Tables of addresses for the C++ passes, and their calls."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_hybrid.optim.fused.block_sums import BlockSums
from lightning_hybrid.optim.fused.contiguous import ContiguousViews, data_ptrs
from lightning_hybrid.optim.fused.cpu import build
from lightning_hybrid.optim.fused.engine import Engine
from lightning_hybrid.optim.fused.option_table import OptionTable
from lightning_hybrid.optim.gradients import GradScaling
from lightning_hybrid.placement import Part

_DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}  # `Dtype` of blocks.h
# Elements. Large enough that taking one costs nothing, small enough that threads end together.
_BLOCK = 1 << 14
_GRAD, _WEIGHT = 1, 2  # bits: which sums of squares of a tensor a call computes


class Table(ctypes.Structure):
    """`Table` of blocks.h, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_tensors", "num_blocks", "block", "num_threads")),
        ("parallel", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("state_dtype", "grad_dtype", "weight_dtype", "copy_dtype")),
        *((name, ctypes.c_void_p) for name in ("grads", "weights", "firsts", "seconds", "copies", "numels")),
        *((name, ctypes.c_void_p) for name in ("tensor_of", "begin_of", "measured", "weight_squares", "squares")),
    ]


class NativeEngine(Engine):
    """The base of both rules: a table of addresses of one tensor group, and the calls of the C++ passes.

    The table is made once; a step only writes the addresses of its gradients and calls, without Python's lock.
    `parts` is empty, or has the part of each tensor: then the sums that count are those in `block_sums`.
    """

    num_numbers: ClassVar[int]  # of each tensor, as in passes.cpp

    def __init__(
        self,
        params: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        copies: Sequence[Tensor],
        grad_dtype: torch.dtype,
        *,
        is_joint: bool = False,
        parts: Sequence[Part | None] = (),
    ) -> None:
        self._library, self._is_joint, self._are_masters = build.library(), is_joint, bool(copies)
        self._views = ContiguousViews(params, *states, copies)
        weight, copy = params[0].dtype, copies[0].dtype if copies else None
        numels = torch.tensor([param.numel() for param in params])
        num_blocks = (numels + _BLOCK - 1) // _BLOCK
        tensor_of = torch.arange(len(params)).repeat_interleave(num_blocks)
        first_of = (num_blocks.cumsum(0) - num_blocks).index_select(0, tensor_of)
        begin_of = (torch.arange(len(tensor_of)) - first_of) * _BLOCK
        self._numbers = torch.zeros(len(params), self.num_numbers, dtype=torch.float64)
        self.sums = torch.zeros(2, len(params), dtype=torch.float64)  # of weights; of gradients, directions or updates
        by_block = torch.zeros(2, len(tensor_of), dtype=torch.float64)  # as `sums`
        pointers = [torch.tensor(data_ptrs(one)) for one in self._views.dense]
        self._arrays: dict[str, Tensor] = {  # held here, as the table only holds their addresses
            "grads": torch.zeros(len(params), dtype=torch.int64),
            "weights": pointers[0],
            **dict(zip(("firsts", "seconds"), pointers[1:-1], strict=False)),
            "copies": pointers[-1],
            "numels": numels,
            "tensor_of": tensor_of,
            "begin_of": begin_of,
            "measured": torch.zeros(len(params), dtype=torch.int64),
            "weight_squares": by_block[0],
            "squares": by_block[1],
        }
        self._table = Table(
            num_tensors=len(params),
            num_blocks=len(tensor_of),
            block=_BLOCK,
            parallel=build.openmp_parallel() or None,
            state_dtype=_DTYPES[torch.promote_types(weight, torch.float32)],
            grad_dtype=_DTYPES[grad_dtype],
            weight_dtype=_DTYPES[weight],
            copy_dtype=_DTYPES[copy] if copy is not None else 0,
            **{name: array.data_ptr() if array.numel() else None for name, array in self._arrays.items()},
        )
        self._measured: list[int] = []
        self._added = self._table  # whose blocks are added up
        if any(parts):
            self.block_sums = BlockSums(params, parts, _BLOCK, by_block)
            self._added = self._table_of_wholes(self.block_sums)

    def _table_of_wholes(self, block_sums: BlockSums) -> Table:
        num_blocks = torch.tensor(block_sums.num_blocks)
        self._arrays["tensor_of_wholes"] = tensor_of = torch.arange(len(num_blocks)).repeat_interleave(num_blocks)
        weight_squares, squares = block_sums.whole
        return Table(
            num_tensors=len(num_blocks),
            num_blocks=len(tensor_of),
            tensor_of=tensor_of.data_ptr(),
            weight_squares=weight_squares.data_ptr(),
            squares=squares.data_ptr(),
        )

    def _add_up(self) -> None:
        self._library.add_up(ctypes.byref(self._added), self.sums.data_ptr())
        if self._add_over_ranks_ is not None:
            self._add_over_ranks_(self.sums)

    def _norms(self, grads: Sequence[Tensor], measured: list[int], decays: Tensor | None = None) -> Tensor:
        """Sum the squares of what is `measured`; return 1.0 if a sum of a gradient is inf or nan: float32, 0-dim."""
        self._arrays["grads"].copy_(torch.tensor(self._views.load(grads)))
        if measured != self._measured:
            self._arrays["measured"].copy_(torch.tensor(measured))
            self._measured = measured
        self._table.num_threads = torch.get_num_threads()
        found_inf = torch.zeros(())
        self._library.measure(ctypes.byref(self._table), _address(decays), found_inf.data_ptr())
        return found_inf


class NativeLars(NativeEngine):
    """The step of LARS.

    norms()     sum(g * g) or sum(d * d), and unknown sum(w * w)    one read of g, and of w there
    update()    the step, and sum(w * w) for the next one           one read of g, w, v; one write of w, v, copy
    """

    num_numbers = 6

    def norms(
        self, grads: Sequence[Tensor], options: OptionTable, scaling: GradScaling, needed: Sequence[bool]
    ) -> Tensor:
        """Compute the norms, and whether a gradient is inf or nan; see `Engine`."""
        decays = None
        if self._is_joint:
            # Gradients are still scaled here: |g / s + decay w| = |g + s decay w| / s, so that decay is scaled instead.
            decays = options["weight_decay"] * options["sign"]
            decays = decays if scaling.inverse_scale is None else decays / scaling.inverse_scale
        # The last update left sum(w * w) of masters: tensors with a copy, which only their owner writes. Other writes
        # raise `_version`, except one through `.data`: these are summed again.
        measured = [(_GRAD if self._are_masters else _GRAD | _WEIGHT) if one else 0 for one in needed]
        for place in self._views.changed() if self._are_masters else ():
            measured[place] |= _WEIGHT
        return self._norms(grads, measured, decays)

    def update(self, options: OptionTable, scaling: GradScaling) -> None:
        """Write the step; see `Engine`."""
        table, inverse_scale, found_inf = ctypes.byref(self._table), *_numbers_of(scaling)
        norms = (_address(inverse_scale), self.sums.data_ptr(), self._numbers.data_ptr())
        # Blocks to tensors, then tensors to coefficients, and only then the pass that writes.
        self._add_up()
        self._library.lars_numbers(table, self._is_joint, options.table.data_ptr(), options["lr"].data_ptr(), *norms)
        self._library.lars_update(table, self._numbers.data_ptr(), _address(found_inf))
        self._views.unload()


class NativeLamb(NativeEngine):
    """The step of LAMB; `states` are both moments and the step counts.

    norms()     sum(g * g), where it is needed                       one read of g
    moments()   moments, sum(w * w), sum(u * u)                      one read of g, w, m, v; one write of m, v
    update()    the step                                             one read of w, m, v; one write of w, copy
    """

    num_numbers = 7

    def __init__(self, params: Sequence[Tensor], states: Sequence[Sequence[Tensor]], *args: Any, **kwargs: Any) -> None:
        *moments, self._steps = states
        super().__init__(params, moments, *args, **kwargs)
        self._step_places = data_ptrs(self._steps)
        self._step_addresses = torch.tensor(self._step_places)
        self._rates = torch.zeros(len(params), dtype=torch.float64)

    def has_moved(self) -> bool:
        """Whether a tensor is no longer where it was when this was built."""
        return super().has_moved() or self._step_places != data_ptrs(self._steps)

    def norms(
        self, grads: Sequence[Tensor], options: OptionTable, scaling: GradScaling, needed: Sequence[bool]
    ) -> Tensor:
        """Compute the squares of gradients, and whether one is inf or nan; see `Engine`."""
        return self._norms(grads, [_GRAD if one else 0 for one in needed])

    def grad_squares(self) -> Tensor:
        """Sum the squares of all gradients, scaled as they are: float64, 0-dim."""
        self._add_up()
        return self.sums[1].sum()

    def moments(self, options: OptionTable, scaling: GradScaling) -> None:
        """Count the step, take the gradients into both moments, and sum the squares of weights and updates."""
        table, inverse_scale, found_inf = ctypes.byref(self._table), *_numbers_of(scaling)
        numbers, skip = self._numbers.data_ptr(), _address(found_inf)
        steps = self._step_addresses.data_ptr()
        self._library.lamb_numbers(table, steps, options.table.data_ptr(), _address(inverse_scale), numbers, skip)
        self._library.lamb_moments(table, numbers, skip)

    def update(self, options: OptionTable, scaling: GradScaling) -> None:
        """Write the step; see `Engine`."""
        table, found_inf = ctypes.byref(self._table), _numbers_of(scaling)[1]
        choices, rates = options.table.data_ptr(), self._rates.data_ptr()
        self._add_up()
        self._library.lamb_rates(table, choices, options["lr"].data_ptr(), self.sums.data_ptr(), rates)
        self._library.lamb_update(table, self._numbers.data_ptr(), rates, _address(found_inf))
        torch.autograd.graph.increment_version(self._steps)
        self._views.unload()


def _numbers_of(scaling: GradScaling) -> tuple[Tensor | None, Tensor | None]:
    # The passes read a double and a float, whatever the scaler holds.
    inverse_scale, found_inf = scaling.inverse_scale, scaling.found_inf
    return None if inverse_scale is None else inverse_scale.double(), None if found_inf is None else found_inf.float()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
