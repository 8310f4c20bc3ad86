"""The cure for torch's errors where an operation does not take the dtypes of a half-precision model."""

from __future__ import annotations

import re

# torch's messages, which differ from operation to operation; numpy has no bfloat16.
_ABOUT_DTYPES = re.compile(
    r"same d?type|expected dtype|expected scalar type|scalar type of|unsupported ScalarType|low precision dtypes|"
    r"not implemented for '(Half|BFloat16)'|should be the same|Expected (Half|BFloat16), got|dtypes match",
    re.IGNORECASE,
)


def add_cure(error: BaseException, precision: object) -> None:
    """Add to torch's error about dtypes that trained parameters are half, and what to do about it.

    >>> error = RuntimeError("mat1 and mat2 must have the same dtype, but got Float and Half")
    >>> add_cure(error, "16-true")
    >>> error.__notes__[0].partition(":")[0]
    "`precision` (='16-true') keeps trained parameters in half precision"
    """
    if precision not in ("16-true", "bf16-true") or not isinstance(error, RuntimeError | TypeError):
        return
    if _ABOUT_DTYPES.search(str(error)):
        error.add_note(
            f"`precision` (={precision!r}) keeps trained parameters in half precision: where an operation takes one "
            "dtype only, cast the parameter (`self.weight.float()`) or the other operand (`x.to(self.weight.dtype)`). "
            "Or keep a module's parameters in fp32: HybridAllReduceStrategy(precision_plugin="
            f"MasterWeightPrecision({precision!r}, keep_fp32=(ItsClass,)))."
        )
