"""CPU engines for fused optimizer steps, which pass the addresses of tensors to C++ functions."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lightning_hybrid.optim.fused.block_sums import BlockSums
from lightning_hybrid.optim.fused.contiguous import ContiguousViews, data_ptrs
from lightning_hybrid.optim.fused.cpu import build
from lightning_hybrid.optim.fused.engine import Engine
from lightning_hybrid.optim.fused.option_table import OptionTable
from lightning_hybrid.optim.gradients import GradScaling
from lightning_hybrid.placement import Part

# Values of the enum `Dtype` in blocks.h.
_DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
# Number of elements of a block. It is large enough that scheduling costs little, and small enough that all threads
# finish at about the same time.
_BLOCK = 1 << 14


class Table(ctypes.Structure):
    """Python counterpart of the C++ struct `Table` in `blocks.h`, with the same fields."""

    _fields_ = (
        ("num_tensors", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("parallel", ctypes.c_void_p),
        ("state_dtype", ctypes.c_int64),
        ("grad_dtype", ctypes.c_int64),
        ("weight_dtype", ctypes.c_int64),
        ("grads", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("firsts", ctypes.c_void_p),
        ("seconds", ctypes.c_void_p),
        ("numels", ctypes.c_void_p),
        ("tensor_of", ctypes.c_void_p),
        ("begin_of", ctypes.c_void_p),
        ("is_measured", ctypes.c_void_p),
        ("weight_squares", ctypes.c_void_p),
        ("squares", ctypes.c_void_p),
    )


class NativeEngine(Engine):
    """Base class of the CPU engines, which run C++ passes over one group of tensors.

    The table of addresses is created once. A step only writes the addresses of its gradients and calls the passes,
    which run without Python's interpreter lock.

    Args:
        params: Parameters of one dtype.
        moments: Lists with the optimizer state of each parameter: the momentum, or both moments of LAMB, or no list.
        grad_dtype: Dtype of all gradients.
        parts: Shard of each parameter, or empty. With shards, `block_sums` has the sums of the full tensors.
    """

    num_numbers: ClassVar[int]  # number of coefficients per tensor, as in passes.cpp

    def __init__(
        self,
        params: Sequence[Tensor],
        moments: Sequence[Sequence[Tensor]],
        grad_dtype: torch.dtype,
        *,
        parts: Sequence[Part | None] = (),
    ) -> None:
        num_tensors = len(params)
        self._library = build.library()
        self._views = ContiguousViews(params, *moments)
        self._numbers = torch.zeros(num_tensors, self.num_numbers, dtype=torch.float64)
        # Sums of squares of weights in the first row, and of gradients, directions or updates in the second row.
        self.sums = torch.zeros(2, num_tensors, dtype=torch.float64)

        # The arrays are kept alive here, because the table holds only their addresses.
        self._arrays = _arrays_of(self._views)
        num_blocks = len(self._arrays["tensor_of"])
        sums_by_block = torch.zeros(2, num_blocks, dtype=torch.float64)
        self._arrays["weight_squares"] = sums_by_block[0]
        self._arrays["squares"] = sums_by_block[1]

        weight_dtype = params[0].dtype
        self._table = Table(
            num_tensors=num_tensors,
            num_blocks=num_blocks,
            block=_BLOCK,
            parallel=build.openmp_parallel() or None,
            state_dtype=_DTYPES[torch.promote_types(weight_dtype, torch.float32)],
            grad_dtype=_DTYPES[grad_dtype],
            weight_dtype=_DTYPES[weight_dtype],
        )
        for name, array in self._arrays.items():
            setattr(self._table, name, array.data_ptr())

        self._measured: list[bool] = []
        # Table whose blocks are added up. If parameters are sharded, it is the table of the full tensors.
        self._summed_table = self._table
        if any(parts):
            self.block_sums = BlockSums(params, parts, _BLOCK, sums_by_block)
            self._summed_table = self._table_of_whole_tensors(self.block_sums)

    def _table_of_whole_tensors(self, block_sums: BlockSums) -> Table:
        """Create a C++ table that describes the blocks of the full tensors, for adding up their sums."""
        num_blocks = torch.tensor(block_sums.num_blocks)
        tensor_of = torch.arange(len(num_blocks)).repeat_interleave(num_blocks)
        self._arrays["tensor_of_whole_tensors"] = tensor_of  # The table holds only its address.
        weight_squares, squares = block_sums.whole_sums
        return Table(
            num_tensors=len(num_blocks),
            num_blocks=len(tensor_of),
            tensor_of=tensor_of.data_ptr(),
            weight_squares=weight_squares.data_ptr(),
            squares=squares.data_ptr(),
        )

    def _load(self, grads: Sequence[Tensor], needed: Sequence[bool]) -> None:
        """Write the addresses of gradients to the C++ table, and mark the tensors whose norms are needed."""
        addresses = self._views.load(grads)
        self._arrays["grads"].copy_(torch.tensor(addresses))
        if self._measured != list(needed):
            self._arrays["is_measured"].copy_(torch.tensor(needed))
            self._measured = list(needed)
        self._table.num_threads = torch.get_num_threads()

    def _add_up_blocks(self) -> None:
        """Sum the squares of each tensor over its blocks and over the ranks that hold its shards.

        The result is written to `sums`.
        """
        self._library.add_up(ctypes.byref(self._summed_table), self.sums.data_ptr())
        if self._add_over_ranks_ is not None:
            self._add_over_ranks_(self.sums)


class NativeLars(NativeEngine):
    """CPU engine for the fused LARS step.

        compute_norms()    sum(w * w), and sum(g * g) or sum(d * d)      one read of g, w
        write_update()     the step                                      one read of g, w, v, one write of w, v

    User code may write parameters between two steps, so each step computes the norms of its weights again.
    """

    num_numbers = 6

    def __init__(
        self,
        params: Sequence[Tensor],
        moments: Sequence[Sequence[Tensor]],
        grad_dtype: torch.dtype,
        *,
        is_joint: bool,
        parts: Sequence[Part | None] = (),
    ) -> None:
        super().__init__(params, moments, grad_dtype, parts=parts)
        self._is_joint = is_joint

    def compute_norms(
        self,
        grads: Sequence[Tensor],
        options: OptionTable,
        scaling: GradScaling,
        needed: Sequence[bool],
    ) -> Tensor:
        """Sum the squares of weights and gradients, and return 1.0 if a gradient contains inf or nan, else 0.0.

        See `Engine`.
        """
        decays = None
        if self._is_joint:
            # Gradients are still scaled. The decay is scaled instead, because |g / s + decay w| = |g + s decay w| / s.
            decays = options["weight_decay"] * options["sign"]
            if scaling.inverse_scale is not None:
                decays = decays / scaling.inverse_scale
        found_inf = torch.zeros(())
        self._load(grads, needed)
        self._library.measure_layers(
            ctypes.byref(self._table), _address(decays), found_inf.data_ptr()
        )
        return found_inf

    def write_update(self, options: OptionTable, scaling: GradScaling) -> None:
        """Update the parameters with the gradients and norms of the last `compute_norms` call."""
        table = ctypes.byref(self._table)
        numbers = self._numbers.data_ptr()
        inverse_scale, found_inf = _as_read_by_passes(scaling)

        # The sums of blocks are added per tensor and converted to coefficients before the pass that writes.
        self._add_up_blocks()
        self._library.lars_numbers(
            table,
            self._is_joint,
            options.table.data_ptr(),
            options["lr"].data_ptr(),
            _address(inverse_scale),
            self.sums.data_ptr(),
            numbers,
        )
        self._library.lars_update(table, numbers, _address(found_inf))
        self._views.unload()


class NativeLamb(NativeEngine):
    """CPU engine for the fused LAMB step.

        compute_norms()     sum(g * g), if it is needed         one read of g
        update_moments()    moments, sum(w * w), sum(u * u)     one read of g, w, m, v, one write of m, v
        write_update()      the step                            one read of w, m, v, one write of w

    Args:
        params, moments, grad_dtype, parts: As in `NativeEngine`.
        steps: Step count of each parameter.
    """

    num_numbers = 7

    def __init__(
        self,
        params: Sequence[Tensor],
        moments: Sequence[Sequence[Tensor]],
        steps: Sequence[Tensor],
        grad_dtype: torch.dtype,
        *,
        parts: Sequence[Part | None] = (),
    ) -> None:
        super().__init__(params, moments, grad_dtype, parts=parts)
        self._steps = steps
        self._step_addresses = data_ptrs(steps)
        self._step_address_array = torch.tensor(self._step_addresses)
        self._rates = torch.zeros(len(params), dtype=torch.float64)

    def has_moved(self) -> bool:
        """Return whether the address of a tensor or a step count has changed since construction."""
        if super().has_moved():
            return True
        return self._step_addresses != data_ptrs(self._steps)

    def compute_norms(
        self,
        grads: Sequence[Tensor],
        options: OptionTable,
        scaling: GradScaling,
        needed: Sequence[bool],
    ) -> Tensor:
        """Sum the squares of gradients, and return 1.0 if a gradient contains inf or nan, else 0.0.

        See `Engine`.
        """
        found_inf = torch.zeros(())
        self._load(grads, needed)
        self._library.measure_grads(ctypes.byref(self._table), found_inf.data_ptr())
        return found_inf

    def sum_grad_squares(self) -> Tensor:
        """Return the sum of squares of all scaled gradients, as a 0-dim float64 tensor."""
        self._add_up_blocks()
        return self.sums[1].sum()

    def update_moments(self, options: OptionTable, scaling: GradScaling) -> None:
        """Increment the step counts, update both moments, and sum the squares of weights and updates."""
        table = ctypes.byref(self._table)
        numbers = self._numbers.data_ptr()
        inverse_scale, found_inf = _as_read_by_passes(scaling)
        self._library.lamb_numbers(
            table,
            self._step_address_array.data_ptr(),
            options.table.data_ptr(),
            _address(inverse_scale),
            numbers,
            _address(found_inf),
        )
        self._library.lamb_moments(table, numbers, _address(found_inf))

    def write_update(self, options: OptionTable, scaling: GradScaling) -> None:
        """Update the parameters with the moments and norms of the last `update_moments` call."""
        table = ctypes.byref(self._table)
        rates = self._rates.data_ptr()
        _, found_inf = _as_read_by_passes(scaling)
        self._add_up_blocks()
        self._library.lamb_rates(
            table, options.table.data_ptr(), options["lr"].data_ptr(), self.sums.data_ptr(), rates
        )
        self._library.lamb_update(table, self._numbers.data_ptr(), rates, _address(found_inf))
        torch.autograd.graph.increment_version(self._steps)
        self._views.unload()


def _arrays_of(views: ContiguousViews) -> dict[str, Tensor]:
    """Create the arrays to which a C++ `Table` points, except the arrays of sums."""
    params = views.dense[0]
    numels = torch.tensor([param.numel() for param in params])
    num_blocks = (numels + _BLOCK - 1) // _BLOCK
    tensor_of = torch.arange(len(params)).repeat_interleave(num_blocks)
    first_blocks = num_blocks.cumsum(0) - num_blocks
    index_in_tensor = torch.arange(len(tensor_of)) - first_blocks.index_select(0, tensor_of)
    arrays = {
        "grads": torch.zeros(len(params), dtype=torch.int64),
        "numels": numels,
        "tensor_of": tensor_of,
        "begin_of": index_in_tensor * _BLOCK,
        "is_measured": torch.zeros(len(params), dtype=torch.int64),
    }
    # Without momentum there are fewer lists than names.
    for name, tensors in zip(("weights", "firsts", "seconds"), views.dense, strict=False):
        arrays[name] = torch.tensor(data_ptrs(tensors))
    return arrays


def _as_read_by_passes(scaling: GradScaling) -> tuple[Tensor | None, Tensor | None]:
    """Convert the inverse loss scale to float64 and `found_inf` to float32, as the C++ code expects."""
    inverse_scale = scaling.inverse_scale
    if inverse_scale is not None:
        inverse_scale = inverse_scale.double()
    found_inf = scaling.found_inf
    if found_inf is not None:
        found_inf = found_inf.float()
    return inverse_scale, found_inf


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    return tensor.data_ptr()
