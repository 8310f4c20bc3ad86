"""Norms of whole tensors of which each rank holds a part, for steps of LARS and LAMB that are not fused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hybrid.optim.foreach_ops import block_numel
from lightning_hybrid.optim.trust_ratio import norm_in_rows, numel_in_rows
from lightning_hybrid.placement import Part, flattened


@dataclass(frozen=True, kw_only=True)
class ShardedVector:
    """A vector whose norm is wanted, of which this rank has a part.

    Attributes:
        part: Which.
        pieces: The part's elements in order; read once.
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

    Each rank sums the squares of its part as `tensor_norms` does on the CPU, the ranks' sums are added in float64. From
    `tensor_norms` of the whole tensor a norm differs by this order only: by 1e-15, which float32 arithmetic rounds away
    but about once in a hundred million norms; in float64 by 1e-13; on an accelerator, which sums otherwise, by 1e-6.

    Args:
        vectors: Of each parameter with a part, some or none.
        found_inf: 0-dim; above 0 where this rank has found one.
        add_up_: Adds a float64 tensor over the ranks, in place.

    Returns:
        The norms of each parameter's vectors, float64 and 0-dim, on its device; and 1.0 or 0.0, float32 and 0-dim, on
        the device of `found_inf`.
    """
    own = [found_inf.double()]
    own += [_sum_of_squares(vector).to(found_inf.device) for some in vectors.values() for vector in some]
    message = torch.stack(own)
    add_up_(message)
    norms = iter(message[1:].sqrt().unbind())
    of_params = {param: [next(norms).to(param.device) for _ in some] for param, some in vectors.items()}
    return of_params, (message[0] > 0).float()


def _sum_of_squares(vector: ShardedVector) -> Tensor:
    """Sum the squares of the part: float64, 0-dim."""
    part, at = vector.part, vector.part.begin
    last = 1 + (part.numel - 1) % block_numel() if vector.is_in_blocks else part.numel
    norms = []
    for piece in vector.pieces:
        # As `tensor_norms` would: small tensors in float64, of which the last block of `in_blocks` may be one.
        end_of_rows = sum(numel_in_rows(numel, piece.dtype) for numel in (part.numel - last, last))
        row = flattened(piece, piece).contiguous()
        in_rows, exact = row.tensor_split([min(max(end_of_rows - at, 0), piece.numel())])
        norms += [norm_in_rows(in_rows)] if in_rows.numel() else []
        norms += [torch.linalg.vector_norm(exact, dtype=torch.float64)] if exact.numel() else []
        at += piece.numel()
    return torch.stack(norms).square().sum()
