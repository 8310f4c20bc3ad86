"""Per-block sums of squares of tensors that ranks share, gathered over ranks and added in one fixed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_hybrid.placement import Part


class BlockSums:
    """Per-block sums of squares of a tensor group: those of this rank, and those of the whole tensors.

        local_sums (2, local blocks)   sums of w * w and of g * g over each block of this rank's parts and whole
                                       tensors, written by the fused passes
        message() (2, blocks)          the local sums at their position among all blocks, zeros for blocks of other
                                       ranks
        store_total(message)           takes the message after it was added over ranks, and fills `whole_sums`
        whole_sums (2, blocks)         the sums that one rank with all tensors would have

    Each block has one owner, and x + 0 is x. So adding over ranks rounds no bit, in whichever order it is done, and a
    norm that is added up from `whole_sums` has the bits of one rank that holds all tensors.

    Slices have no order in the whole tensor. Each rank describes its slice as a part that begins at 0 and covers all
    of the slice, and the sums of all slices are added block by block.

    Tensors that every rank holds whole are taken from `local_sums`, because all ranks have the same sums.

    Args:
        params: The tensors. A tensor with a part is 1-D and holds the elements of that part.
        parts: The part of each tensor, or None for a tensor that all ranks hold whole.
        block: Number of elements of a block.
        local_sums: Per-block sums of `params`.

    Attributes:
        num_blocks: Number of blocks of each whole tensor.
        first_blocks: Index of the first block of each whole tensor, then the number of all blocks.
        whole_sums: Per-block sums of the whole tensors.
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
        global_indices: list[int] = []  # of each local block, its index among all blocks
        replicated: list[int] = []  # local blocks of tensors that all ranks hold whole
        num_holders: list[int] = []  # of each local block, the number of ranks that add it

        for param, part in zip(params, parts, strict=True):
            first_block = self.first_blocks[-1]
            num_local_blocks = _count_blocks(param.numel(), block)
            num_blocks = num_local_blocks
            num_holders_of_part = 1
            if part is None:
                first_local = len(global_indices)
                replicated.extend(range(first_local, first_local + num_local_blocks))
            else:
                first_block += _count_blocks(part.begin, block)
                num_blocks = _count_blocks(part.numel, block)
                num_holders_of_part = part.num_holders

            global_indices.extend(range(first_block, first_block + num_local_blocks))
            num_holders.extend([num_holders_of_part] * num_local_blocks)
            self.num_blocks.append(num_blocks)
            self.first_blocks.append(self.first_blocks[-1] + num_blocks)

        device = local_sums.device
        self._local_sums = local_sums
        self._global_indices = torch.tensor(global_indices, dtype=torch.int64, device=device)
        self._replicated = torch.tensor(replicated, dtype=torch.int64, device=device)
        self._replicated_global = self._global_indices.index_select(0, self._replicated)
        self._num_holders = torch.tensor(num_holders, dtype=torch.float64, device=device)
        self.whole_sums = torch.zeros(
            2, self.first_blocks[-1], dtype=local_sums.dtype, device=device
        )

    def message(self) -> Tensor:
        """Return this rank's sums among zeros for the blocks of other ranks: float64, (2, blocks)."""
        message = torch.zeros_like(self.whole_sums, dtype=torch.float64)
        return message.index_copy_(1, self._global_indices, self._local_sums / self._num_holders)

    def store_total(self, message: Tensor) -> None:
        """Fill `whole_sums` from the message as it was added over ranks."""
        self.whole_sums.copy_(message)
        # Every rank has added its sums of the replicated tensors, which must count once.
        replicated_sums = self._local_sums.index_select(1, self._replicated)
        self.whole_sums.index_copy_(1, self._replicated_global, replicated_sums)


def _count_blocks(numel: int, block: int) -> int:
    """Return the number of blocks of `numel` elements, the last of which may be shorter."""
    return -(-numel // block)


def add_up(
    block_sums: Sequence[BlockSums], found_inf: Tensor, add_up_: Callable[[Tensor], None]
) -> Tensor:
    """Add the sums of several tensor groups, and their `found_inf`, over the ranks in one call of `add_up_`.

    Collective: every rank that holds parts must call it, in the same order. Afterwards all ranks hold the same sums.

    Args:
        block_sums: The sums of the tensor groups, in the same order on all ranks.
        found_inf: 0-dim tensor, above 0 if this rank has found an inf or nan.
        add_up_: Function that adds a float64 tensor over the ranks, in place.

    Returns:
        1.0 if any rank has found an inf or nan, else 0.0: float32, 0-dim, on the device of `found_inf`.
    """
    device = found_inf.device
    messages = []
    for sums in block_sums:
        messages.append(sums.message().to(device, non_blocking=True).flatten())
    message = torch.cat([found_inf.double().view(1), *messages])
    add_up_(message)

    sizes = [local_message.numel() for local_message in messages]
    flag, *totals = message.split([1, *sizes])
    for sums, total in zip(block_sums, totals, strict=True):
        sums.store_total(total.view_as(sums.whole_sums))
    return (flag.view(()) > 0).float()
