"""Recognition of errors about half-precision dtypes, and the note with a cure that they get.

Trained parameters are half inside a step. An operation that takes one dtype only, or no half precision at all, then
raises an error that says nothing about the cause.
"""

from __future__ import annotations

import re
import traceback

from torch import nn

_MIXED_PRECISION = {"16-true": "16-mixed", "bf16-true": "bf16-mixed"}

# A half-precision dtype as torch spells it (Half, c10::BFloat16, ComplexHalf, torch.HalfTensor, CPUBFloat16Type,
# torch.float16) and as numpy does. HalfCauchy is a distribution, and a bare float16 may be the value of an option.
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

# Some operations name no dtype ("both inputs should have same dtype"), and some only those that they accept.
_DTYPE_WORD = re.compile(r"dtype|scalar type|data type", re.IGNORECASE)
_COMPARISON = re.compile(r"\b(same|equal|different)\b|match", re.IGNORECASE)
_ONLY_FULL_DTYPES = re.compile(r"types? (of|other than) float\b", re.IGNORECASE)

# The tensors that `torch.compile` and debuggers of collectives print: `FakeTensor(..., dtype=torch.float16)`.
_TENSOR_DESCRIPTION = re.compile(r"\w*dtypes?=[\w.]+", re.IGNORECASE)


def is_about_half_precision(message: str) -> bool:
    """Return whether a message complains about a half-precision dtype, or about dtypes that it does not name.

    >>> is_about_half_precision("expected scalar type Float but found Half")
    True
    >>> is_about_half_precision("both inputs should have same dtype")
    True
    >>> is_about_half_precision("expected scalar type Float but found Double")
    False

    Some operations raise the same text when an integer tensor is the cause: "Expected self.dtype to be equal to
    src.dtype". These are taken to be about half precision.
    """
    # Words that belong together share a line. Other lines of the message may be a traceback or the user's code.
    lines = _TENSOR_DESCRIPTION.sub("", message).splitlines()
    return any(_refuses_half(line) or _compares_unnamed_dtypes(line) for line in lines)


def _refuses_half(line: str) -> bool:
    # An integer tensor is refused together with fp32 parameters as well.
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
    """Add a note to an error about half-precision dtypes: trained parameters are half, and how to avoid the error.

    The note names the module type to keep in fp32 if the traceback shows a module that trains half parameters of its
    own: to be called while the module shows these. An error that has a note stays as it is.

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
    """Return the module with trained half parameters whose method is innermost in the traceback."""
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
        f"(`x.to(self.weight.dtype)`). If the code is a library's, keep the module's own parameters in fp32 with "
        f"plugins=[MasterWeightPrecision({precision!r}, keep_fp32=({names}{types[-1]},))], or train with "
        f"precision={_MIXED_PRECISION[precision]!r}."
    )


def _types_to_keep(module: nn.Module | None) -> list[str]:
    """Return the names of the module types that hold a module's own trained half-precision parameters."""
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
