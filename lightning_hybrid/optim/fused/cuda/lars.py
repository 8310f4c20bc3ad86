"""Tables of addresses for the Triton kernels, and their three launches per step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from lightning_hybrid.optim.fused.block_sums import BlockSums
from lightning_hybrid.optim.fused.contiguous import ContiguousViews, data_ptrs
from lightning_hybrid.optim.fused.cuda import lars_kernels
from lightning_hybrid.optim.fused.engine import Engine
from lightning_hybrid.optim.fused.option_table import OptionTable, is_capturing, lars_options, to_device_
from lightning_hybrid.optim.gradients import GradScaling
from lightning_hybrid.placement import Part

_DTYPES = {getattr(torch, name): getattr(tl, name) for name in ("float16", "bfloat16", "float32", "float64")}
_LAUNCH = {"num_warps": 8, "enable_fp_fusion": True}  # triton means to change its default, and warns until it is chosen


class KernelLars(Engine):
    """The step of LARS for one tensor group on one device: tables of addresses, and the launches.

        norms()     `norms`
        update()    `finalize`, `lars_update`

    Three kernels, whatever the number of tensors; a gradient at another address costs one more copy of the table of
    addresses. The host waits for nothing, and compares addresses only. `chunk` is the number of elements
    per program, a power of two. `parts` is empty, or has the part of each tensor: then the sums that count are those in
    `block_sums`.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        copies: Sequence[Tensor],
        grad_dtype: torch.dtype,
        *,
        is_joint: bool,
        chunk: int = 4096,
        parts: Sequence[Part | None] = (),
    ) -> None:
        buffers = states[0] if states else []
        self._is_joint, self._has_momentum = is_joint, bool(buffers)
        self._views = ContiguousViews(params, buffers, copies)
        dense = self._views.dense
        device, weight = params[0].device, params[0].dtype
        state = torch.promote_types(weight, torch.float32)
        num_chunks = [-(-param.numel() // chunk) for param in params]
        tensor_of = [i for i, num in enumerate(num_chunks) for _ in range(num)]
        index_of = [index for num in num_chunks for index in range(num)]
        total = len(tensor_of)
        # One program per chunk, whatever tensor it is of: `tensor_of` and `index_of` find the chunk.
        self._grid, self._counts = (total,), (len(params), total)
        self._num_chunks, firsts = num_chunks, list(itertools.accumulate(num_chunks, initial=0))
        self._numels = table_of([param.numel() for param in params], torch.int64, device)
        self._chunks = (self._numels, table_of(tensor_of, torch.int32, device), table_of(index_of, torch.int32, device))
        pointers = [data_ptrs(one) if one else [0] * len(params) for one in dense]
        self._pointers = list(table_of(pointers, torch.int64, device))
        self._grad_pointers = table_of([0] * len(params), torch.int64, device)
        self._sums = self._added = torch.zeros(2, total, dtype=state, device=device)
        if any(parts):
            self.block_sums = BlockSums(params, parts, chunk, self._sums)
            self._added, firsts = self.block_sums.whole, self.block_sums.first_of
        # What is added up: the sums of the chunks here, or of all that ranks hold together.
        self._first_chunk = table_of(firsts, torch.int32, device)
        self._added_counts = (len(params), firsts[-1])
        self._numbers = torch.zeros(len(params), lars_kernels.NUM_LARS, dtype=torch.float64, device=device)
        self._device = device
        self._one, self._zero = torch.ones((), device=device), torch.zeros((), device=device)
        self._ignored = torch.zeros((), device=device)  # takes the flag of a step that is not checked
        self._are_masters, self._copy = bool(copies), _DTYPES[copies[0].dtype if copies else torch.float16]
        dtypes = {"WEIGHT": _DTYPES[weight], "GRAD": _DTYPES[grad_dtype], "STATE": _DTYPES[state]}
        self._common: dict[str, Any] = {**dtypes, "CHUNK": chunk, **_LAUNCH}
        self._grad_addresses: list[int] = []

    def share(self, add_up_: Callable[[Tensor], None]) -> None:
        """Have the sums of shards added over ranks; see `Engine`."""
        super().share(add_up_)
        num_tensors = len(self._num_chunks)
        self._lengths = table_of(self._num_chunks, torch.int64, self._device)
        # What is added up is then one sum for each tensor.
        self._added = self._sums.new_zeros(2, num_tensors)
        self._first_chunk = table_of(range(num_tensors + 1), torch.int32, self._device)
        self._added_counts = (num_tensors, num_tensors)

    def _add_up(self) -> None:
        if self._add_over_ranks_ is not None:
            # Not `index_add_`, whose order on a GPU is that of the moment: ranks with equal shards need equal bits.
            by_chunk = self._sums.double().T.contiguous()
            sums = torch.segment_reduce(by_chunk, "sum", lengths=self._lengths, unsafe=True).T.contiguous()
            self._add_over_ranks_(sums)
            self._added.copy_(sums)

    def norms(
        self, grads: Sequence[Tensor], options: OptionTable, scaling: GradScaling, needed: Sequence[bool]
    ) -> Tensor:
        """Compute the norms, and whether a gradient is inf or nan, `needed` or not; see `Engine`."""
        found_inf = self._ignored if scaling.found_inf_out is None else scaling.found_inf_out
        # Without a factor the kernel multiplies by a stored 1: one compiled kernel for both cases.
        self._inverse_scale = self._one if scaling.inverse_scale is None else scaling.inverse_scale
        with torch.cuda.device_of(self._sums):  # Triton launches on the current device, whichever the tensors are on
            self._load(grads)
            if self._grid[0]:  # CUDA refuses an empty grid
                lars_kernels.norms[self._grid](
                    *(self._pointers[0], self._grad_pointers, *self._chunks),
                    *(options.table, self._inverse_scale, self._sums, found_inf, *self._counts),
                    IS_JOINT=self._is_joint,
                    HAS_WEIGHT_SUMS=self._knows_weights(),
                    **self._common,
                )
        return found_inf

    def update(self, options: OptionTable, scaling: GradScaling) -> None:
        """Write the step; see `Engine`."""
        found_inf = self._zero if scaling.found_inf is None else scaling.found_inf
        with torch.cuda.device_of(self._sums):
            self._add_up()
            if self._grid[0]:
                lars_kernels.finalize[(self._counts[0],)](
                    *(self._added, self._first_chunk, options.table, options["lr"], self._inverse_scale, self._numbers),
                    *self._added_counts,
                    IS_JOINT=self._is_joint,
                )
                weights, buffers, copies = self._pointers
                lars_kernels.lars_update[self._grid](
                    *(weights, self._grad_pointers, buffers, copies, *self._chunks),
                    *(self._numbers, found_inf, self._sums),
                    COPY=self._copy,
                    HAS_MOMENTUM=self._has_momentum,
                    HAS_COPY=self._are_masters,
                    **self._common,
                )
            self._views.unload()

    def _load(self, grads: Sequence[Tensor]) -> None:
        places = self._views.load(grads)
        if places == self._grad_addresses:
            return
        if is_capturing():
            raise RuntimeError(
                "The fused step inside a CUDA-graph capture needs gradients where they were in the step before: the "
                "table of their addresses cannot be captured. Keep them, with zero_grad(set_to_none=False), and do one "
                "step on them before the capture; or set fused=False."
            )
        to_device_(self._grad_pointers, torch.tensor(places))
        self._grad_addresses = places

    def _knows_weights(self) -> bool:
        # The last update left sum(w * w) of masters: tensors with a copy, which only their owner writes. Other writes
        # raise `_version`, except one through `.data`. A captured graph cannot look at versions: there it is computed.
        if not self._are_masters or self._views.pairs or is_capturing():
            return False
        return not self._views.changed()


def table_of(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to the device without a wait."""
    on_host = torch.tensor(values, dtype=dtype)
    table = torch.empty(on_host.shape, dtype=dtype, device=device)
    to_device_(table, on_host)
    return table


def try_out(device: torch.device | str = "cuda") -> None:
    """Compile and launch one small kernel; where that fails, let Triton's error pass."""
    options = torch.zeros(len(lars_options()), 1, dtype=torch.float64, device=device)
    numbers = torch.zeros(1, lars_kernels.NUM_LARS, dtype=torch.float64, device=device)
    first_chunk, sums = torch.zeros(2, dtype=torch.int32, device=device), torch.zeros(2, device=device)
    lars_kernels.finalize[(1,)](sums, first_chunk, options, options[0], sums[0], numbers, 1, 0, IS_JOINT=False)
