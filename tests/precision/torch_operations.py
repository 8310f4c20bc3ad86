"""Collection of the errors that all torch operations raise in half precision and in fp32.

    PYTHONPATH=. python tests/precision/torch_operations.py cpu errors.json

Operations and arguments come from torch's own tests. Each call mixes half-precision and fp32 tensors as in a step, with
forward under autocast, and then runs backward. The output file is a list of `RaisedError` without duplicate texts.
"""

import json
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_hybrid.precision.fp16_emulation import Fp16MatmulEmulation

MAX_SAMPLES = 4
"""Arguments of each operation: more bring no text that is new in kind."""

MAX_SINGLE = 5

COMPLEX_OF = {
    torch.float16: torch.complex32,
    torch.bfloat16: getattr(torch, "bcomplex32", torch.complex32),
}
HALF_DTYPES = {*COMPLEX_OF, *COMPLEX_OF.values()}


@dataclass(frozen=True)
class RaisedError:
    """Error of a call. `needs_half`: the same call works with fp32 tensors."""

    kind: str
    message: str
    needs_half: bool
    operation: str
    dtypes: str


@dataclass(frozen=True)
class Call:
    """Call of an operation with fp32 tensors, any of which can be replaced by half-precision ones."""

    name: str
    function: Callable[..., Any]
    leaves: list[Any]  # of (input, args, kwargs)
    spec: Any
    dtype: torch.dtype  # of the tensors that can be half: float32 or complex64
    has_backward: bool

    @property
    def positions(self) -> list[int]:
        return [
            i
            for i, leaf in enumerate(self.leaves)
            if isinstance(leaf, Tensor) and leaf.dtype is self.dtype
        ]

    def leaves_with(self, half_positions: set[int], half_dtype: torch.dtype) -> list[Any]:
        leaves = list(self.leaves)
        for position in self.positions:
            tensor = leaves[position].detach().clone()
            if position in half_positions:
                tensor = tensor.to(COMPLEX_OF[half_dtype] if tensor.is_complex() else half_dtype)
            leaves[position] = tensor.requires_grad_(self.has_backward)
        return leaves

    def run(self, leaves: list[Any]) -> list[Tensor]:
        """Return the results from which backward can start."""
        operand, args, kwargs = tree_unflatten(leaves, self.spec)
        results = tree_leaves(self.function(operand, *args, **kwargs))
        return [result for result in results if isinstance(result, Tensor) and result.requires_grad]

    def run_in_fp32(self) -> None:
        backward(self.run(self.leaves_with(set(), torch.float16)))

    def run_as_in_a_step(
        self, half_positions: set[int], half_dtype: torch.dtype, device: str
    ) -> None:
        leaves = self.leaves_with(half_positions, half_dtype)
        with ExitStack() as step:
            if device == "cpu":
                step.enter_context(Fp16MatmulEmulation(with_products=half_dtype is torch.float16))
            with torch.autocast(device, dtype=half_dtype):
                results = self.run(leaves)
            backward(results)


def backward(results: list[Tensor]) -> None:
    if results:
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])


def torch_operations() -> list[Any]:
    """Return the operations that torch's own tests describe."""
    # Torch's tests import this module to compare printed text, which is not used here.
    expecttest = types.ModuleType("expecttest")
    expecttest.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", expecttest)
    from torch.testing._internal import common_methods_invocations as database

    return [*database.op_db, *database.foreach_binary_op_db, *database.foreach_other_op_db]


def calls_of(operation: Any, device: str) -> Iterator[Call]:
    """Yield the calls of an operation as a function, as a method and in place."""
    variants = {
        "": operation.op,
        "method ": operation.method_variant,
        "in-place ": operation.inplace_variant,
    }
    for dtype in (torch.float32, torch.complex64):
        if not operation.supports_dtype(dtype, torch.device(device).type):
            continue
        samples = operation.sample_inputs(device, dtype)
        for _, sample in zip(range(MAX_SAMPLES), samples, strict=False):
            leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
            for prefix, function in variants.items():
                if function is not None:
                    has_backward = operation.supports_autograd and prefix != "in-place "
                    yield Call(prefix + operation.name, function, leaves, spec, dtype, has_backward)


def half_positions_of(call: Call) -> list[set[int]]:
    """Return sets of tensors to make half: all of them, each one alone, and all but one."""
    positions = call.positions
    single = positions
    if len(positions) > MAX_SINGLE:  # the tensors of a list are interchangeable
        single = [positions[0], positions[-1]]

    chosen = [set(positions)]
    if len(positions) > 1:
        chosen += [{position} for position in single]
    if len(positions) > 2:
        chosen += [set(positions) - {position} for position in single]
    return chosen


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Exception | None:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
    return None


def errors_of_calls(operation: Any, device: str) -> Iterator[RaisedError]:
    """Yield the errors of calls that torch's tests expect to work."""
    for call in calls_of(operation, device):
        if not call.positions:
            continue
        error = error_of(call.run_in_fp32)
        if error is not None:
            yield RaisedError(type(error).__name__, str(error), False, call.name, "fp32")
            continue
        for half_dtype in COMPLEX_OF:
            for half_positions in half_positions_of(call):
                error = error_of(call.run_as_in_a_step, half_positions, half_dtype, device)
                if error is not None:
                    dtypes = ", ".join(
                        "half" if i in half_positions else "fp32" for i in call.positions
                    )
                    yield RaisedError(
                        type(error).__name__, str(error), True, call.name, f"{half_dtype}: {dtypes}"
                    )


def errors_of_wrong_arguments(operation: Any, device: str) -> Iterator[RaisedError]:
    """Yield errors without half precision: of shapes, indices, devices and other dtypes."""
    if getattr(operation, "error_inputs_func", None) is None:
        return
    for error_input in operation.error_inputs(device):
        sample = error_input.sample_input
        leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
        dtypes = {leaf.dtype for leaf in leaves if isinstance(leaf, Tensor)}
        dtypes |= {leaf for leaf in leaves if isinstance(leaf, torch.dtype)}
        if dtypes & HALF_DTYPES:
            continue
        error = error_of(operation.op, sample.input, *sample.args, **sample.kwargs)
        if error is not None:
            yield RaisedError(
                type(error).__name__, str(error), False, operation.name, "wrong arguments"
            )


def main(device: str, path: str) -> None:
    warnings.simplefilter("ignore")
    errors: dict[tuple[str, str, bool], RaisedError] = {}
    for operation in torch_operations():
        for error in [
            *errors_of_calls(operation, device),
            *errors_of_wrong_arguments(operation, device),
        ]:
            errors.setdefault((error.kind, error.message, error.needs_half), error)
    Path(path).write_text(json.dumps([asdict(error) for error in errors.values()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
