"""Layer norms that are right at any size, also of tensors of which ranks hold parts, and the trust ratio of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.optim.foreach_ops import block_numel
from lightning_hybrid.placement import Part, flattened

# A row is summed in float32, the rows in float64. 256 float32 additions spread over a vector register keep the relative
# error near 1e-7 even where every addend is equal, and a row is long enough that memory, not arithmetic, is the limit.
_ROW = 256
# Elements per call. Half-precision input is widened to a temporary of this size (4 MiB), which stays in cache.
_CHUNK = 1 << 20
# Below this a float64 sum costs nothing measurable, and it is exact.
_SMALL = 1 << 15


def trust_ratio(
    weight_norm: Tensor,
    update_norm: Tensor,
    *,
    trust_coefficient: float | Tensor = 1.0,
    weight_decay: float | Tensor = 0.0,
    eps: float | Tensor = 0.0,
) -> Tensor:
    """Compute how far a layer may move, relative to its own size (You et al. 2017, arXiv:1708.03888).

        ratio = trust_coefficient * |w| / (|u| + weight_decay * |w| + eps)

    eta -> `trust_coefficient`; |w| -> `weight_norm`, |u| -> `update_norm`, tensors of one shape, one element a layer.
    Where the norm of the decayed direction is known, pass it as `update_norm` and leave `weight_decay` at 0.

    A layer whose weights or update are all zero gets ratio 1, as in MLPerf's, optax and timm; the paper leaves it open.

    >>> trust_ratio(torch.tensor([10.0]), torch.tensor([2.0]), trust_coefficient=0.001)
    tensor([0.0050])
    >>> trust_ratio(torch.tensor([10.0]), torch.tensor([2.0]), trust_coefficient=0.001, weight_decay=0.3)
    tensor([0.0020])
    >>> trust_ratio(torch.tensor([0.0, 10.0]), torch.tensor([2.0, 0.0]), trust_coefficient=0.001, weight_decay=0.3)
    tensor([1., 1.])
    """
    denominator = update_norm + weight_decay * weight_norm + eps
    defined = (weight_norm > 0) & (update_norm > 0)
    # where() drops the inf or nan of a division by zero.
    return torch.where(defined, trust_coefficient * weight_norm / denominator, 1.0)


def require_bounds(bounds: Any) -> None:
    """Raise `ValueError` unless `weight_norm_bounds` is None, or two numbers that bound a norm."""
    pair: Any = bounds if isinstance(bounds, tuple | list) and len(bounds) == 2 else ()
    are_numbers = bool(pair) and all(
        isinstance(one, int | float) and not isinstance(one, bool) for one in pair
    )
    if bounds is not None and not (are_numbers and 0 <= pair[0] <= pair[1] and pair[1] > 0):
        raise ValueError(
            f"`weight_norm_bounds` (={bounds!r:.60}) must be (low, high), two numbers, low <= high, neither negative, "
            "high above 0: they bound a layer's |w| in the trust ratio. None is no bound."
        )


def tensor_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Compute the Euclidean norms of several tensors on one device, as one 1-D tensor that stays on that device.

        norms[i] = sqrt(sum(tensors[i] ** 2))

    Any shapes; float16, bfloat16, float32 or float64. On the CPU the result is float64 and right to 1e-6 at any size;
    elsewhere float32, or float64 for float64 tensors. Squares are float32: above 1e19 inf, below 1e-23 zero.

    >>> tensor_norms([torch.tensor([3.0, 4.0]), torch.full((4,), 60000.0, dtype=torch.float16)])
    tensor([5.0000e+00, 1.2000e+05], dtype=torch.float64)
    """
    # Not torch's own CPU norm: it adds millions of squares into a few float32 sums, and is off by 0.2 % on 37.7 million
    # normal numbers and by 1 % on equal ones. Elsewhere torch's multi-tensor norm sums blocks in a tree. Never half
    # precision: a norm past 65504 would be inf, and its layer would stop for good.
    if tensors[0].device.type == "cpu":
        return torch.stack([_norm_cpu(tensor) for tensor in tensors])
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=dtype))


def _norm_cpu(tensor: Tensor) -> Tensor:
    if not numel_in_rows(tensor.numel(), tensor.dtype):
        return torch.linalg.vector_norm(tensor, dtype=torch.float64)
    # In the order of memory: of a channels_last weight that is a view.
    return norm_in_rows(flattened(tensor, tensor).contiguous())


def norm_in_rows(tensor: Tensor) -> Tensor:
    """Compute the norm of a 1-D tensor by rows: float64, 0-dim. Right to 1e-6 at any size, in one pass at any dtype.

    >>> norm_in_rows(torch.full((1 << 20,), 2.0, dtype=torch.float16))
    tensor(2048., dtype=torch.float64)
    """
    parts = []
    for chunk in tensor.split(_CHUNK):
        # The elements that fill no row are fewer than one row: a sum of their own, as exact.
        num_in_rows = chunk.numel() // _ROW * _ROW
        rows = chunk[:num_in_rows].view(-1, _ROW)
        parts.append(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32))
        parts.append(torch.linalg.vector_norm(chunk[num_in_rows:], dtype=torch.float32).view(1))
    return torch.linalg.vector_norm(torch.cat(parts), dtype=torch.float64)


def numel_in_rows(numel: int, dtype: torch.dtype) -> int:
    """Count the leading elements of a tensor that `tensor_norms` sums in rows of float32: all, or none of small ones.

    >>> [numel_in_rows(1 << 20, dtype) for dtype in (torch.float16, torch.float64)], numel_in_rows(5, torch.float32)
    ([1048576, 0], 0)
    """
    return 0 if numel <= _SMALL or dtype == torch.float64 else numel


def combined_norms(parts: list[Tensor]) -> Tensor:
    """Combine the norms of the parts of tensors into the norms of the tensors."""
    return parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts), dim=0)


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
    vectors: Mapping[Tensor, Sequence[ShardedVector]],
    found_inf: Tensor,
    add_up_: Callable[[Tensor], None],
) -> tuple[dict[Tensor, list[Tensor]], Tensor]:
    """Compute the norms of whole vectors, and whether any rank has found an inf or nan, in one call of `add_up_`.

    Every rank that holds parts must call it, with vectors in the same order; afterwards all hold the same bits.

    Each rank sums the squares of its part as `tensor_norms` does on the CPU, the ranks' sums are added in float64. From
    `tensor_norms` of the whole tensor a norm differs by this order only: by 1e-15, which float32 arithmetic rounds away
    but about once in a hundred million norms; in float64 by 1e-13; on an accelerator, which sums otherwise, by 1e-6.

    `found_inf`: 0-dim, above 0 where this rank has found one; `add_up_` adds a float64 tensor over the ranks, in place.

    Returns:
        The norms of each parameter's vectors, float64 and 0-dim, on its device; and 1.0 or 0.0, float32 and 0-dim, on
        the device of `found_inf`.
    """
    own = [found_inf.double()]
    each = [vector for some in vectors.values() for vector in some]
    own += [
        _sum_of_squares(vector).to(found_inf.device) / vector.part.num_holders for vector in each
    ]
    message = torch.stack(own)
    add_up_(message)
    norms = iter(message[1:].sqrt().unbind())
    of_params = {
        param: [next(norms).to(param.device) for _ in some] for param, some in vectors.items()
    }
    return of_params, (message[0] > 0).float()


def _sum_of_squares(vector: ShardedVector) -> Tensor:
    part = vector.part
    at = vector.part.begin
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
