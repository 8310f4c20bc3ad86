"""Which devices have fused steps."""

from __future__ import annotations

import functools
import warnings

from lightning_hybrid.cpp.library import CannotBuildError
from lightning_hybrid.optim.fused.cpu import build

# Types of device; a parameter on "meta" has yet to be moved to one.
FUSED_DEVICES = ("cpu", "cuda", "meta")

TRITON_CURE = "It needs triton, a C compiler (`apt install gcc`), Python's headers (python3-dev) and a GPU of its list"


@functools.cache
def has_kernels(device_type: str) -> bool:
    """Whether this type of device has fused steps; warns once if something is missing for them.

    On the CPU the first call builds the passes, unless the user's cache has them; on CUDA it compiles and launches a
    small kernel, which takes a C compiler, Python's headers, and a GPU that Triton knows.

    >>> has_kernels("meta"), has_kernels("mps")
    (True, False)
    """
    if device_type == "cuda":
        try:
            from lightning_hybrid.optim.fused.cuda import lars  # needs triton

            lars.try_out()
        except (
            Exception
        ) as error:  # there is no triton; or of the compiler, the linker, the driver, or its own
            text = " ".join(f"{type(error).__name__}: {error}".split())
            what = f"(=True) on CUDA needs kernels that triton can build, and a first one failed ({text:.300})"
            _warn(what, TRITON_CURE)
            return False
    if device_type == "cpu":
        try:
            build.library()
        except CannotBuildError as error:
            cure = "Install one (`apt install g++`), or name it in the environment variable CXX"
            _warn(
                f"(=True) on a CPU needs a C++ compiler that can build its passes, and {error}",
                cure,
            )
            return False
    return device_type in FUSED_DEVICES


def _warn(what: str, cure: str) -> None:
    warnings.warn(
        f"`fused` {what}: the lists are used instead, the same rule in more passes over memory "
        f"and with other rounding, so that all ranks should do the same. {cure}, or set fused=False.",
        RuntimeWarning,
        stacklevel=3,
    )
