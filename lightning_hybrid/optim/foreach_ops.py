"""Multi-tensor operations for LARS and LAMB steps that do not use fused kernels."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.optim.fused.contiguous import is_dense
from lightning_hybrid.placement import flattened

# Number of elements per thread that are processed at a time on the CPU (2 MiB of float32). The allocator reuses
# temporaries of this size, while temporaries of a tensor of 150 MB would need new memory pages.
_BLOCK = 1 << 19


def as_dtype(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Convert a list of tensors to `dtype`, or return the list itself if it has this dtype."""
    if tensors[0].dtype == dtype:
        return tensors
    return copied(tensors, dtype)


def copied(tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Copy a list of tensors with one kernel launch, and convert the copies to `dtype` unless it is None."""
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def add_scaled_(tensors: list[Tensor], addends: list[Tensor], factor: float | Tensor) -> None:
    """Add `factor * addends` to `tensors` in place.

    `factor` may be a 0-dim tensor on their device.
    """
    if isinstance(factor, Tensor):
        scaled_addends = torch._foreach_mul(addends, factor)
        torch._foreach_add_(tensors, scaled_addends)
    else:
        torch._foreach_add_(tensors, addends, alpha=factor)


def in_blocks(*lists: list[Tensor]) -> Iterator[list[list[Tensor]]]:
    """Yield large CPU tensors block by block, so that temporaries stay small.

    If each list holds one large CPU tensor, lists with a view of one block each are yielded, block after block.
    Otherwise the lists are yielded once, unchanged. Tensors at the same index must have equal shapes.
    """
    if not _is_cut(lists):
        yield list(lists)
        return

    block_size = block_numel()
    first_tensor = lists[0][0]
    blocks_of_tensors = []
    for tensors in lists:
        flat = flattened(tensors[0], like=first_tensor)
        blocks_of_tensors.append(flat.split(block_size))
    for blocks in zip(*blocks_of_tensors, strict=True):
        yield [[block] for block in blocks]


def _is_cut(lists: tuple[list[Tensor], ...]) -> bool:
    """Return whether `in_blocks` splits the tensors of these lists."""
    # While torch.compile traces they are not split, because it would unroll the blocks into its graph.
    if torch.compiler.is_compiling():
        return False

    first_list = lists[0]
    first_tensor = first_list[0]
    is_single = len(first_list) == 1
    is_on_cpu = first_tensor.device.type == "cpu"
    is_large = first_tensor.numel() > block_numel()
    if not (is_single and is_on_cpu and is_large):
        return False
    # Blocks are ranges of memory, so they correspond only if all tensors have the same memory order.
    corresponding_tensors = [tensors[0] for tensors in lists]
    return is_dense(corresponding_tensors)


def block_numel() -> int:
    """Return the number of elements per block of `in_blocks`."""
    return _BLOCK * torch.get_num_threads()


def scaled(tensors: list[Tensor], factors: float | Tensor, keep: list[Tensor]) -> list[Tensor]:
    """Multiply all tensors by one factor, or each tensor by its own factor.

    The result is written in place, unless `tensors` is the list `keep`.
    """
    multiplier: Any = factors
    if isinstance(factors, Tensor) and factors.dim() == 1:
        multiplier = factors.unbind()

    if tensors is keep:
        products = torch._foreach_mul(tensors, multiplier)
        return list(products)
    torch._foreach_mul_(tensors, multiplier)
    return tensors
