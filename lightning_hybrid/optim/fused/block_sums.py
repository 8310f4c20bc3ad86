"""Reproducible all-reduce of blockwise sums of squares, for the norms of sharded tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hybrid.placement import Part


@dataclass(frozen=True, kw_only=True)
class _TensorBlocks:
    """Position of this rank's blocks among the blocks of a full tensor.

    Attributes:
        num_local: Number of blocks that this rank holds.
        num_before: Number of blocks of the full tensor before them.
        num_whole: Number of blocks of the full tensor.
        num_holders: Number of ranks that add the sums of the same blocks.
    """

    num_local: int
    num_before: int
    num_whole: int
    num_holders: int

    @classmethod
    def of(cls, param: Tensor, part: Part | None, block: int) -> _TensorBlocks:
        """Count the blocks of a shard, or of a full tensor if `part` is None."""
        num_local = _count_blocks(param.numel(), block)
        if part is None:
            return cls(num_local=num_local, num_before=0, num_whole=num_local, num_holders=1)
        return cls(
            num_local=num_local,
            num_before=_count_blocks(part.begin, block),
            num_whole=_count_blocks(part.numel, block),
            num_holders=part.num_holders,
        )


class BlockSums:
    """Blockwise sums of squares for a group of tensors, both for this rank's shards and over all ranks.

        local_sums (2, local blocks)   sums of w * w and of g * g for each block of this rank's shards and full
                                       tensors, written by the fused passes
        message() (2, blocks)          local sums at their positions among all blocks, with zeros for blocks of other
                                       ranks
        store_total(message)           fills `whole_sums` from the message after its all-reduce
        whole_sums (2, blocks)         sums that a single rank with all tensors would have

    Each block belongs to one rank, and all other ranks add 0 to its sum. The all-reduce is therefore exact in any
    order, and a norm computed from `whole_sums` is bitwise equal to that of a single rank with all tensors.

    Slices of tensor-parallel layers have no order in the full tensor. Each rank describes its slice as a shard that
    begins at 0 and has the length of the slice, and the sums of all slices are added block by block.

    Sums of tensors that are not sharded are taken from `local_sums`, because they are equal on all ranks.

    Args:
        params: Tensors. A sharded tensor is 1-D and holds the elements of its shard.
        parts: Shard of each tensor. None: every rank holds the full tensor.
        block: Number of elements of a block.
        local_sums: Sums per block of `params`.

    Attributes:
        num_blocks: Number of blocks of each full tensor.
        first_blocks: Index of the first block of each full tensor, followed by the number of all blocks.
        whole_sums: Sums per block of the full tensors.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        parts: Sequence[Part | None],
        block: int,
        local_sums: Tensor,
    ) -> None:
        self.num_blocks: list[int] = []
        self.first_blocks: list[int] = [0]
        global_indices: list[int] = []  # index of each local block among all blocks
        replicated: list[int] = []  # local indices of the blocks of tensors that are not sharded
        num_holders: list[int] = []  # number of ranks that add each local block

        for param, part in zip(params, parts, strict=True):
            blocks = _TensorBlocks.of(param, part, block)
            if part is None:
                first_local = len(global_indices)
                replicated.extend(range(first_local, first_local + blocks.num_local))

            first_of_tensor = self.first_blocks[-1]
            first_global = first_of_tensor + blocks.num_before
            global_indices.extend(range(first_global, first_global + blocks.num_local))
            num_holders.extend([blocks.num_holders] * blocks.num_local)
            self.num_blocks.append(blocks.num_whole)
            self.first_blocks.append(first_of_tensor + blocks.num_whole)

        device = local_sums.device
        self._local_sums = local_sums
        self._global_indices = torch.tensor(global_indices, dtype=torch.int64, device=device)
        self._replicated = torch.tensor(replicated, dtype=torch.int64, device=device)
        self._replicated_global = self._global_indices.index_select(0, self._replicated)
        self._num_holders = torch.tensor(num_holders, dtype=torch.float64, device=device)

        num_all_blocks = self.first_blocks[-1]
        sums_dtype = local_sums.dtype
        self.whole_sums = torch.zeros(2, num_all_blocks, dtype=sums_dtype, device=device)

    def message(self) -> Tensor:
        """Return this rank's block sums as a float64 tensor (2, blocks), with zeros for other ranks' blocks."""
        message = torch.zeros_like(self.whole_sums, dtype=torch.float64)
        addends = self._local_sums / self._num_holders
        return message.index_copy_(1, self._global_indices, addends)

    def store_total(self, message: Tensor) -> None:
        """Store an all-reduced message in `whole_sums`."""
        self.whole_sums.copy_(message)
        # Every rank has added its sums of replicated tensors, which must count only once.
        replicated_sums = self._local_sums.index_select(1, self._replicated)
        self.whole_sums.index_copy_(1, self._replicated_global, replicated_sums)


def _count_blocks(numel: int, block: int) -> int:
    """Return the number of blocks needed for `numel` elements, where the last block may be shorter."""
    return -(-numel // block)


def add_up(
    block_sums: Sequence[BlockSums], found_inf: Tensor, add_up_: Callable[[Tensor], None]
) -> Tensor:
    """All-reduce the block sums of several tensor groups together with `found_inf`.

    The function calls `add_up_` once. Afterwards the sums are equal on all ranks. Collective: every rank that holds
    shards must call it, in the same order.

    Args:
        block_sums: Sums of the tensor groups, in the same order on all ranks.
        found_inf: 0-dim tensor that is above 0 if this rank has found inf or nan.
        add_up_: Function that adds a float64 tensor over the ranks, in place.

    Returns:
        A 0-dim float32 tensor on the device of `found_inf`, which is 1.0 if any rank has found inf or nan, else 0.0.
    """
    device = found_inf.device
    messages = []
    for sums in block_sums:
        message_of_group = sums.message().to(device, non_blocking=True)
        messages.append(message_of_group.flatten())

    # The flag is sent with the sums, so that one all-reduce is enough.
    message = torch.cat([found_inf.double().view(1), *messages])
    add_up_(message)

    sizes = [message_of_group.numel() for message_of_group in messages]
    flag, *totals = message.split([1, *sizes])
    for sums, total in zip(block_sums, totals, strict=True):
        sums.store_total(total.view_as(sums.whole_sums))
    has_found_inf = flag.view(()) > 0
    return has_found_inf.float()
