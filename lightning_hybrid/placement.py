"""Sharding of tensors over ranks, with shard boundaries at multiples of a block size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

BLOCK = 1 << 14
"""Number of elements of a block. The C++ passes sum squares per block. The Triton kernels use smaller chunks, whose
size divides the block size."""


_IGNORED_KEY = "_ddp_params_and_buffers_to_ignore"  # attribute of a module that DDP reads


@dataclass(frozen=True, kw_only=True)
class Part:
    """Shard of a tensor that this rank holds, as a range of elements in memory order.

    The shard holds the elements from `begin` up to, but not including, `end`.

    Attributes:
        numel: Number of elements of the full tensor.
        begin: First element of the shard, a multiple of `BLOCK`, or `numel` if the shard is empty.
        end: One past the last element of the shard, a multiple of `BLOCK` or `numel`.
        num_holders: Number of ranks that hold this shard and contribute to the same sum over ranks. Each contribution
            is divided by this number.

    Raises:
        ValueError: The shard is not within the tensor, or a boundary of the shard is inside a block.

    >>> Part(numel=40_000, begin=16_384, end=40_000)
    Part(numel=40000, begin=16384, end=40000)
    """

    numel: int
    begin: int
    end: int
    num_holders: int = field(default=1, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.begin <= self.end <= self.numel:
            raise ValueError(
                f"`begin` and `end` (={self.begin}, {self.end}) must be within the tensor, whose `numel` is "
                f"{self.numel}, and in ascending order. Use values that `spans` returns."
            )
        for name, value in (("begin", self.begin), ("end", self.end)):
            if value % BLOCK and value != self.numel:
                raise ValueError(
                    f"`{name}` (={value}) must be a multiple of {BLOCK} or the end of the tensor ({self.numel}), "
                    "because squares are summed per block, so that norms are bit-identical however the tensor is "
                    "divided among ranks. Use a value that `spans` returns."
                )


def spans(numel: int, num_parts: int, block: int = BLOCK) -> list[tuple[int, int]]:
    """Split `numel` elements into `num_parts` ranges `(begin, end)` of nearly equal size.

    The ranges are consecutive and cover all elements. All boundaries except the last are multiples of `block`. If there
    are fewer blocks than ranges, some ranges are empty. If the number of blocks is not divisible by `num_parts`, later
    ranges tend to get the additional blocks, because the last block may be short.

    >>> spans(10, 2, block=4), spans(3, 2, block=4)
    ([(0, 4), (4, 10)], [(0, 0), (0, 3)])
    """
    num_blocks = -(-numel // block)
    result = []
    begin = 0
    for part in range(1, num_parts + 1):
        end_block = num_blocks * part // num_parts
        end = min(numel, end_block * block)
        result.append((begin, end))
        begin = end
    return result


def is_split(numel: int, num_parts: int, block: int = BLOCK) -> bool:
    """Return whether a tensor of `numel` elements is large enough to be sharded over `num_parts` ranks.

    A tensor with fewer blocks than ranks is not sharded: every rank holds all of its elements.

    >>> is_split(8, 2, block=4), is_split(5, 2, block=4), is_split(4, 2, block=4)
    (True, True, False)
    """
    return num_parts > 1 and numel > block * (num_parts - 1)


def flattened(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the elements of `tensor` as a 1-D tensor, in the memory order of `like`.

    Both tensors must have the same shape. The result is a view if they have the same strides and no gaps, otherwise it
    is a copy.

    >>> import torch; like = torch.zeros(2, 3).T
    >>> flattened(torch.arange(6).view(3, 2), like)
    tensor([0, 2, 4, 1, 3, 5])
    """
    by_stride = sorted(range(like.dim()), key=like.stride, reverse=True)
    return tensor.detach().permute(by_stride).reshape(-1)


def has_gaps(tensor: Tensor) -> bool:
    """Return whether a tensor's elements overlap in memory or have gaps between them.

    >>> import torch
    >>> has_gaps(torch.zeros(4, 3).T), has_gaps(torch.zeros(4, 3)[:, :2])
    (False, True)
    """
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return not tensor.permute(by_stride).is_contiguous()


def with_entries(
    state: Mapping[str, Any],
    optimizer: Optimizer,
    change: Callable[[Tensor, dict[str, Any]], dict[str, Any] | None],
) -> dict[str, Any]:
    """Return an optimizer state dict with each parameter's entry replaced by `change(parameter, entry)`.

    Entries for which `change` returns None are removed. The state dict may have been saved by another run. Entries
    without a parameter in this optimizer are left unchanged.
    """
    indices: list[int] = []
    for group in state["param_groups"]:
        indices.extend(group["params"])
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters.extend(group["params"])
    parameter_of_index = dict(zip(indices, parameters, strict=False))

    entries = {}
    for index, entry in state["state"].items():
        changed_entry = entry
        if index in parameter_of_index:
            changed_entry = change(parameter_of_index[index], entry)
        if changed_entry is not None:
            entries[index] = changed_entry
    return {**state, "state": entries}


@contextmanager
def ignored_by_ddp(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Make DDP ignore the named parameters and buffers within the `with` block.

    Parameters and buffers that the module already ignores stay ignored.
    """
    was_set = _IGNORED_KEY in vars(module)  # on the instance, not on its class
    ignored_before = getattr(module, _IGNORED_KEY, ())
    requested = set(names)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, [*ignored_before, *requested]
    )
    try:
        yield
    finally:
        added = requested.difference(ignored_before)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in added:
                vars(tensor).pop("_ddp_ignored", None)
        delattr(module, _IGNORED_KEY)
        if was_set:
            setattr(module, _IGNORED_KEY, ignored_before)


def broadcast_first_(tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Broadcast tensors in place from the first rank of `group` to its other ranks.

    If `group` is None, all ranks take part.

    Collective: every rank of the group must call it, in the same order.
    """
    if group is None:
        group = dist.group.WORLD
    if tensors and group is not None:
        # Tensors are flattened into buffers of the size that DDP uses. NCCL rejects tensors that are not contiguous,
        # and a broadcast for each tensor would be slow.
        dist._broadcast_coalesced(group, tensors, 25 * 2**20, 0)
