"""Availability check for fused optimizer steps on a device type."""

from __future__ import annotations

import functools
import warnings

from lightning_hybrid.cpp.library import CannotBuildError
from lightning_hybrid.optim.fused.cpu import build

# Device types. A parameter on "meta" will be moved to another device before it is trained.
FUSED_DEVICES = ("cpu", "cuda", "meta")

TRITON_CURE = (
    "Install Triton, a C compiler (`apt install gcc`) and Python's headers (python3-dev), and use a GPU that Triton "
    "supports"
)


@functools.cache
def has_kernels(device_type: str) -> bool:
    """Return whether a device type has fused optimizer steps, and warn once if they cannot be built.

    On the CPU the first call builds the C++ code, unless it is in the user's cache. On CUDA it compiles and launches
    a small kernel, which requires a C compiler, Python's headers, and a GPU that Triton supports.

    >>> has_kernels("meta"), has_kernels("mps")
    (True, False)
    """
    if device_type == "cuda":
        try:
            # Imported here, because it needs triton.
            from lightning_hybrid.optim.fused.cuda import lars

            lars.try_out()
        # Triton may be missing, or the compiler, the linker, the driver or Triton itself may fail.
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            reason = f"(=True) needs Triton kernels on CUDA, but these could not be compiled ({text:.300})"
            _warn(reason, TRITON_CURE)
            return False
    if device_type == "cpu":
        try:
            build.library()
        except CannotBuildError as error:
            reason = f"(=True) needs a C++ compiler on a CPU, but {error}"
            cure = "Install a C++ compiler (`apt install g++`), or set the environment variable CXX to its path"
            _warn(reason, cure)
            return False
    return device_type in FUSED_DEVICES


def _warn(reason: str, cure: str) -> None:
    warnings.warn(
        f"`fused` {reason}. The multi-tensor implementation is used instead, which is slower and rounds differently. "
        f"All ranks should use the same implementation. {cure}, or set fused=False.",
        RuntimeWarning,
        stacklevel=3,
    )
