"""Trust ratios, and Euclidean norms that are accurate for tensors of any size, sharded or not."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.optim.foreach_ops import block_numel
from lightning_hybrid.placement import Part, flattened

# A row is summed in float32, and the sums of rows in float64. The relative error of 256 float32 additions in a vector
# register is near 1e-7 even if all addends are equal. Rows of this length are limited by memory, not by arithmetic.
_ROW = 256
# Number of elements per call. Half-precision input is converted to a temporary of this size (4 MiB), which stays in the
# cache.
_CHUNK = 1 << 20
# Number of elements up to which a float64 sum, which is exact, takes no measurable time.
_SMALL = 1 << 15


def trust_ratio(
    weight_norm: Tensor,
    update_norm: Tensor,
    *,
    trust_coefficient: float | Tensor = 1.0,
    weight_decay: float | Tensor = 0.0,
    eps: float | Tensor = 0.0,
) -> Tensor:
    """Compute the trust ratio of each layer, which scales its step to the norm of its weights.

        ratio = trust_coefficient * |w| / (|u| + weight_decay * |w| + eps)

    The paper's eta is `trust_coefficient`. |w| is `weight_norm`, and |u| is `update_norm`. They are tensors of the same
    shape with one element per layer. If the norm of the decayed direction is known, pass it as `update_norm` and leave
    `weight_decay` at 0.

    A layer whose weights or updates are all zero gets the ratio 1, as in MLPerf's reference, optax and timm. The paper
    does not define this case.

    Source: You et al. 2017 (arXiv:1708.03888).

    >>> trust_ratio(torch.tensor([10.0]), torch.tensor([2.0]), trust_coefficient=0.001)
    tensor([0.0050])
    >>> trust_ratio(torch.tensor([10.0]), torch.tensor([2.0]), trust_coefficient=0.001, weight_decay=0.3)
    tensor([0.0020])
    >>> trust_ratio(torch.tensor([0.0, 10.0]), torch.tensor([2.0, 0.0]), trust_coefficient=0.001, weight_decay=0.3)
    tensor([1., 1.])
    """
    denominator = update_norm + weight_decay * weight_norm + eps
    is_nonzero = (weight_norm > 0) & (update_norm > 0)
    ratio = trust_coefficient * weight_norm / denominator
    # `where` replaces the inf or nan of a division by zero.
    return torch.where(is_nonzero, ratio, 1.0)


def require_bounds(bounds: Any) -> None:
    """Raise `ValueError` unless the bounds of a weight norm are None or two valid numbers."""
    if bounds is not None and not _are_bounds(bounds):
        raise ValueError(
            f"`weight_norm_bounds` (={bounds!r:.60}) must be two numbers (low, high) with 0 <= low <= high and high > "
            "0, because they bound the weight norm of a layer in the trust ratio. Set weight_norm_bounds=None for no "
            "bounds."
        )


def _are_bounds(bounds: Any) -> bool:
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        return False
    for bound in bounds:
        if not isinstance(bound, int | float) or isinstance(bound, bool):
            return False
    low, high = bounds
    return bool(0 <= low <= high and high > 0)


def tensor_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Compute the Euclidean norm of each tensor in a list.

        norms[i] = sqrt(sum(tensors[i] ** 2))

    The result is a 1-D tensor on the device of the tensors. The tensors may have any shape, and the dtype float16,
    bfloat16, float32 or float64. On the CPU the result is float64, with a relative error below 1e-6 at any size.
    Elsewhere it is float32, or float64 for float64 tensors. Squares are float32, so elements above 1e19 give inf and
    elements below 1e-23 count as zero.

    >>> tensor_norms([torch.tensor([3.0, 4.0]), torch.full((4,), 60000.0, dtype=torch.float16)])
    tensor([5.0000e+00, 1.2000e+05], dtype=torch.float64)
    """
    # torch's CPU norm adds millions of squares to a few float32 sums. For 37.7 million numbers its error is 0.2 % if
    # they are normal, and 1 % if they are equal. On other devices torch's multi-tensor norm sums blocks in a tree. A
    # norm is never in half precision, because above 65504 it would be inf, and its layer would not be updated any more.
    if tensors[0].device.type == "cpu":
        return torch.stack([_norm_cpu(tensor) for tensor in tensors])
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=dtype))


def _norm_cpu(tensor: Tensor) -> Tensor:
    if not numel_in_rows(tensor.numel(), tensor.dtype):
        return torch.linalg.vector_norm(tensor, dtype=torch.float64)
    # Elements are read in memory order, so that a channels_last weight needs no copy.
    return norm_in_rows(flattened(tensor, tensor).contiguous())


def norm_in_rows(tensor: Tensor) -> Tensor:
    """Compute the Euclidean norm of a 1-D tensor slice by slice, and return a 0-dim float64 tensor.

    The relative error is below 1e-6 at any size. The function makes one pass over memory for any dtype.

    >>> norm_in_rows(torch.full((1 << 20,), 2.0, dtype=torch.float16))
    tensor(2048., dtype=torch.float64)
    """
    norms = []
    for chunk in tensor.split(_CHUNK):
        num_in_rows = chunk.numel() // _ROW * _ROW
        rows = chunk[:num_in_rows].view(-1, _ROW)
        norms.append(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32))

        # The remaining elements are fewer than one row, so their sum is as accurate.
        remainder = chunk[num_in_rows:]
        norm_of_remainder = torch.linalg.vector_norm(remainder, dtype=torch.float32)
        norms.append(norm_of_remainder.view(1))
    return torch.linalg.vector_norm(torch.cat(norms), dtype=torch.float64)


def numel_in_rows(numel: int, dtype: torch.dtype) -> int:
    """Return the number of elements of a tensor that `tensor_norms` sums slice by slice in float32.

    These are all elements of a large tensor, and no elements of a small tensor or a float64 tensor.

    >>> [numel_in_rows(1 << 20, dtype) for dtype in (torch.float16, torch.float64)], numel_in_rows(5, torch.float32)
    ([1048576, 0], 0)
    """
    if numel <= _SMALL or dtype == torch.float64:
        return 0
    return numel


def combined_norms(norms_of_blocks: list[Tensor]) -> Tensor:
    """Combine the norms of the blocks of tensors into the norms of the full tensors."""
    if len(norms_of_blocks) == 1:
        return norms_of_blocks[0]
    return torch.linalg.vector_norm(torch.stack(norms_of_blocks), dim=0)


@dataclass(frozen=True, kw_only=True)
class ShardedVector:
    """Vector that is sharded over ranks and whose norm is to be computed.

    Attributes:
        part: Shard of the vector that this rank holds.
        pieces: Elements of the shard in order. They are read once.
        is_in_blocks: Whether a single rank would sum the vector with `in_blocks`, so that a small last block is summed
            in float64.
    """

    part: Part
    pieces: Iterable[Tensor]
    is_in_blocks: bool = False


def norms_over_ranks(
    vectors: Mapping[Tensor, Sequence[ShardedVector]],
    found_inf: Tensor,
    add_up_: Callable[[Tensor], None],
) -> tuple[dict[Tensor, list[Tensor]], Tensor]:
    """Compute the norms of sharded vectors and combine `found_inf` over ranks in one all-reduce.

    Collective: every rank that holds shards must call it, with vectors in the same order. Afterwards the results are
    bitwise equal on all ranks.

    Each rank sums the squares of its shard as `tensor_norms` does on the CPU, and the sums of the ranks are added in
    float64. A norm differs from `tensor_norms` of the full tensor only by the order of additions. The relative
    difference is 1e-15, which changes a float32 result about once in a hundred million norms. It is 1e-13 for float64
    tensors, and 1e-6 on an accelerator, which sums differently.

    Args:
        vectors: Vectors of each parameter.
        found_inf: 0-dim tensor that is above 0 if this rank has found inf or nan.
        add_up_: Function that adds a float64 tensor over the ranks, in place.

    Returns:
        The norms of each parameter's vectors, as 0-dim float64 tensors on its device, and a 0-dim float32 tensor on the
        device of `found_inf`, which is 1.0 if any rank has found inf or nan, else 0.0.
    """
    device = found_inf.device
    addends = [found_inf.double()]
    for vectors_of_param in vectors.values():
        for vector in vectors_of_param:
            squares = _sum_of_squares(vector).to(device)
            addends.append(squares / vector.part.num_holders)
    message = torch.stack(addends)
    add_up_(message)

    norms = message[1:].sqrt().unbind()
    norms_of_params: dict[Tensor, list[Tensor]] = {}
    begin = 0
    for param, vectors_of_param in vectors.items():
        end = begin + len(vectors_of_param)
        norms_of_params[param] = [norm.to(param.device) for norm in norms[begin:end]]
        begin = end
    found_inf_on_any_rank = message[0] > 0
    return norms_of_params, found_inf_on_any_rank.float()


def _sum_of_squares(vector: ShardedVector) -> Tensor:
    """Return the sum of squares of this rank's shard of a vector.

    Elements are summed in float32 rows or in float64, as `tensor_norms` does for the full vector.
    """
    norms = []
    begin = vector.part.begin
    for piece in vector.pieces:
        end = begin + piece.numel()
        end_of_rows = _end_of_rows(vector, piece.dtype)
        num_in_rows = max(0, min(end, end_of_rows) - begin)
        begin = end

        flat = flattened(piece, piece).contiguous()
        in_rows = flat[:num_in_rows]
        exact = flat[num_in_rows:]
        if in_rows.numel():
            norms.append(norm_in_rows(in_rows))
        if exact.numel():
            norms.append(torch.linalg.vector_norm(exact, dtype=torch.float64))
    return torch.stack(norms).square().sum()


def _end_of_rows(vector: ShardedVector, dtype: torch.dtype) -> int:
    """Return the index up to which a single rank would sum the full vector in float32 rows.

    It would sum the elements after this index in float64.
    """
    numel = vector.part.numel
    if not vector.is_in_blocks:
        return numel_in_rows(numel, dtype)
    numel_of_last_block = 1 + (numel - 1) % block_numel()
    numel_before = numel - numel_of_last_block
    return numel_in_rows(numel_before, dtype) + numel_in_rows(numel_of_last_block, dtype)
