"""The device types that have fused steps, and the check that their kernels can be built."""

from __future__ import annotations

import functools
import warnings

from lightning_hybrid.cpp.library import CannotBuildError
from lightning_hybrid.optim.fused.cpu import build

# Device types. A parameter on "meta" has yet to be moved to another device.
FUSED_DEVICES = ("cpu", "cuda", "meta")

TRITON_CURE = "It needs triton, a C compiler (`apt install gcc`), Python's headers (python3-dev) and a GPU of its list"


@functools.cache
def has_kernels(device_type: str) -> bool:
    """Return True if this device type has fused steps. Warn once if something is missing to build them.

    On the CPU the first call builds the passes, unless they are in the user's cache. On CUDA it compiles and launches
    a small kernel, for which it needs a C compiler, Python's headers, and a GPU that Triton supports.

    >>> has_kernels("meta"), has_kernels("mps")
    (True, False)
    """
    if device_type == "cuda":
        try:
            from lightning_hybrid.optim.fused.cuda import lars  # needs triton

            lars.try_out()
        # Triton is missing, or the compiler, the linker, the driver or Triton itself fails with an error of its own.
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            reason = f"(=True) on CUDA needs kernels that triton can build, and a first one failed ({text:.300})"
            _warn(reason, TRITON_CURE)
            return False
    if device_type == "cpu":
        try:
            build.library()
        except CannotBuildError as error:
            reason = f"(=True) on a CPU needs a C++ compiler that can build its passes, and {error}"
            cure = "Install one (`apt install g++`), or name it in the environment variable CXX"
            _warn(reason, cure)
            return False
    return device_type in FUSED_DEVICES


def _warn(reason: str, cure: str) -> None:
    warnings.warn(
        f"`fused` {reason}: the lists are used instead, the same rule in more passes over memory "
        f"and with other rounding, so that all ranks should do the same. {cure}, or set fused=False.",
        RuntimeWarning,
        stacklevel=3,
    )
