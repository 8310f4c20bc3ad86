"""State of one all-reduce, which is passed from stage to stage of an algorithm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hybrid.comm.bucket_sizes import ALIGNMENT
from lightning_hybrid.comm.codec.block_format import BLOCK
from lightning_hybrid.comm.codec.encoder import Blocks
from lightning_hybrid.comm.topology import Topology

# On CUDA, shards begin at multiples of this many elements, because NCCL moves 16 bytes at a time if the alignment of
# addresses allows it.
SHARD_ALIGNMENT = 128


@dataclass
class Job:
    """Tensor to all-reduce, with the state that the stages of the algorithm share.

    Args:
        flat: Tensor to reduce in place, 1-D and contiguous.
        topology: Topology, from the perspective of this rank.
        adasum_numels: Number of elements of each tensor in `flat`, if leaders combine the tensors by Adasum. Empty if
            leaders sum the tensors.
        dtype_across: Dtype between nodes, if it is narrower than the tensor's dtype, otherwise None.
        shard: This rank's shard of `flat` between the stages of `two_level`.
        num_owners: Number of ranks if each rank keeps only its own shard, because `two_level` ends before the gather,
            or 0 if every rank gets the whole sum.
        shard_begin: Index in `flat` of the first element of the shard.
        by_backend: Whether every stage is a collective of the backend, as on CUDA, rather than our own messages over
            Gloo.
        blocks: Blocks in which a codec encodes the tensor between nodes, or None if the tensor is not encoded.
    """

    flat: Tensor
    topology: Topology
    adasum_numels: tuple[int, ...] = ()
    dtype_across: torch.dtype | None = None
    shard: Tensor | None = None
    num_owners: int = 0
    shard_begin: int = 0
    by_backend: bool = False
    blocks: Blocks | None = None

    @property
    def shard_alignment(self) -> int:
        """Alignment of shard boundaries, in elements."""
        if self.blocks is not None:
            return BLOCK
        if self.by_backend:
            return SHARD_ALIGNMENT
        return ALIGNMENT
