"""What ranks that share layers send one another in forward and backward: images, tokens, sums and logits.

One primitive, and its adjoint is itself: each rank sends every other one part of a tensor. torch's own layouts
(`torch.distributed.tensor.parallel`) send the same on NCCL; on Gloo they sum by whole all-reduces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.comm.engine.node_exchange import all_gather
from lightning_hybrid.precision.window import HalfPrecisionWindow


class NodeRanks:
    """The ranks that share layers. What they do here is collective, with as many images `[b, ...]` on every rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.is_whole = False  # while layers compute with whole tensors, each rank by itself
        self.is_own_state = (
            False  # whether state dicts hold this rank's slices, and to take one is not collective
        )
        self.meet: Callable[[], None] = lambda: None  # before a state dict is gathered
        self.handles: list[Any] = []  # of hooks where pairs begin
        self.window: HalfPrecisionWindow | None = (
            None  # of half precision, which shows whole tensors too
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NodeRanks:
        return self  # a copy of a layer is cut over the same ranks

    def gather(self, own: Tensor) -> Tensor:
        """Return the images of all ranks, in rank order; their gradients are summed over ranks as `sum_to_own` sums."""
        return _exchanged(own.expand(self.size, *own.shape).flatten(0, 1), self.group)

    def sum_to_own(self, parts: Tensor) -> Tensor:
        """Return the sums over ranks of `[g b, ...]`, of the own images alone; in fp32 at least, rounded once."""
        return _exchanged(parts, self.group).unflatten(0, (self.size, -1)).sum(0)

    def own_logits(self, logits: Tensor) -> Tensor:
        """Return logits of the own images, `[b, ..., c]`, from those of own classes, `[g b, ..., c / g]`."""
        return (
            _exchanged(logits, self.group).unflatten(0, (self.size, -1)).movedim(0, -2).flatten(-2)
        )

    def refuse_unequal_batches(self, images: Tensor, *others: Any) -> None:
        """Check on a CPU that all ranks have as many images, and other tensors of the same size.

        Raises:
            ValueError: on every rank, with what they have.
        """
        # Gloo takes a shorter message for a longer one in silence, or ends the process. On CUDA the host would wait.
        if images.is_cuda:
            return
        tensors = [images, *(one for one in others if isinstance(one, Tensor))]
        num_bytes = sum(
            one[:1].numel() * one.element_size() for one in tensors
        )  # of an image, in all
        found = torch.empty(2 * self.size, dtype=torch.int64)
        all_gather(found, torch.tensor([images.shape[0], num_bytes]), group=self.group)
        sizes, same = found.view(-1, 2).T.tolist()
        if len(set(sizes)) > 1:
            raise ValueError(
                f"the batch (={images.shape[0]} images here) must have the same size on all ranks that share a layer, "
                f"and they have {sizes}: images are gathered. Set drop_last=True in the DataLoader."
            )
        if len(set(same)) > 1:
            shapes = [tuple(one.shape) for one in tensors]
            raise ValueError(
                f"the arguments (of shapes {shapes} here) of layers that `node_slices` cuts must be alike on all "
                "ranks of a node, as they are gathered. Pad to one length, and give `transformers` a mask of 4 "
                "dimensions, `[b, 1, 1, t]`: another it leaves out where a batch has no padding."
            )


class _Exchange(torch.autograd.Function):
    """Part r of the first dimension to rank r; backward sends gradients the same way back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        arrived = torch.empty_like(parts)
        dist.all_to_all_single(arrived, parts, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Exchange.forward(ctx, gradient, ctx.group), None


_exchanged: Callable[[Tensor, dist.ProcessGroup], Tensor] = _Exchange.apply
