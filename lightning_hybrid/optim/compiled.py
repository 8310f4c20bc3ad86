"""The passes over rows, compiled by Inductor (C++ and OpenMP on the CPU).

A row is `ROW` elements of one tensor; each row has its own coefficients, so one kernel serves tensors of all groups:

    coefficients (rows, 7)      SCALE, DECAY, MOMENTUM, INSIDE, OUTSIDE, LOOK, SKIP

    norms       sum over the row of g * g, or of d * d                        reads g, or g and w
    update      d = SCALE * g + DECAY * w                                     reads g, w, v; writes w, v, half(w)
                v <- MOMENTUM * v + INSIDE * d
                w <- w - OUTSIDE * v            LOOK (Nesterov): w - OUTSIDE * (MOMENTUM * v + INSIDE * d)
                unless SKIP

Each call takes `BATCH` pieces, matrices of any number of rows: a call costs some 50 us whatever it holds. Shapes are
dynamic, so a kernel is compiled once per dtype and rule, not per model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.optim.coefficients import (
    DECAY,
    INSIDE,
    LOOK,
    MOMENTUM,
    NUM_COEFFICIENTS,
    OUTSIDE,
    SCALE,
    SKIP,
)

# 512 squares are added in float32 over 16 or 32 vector lanes: relative error below 1e-6 even where all are equal.
ROW = 512
BATCH = 8
_SAMPLE_ROWS = 700  # of what a kernel is compiled with; enough for the compiler to think of threads

# All that is written comes from one expression of ten reads. By default Inductor keeps its value in memory of its own,
# written and read again, and makes weights and copies of it in a second loop: 93 ms for AlexNet's parameters on two
# quiet cores. A sum of the new weights' squares in the same function makes two loops of it as well (52 ms), so that is
# a pass of its own: 30 ms in all.
_OPTIONS = {
    "size_asserts": False,
    "realize_reads_threshold": 64,
    "realize_opcount_threshold": 256,
    "realize_acc_reads_threshold": 64,
}

Columns = Sequence[Sequence[Tensor]]


def grad_squares(grads: list[Tensor], sums: list[Tensor]) -> None:
    """sums[i][r] = the sum of the squares of row r of grads[i]."""
    for grad, out in zip(grads, sums, strict=True):
        out.copy_(grad.to(out.dtype).square().sum(1))


def joint_squares(grads: list[Tensor], sums: list[Tensor], weights: list[Tensor], rows: list[Tensor]) -> None:
    """The same of d / SCALE = g + (DECAY / SCALE) * w, so that |d| is compared with |w| before any unscaling."""
    for grad, out, weight, row in zip(grads, sums, weights, rows, strict=True):
        decay = row[:, DECAY, None] / row[:, SCALE, None]
        out.copy_((grad.to(out.dtype) + decay * weight.to(out.dtype)).square().sum(1))


def update(
    grads: list[Tensor],
    weights: list[Tensor],
    rows: list[Tensor],
    new_weights: list[Tensor],
    buffers: list[Tensor],
    new_buffers: list[Tensor],
    copies: list[Tensor],
) -> None:
    """Weights, buffers and copies after the step.

    `new_weights` and `new_buffers` may be the very memory of `weights` and `buffers`: each element is read once, and
    then written. They are arguments of their own because Inductor does not fuse loops that write what they read.
    Without `buffers` there is no momentum; without `copies` there are no copies.
    """
    for i, (grad, weight, row, new_weight) in enumerate(zip(grads, weights, rows, new_weights, strict=True)):
        dtype = row.dtype
        skip = row[:, SKIP, None] != 0
        w = weight.to(dtype)
        inside = row[:, INSIDE, None] * (row[:, SCALE, None] * grad.to(dtype) + row[:, DECAY, None] * w)
        step = inside
        if buffers:
            v = row[:, MOMENTUM, None] * buffers[i] + inside
            step = torch.where(row[:, LOOK, None] != 0, row[:, MOMENTUM, None] * v + inside, v)
            new_buffers[i].copy_(torch.where(skip, buffers[i], v))
        moved = torch.where(skip, w, w - row[:, OUTSIDE, None] * step).to(weight.dtype)
        new_weight.copy_(moved)
        if copies:
            copies[i].copy_(moved.to(copies[i].dtype))


class BatchKernel:
    """A function of columns of `BATCH` matrices each, compiled for any numbers of rows of 2 and more.

    The callable that Inductor made is kept and called directly: no guards (a few thousand checks a step), and nothing
    that `torch._dynamo.reset()` could take away. `dtypes` are those of the columns, "row" dtype last: columns named in
    `vectors` have one number per row, `wide` ones `NUM_COEFFICIENTS`.
    """

    def __init__(self, function: Callable[..., None], kinds: Sequence[tuple[torch.dtype, int]]) -> None:
        self._order: list[tuple[int, int]] = []
        self._kinds = kinds
        self._call: Callable[..., Any] = self._compile(function)

    def __call__(self, columns: Columns) -> None:
        """Run on `BATCH` pieces. A column is empty if its kind is missing from the function's work."""
        self.bind(columns)(columns[0])

    def bind(self, columns: Columns) -> Callable[[Sequence[Tensor]], None]:
        """A call that takes the first column, the gradients, each time, and the others of now."""
        rest: list[Any] = [
            columns[c][i] if c > 0 else columns[1][i].shape[0] if c < 0 else None for c, i in self._order
        ]
        places = [(place, i) for place, (c, i) in enumerate(self._order) if c == 0]
        call = self._call

        def bound(first: Sequence[Tensor]) -> None:
            args = rest.copy()
            for place, i in places:
                args[place] = first[i]
            call(*args)

        return bound

    def sample(self, seed: int = 0) -> list[list[Tensor]]:
        """Columns of small matrices, no two pieces of the same number of rows: equal sizes would be taken as one."""
        generator = torch.Generator().manual_seed(seed)
        columns: list[list[Tensor]] = []
        for dtype, width in self._kinds:
            shape = () if width == 0 else (width,)
            rows = range(_SAMPLE_ROWS, _SAMPLE_ROWS + BATCH) if width >= 0 else ()
            columns.append([torch.rand((num, *shape), generator=generator).to(dtype) for num in rows])
        return columns

    def _compile(self, function: Callable[..., None]) -> Callable[..., Any]:
        columns = self.sample()
        # By identity: what dynamo keeps of this call must not keep the samples, 75 MB for one optimizer.
        places = {id(tensor): (c, i) for c, column in enumerate(columns) for i, tensor in enumerate(column)}
        made: list[Callable[..., Any]] = []

        def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
            from torch._inductor import compile as inductor_compile

            made.append(inductor_compile(graph, examples, options=_OPTIONS))
            return first_call

        def first_call(*args: Any) -> Any:
            """Dynamo's first call tells in which order it hands over sizes and tensors."""
            for arg in args:
                self._order.append((-1, int(arg) - _SAMPLE_ROWS) if isinstance(arg, int) else places[id(arg)])
            return made[0](*args)

        for tensor in (tensor for column in columns for tensor in column):
            torch._dynamo.mark_dynamic(tensor, 0)
        # Dynamo counts the compilations of a code object and stops at eight; each kernel is another program.
        own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
        with torch.no_grad(), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
            torch.compile(own, backend=backend, fullgraph=True)(*columns)
        return made[0]


@functools.cache
def norm_kernel(grad: torch.dtype, weight: torch.dtype | None, state: torch.dtype, num_threads: int) -> BatchKernel:
    """`grad_squares`, or with the dtype of weights `joint_squares`. Inductor compiles for a number of threads."""
    kinds = [(grad, ROW), (state, 0)]
    if weight is None:
        return BatchKernel(grad_squares, kinds)
    return BatchKernel(joint_squares, [*kinds, (weight, ROW), (state, NUM_COEFFICIENTS)])


@functools.cache
def update_kernel(
    grad: torch.dtype,
    weight: torch.dtype,
    state: torch.dtype,
    copy: torch.dtype | None,
    has_momentum: bool,
    num_threads: int,
) -> BatchKernel:
    """`update`, safe to write where it reads: that is tried on small numbers here, to the bit.

    Raises `RuntimeError` where this Inductor made two loops of it.
    """
    buffer, half = (state, ROW if has_momentum else -1), (copy or state, -1 if copy is None else ROW)
    kinds = [(grad, ROW), (weight, ROW), (state, NUM_COEFFICIENTS), (weight, ROW), buffer, buffer, half]
    kernel = BatchKernel(update, kinds)
    apart, within = kernel.sample(seed=1), kernel.sample(seed=1)
    within[3], within[5] = within[1], within[4]
    for columns in (apart, within):
        for row in columns[2]:
            row[::2, SKIP] = 0
        kernel(columns)
    for one, other in zip(apart, within, strict=True):
        if one is not apart[1] and one is not apart[4] and not all(map(torch.equal, one, other)):
            raise RuntimeError(
                f"`fused` (=True) cannot be used with torch {torch.__version__}: its compiler reads weights after "
                "writing them. Use fused=False."
            )
    return kernel
