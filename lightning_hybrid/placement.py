"""Where the elements of a tensor are when ranks share it: each holds one part, cut where sums of squares are cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

BLOCK = 1 << 14
"""Elements. The C++ passes sum squares by blocks of this size, the Triton kernels by chunks that divide it."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a tensor that this rank holds: elements `begin` up to `end` of the whole, in its order of memory.

    Attributes:
        numel: Elements of the whole tensor.
        begin: The first element held, a multiple of `BLOCK`, or `numel` where the part is empty.
        end: One past the last, a multiple of `BLOCK` or `numel`.
        num_holders: Ranks that hold this part and add their sums of it up, as those of all nodes a layer's slice.

    Raises:
        ValueError: The part is not within the tensor, or cuts a block.

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
                f"{self.numel}: a part is elements `begin` up to `end` of the whole. Take them from `spans`."
            )
        for name, value in (("begin", self.begin), ("end", self.end)):
            if value % BLOCK and value != self.numel:
                raise ValueError(
                    f"`{name}` (={value}) must be a multiple of {BLOCK} or the tensor's end ({self.numel}): sums of "
                    "squares are by whole blocks, so that their bits do not depend on who holds which part. Take it "
                    "from `spans`."
                )


def spans(numel: int, num_parts: int, block: int = BLOCK) -> list[tuple[int, int]]:
    """Cut `numel` elements at multiples of `block` into `num_parts` spans `(begin, end)`, as equal as that allows.

    Each element is in one span, in order; with fewer blocks than parts some spans are empty. A block more, where the
    number does not divide, goes to late spans, since the last block may be short.

    >>> spans(10, 2, block=4), spans(3, 2, block=4)
    ([(0, 4), (4, 10)], [(0, 0), (0, 3)])
    """
    num_blocks = -(-numel // block)
    cuts = [min(numel, num_blocks * part // num_parts * block) for part in range(num_parts + 1)]
    return list(itertools.pairwise(cuts))


def is_split(numel: int, num_parts: int, block: int = BLOCK) -> bool:
    """Whether a tensor is large enough to be shared: of fewer than `num_parts` blocks, every rank holds all of it.

    >>> is_split(8, 2, block=4), is_split(5, 2, block=4), is_split(4, 2, block=4)
    (True, True, False)
    """
    return num_parts > 1 and numel > block * (num_parts - 1)


def flattened(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the elements of `tensor` as one row, in the order in which `like` (of its shape) has them in memory.

    A view where both have one order and no gaps, else a copy.

    >>> import torch; like = torch.zeros(2, 3).T
    >>> flattened(torch.arange(6).view(3, 2), like)
    tensor([0, 2, 4, 1, 3, 5])
    """
    by_stride = sorted(range(like.dim()), key=like.stride, reverse=True)
    return tensor.detach().permute(by_stride).reshape(-1)


def has_gaps(tensor: Tensor) -> bool:
    """Return whether memory lies between the elements, or elements share some.

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
    """Return a state dict of `optimizer` with `change(parameter, entry)` in place of each entry; without those of None.

    The state dict may have been saved by another run: what has no parameter here is left as it is.
    """
    indices = [index for group in state["param_groups"] for index in group["params"]]
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    known = dict(zip(indices, parameters, strict=False))
    changed = (
        (i, change(known[i], entry) if i in known else entry) for i, entry in state["state"].items()
    )
    return {**state, "state": {index: entry for index, entry in changed if entry is not None}}


@contextmanager
def ignored_by_ddp(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Let DDP leave these parameters and buffers alone, besides those that it is to ignore already."""
    key, is_own = (
        "_ddp_params_and_buffers_to_ignore",
        "_ddp_params_and_buffers_to_ignore" in vars(module),
    )
    before, added = getattr(module, key, ()), set(names)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [*before, *added])
    try:
        yield
    finally:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in added.difference(before):
                vars(tensor).pop("_ddp_ignored", None)
        delattr(module, key)
        if is_own:
            setattr(module, key, before)


def broadcast_first_(tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Take the values of the first rank of `group`; None: the world. Collective: every rank must call it."""
    group = group or dist.group.WORLD
    if tensors and group is not None:
        # Flattened: NCCL refuses tensors that are not contiguous, and one call is not one for each. DDP's size.
        dist._broadcast_coalesced(group, tensors, 25 * 2**20, 0)
