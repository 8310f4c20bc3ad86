"""Jobs: buckets on their way through the stages of an algorithm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hybrid.comm.bucket_layout import ALIGNMENT
from lightning_hybrid.comm.codec.block_format import BLOCK
from lightning_hybrid.comm.codec.encoder import Blocks
from lightning_hybrid.comm.topology import Topology

# On CUDA shards begin at multiples of this many elements: NCCL moves 16 bytes at a time where addresses allow it.
SHARD_ALIGNMENT = 128


@dataclass
class Job:
    """One tensor on its way through the stages of an algorithm."""

    flat: Tensor  # 1-D, contiguous; summed in place
    topology: Topology
    adasum_numels: tuple[
        int, ...
    ] = ()  # of the tensors in `flat`, where leaders combine them by Adasum; else they sum
    dtype_across: torch.dtype | None = (
        None  # in which it travels between nodes, where narrower; None: its own
    )
    shard: Tensor | None = None  # this rank's part of it between two-level stages
    num_owners: int = 0  # two-level stops before the gather: each of so many ranks has its own part alone, in its place
    shard_begin: int = 0  # the element of `flat` with which the shard begins
    by_backend: bool = (
        False  # every stage is a collective of the backend's, as on CUDA, and no message of our own
    )
    blocks: Blocks | None = None  # those in which a codec carries it between nodes; None: as it is

    @property
    def shard_alignment(self) -> int:
        """Shards begin at multiples of this many elements."""
        if self.blocks is not None:
            return BLOCK
        return SHARD_ALIGNMENT if self.by_backend else ALIGNMENT
