"""Collectives of tensor-parallel layers for samples, tokens, partial sums and logits.

All functions use one primitive, an all-to-all, whose adjoint is an all-to-all again. The tensor-parallel layouts of
torch (`torch.distributed.tensor.parallel`) send the same data on NCCL. On Gloo they all-reduce full tensors instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.comm.engine.node_exchange import all_gather
from lightning_hybrid.precision.half_window import HalfPrecisionWindow


def _no_wait() -> None:
    pass


class NodeRanks:
    """Process group of the ranks that share sliced layers, with the collectives of these layers.

    Collective: every rank of the group must call each method that sends tensors, in the same order, with the same
    number of samples `[b, ...]`.

    Attributes:
        is_whole: Whether layers currently compute with full tensors, each rank by itself.
        is_own_state: Whether state dicts hold this rank's slices. Taking one then is not collective.
        wait_for_ranks: Function that waits for all ranks before a state dict is gathered.
        handles: Handles of the hooks at the entrances of pairs.
        window: Half-precision window, which also shows gathered full tensors in both precisions. None: there is none.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.is_whole = False
        self.is_own_state = False
        self.wait_for_ranks: Callable[[], None] = _no_wait
        self.handles: list[Any] = []
        self.window: HalfPrecisionWindow | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> NodeRanks:
        return self  # a copy of a layer is sliced over the same ranks

    def gather(self, images: Tensor) -> Tensor:
        """Gather the samples of all ranks in rank order, with the shape `[g b, ...]`.

        Backward sums their gradients over ranks, as `reduce_scatter` does.
        """
        copies = images.expand(self.size, *images.shape)
        return _exchange(copies.flatten(0, 1), self.group)

    def reduce_scatter(self, partial_sums: Tensor) -> Tensor:
        """Sum partial results `[g b, ...]` over ranks, and return the sums for this rank's samples, `[b, ...]`.

        The sums are computed in at least fp32 and rounded once.
        """
        received = _exchange(partial_sums, self.group)
        return received.unflatten(0, (self.size, -1)).sum(0)

    def exchange_logits(self, logits: Tensor) -> Tensor:
        """Return the logits of this rank's samples for all classes, `[b, ..., c]`.

        Args:
            logits: Logits of all samples of the node for this rank's classes, `[g b, ..., c / g]`.
        """
        received = _exchange(logits, self.group)
        by_rank = received.unflatten(0, (self.size, -1))
        return by_rank.movedim(0, -2).flatten(-2)

    def refuse_unequal_batches(self, images: Tensor, *arguments: Any) -> None:
        """Raise if the ranks have different numbers of samples, or arguments of different sizes.

        This is checked only on a CPU.

        Raises:
            ValueError: Sizes differ. Raised on every rank, with all sizes.
        """
        # Without this check Gloo would accept a message of the wrong size without an error, or end the process. On CUDA
        # nothing is checked, because the host would wait for the device.
        if images.is_cuda:
            return
        tensors = [images]
        for argument in arguments:
            if isinstance(argument, Tensor):
                tensors.append(argument)
        bytes_per_image = sum(tensor[:1].numel() * tensor.element_size() for tensor in tensors)

        gathered = torch.empty(2 * self.size, dtype=torch.int64)
        sizes_here = torch.tensor([images.shape[0], bytes_per_image])
        all_gather(gathered, sizes_here, group=self.group)
        batch_sizes, image_bytes = gathered.view(-1, 2).T.tolist()
        if len(set(batch_sizes)) > 1:
            raise ValueError(
                f"The batch (={images.shape[0]} images) has different sizes on the ranks that share a layer "
                f"({batch_sizes}), but their images can be gathered only if all batches have the same size. Set "
                "drop_last=True in the DataLoader."
            )
        if len(set(image_bytes)) > 1:
            shapes = [tuple(tensor.shape) for tensor in tensors]
            raise ValueError(
                f"The arguments of layers in `node_slices` (of shapes {shapes} on this rank) must have the same "
                "shapes on all ranks of a node, because they are gathered. Pad sequences to one length. With "
                "`transformers`, pass a mask with 4 dimensions, `[b, 1, 1, t]`, because `transformers` drops other "
                "masks if a batch has no padding."
            )


class _Exchange(torch.autograd.Function):
    """All-to-all with autograd support, which sends chunk r of the first dimension to rank r.

    Backward sends gradients back in the same way.
    """

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Exchange.forward(ctx, gradient, ctx.group), None


_exchange: Callable[[Tensor, dist.ProcessGroup], Tensor] = _Exchange.apply
