"""What all losses over the pairs of all ranks share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.contrastive.exchange import Peers


class PairLoss(nn.Module):
    """A loss of two views `"pairs features"`: row i of one belongs to row i of the other.

    Every rank must call it, with as many pairs. Computed in fp32, or in fp64 where that is given.

    Args:
        block: rows of a block; memory grows with its square, and bits are those of this block.

    Raises:
        ValueError: in forward: the views differ in shape, are no matrices, or have other shapes on other ranks.
    """

    couples_the_batch: bool = (
        True  # a loss of a part of the batch is another loss: gradients do not add up over batches
    )

    def __init__(self, *, block: int = 256) -> None:
        super().__init__()
        if block < 1:
            raise ValueError(f"`block` (={block}) must be at least 1: rows of a block of pairs.")
        self.block = block
        self._peers: Peers | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_peers": None}  # a group of processes is of this run alone

    def peers(self) -> Peers:
        """Return the ranks of the run. Collective at its first call, and at the first of another run."""
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if self._peers is None or self._peers.of is not world:
            self._peers = Peers()
        return self._peers

    def checked(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return both views in fp32 or fp64, once it is sure that all ranks have the same shape."""
        is_pair = a.dim() == 2 and a.shape == b.shape and len(a) > 0
        # Before this rank raises: the others would wait for its answer.
        self.peers().check_same(a.shape if is_pair else (0, 0), device=a.device)
        if not is_pair:
            raise ValueError(
                f"`a` and `b` (of shapes {tuple(a.shape)} and {tuple(b.shape)}) must be two matrices of one shape, "
                "pairs x features: row i of one belongs to row i of the other."
            )
        dtype = torch.float64 if a.dtype is torch.float64 else torch.float32
        return a.to(dtype), b.to(dtype)
