"""LARS steps along momentum orthogonalized by Newton-Schulz iterations, which ranks can share among themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.optim.foreach_ops import add_scaled_, as_dtype
from lightning_hybrid.optim.gradients import (
    decayed_gradients,
    dense_gradients,
    is_together,
    lr_of,
    state_dtype,
)
from lightning_hybrid.optim.layerwise import LayerwiseOptimizer
from lightning_hybrid.optim.trust_ratio import tensor_norms, trust_ratio
from lightning_hybrid.placement import Part

# Coefficients of Jordan et al. 2024. An iteration maps a singular value s in (0, 1] to a*s + b*s^3 + c*s^5. With these
# coefficients the slope at zero is as large as possible, and five iterations map values of at least 0.01 to
# [0.68, 1.21]. The classical coefficients (1.5, -0.5) need twice as many iterations.
_A = 3.4445
_B = -4.7750
_C = 2.0315
NUM_ITERATIONS = 5
# Maximum number of elements of a batch of equal shapes. It takes 64 MiB in float32, and three times that for
# temporaries.
_BATCH = 1 << 24


@dataclass(frozen=True)
class _Matrix:
    """Parameter whose momentum is orthogonalized, with its gradient and its parameter group."""

    param: Tensor
    grad: Tensor
    group: dict[str, Any]


class OrthogonalStep(LayerwiseOptimizer):
    """Base class of `LARS` that implements the step of groups with `direction="orthogonal"`.

    The step processes lists of tensors.

    Attributes:
        work_group: Process group whose ranks share the orthogonalization. None: this rank processes all tensors.
    """

    work_group: dist.ProcessGroup | None = None
    _orthogonal: dict[Tensor, Tensor]  # directions of the current step, by parameter

    def _orthogonalize(self) -> None:
        """Compute the orthogonalized momentum of all groups with `direction="orthogonal"`.

        Collective: every rank of `work_group` must call it, in the same order.
        """
        self._orthogonal = {}
        # Matrices of all groups are processed together, so that ranks can share the work and equal shapes are
        # multiplied as a batch.
        matrices_by_key = self._matrices_to_orthogonalize()
        for (device, dtype, together), matrices in matrices_by_key.items():
            params = [matrix.param for matrix in matrices]
            directions = orthogonalized_all(
                [param.shape for param in params],
                partial(self._moment_of, matrices),
                dtype=dtype,
                device=device,
                together=together,
                group=self.work_group,
            )
            self._orthogonal.update(zip(params, directions, strict=True))

    def _matrices_to_orthogonalize(self) -> dict[Any, list[_Matrix]]:
        """Return all matrices to orthogonalize, grouped by device, dtype and whether they are updated together."""
        matrices: dict[Any, list[_Matrix]] = {}
        for group in self.param_groups:
            if group["direction"] != "orthogonal":
                continue
            for _, (param, grad) in dense_gradients(group):
                if not is_matrix(param):
                    continue
                key = (param.device, state_dtype(param.dtype), is_together(group, param))
                matrices.setdefault(key, []).append(_Matrix(param, grad, group))
        return matrices

    def _moment_of(self, matrices: list[_Matrix], index: int) -> Tensor:
        """Return the tensor that is orthogonalized for one parameter, such as its new momentum."""
        matrix = matrices[index]
        moments, _ = self._moments(matrix.group, [matrix.param], [matrix.grad])
        return moments[0]

    def _moments(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """Return the tensors to orthogonalize, and the new momentum buffers (None without momentum).

            g = gradient + weight_decay * weight
            buffer <- momentum * buffer + g
            moment  = buffer,   or   g + momentum * buffer   with Nesterov momentum

        No state is changed.
        """
        first_param = params[0]
        weights = as_dtype(params, state_dtype(first_param.dtype))
        scaling = self._scaling.to(first_param.device)
        directions = decayed_gradients(weights, grads, group=group, scaling=scaling)
        momentum = group["momentum"]
        if momentum == 0:
            return directions, None

        (buffers,) = self.state_lists(params, "momentum_buffer")
        new_buffers = list(torch._foreach_mul(buffers, momentum))
        torch._foreach_add_(new_buffers, directions)
        if not group["nesterov"]:
            return new_buffers, new_buffers
        moments = torch._foreach_add(directions, new_buffers, alpha=momentum)
        return list(moments), new_buffers

    def _orthogonal_update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> None:
        """Apply one step to parameters of a group with `direction="orthogonal"`.

        The parameters have the same device and dtype.
        """
        lr = lr_of(group, params[0].device)
        scaling = self._scaling
        moments, new_buffers = self._moments(group, params, grads)
        steps = self._sized_steps(group, params, moments)

        weights = scaling.scratch(params, moments[0].dtype)
        add_scaled_(weights, steps, -lr)
        if new_buffers is not None:
            (buffers,) = self.state_lists(params, "momentum_buffer")
            scaling.commit_(buffers, new_buffers)
        scaling.commit_(params, weights)

    def _sized_steps(
        self, group: dict[str, Any], params: list[Tensor], moments: list[Tensor]
    ) -> list[Tensor]:
        """Return the update directions, scaled by the trust ratio or by Muon's factor.

        The learning rate is not applied yet.
        """
        directions = self._directions_of(params, moments)
        if not group["trust_ratio"]:
            factors = []
            for direction, moment in zip(directions, moments, strict=True):
                factor = 1.0
                if direction is not moment:
                    factor = _muon_factor(direction)
                factors.append(factor)
            return list(torch._foreach_mul(directions, factors))

        weight_norms = tensor_norms(params)
        direction_norms = tensor_norms(directions)
        ratios = trust_ratio(
            weight_norms, direction_norms, trust_coefficient=group["trust_coefficient"]
        )
        # If a norm is zero, the ratio is 1, and the step is the momentum itself, as with direction="momentum".
        is_nonzero = (weight_norms > 0).unbind()
        directions = list(map(torch.where, is_nonzero, directions, moments))
        ratios = ratios.to(directions[0].dtype)
        return list(torch._foreach_mul(directions, ratios.unbind()))

    def _directions_of(self, params: list[Tensor], moments: list[Tensor]) -> list[Tensor]:
        """Return the orthogonalized momentum of matrices, and the momentum of other tensors."""
        directions = []
        for param, moment in zip(params, moments, strict=True):
            direction = moment
            if param in self._orthogonal:
                direction = self._orthogonal[param].to(moment.dtype)
            directions.append(direction)
        return directions


def _muon_factor(matrix: Tensor) -> float:
    """Return the factor sqrt(max(1, rows / columns)) by which `torch.optim.Muon` scales a matrix."""
    rows_per_column = matrix.shape[0] ** 2 / matrix.numel()
    return float(max(1.0, rows_per_column) ** 0.5)


def refuse_part(part: Part) -> NoReturn:
    """Raise `ValueError`, because a single shard of a tensor cannot be orthogonalized."""
    raise ValueError(
        '`direction` (="orthogonal") requires full tensors, because orthogonalization needs the full matrix, but this '
        f"rank has only elements {part.begin} to {part.end} of {part.numel}. Leave `shard_update` out. To divide the "
        "work among the ranks of a node, set `work_group` of the optimizer."
    )


def is_matrix(tensor: Tensor) -> bool:
    """Return whether a tensor, flattened to a matrix, has more than one row and more than one column.

    Orthogonalization changes only the direction of such tensors. The first dimension counts the rows.

    >>> [is_matrix(torch.zeros(shape)) for shape in [(2, 3), (8, 3, 5, 5), (4,), (1, 4), (4, 1, 1, 1), (0, 3)]]
    [True, True, False, False, False, False]
    """
    if tensor.dim() < 2:
        return False
    num_rows = tensor.shape[0]
    return num_rows > 1 and tensor.numel() > num_rows


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of orthogonalized tensors: float64 for float64 input, and float16 otherwise.

    Elements are at most 1.2, and singular values differ from 1 by up to a third. So the rounding of float16
    (5e-4) does not matter, and ranks that share the work send half as many bytes as in float32.
    """
    if dtype == torch.float64:
        return torch.float64
    return torch.float16


def num_flops(shape: Sequence[int]) -> int:
    """Return the number of floating-point operations needed to orthogonalize a tensor of this shape.

        5 * (4 * rows^2 * columns + 2 * rows^3)         for the matrix or its transpose, with rows <= columns

    >>> num_flops((512, 512, 3, 3)) == 5 * (4 * 512**2 * 4608 + 2 * 512**3)
    True
    """
    num_columns = torch.Size(shape[1:]).numel()
    rows, columns = sorted((shape[0], num_columns))
    flops_per_iteration = 4 * rows**2 * columns + 2 * rows**3
    return NUM_ITERATIONS * flops_per_iteration


def orthogonalized(*tensors: Tensor) -> list[Tensor]:
    """Return tensors with the same singular vectors as `tensors`, but singular values of about 1.

        M = tensor as [out, in * height * width] = U S V'   ->   U S' V',   S' within [0.68, 1.21]

        X <- M / |M|,   five times:   G = X X',   X <- a X + (b G + c G G) X

    The result approximates the nearest matrix with orthonormal rows or columns, and does not depend on the
    size of M. The iteration uses float32 on a CPU, bfloat16 on other devices, and float64 for float64.
    Matrices with more rows than columns are transposed. Singular values below 0.01 |M| remain smaller.

    Args:
        tensors: Matrices (see `is_matrix`) of one device and dtype, in any memory format. Several tensors must
            have equal shapes. They are multiplied as a batch, which may change the last bits.

    Returns:
        Contiguous tensors of the same shapes, in float16, or in float64 for float64.

    Sources: Jordan et al. 2024 (Muon), Bernstein & Newhouse 2024 (arXiv:2409.20325).
    """
    shape = tensors[0].shape
    # `flatten` uses the order of the dimensions, so a channels_last kernel gives the same matrix.
    matrices = torch.stack([tensor.flatten(1) for tensor in tensors])
    num_rows, num_columns = matrices.shape[1:]
    if num_rows > num_columns:
        results = _iterate(matrices.mT).mT
    else:
        results = _iterate(matrices)
    results = results.to(result_dtype(tensors[0].dtype))
    return [result.reshape(shape) for result in results]


def orthogonalized_all(
    shapes: Sequence[torch.Size],
    tensor_of: Callable[[int], Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    together: bool,
    group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """Orthogonalize many tensors, sharing the work among the ranks of a process group.

    Each rank processes some of the tensors, with about equal `num_flops`, and receives all results of the other
    ranks. Afterwards the results are bitwise equal on all ranks.

    Collective: every rank of the group must call it, with the same shapes, in the same order.

    Args:
        shapes: Shape of each tensor.
        tensor_of: Function that returns a tensor, float32 or float64, by its index. With `group` it is only
            called for the tensors of this rank.
        dtype: Dtype of the tensors.
        device: Device of the tensors.
        together: Whether to multiply tensors of equal shapes as a batch.
        group: Process group whose ranks share the work. None: this rank processes all tensors.
    """
    num_ranks = 1
    rank = 0
    if group is not None:
        num_ranks = dist.get_world_size(group)
        rank = dist.get_rank(group)
    indices_of_ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for index, owner in enumerate(owners_by_flops(shapes, num_ranks)):
        indices_of_ranks[owner].append(index)

    results: list[Tensor] = [torch.empty(0)] * len(shapes)
    for batch in _batches(shapes, indices_of_ranks[rank], together=together):
        # The tensors are not stored in a variable, so that their memory is free before the next batch.
        batch_results = orthogonalized(*map(tensor_of, batch))
        for index, result in zip(batch, batch_results, strict=True):
            results[index] = result
    if group is not None:
        _exchange(results, indices_of_ranks, shapes, result_dtype(dtype), device, group)
    return results


def _exchange(
    results: list[Tensor],
    indices_of_ranks: list[list[int]],
    shapes: Sequence[torch.Size],
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    """Broadcast this rank's results to the other ranks, and store their results in `results`.

    Collective: every rank of the group must call it, in the same order.
    """
    rank = dist.get_rank(group)
    works: list[Any] = []
    for owner, indices in enumerate(indices_of_ranks):
        if not indices:
            continue
        if owner == rank:
            flat = torch.cat([results[index].reshape(-1) for index in indices])
        else:
            numels = [shapes[index].numel() for index in indices]
            flat = torch.empty(sum(numels), dtype=dtype, device=device)
            # The results are views of the tensor that the broadcast fills.
            for index, received in zip(indices, flat.split(numels), strict=True):
                results[index] = received.view(shapes[index])
        source = dist.get_global_rank(group, owner)
        work = dist.broadcast(flat, src=source, group=group, async_op=True)
        works.append(work)
    for work in works:
        work.wait()


def owners_by_flops(shapes: Sequence[torch.Size], num_ranks: int) -> list[int]:
    """Assign each tensor to a rank so that all ranks perform about the same number of operations.

    The costliest tensors are assigned first, each to the rank with the least work. The result is equal on every rank.

    >>> owners_by_flops([torch.Size((64, 64)), torch.Size((512, 512)), torch.Size((64, 64))], 2)
    [1, 0, 1]
    """
    flops = [num_flops(shape) for shape in shapes]
    loads = [0] * num_ranks
    owners = [0] * len(shapes)
    costliest_first = sorted(range(len(shapes)), key=flops.__getitem__, reverse=True)
    for index in costliest_first:
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += flops[index]
    return owners


def _batches(
    shapes: Sequence[torch.Size], indices: Sequence[int], *, together: bool
) -> list[list[int]]:
    """Split indices into batches of tensors with equal shapes and at most `_BATCH` elements.

    If `together` is False, each batch has one index.
    """
    if not together:
        return [[index] for index in indices]
    open_batches: dict[torch.Size, list[int]] = {}
    batches: list[list[int]] = []
    for index in indices:
        shape = shapes[index]
        batch = open_batches.get(shape)
        if batch is None or (len(batch) + 1) * shape.numel() > _BATCH:
            batch = []
            open_batches[shape] = batch
            batches.append(batch)
        batch.append(index)
    return batches


def _iterate(matrices: Tensor) -> Tensor:
    """Run the Newton-Schulz iterations on a batch of matrices.

        G = X X',   P = b G + c G G,   X <- a X + P X

    The shape is (matrix, row, column), with no more rows than columns.
    """
    # The matrices are scaled twice, because squares of very small or large elements would exceed the range of float32.
    tiny = torch.finfo(matrices.dtype).tiny  # avoids a division of zeros by zero
    largest = matrices.abs().amax(dim=(1, 2), keepdim=True)
    iterate = matrices / largest.clamp(min=tiny)
    norms = torch.linalg.vector_norm(iterate, dim=(1, 2), keepdim=True)
    iterate = iterate / norms.clamp(min=1.0)  # A norm is below 1 only for a matrix of zeros.
    if iterate.device.type != "cpu" and iterate.dtype != torch.float64:
        # bfloat16 can represent the small elements of large matrices, and float16 cannot.
        iterate = iterate.bfloat16()
    # In manual optimization the step is inside `training_step`, whose autocast would multiply in another dtype.
    with torch.autocast(iterate.device.type, enabled=False):
        for _ in range(NUM_ITERATIONS):
            gram = iterate @ iterate.mT
            polynomial = torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)
            iterate = torch.baddbmm(iterate, polynomial, iterate, beta=_A)
    return iterate
