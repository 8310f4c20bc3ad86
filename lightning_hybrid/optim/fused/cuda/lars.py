"""CUDA engine for the fused LARS step, which passes the addresses of tensors to Triton kernels."""

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
from lightning_hybrid.optim.fused.option_table import (
    OptionTable,
    is_capturing,
    lars_options,
    to_device_,
)
from lightning_hybrid.optim.gradients import GradScaling
from lightning_hybrid.placement import Part

_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
# Triton will change the default of `enable_fp_fusion`, and warns if the option is not set.
_LAUNCH = {"num_warps": 8, "enable_fp_fusion": True}


class KernelLars(Engine):
    """CUDA engine that runs the fused LARS step for one group of tensors with Triton kernels.

        compute_norms()    launches `norms`
        write_update()     launches `finalize` and `lars_update`

    The number of launches does not depend on the number of tensors. If the address of a gradient changes, the table of
    addresses is copied again. The host compares only addresses, and does not wait for the device.

    Args:
        params: Parameters of one dtype.
        moments: One list with the momentum of each parameter, or no list if there is no momentum.
        grad_dtype: Dtype of all gradients.
        is_joint: Whether the denominator is |g + weight_decay * w|.
        chunk: Number of elements per program, a power of two.
        parts: Shard of each parameter, or empty. With shards, `block_sums` has the sums of the full tensors.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        moments: Sequence[Sequence[Tensor]],
        grad_dtype: torch.dtype,
        *,
        is_joint: bool,
        chunk: int = 4096,
        parts: Sequence[Part | None] = (),
    ) -> None:
        device = params[0].device
        num_tensors = len(params)
        state_dtype = torch.promote_types(params[0].dtype, torch.float32)
        self._device = device
        self._is_joint = is_joint
        self._has_momentum = bool(moments)
        self._views = ContiguousViews(params, *moments)

        # One program processes one chunk of a tensor.
        self._num_chunks = [-(-param.numel() // chunk) for param in params]
        num_programs = sum(self._num_chunks)
        self._counts = (num_tensors, num_programs)
        self._grid = (num_programs,)
        self._chunks = _chunk_tables(params, self._num_chunks)
        self._weight_pointers, self._buffer_pointers = _pointer_tables(self._views)
        self._grad_pointers = table_of([0] * num_tensors, torch.int64, device)
        self._grad_addresses: list[int] = []

        # `finalize` adds the sums of local chunks. If parameters are sharded, it adds the sums of all chunks of full
        # tensors.
        self._sums = torch.zeros(2, num_programs, dtype=state_dtype, device=device)
        self._summed = self._sums
        first_chunks = list(itertools.accumulate(self._num_chunks, initial=0))
        if any(parts):
            self.block_sums = BlockSums(params, parts, chunk, self._sums)
            self._summed = self.block_sums.whole_sums
            first_chunks = self.block_sums.first_blocks
        self._first_chunk = table_of(first_chunks, torch.int32, device)
        self._summed_counts = (num_tensors, first_chunks[-1])

        self._numbers = torch.zeros(
            num_tensors, lars_kernels.NUM_LARS, dtype=torch.float64, device=device
        )
        self._one = torch.ones((), device=device)
        self._zero = torch.zeros((), device=device)
        self._inverse_scale = self._one  # inverse scale of the current step
        self._unread_flag = torch.zeros((), device=device)  # flag that steps without a check write
        self._common = _launch_options(params[0].dtype, grad_dtype, chunk)

    def add_shards_with(self, add_up_: Callable[[Tensor], None]) -> None:
        """Set the function that all-reduces the sums of squares of DTensor shards.

        Its argument is a float64 tensor of shape (2, tensors).
        """
        super().add_shards_with(add_up_)
        num_tensors = len(self._num_chunks)
        self._lengths = table_of(self._num_chunks, torch.int64, self._device)
        # `finalize` then reads one sum per tensor.
        self._summed = self._sums.new_zeros(2, num_tensors)
        self._first_chunk = table_of(range(num_tensors + 1), torch.int32, self._device)
        self._summed_counts = (num_tensors, num_tensors)

    def _add_shards(self) -> None:
        """All-reduce the sums of squares of each tensor's shards, if parameters are DTensors."""
        if self._add_over_ranks_ is None:
            return
        # `index_add_` is not used, because it adds in an arbitrary order on a GPU, and the sums must be bitwise equal
        # on ranks with equal shards.
        by_chunk = self._sums.double().T.contiguous()
        by_tensor = torch.segment_reduce(by_chunk, "sum", lengths=self._lengths, unsafe=True)
        sums = by_tensor.T.contiguous()
        self._add_over_ranks_(sums)
        self._summed.copy_(sums)

    def compute_norms(
        self,
        grads: Sequence[Tensor],
        options: OptionTable,
        scaling: GradScaling,
        needed: Sequence[bool],
    ) -> Tensor:
        """Sum the squares for all norms, and set `found_inf_out` if a gradient contains inf or nan.

        See `Engine`.
        """
        found_inf = scaling.found_inf_out
        if found_inf is None:
            found_inf = self._unread_flag
        # Without a loss scale the kernel multiplies by 1, so that one compiled kernel serves both cases.
        self._inverse_scale = self._one
        if scaling.inverse_scale is not None:
            self._inverse_scale = scaling.inverse_scale

        # Triton launches on the current device, which may not be the device of the tensors.
        with torch.cuda.device_of(self._sums):
            self._load(grads)
            if self._grid[0]:  # CUDA does not allow an empty grid.
                lars_kernels.norms[self._grid](
                    self._weight_pointers,
                    self._grad_pointers,
                    *self._chunks,
                    options.table,
                    self._inverse_scale,
                    self._sums,
                    found_inf,
                    *self._counts,
                    IS_JOINT=self._is_joint,
                    **self._common,
                )
        return found_inf

    def write_update(self, options: OptionTable, scaling: GradScaling) -> None:
        """Update the parameters with the gradients and norms of the last `compute_norms` call."""
        found_inf = scaling.found_inf
        if found_inf is None:
            found_inf = self._zero
        num_tensors, _ = self._counts

        with torch.cuda.device_of(self._sums):
            self._add_shards()
            if self._grid[0]:
                lars_kernels.finalize[(num_tensors,)](
                    self._summed,
                    self._first_chunk,
                    options.table,
                    options["lr"],
                    self._inverse_scale,
                    self._numbers,
                    *self._summed_counts,
                    IS_JOINT=self._is_joint,
                )
                lars_kernels.lars_update[self._grid](
                    self._weight_pointers,
                    self._grad_pointers,
                    self._buffer_pointers,
                    *self._chunks,
                    self._numbers,
                    found_inf,
                    HAS_MOMENTUM=self._has_momentum,
                    **self._common,
                )
            self._views.unload()

    def _load(self, grads: Sequence[Tensor]) -> None:
        """Copy the addresses of the gradients to the device if they have changed."""
        addresses = self._views.load(grads)
        if addresses == self._grad_addresses:
            return
        if is_capturing():
            raise RuntimeError(
                "Inside a CUDA graph capture, the fused step needs gradients at the same addresses as in the previous "
                "step, because copying the addresses cannot be captured. Use zero_grad(set_to_none=False) and run one "
                "step before the capture, or set fused=False."
            )
        to_device_(self._grad_pointers, torch.tensor(addresses))
        self._grad_addresses = addresses


def _launch_options(
    weight_dtype: torch.dtype, grad_dtype: torch.dtype, chunk: int
) -> dict[str, Any]:
    """Return the compile-time arguments that the kernels `norms` and `lars_update` have in common."""
    state_dtype = torch.promote_types(weight_dtype, torch.float32)
    return {
        "WEIGHT": _DTYPES[weight_dtype],
        "GRAD": _DTYPES[grad_dtype],
        "STATE": _DTYPES[state_dtype],
        "CHUNK": chunk,
        **_LAUNCH,
    }


def _chunk_tables(
    params: Sequence[Tensor], num_chunks: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Create device tables with the size of each tensor, and with the tensor and position of each chunk.

    They are `numels` with one entry per tensor, and `tensor_of` and `index_of` with one entry per chunk.
    """
    device = params[0].device
    tensor_of: list[int] = []
    index_of: list[int] = []
    for tensor_index, num_chunks_of_tensor in enumerate(num_chunks):
        tensor_of.extend([tensor_index] * num_chunks_of_tensor)
        index_of.extend(range(num_chunks_of_tensor))
    numels = table_of([param.numel() for param in params], torch.int64, device)
    return numels, table_of(tensor_of, torch.int32, device), table_of(index_of, torch.int32, device)


def _pointer_tables(views: ContiguousViews) -> tuple[Tensor, Tensor]:
    """Create device tensors with the addresses of the weights and of the momentum buffers.

    Without momentum the addresses of the buffers are 0.
    """
    weights = views.dense[0]
    addresses = [data_ptrs(tensors) for tensors in views.dense]
    if len(addresses) == 1:
        addresses.append([0] * len(weights))
    weight_pointers, buffer_pointers = table_of(addresses, torch.int64, weights[0].device)
    return weight_pointers, buffer_pointers


def table_of(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Create a device tensor from numbers on the host, without waiting for the device."""
    on_host = torch.tensor(values, dtype=dtype)
    table = torch.empty(on_host.shape, dtype=dtype, device=device)
    to_device_(table, on_host)
    return table


def try_out(device: torch.device | str = "cuda") -> None:
    """Compile and launch a small test kernel, which raises an error if Triton does not work."""
    options = torch.zeros(len(lars_options()), 1, dtype=torch.float64, device=device)
    numbers = torch.zeros(1, lars_kernels.NUM_LARS, dtype=torch.float64, device=device)
    first_chunk = torch.zeros(2, dtype=torch.int32, device=device)
    sums = torch.zeros(2, device=device)
    lars_kernels.finalize[(1,)](
        sums, first_chunk, options, options[0], sums[0], numbers, 1, 0, IS_JOINT=False
    )
