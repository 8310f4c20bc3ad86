"""Arithmetic on lists of tensors, for steps of LARS and LAMB that are not fused."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.optim.fused.contiguous import is_dense
from lightning_hybrid.placement import flattened

# Elements per thread that are worked on at once on the CPU (2 MiB of float32). The allocator reuses temporaries of this
# size, where those of a tensor of 150 MB would come from the operating system, page by page.
_BLOCK = 1 << 19


def as_dtype(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the tensors in `dtype`: the very same list if they have it, else copies."""
    return tensors if tensors[0].dtype == dtype else copied(tensors, dtype)


def copied(tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Copy the tensors, on a GPU in one launch; `dtype` None: in their own."""
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def add_scaled_(tensors: list[Tensor], others: list[Tensor], factor: float | Tensor) -> None:
    """Add factor * others to tensors, list-wise and in place; `factor` may be a 0-dim tensor on their device."""
    if isinstance(factor, Tensor):
        torch._foreach_add_(tensors, torch._foreach_mul(others, factor))
    else:
        torch._foreach_add_(tensors, others, alpha=factor)


def in_blocks(*lists: list[Tensor]) -> Iterator[list[list[Tensor]]]:
    """Yield views of lists of equal shapes, to work on in turn: one large CPU tensor in blocks, all else as it is."""
    first = lists[0][0]
    # Not while torch.compile traces: it would unroll the blocks into its graph.
    size = 0 if torch.compiler.is_compiling() else block_numel()
    whole = size == 0 or len(lists[0]) > 1 or first.device.type != "cpu" or first.numel() <= size
    # Blocks are stretches of memory: they belong together only if all lists have their elements in one order.
    if whole or not is_dense([one[0] for one in lists]):
        yield list(lists)
        return
    for blocks in zip(*(flattened(one[0], first).split(size) for one in lists), strict=True):
        yield [[block] for block in blocks]


def block_numel() -> int:
    """Count the elements of the blocks of `in_blocks`."""
    return _BLOCK * torch.get_num_threads()


def scaled(tensors: list[Tensor], factors: float | Tensor, keep: list[Tensor]) -> list[Tensor]:
    """Multiply `tensors` by one factor, or by one each; in place unless they are the very list to `keep`."""
    by: Any = factors.unbind() if isinstance(factors, Tensor) and factors.dim() == 1 else factors
    if tensors is keep:
        return list(torch._foreach_mul(tensors, by))
    torch._foreach_mul_(tensors, by)
    return tensors
