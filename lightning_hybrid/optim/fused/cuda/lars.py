"""Tables of addresses for the Triton kernels, and their three launches per step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from lightning_hybrid.optim.fused.contiguous import ContiguousViews, data_ptrs
from lightning_hybrid.optim.fused.cuda import lars_kernels
from lightning_hybrid.optim.fused.option_table import OptionTable, lars_options, to_device_
from lightning_hybrid.optim.grad_scaling import GradScaling

_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


class KernelEngine:
    """The base of both rules: tables of addresses of one tensor group on one device, and the launch of the norms.

    `chunk` is the number of elements per program, a power of two. Each launch is under `current`.
    """

    add_up_: Callable[[Tensor], None] | None = None  # see `step.Engine`

    def __init__(
        self,
        params: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        copies: Sequence[Tensor],
        grad_dtype: torch.dtype,
        *,
        num_numbers: int,
        chunk: int,
    ) -> None:
        self._views = ContiguousViews(params, *states, copies)
        dense = self._views.dense
        device, weight = params[0].device, params[0].dtype
        state = torch.promote_types(weight, torch.float32)
        num_chunks = [-(-param.numel() // chunk) for param in params]
        tensor_of = [i for i, num in enumerate(num_chunks) for _ in range(num)]
        index_of = [index for num in num_chunks for index in range(num)]
        total = len(tensor_of)
        # One program per chunk, whatever tensor it is of: `tensor_of` and `index_of` find the chunk.
        self._grid, self._counts = (total,), (len(params), total)
        self._first_chunk = table_of(list(itertools.accumulate(num_chunks, initial=0)), torch.int32, device)
        self._num_chunks = table_of(num_chunks, torch.int64, device)
        self._numels = table_of([param.numel() for param in params], torch.int64, device)
        self._chunks = (self._numels, table_of(tensor_of, torch.int32, device), table_of(index_of, torch.int32, device))
        pointers = [data_ptrs(one) if one else [0] * len(params) for one in dense]
        self._pointers = list(table_of(pointers, torch.int64, device))
        self._grad_pointers = table_of([0] * len(params), torch.int64, device)
        self._sums = torch.zeros(2, total, dtype=state, device=device)
        self._numbers = torch.zeros(len(params), num_numbers, dtype=torch.float64, device=device)
        self._device = device
        self._one, self._zero = torch.ones((), device=device), torch.zeros((), device=device)
        self._ignored = torch.zeros((), device=device)  # takes the flag of a step that is not checked
        self._are_masters, self._copy = bool(copies), _DTYPES[copies[0].dtype if copies else torch.float16]
        self._common: dict[str, Any] = {
            "WEIGHT": _DTYPES[weight],
            "STATE": _DTYPES[state],
            "CHUNK": chunk,
            "num_warps": 8,
            "enable_fp_fusion": True,  # triton means to change its default, and warns until one is chosen
        }
        self._of_grads: dict[str, Any] = {"GRAD": _DTYPES[grad_dtype]}
        self._grad_addresses: list[int] = []

    def has_moved(self) -> bool:
        """Whether a tensor is no longer at the address it had when this was built."""
        return self._views.have_moved()

    def _sums_of_wholes(self, add_up_: Callable[[Tensor], None]) -> Tensor:
        """Add up the chunks of each tensor, and the shards of all ranks: float64 (2, tensors)."""
        # Not `index_add_`, whose order on a GPU is that of the moment: ranks with equal shards need equal bits.
        sums = torch.segment_reduce(self._sums.double().T.contiguous(), "sum", lengths=self._num_chunks, unsafe=True)
        wholes = sums.T.contiguous()
        add_up_(wholes)
        return wholes

    def _add_up(self) -> None:
        if self.add_up_ is None:
            return
        wholes = self._sums_of_wholes(self.add_up_).to(self._sums.dtype)
        # The kernels add up the chunks of a tensor: the whole's sum goes to the first, and the others are 0. A tensor
        # without chunks here is none of this rank's to move.
        has_chunks = self._num_chunks > 0
        places = torch.where(has_chunks, self._first_chunk[:-1].long(), self._counts[1])
        padded = torch.zeros(2, self._counts[1] + 1, dtype=wholes.dtype, device=wholes.device)
        self._sums.copy_(padded.index_copy_(1, places, wholes)[:, :-1])

    def _norms(self, options: OptionTable, scaling: GradScaling, *, is_joint: bool, has_weight_sums: bool) -> Tensor:
        found_inf = self._ignored if scaling.found_inf_out is None else scaling.found_inf_out
        self._inverse_scale = self._one if scaling.inverse_scale is None else scaling.inverse_scale
        # Without a factor the kernel multiplies by a stored 1: one compiled kernel for both cases.
        if self._grid[0]:  # CUDA refuses an empty grid
            lars_kernels.norms[self._grid](
                *(self._pointers[0], self._grad_pointers, *self._chunks),
                *(options.table, self._inverse_scale, self._sums, found_inf, *self._counts),
                IS_JOINT=is_joint,
                HAS_WEIGHT_SUMS=has_weight_sums,
                **self._common,
                **self._of_grads,
            )
        return found_inf

    def _load(self, grads: Sequence[Tensor]) -> None:
        places = self._views.load(grads)
        if places == self._grad_addresses:
            return
        if _is_capturing():
            raise RuntimeError(
                "The fused step inside a CUDA-graph capture needs gradients where they were in the step before: the "
                "table of their addresses cannot be captured. Keep them, with zero_grad(set_to_none=False), and do one "
                "step on them before the capture; or set fused=False."
            )
        to_device_(self._grad_pointers, torch.tensor(places))
        self._grad_addresses = places


class KernelLars(KernelEngine):
    """The step of LARS.

        norms()     `norms`
        update()    `finalize`, `lars_update`

    Three kernels, whatever the number of tensors; a gradient at another address costs one more copy of the table of
    addresses. The host waits for nothing, and compares addresses only.
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
    ) -> None:
        buffers = states[0] if states else []
        super().__init__(params, [buffers], copies, grad_dtype, num_numbers=lars_kernels.NUM_LARS, chunk=chunk)
        self._is_joint, self._has_momentum = is_joint, bool(buffers)

    def norms(
        self, grads: Sequence[Tensor], options: OptionTable, scaling: GradScaling, needed: Sequence[bool]
    ) -> Tensor:
        """Compute the norms, and whether a gradient is inf or nan, `needed` or not; see `step.Engine`."""
        with current(self._device):
            self._load(grads)
            return self._norms(options, scaling, is_joint=self._is_joint, has_weight_sums=self._knows_weights())

    def update(self, options: OptionTable, scaling: GradScaling) -> None:
        """Write the step; see `step.Engine`."""
        with current(self._device):
            self._update(options, scaling)
            self._views.unload()

    def _update(self, options: OptionTable, scaling: GradScaling) -> None:
        found_inf = self._zero if scaling.found_inf is None else scaling.found_inf
        self._add_up()
        if self._grid[0]:
            lars_kernels.finalize[(self._counts[0],)](
                *(self._sums, self._first_chunk, options.table, options["lr"], self._inverse_scale, self._numbers),
                *self._counts,
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
                **self._of_grads,
            )

    def _knows_weights(self) -> bool:
        # The last update left sum(w * w) of masters: tensors with a copy, which only their owner writes. Other writes
        # raise `_version`, except one through `.data`. A captured graph cannot look at versions: there it is computed.
        if not self._are_masters or self._views.pairs or self.add_up_ is not None or _is_capturing():
            return False
        return not self._views.changed()


def table_of(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to the device without a wait."""
    on_host = torch.tensor(values, dtype=dtype)
    table = torch.empty(on_host.shape, dtype=dtype, device=device)
    to_device_(table, on_host)
    return table


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the one that kernels are launched on, within a `with` block; nothing without CUDA."""
    # Triton launches on the current device, whichever device the tensors are on.
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def try_out(device: torch.device | str = "cuda") -> None:
    """Compile and launch one small kernel; where that fails, let Triton's error pass."""
    options = torch.zeros(len(lars_options()), 1, dtype=torch.float64, device=device)
    numbers = torch.zeros(1, lars_kernels.NUM_LARS, dtype=torch.float64, device=device)
    first_chunk, sums = torch.zeros(2, dtype=torch.int32, device=device), torch.zeros(2, device=device)
    lars_kernels.finalize[(1,)](sums, first_chunk, options, options[0], sums[0], numbers, 1, 0, IS_JOINT=False)


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
