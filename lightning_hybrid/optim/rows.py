"""Tensors of any shapes as rows of equal length, for the compiled passes over them on the CPU."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_hybrid.optim.coefficients import DECAY, NUM_COEFFICIENTS, SCALE, Options, coefficients
from lightning_hybrid.optim.compiled import BATCH, ROW, BatchKernel, norm_kernel, update_kernel
from lightning_hybrid.optim.scaling import Scaling

# Elements. Smaller tensors are gathered into one matrix and scattered back, in cache; a piece of its own costs 8 us.
_SMALL = 1 << 13


class RowEngine:
    """The passes over the tensors of one kind: dtypes alike, all with momentum and copies or all without.

    A tensor of 8,192 elements and more is a piece: a matrix, in place, of as many whole rows as it has. What is left
    of it, smaller tensors, and tensors that do not fill a stretch of memory in one layout are gathered into one last
    piece, where each begins a new row; the rest of its last row is zero.

        measure()   sum(w * w) and sum(g * g) of each tensor       one read of g, and of w where it is not known
        move()      the step                                       one read of g, w, v; one write of w, v, copy
                    sum(w * w) for the next step                   one read of w, in cache if it is small

    sum(w * w) is known from the last update where a tensor has a copy, that is, is a master, which nobody but its owner
    writes: an edit shows in `_version`, except one through `.data`. A step on a million parameters makes no allocation
    that grows with them.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        buffers: Sequence[Tensor],
        copies: Sequence[Tensor],
        grad_dtype: torch.dtype,
        *,
        is_joint: bool,
    ) -> None:
        self.num_tensors = len(params)
        self._tensors = (list(params), list(buffers), list(copies))
        self._addresses = _addresses(params, copies)
        self._is_joint = is_joint
        weight, state = params[0].dtype, torch.promote_types(params[0].dtype, torch.float32)
        copy = copies[0].dtype if copies else None
        threads = torch.get_num_threads()
        self._update = update_kernel(grad_dtype, weight, state, copy, bool(buffers), threads)
        self._grad_norms = norm_kernel(grad_dtype, weight if is_joint else None, state, threads)
        self._weight_norms = norm_kernel(weight, None, state, threads)

        self._rows_of: list[tuple[int, int]] = []  # of each piece in place: its tensor, its number of rows
        rest: list[tuple[int, int]] = []  # tensor, elements of it that are in place
        lengths: list[int] = []
        for index, together in enumerate(zip(*(one for one in self._tensors if one), strict=True)):
            numel = together[0].numel()
            in_place = numel // ROW if numel >= _SMALL and is_one_stretch(together) else 0
            if in_place:
                self._rows_of.append((index, in_place))
                lengths.append(in_place)
            if numel > in_place * ROW:
                rest.append((index, in_place * ROW))
        begins = [0]
        for index, begin in rest:
            num_rows = -(-(params[index].numel() - begin) // ROW)
            lengths.append(num_rows)
            begins.append(begins[-1] + num_rows)
        num_rest = max(begins[-1], 2)  # no kernel takes one row, or none
        # Rows of one tensor follow one another, but for a rest. Rows of no tensor are zero and count for the first.
        lengths.append(num_rest - begins[-1])
        self._lengths = torch.tensor(lengths)
        self._tensor_of_length = torch.tensor([i for i, _ in (*self._rows_of, *rest, (0, 0))])
        self._tensor_of_row = self._tensor_of_length.repeat_interleave(self._lengths)

        num_rows = len(self._tensor_of_row)
        self._coefficients = torch.zeros(num_rows, NUM_COEFFICIENTS, dtype=state)
        self._squares = torch.zeros(2, num_rows, dtype=state)  # of weights, of gradients
        ends = torch.tensor([0, *(rows for _, rows in self._rows_of), num_rest]).cumsum(0).tolist()
        spans = [slice(begin, end) for begin, end in itertools.pairwise(ends)]
        self._squares_fp64 = self._squares.double()  # kept: fresh pages would cost more than the sums
        dtypes = (weight, state if buffers else None, copy, grad_dtype)
        gathered = [None if dtype is None else torch.zeros(num_rest, ROW, dtype=dtype) for dtype in dtypes]
        self._gathered = [
            [_slot(matrix, row, params[i], begin) for (i, begin), row in zip(rest, begins, strict=False)]
            if matrix is not None
            else []
            for matrix in gathered
        ]
        self._rest = rest
        # Columns of the kernels, one entry per piece; gradients come with each step.
        self._columns: list[list[Tensor]] = []
        for tensors, matrix in zip(self._tensors, gathered, strict=False):
            in_place_matrices = [_matrix(tensors[i], rows) for i, rows in self._rows_of] if tensors else []
            self._columns.append(in_place_matrices + ([] if matrix is None else [matrix]))
        self._gathered_grads = gathered[3]
        self._row_columns = [
            [whole[span] for span in spans] for whole in (self._coefficients, self._squares[0], self._squares[1])
        ]
        self._versions: list[int] | None = None
        self._bound: dict[str, tuple[list[int], list[list[int]], list[Callable[[Sequence[Tensor]], None]]]] = {}
        self._grads: list[Tensor] = []

    def is_of(self, params: Sequence[Tensor], buffers: Sequence[Tensor], copies: Sequence[Tensor]) -> bool:
        """Whether these are the tensors, where they were when this was built."""
        same = all(map(operator.is_, buffers, self._tensors[1]))
        return same and self._addresses == _addresses(params, copies)

    def measure(self, grads: Sequence[Tensor], options: Options, scaling: Scaling, needed: Sequence[bool]) -> Tensor:
        """The norms, and whether a gradient is inf or nan; see `fused.Engine`."""
        decay = None
        if self._is_joint:
            decay = options.decay * options.sign
            decay = decay if scaling.inverse_scale is None else decay / scaling.inverse_scale
        self._sums = self.squares(grads, decay, needed)
        return (~self._sums[1].sum().isfinite()).float()

    def move(self, options: Options, scaling: Scaling) -> None:
        """The step; see `fused.Engine`."""
        self.update(coefficients(self._sums, options, scaling, is_joint=self._is_joint))

    def squares(self, grads: Sequence[Tensor], unscaled_decay: Tensor | None, needed: Sequence[bool]) -> Tensor:
        """Sums of squares, float64, of shape (2, tensors): of weights; of gradients, or of directions if joint.

        Gradients stay with the engine until `update`. Of tensors that are not `needed` the sums mean nothing.
        `unscaled_decay`: for the joint rule, what to multiply w by before it is added to g, one number per tensor.
        """
        self._load(grads)
        weights = self._columns[0]
        rows, weight_sums, grad_sums = self._row_columns
        pieces = [k for k, (index, _) in enumerate(self._rows_of) if needed[index]]
        pieces.append(len(self._rows_of))
        if self._is_joint:
            assert unscaled_decay is not None
            per_tensor = torch.zeros(self.num_tensors, NUM_COEFFICIENTS, dtype=self._coefficients.dtype)
            per_tensor[:, SCALE], per_tensor[:, DECAY] = 1.0, unscaled_decay
            torch.index_select(per_tensor, 0, self._tensor_of_row, out=self._coefficients)
        columns = [self._grads, grad_sums, weights, rows] if self._is_joint else [self._grads, grad_sums]
        self._run("norms", self._grad_norms, pieces, columns)
        changed = self._changed()
        stale = [k for k in pieces[:-1] if self._rows_of[k][0] in changed]
        if any(i in changed for i, _ in self._rest):
            stale.append(pieces[-1])
        self._run("weights", self._weight_norms, stale, [weights, weight_sums])
        sums = torch.zeros(2, self.num_tensors, dtype=torch.float64)
        self._squares_fp64.copy_(self._squares)
        by_length = [torch.segment_reduce(one, "sum", lengths=self._lengths) for one in self._squares_fp64]
        return sums.index_add_(1, self._tensor_of_length, torch.stack(by_length))

    def update(self, numbers: Tensor) -> None:
        """The step, with `numbers` of shape (tensors, NUM_COEFFICIENTS)."""
        torch.index_select(numbers.to(self._coefficients.dtype), 0, self._tensor_of_row, out=self._coefficients)
        weights, buffers, copies = self._columns
        rows, weight_sums, _ = self._row_columns
        # From the last to the first: the last that `squares` read are still in cache.
        last_first = list(reversed(range(len(weights))))
        columns = [self._grads, weights, rows, weights, buffers, buffers, copies]
        moves = self._calls("update", self._update, last_first, columns)
        norms = self._calls("new weights", self._weight_norms, last_first, [weights, weight_sums])
        for move, norm in zip(moves, norms, strict=True):
            move()
            if copies:  # else the weights may be anybody's, and are measured again before the next step
                norm()  # at once: small weights are still in cache
        for tensors, slots in zip(self._tensors, self._gathered, strict=False):
            if tensors and slots:
                torch._foreach_copy_(self._pieces_of_rest(tensors), slots)
        torch.autograd.graph.increment_version([tensor for tensors in self._tensors for tensor in tensors])
        self._versions = self._versions_now()
        self._grads = []

    def _run(self, name: str, kernel: BatchKernel, pieces: list[int], columns: Sequence[Sequence[Tensor]]) -> None:
        """Call `kernel` on some pieces."""
        for call in self._calls(name, kernel, pieces, columns):
            call()

    def _calls(
        self, name: str, kernel: BatchKernel, pieces: list[int], columns: Sequence[Sequence[Tensor]]
    ) -> list[Callable[[], None]]:
        """What calls `kernel` on some pieces; all columns but the first are the same each time and stay bound."""
        bound = self._bound.get(name)
        if bound is None or bound[0] != pieces:
            batches = [pieces[first : first + BATCH] for first in range(0, len(pieces), BATCH)]
            calls = [kernel.bind([_padded(column, batch) for column in columns]) for batch in batches]
            bound = self._bound[name] = (pieces, batches, calls)
        return [partial(call, _padded(columns[0], batch)) for batch, call in zip(bound[1], bound[2], strict=True)]

    def _load(self, grads: Sequence[Tensor]) -> None:
        params, grads = self._tensors[0], list(grads)
        in_place = []
        for index, num_rows in self._rows_of:
            grad = grads[index]
            if grad.stride() != params[index].stride() and not is_one_stretch((params[index], grad)):
                grads[index] = grad = torch.empty_like(params[index], dtype=grad.dtype).copy_(grad)
            in_place.append(_matrix(grad, num_rows))
        assert self._gathered_grads is not None
        self._grads = [*in_place, self._gathered_grads]
        if self._rest:
            torch._foreach_copy_(self._gathered[3], self._pieces_of_rest(grads))
        changed = self._changed()
        if any(i in changed for i, _ in self._rest):
            for tensors, slots in zip(self._tensors[:2], self._gathered[:2], strict=True):
                if tensors and slots:
                    torch._foreach_copy_(slots, self._pieces_of_rest(tensors))

    def _changed(self) -> set[int]:
        """The tensors that someone else may have written since the last update."""
        versions = self._versions_now()
        if self._versions is None or not self._tensors[2]:
            return set(range(self.num_tensors))
        if versions == self._versions:
            return set()
        pairs = enumerate(zip(self._versions, versions, strict=True))
        return {i % self.num_tensors for i, (old, new) in pairs if old != new}

    def _versions_now(self) -> list[int]:
        return [tensor._version for tensors in self._tensors[:2] for tensor in tensors]

    def _pieces_of_rest(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [_end(tensors[i], begin) if begin else tensors[i] for i, begin in self._rest]


def _addresses(*lists: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensors in lists for tensor in tensors]


def _matrix(tensor: Tensor, num_rows: int) -> Tensor:
    return tensor.as_strided((num_rows, ROW), (ROW, 1))


def _end(tensor: Tensor, begin: int) -> Tensor:
    return tensor.as_strided((tensor.numel() - begin,), (1,), tensor.storage_offset() + begin)


def _slot(matrix: Tensor, row: int, like: Tensor, begin: int) -> Tensor:
    """Where in the gathered matrix, from `row` on, the elements of `like` from `begin` on have their place."""
    flat = matrix.view(-1)[row * ROW :][: like.numel() - begin]
    return flat if begin else flat.view(like.shape)


def is_one_stretch(tensors: Iterable[Tensor]) -> bool:
    """Whether each fills a stretch of memory, and all in one order of their elements.

    >>> image = torch.zeros(2, 3, 4, 5)
    >>> is_one_stretch([image, image[:]]), is_one_stretch([image, image.to(memory_format=torch.channels_last)])
    (True, False)
    """
    orders = set()
    for tensor in tensors:
        sides = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
        expected = 1
        for stride, size in sides:
            if stride != expected:
                return False
            expected *= size
        orders.add(tuple(s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1))
    return len(orders) == 1


def _padded(column: Sequence[Tensor], chosen: list[int]) -> list[Tensor]:
    """The chosen pieces; what is missing to a batch are two rows of zeros, of no tensor."""
    some = [column[k] for k in chosen] if column else []
    if column and len(some) < BATCH:
        nothing = some[0].new_zeros((2, *some[0].shape[1:]))
        some += [nothing] * (BATCH - len(some))
    return some
