"""What ranks that share layers send one another in forward and backward: images, sums and logits, and few numbers.

All are collective over the group, with as many images on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.comm.engine.node_exchange import all_gather

# The target that counts as no loss, as in `torch.nn.functional.cross_entropy`.
IGNORED = -100


def refuse_unequal_batches(images: Tensor, group: dist.ProcessGroup) -> None:
    """Check on a CPU that all ranks of the group have as many images.

    Raises:
        ValueError: on every rank, with their numbers.
    """
    # Gloo takes a shorter message for a longer one in silence, or ends the process. On CUDA the host would wait.
    if images.is_cuda:
        return
    sizes = gathered_rows(torch.tensor([images.shape[0]]), group).tolist()
    if len(set(sizes)) > 1:
        raise ValueError(
            f"the batch (={images.shape[0]} images here) must have the same size on all ranks that share a layer, and "
            f"they have {sizes}: images are gathered. Set drop_last=True in the DataLoader."
        )


def gather_images(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the images `[b, ...]` of all ranks, in rank order; their gradients are summed over ranks."""
    return _GatherImages.apply(own, group)


def sum_to_own_images(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sums over ranks of `[g b, ...]`, of the own images alone; in fp32 at least, rounded once."""
    return _SumToOwnImages.apply(parts, group)


def own_logits(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return logits of the own images, `[b, ..., classes]`, from those of own classes, `[g b, ..., classes / g]`."""
    return _OwnLogits.apply(logits, group)


def class_parallel_cross_entropy(logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the cross-entropy of each target `[b, ...]`, from logits of own classes, `[g b, ..., classes / g]`."""
    losses: Tensor = _ClassParallelCrossEntropy.apply(logits.flatten(0, -2), targets.flatten(), group)
    return losses.view(targets.shape)


class _GatherImages(torch.autograd.Function):
    """Images of all ranks, in rank order; backward sums their gradients and returns those of the own."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered_rows(own.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _own_sum(gradient.contiguous(), ctx.group), None


class _SumToOwnImages(torch.autograd.Function):
    """The sum over ranks of the own images; backward gathers the gradients of all images."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_sum(parts.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gathered_rows(gradient.contiguous(), ctx.group), None


class _OwnLogits(torch.autograd.Function):
    """Logits of the own images, of all classes, from those `[g b, ..., classes / g]` of all images."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, size = group, dist.get_world_size(group)
        arrived = torch.empty_like(logits)  # one rank's classes behind the other's
        dist.all_to_all_single(arrived, logits.contiguous(), group=group)
        return arrived.unflatten(0, (size, -1)).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        size = dist.get_world_size(ctx.group)
        by_rank = gradient.unflatten(-1, (size, -1)).movedim(-2, 0).contiguous()
        arrived = torch.empty_like(by_rank)
        dist.all_to_all_single(arrived, by_rank, group=ctx.group)
        return arrived.flatten(0, 1), None


class _ClassParallelCrossEntropy(torch.autograd.Function):
    """Losses of the own images from logits `[g b, classes / g]` of all; backward: softmax minus one at the target."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> Tensor:
        rank, (num_images, num_classes) = dist.get_rank(group), logits.shape
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        targets = gathered_rows(targets, group)
        counts = targets != IGNORED
        _refuse_unknown_classes(targets[counts], num_classes * dist.get_world_size(group))
        largest = wide.amax(1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        exponentials = (wide - largest[:, None]).exp_()
        own_class = targets - rank * num_classes
        is_here = (own_class >= 0) & (own_class < num_classes)
        own_class = own_class.clamp(0, num_classes - 1)
        chosen = torch.where(is_here, wide.gather(1, own_class[:, None])[:, 0] - largest, 0.0)
        sums = torch.stack([exponentials.sum(1), chosen])
        dist.all_reduce(sums, group=group)
        ctx.group, ctx.dtype = group, logits.dtype
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), own_class, is_here, counts)
        num_own = num_images // dist.get_world_size(group)
        losses = torch.where(counts, sums[0].log() - sums[1], 0.0)
        return losses[rank * num_own : (rank + 1) * num_own]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        softmax, own_class, is_here, counts = ctx.saved_tensors
        of_all = gathered_rows(gradient.contiguous(), ctx.group) * counts
        result = softmax * of_all[:, None]
        result.scatter_add_(1, own_class[:, None], -(of_all * is_here)[:, None])
        return result.to(ctx.dtype), None, None


def _refuse_unknown_classes(targets: Tensor, num_classes: int) -> None:
    # On a CPU, as torch does; on CUDA the host would wait.
    if not targets.is_cuda and bool(((targets < 0) | (targets >= num_classes)).any()):
        raise IndexError(
            f"`targets` (={targets.min()} to {targets.max()}) must be classes from 0 to {num_classes - 1}, or "
            f"{IGNORED}, which counts as no loss. Check the labels."
        )


def gathered_rows(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks, in rank order."""
    size = dist.get_world_size(group)
    whole = own.new_empty(size * own.shape[0], *own.shape[1:])
    all_gather(whole, own, group=group)
    return whole


def _own_sum(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    # The sum over ranks of this rank's rows: each sends every other its rows and no more. torch adds in fp32 at least.
    size = dist.get_world_size(group)
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=group)
    return arrived.view(size, -1, *parts.shape[1:]).sum(0)
