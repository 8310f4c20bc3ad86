"""Norms of whole tensors of which each rank holds a part, for steps of LARS and LAMB that are not fused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hybrid.optim.foreach_ops import block_numel
from lightning_hybrid.optim.trust_ratio import block_squares, numel_in_rows
from lightning_hybrid.placement import BLOCK, Part


@dataclass(frozen=True, kw_only=True)
class ShardedVector:
    """A vector whose norm is wanted, of which this rank has a part.

    Attributes:
        part: Which.
        pieces: The part's elements in order, each piece but the last of whole `BLOCK`s; read once.
        is_in_blocks: Whether one rank alone would sum it by `in_blocks`: then the last of these may be a small tensor.
    """

    part: Part
    pieces: Iterable[Tensor]
    is_in_blocks: bool = False


def norms_over_ranks(
    vectors: Mapping[Tensor, Sequence[ShardedVector]], found_inf: Tensor, add_up_: Callable[[Tensor], None]
) -> tuple[dict[Tensor, list[Tensor]], Tensor]:
    """Compute the norms of whole vectors, and whether any rank has found an inf or nan, in one call of `add_up_`.

    Every rank that holds parts must call it, with vectors in the same order; afterwards all hold the same bits.

    Each rank sums the squares of its own blocks, as `tensor_norms` does on the CPU, and leaves zeros for the others;
    the blocks of all ranks are added in the order of the whole vector, in float64. From `tensor_norms` of the whole
    tensor they differ by this order only: by 1e-15, or on an accelerator, where torch sums otherwise, by 1e-6.

    Args:
        vectors: Of each parameter with a part, some or none.
        found_inf: 0-dim; above 0 where this rank has found one.
        add_up_: Adds a float64 tensor over the ranks, in place.

    Returns:
        The norms of each parameter's vectors, float64 and 0-dim, on its device; and 1.0 or 0.0, float32 and 0-dim, on
        the device of `found_inf`.
    """
    squares = [_own_squares(vector) for some in vectors.values() for vector in some]
    own = [found_inf.double().view(1), *(one.to(found_inf.device, non_blocking=True) for one in squares)]
    message = torch.cat(own)
    add_up_(message)
    flag, *added = message.split([len(one) for one in own])
    norms = iter([one.sum().sqrt() for one in added])
    of_params = {param: [next(norms).to(param.device) for _ in some] for param, some in vectors.items()}
    return of_params, (flag.view(()) > 0).float()


def _own_squares(vector: ShardedVector) -> Tensor:
    """Sum the squares of the blocks of the part, zeros for those of others: float64, (blocks of the whole)."""
    part, at, found = vector.part, vector.part.begin, []
    last = 1 + (part.numel - 1) % block_numel() if vector.is_in_blocks else part.numel
    for piece in vector.pieces:
        # As `tensor_norms` would: small tensors in float64, of which the last block of `in_blocks` may be one.
        end_of_rows = sum(numel_in_rows(numel, piece.dtype) for numel in (part.numel - last, last))
        in_rows = min(max(end_of_rows - at, 0), piece.numel())
        found.append(block_squares(piece, BLOCK, num_in_rows=in_rows))
        at += piece.numel()
    own = torch.cat(found)
    first, num_blocks = -(-part.begin // BLOCK), -(-part.numel // BLOCK)
    return torch.nn.functional.pad(own, (first, num_blocks - first - len(own)))
