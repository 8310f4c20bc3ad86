"""Detection of errors that are caused by half-precision dtypes, with a note on how to fix them.

Trained parameters are in half precision inside a step. An operation that does not support half precision, or that
needs equal dtypes, then raises an error which does not name this cause.
"""

from __future__ import annotations

import re
import traceback

from torch import nn

_MIXED_PRECISION = {"16-true": "16-mixed", "bf16-true": "bf16-mixed"}

# Half-precision dtypes as torch spells them (Half, c10::BFloat16, ComplexHalf, torch.HalfTensor, CPUBFloat16Type,
# torch.float16) and as NumPy does. HalfCauchy is a distribution, and float16 without a prefix may be an option's value.
_HALF_DTYPE = re.compile(
    r"(Half|BFloat16|BComplex32)(?=Tensor|Type|\W|$)"
    r"|(torch\.|array type |dtype\(')(b?float16|b?complex32)"
    r"|computing in half precision"
)
_FULL_DTYPE = re.compile(
    r"\b((Complex)?(Float|Double)|float|double|torch\.(float|complex)(32|64|128))\b"
)
_INTEGER_DTYPE = re.compile(r"\b(Long|Int|Short|Char|Byte|Bool|torch\.(u?int\d+|bool))\b")

_REFUSAL = re.compile(
    r"\b(expect\w*|must|should|only|not|but|same|different|unsupported|unrecognized)\b|match|n't",
    re.IGNORECASE,
)

# Some messages name no dtype ("both inputs should have same dtype"), and some name only the accepted ones.
_DTYPE_WORD = re.compile(r"dtype|scalar type|data type", re.IGNORECASE)
_COMPARISON = re.compile(r"\b(same|equal|different)\b|match", re.IGNORECASE)
_ONLY_FULL_DTYPES = re.compile(r"types? (of|other than) float\b", re.IGNORECASE)

# Tensors as `torch.compile` and debuggers of collectives print them: `FakeTensor(..., dtype=torch.float16)`.
_TENSOR_DESCRIPTION = re.compile(r"\w*dtypes?=[\w.]+", re.IGNORECASE)


def is_about_half_precision(message: str) -> bool:
    """Return whether an error message probably refers to a half-precision dtype.

    The message either names such a dtype, or is about dtypes without naming them.

    >>> is_about_half_precision("expected scalar type Float but found Half")
    True
    >>> is_about_half_precision("both inputs should have same dtype")
    True
    >>> is_about_half_precision("expected scalar type Float but found Double")
    False

    Some messages are the same if an integer tensor is the cause, such as "Expected self.dtype to be equal to
    src.dtype". They count as messages about half precision.
    """
    # Words that belong together are on the same line. Other lines of the message may be a traceback or user code.
    lines = _TENSOR_DESCRIPTION.sub("", message).splitlines()
    return any(_refuses_half(line) or _compares_unnamed_dtypes(line) for line in lines)


def _refuses_half(line: str) -> bool:
    # An integer tensor would be rejected with fp32 parameters as well.
    if _INTEGER_DTYPE.search(line):
        return False
    return bool(_HALF_DTYPE.search(line) and _REFUSAL.search(line))


def _compares_unnamed_dtypes(line: str) -> bool:
    if _ONLY_FULL_DTYPES.search(line):
        return True
    if _FULL_DTYPE.search(line) or _INTEGER_DTYPE.search(line):
        return False
    return bool(_DTYPE_WORD.search(line) and _COMPARISON.search(line))


def add_cure(error: BaseException, precision: object) -> None:
    """Add a note that explains cause and fix to an error, if the error is about half-precision dtypes.

    If the traceback contains a module with trained half-precision parameters, the note names the module type to keep in
    fp32. The function must therefore be called while the parameters are in half precision. An error that already has
    the note is not changed.

    >>> error = RuntimeError("mat1 and mat2 must have the same dtype, but got Float and Half")
    >>> add_cure(error, "16-true")
    >>> error.__notes__[0].partition(",")[0]
    "`precision` (='16-true') keeps trained parameters in half precision"
    """
    if precision not in _MIXED_PRECISION or not isinstance(
        error, RuntimeError | TypeError | ValueError
    ):
        return
    message = str(error)
    if not is_about_half_precision(message):
        return

    notes = getattr(error, "__notes__", ())
    if not any(note.startswith(f"`precision` (={precision!r})") for note in notes):
        error.add_note(_note_for_module(_innermost_owner_of_parameters(error), str(precision)))


def _innermost_owner_of_parameters(error: BaseException) -> nn.Module | None:
    """Return the innermost module in a traceback that has trainable half-precision parameters, or None."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, nn.Module) and any(
            _is_trained_in_half(p) for p in candidate.parameters()
        ):
            return candidate
    return None


def _is_trained_in_half(parameter: nn.Parameter) -> bool:
    return (
        parameter.requires_grad and parameter.is_floating_point() and parameter.dtype.itemsize == 2
    )


def _note_for_module(module: nn.Module | None, precision: str) -> str:
    types = _types_to_keep(module) or ["ItsClass"]
    names = "".join(f"{name}, " for name in types[:-1])
    return (
        f"`precision` (={precision!r}) keeps trained parameters in half precision, and this operation does not accept "
        "the dtypes of its operands. In your own code, cast the parameter (`self.weight.float()`) or the other operand "
        f"(`x.to(self.weight.dtype)`). In library code, keep the module's own parameters in fp32 with "
        f"plugins=[MasterWeightPrecision({precision!r}, keep_fp32=({names}{types[-1]},))], or train with "
        f"precision={_MIXED_PRECISION[precision]!r}."
    )


def _types_to_keep(module: nn.Module | None) -> list[str]:
    """Return the names of module types that must be in `keep_fp32` to keep a module's parameters in fp32.

    These are the types that hold the module's trained half-precision parameters. They are the type of the module
    itself, or those of its parameter lists and dictionaries.
    """
    if module is None:
        return []
    lists = [
        child
        for child in module.children()
        if isinstance(child, nn.ParameterList | nn.ParameterDict)
    ]
    names = []
    for holder in [module, *lists]:
        if any(_is_trained_in_half(parameter) for parameter in holder.parameters(recurse=False)):
            name = type(holder).__name__
            if type(holder).__module__.startswith("torch.nn."):
                name = f"torch.nn.{name}"
            names.append(name)
    return list(dict.fromkeys(names))
