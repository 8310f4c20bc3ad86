"""Sums of squares of whole tensors of which each rank holds a part: gathered block by block, added in one order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_hybrid.placement import Part


class BlockSums:
    """The sums of the blocks of a tensor group, of parts and of all that ranks hold together.

        own (2, blocks here)      the passes write sums(w * w), sums(g * g): of this rank's parts and whole tensors
        message()                 (2, blocks): `own` at its places, zeros for the blocks of other ranks
        take(message)             the message, added over ranks -> `whole`; of whole tensors `own`: all ranks have it
        whole (2, blocks)         what one rank with all tensors would have: added up in the same order, the same bits

    0 + x is x: whichever order ranks are added in, no bit is rounded. Of slices, which have no order in the whole, each
    rank gives a part that begins at 0 and is all of its tensor: block by block their sums are added.

    Args:
        params: The tensors; one with a part is 1-D, of its elements.
        parts: The part of each; None: the tensor is whole, the same on all ranks.
        block: Elements of a block.
        own: Sums by block of `params`.
    """

    def __init__(
        self, params: Sequence[Tensor], parts: Sequence[Part | None], block: int, own: Tensor
    ) -> None:
        numels = [
            param.numel() if part is None else part.numel
            for param, part in zip(params, parts, strict=True)
        ]
        self.num_blocks = [-(-numel // block) for numel in numels]
        firsts = list(itertools.accumulate(self.num_blocks, initial=0))
        places, of_wholes, holders = list[int](), list[int](), list[int]()
        for param, part, first in zip(params, parts, firsts, strict=False):
            begin = first if part is None else first + -(-part.begin // block)
            here = range(begin, begin + -(-param.numel() // block))
            of_wholes += range(len(places), len(places) + len(here)) if part is None else ()
            places += here
            holders += [1 if part is None else part.num_holders] * len(here)
        self.first_of = firsts
        self._own = own
        self._places = torch.tensor(places, dtype=torch.int64, device=own.device)
        self._of_wholes = torch.tensor(of_wholes, dtype=torch.int64, device=own.device)
        self._places_of_wholes = self._places.index_select(0, self._of_wholes)
        self._holders = torch.tensor(holders, dtype=torch.float64, device=own.device)
        self.whole = torch.zeros(2, firsts[-1], dtype=own.dtype, device=own.device)

    def message(self) -> Tensor:
        """Return this rank's sums, with zeros for the blocks of others: float64, (2, blocks)."""
        return torch.zeros_like(self.whole, dtype=torch.float64).index_copy_(
            1, self._places, self._own / self._holders
        )

    def take(self, message: Tensor) -> None:
        """Take the message as added over ranks."""
        self.whole.copy_(message)
        # Each rank has added the sums of whole tensors: they count once.
        self.whole.index_copy_(
            1, self._places_of_wholes, self._own.index_select(1, self._of_wholes)
        )


def add_up(
    block_sums: Sequence[BlockSums], found_inf: Tensor, add_up_: Callable[[Tensor], None]
) -> Tensor:
    """Add the sums of several tensor groups over ranks, in one call of `add_up_`; return the verdict of all ranks.

    Every rank that holds parts must call it, in the same order; afterwards all hold the same sums and verdict.

    Args:
        block_sums: Of the tensor groups, in an order that is the same on all ranks.
        found_inf: 0-dim; above 0 where this rank has found an inf or nan.
        add_up_: Adds a float64 tensor over the ranks, in place.

    Returns:
        1.0 where any rank has found one, else 0.0: float32, 0-dim, on the device of `found_inf`.
    """
    device = found_inf.device
    messages = [one.message().to(device, non_blocking=True).flatten() for one in block_sums]
    message = torch.cat([found_inf.double().view(1), *messages])
    add_up_(message)
    flag, *sums = message.split([1, *(one.numel() for one in messages)])
    for one, added in zip(block_sums, sums, strict=True):
        one.take(added.view_as(one.whole))
    return (flag.view(()) > 0).float()
