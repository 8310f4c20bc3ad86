"""Where fused steps are possible."""

from __future__ import annotations

import functools
import importlib.util
import warnings

from lightning_hybrid.optim.native import build

# Types of device; a parameter on "meta" has yet to be moved to one.
FUSED_DEVICES = ("cpu", "cuda", "meta")


@functools.cache
def has_kernels(device_type: str) -> bool:
    """Whether fused steps are possible on this type of device; warns, once, of what is missing for them.

    On the CPU the first call builds the passes, unless the user's cache has them.

    >>> has_kernels("meta"), has_kernels("mps")
    (True, False)
    """
    if device_type == "cuda" and importlib.util.find_spec("triton") is None:
        _warn("on CUDA needs triton, which cannot be imported here", "Install it with `pip install triton`")
        return False
    if device_type == "cpu":
        try:
            build.library()
        except build.CannotBuildError as error:
            cure = "Install one (`apt install g++`), or name it in the environment variable CXX"
            _warn(f"on a CPU needs a C++ compiler that can build its passes, and {error}", cure)
            return False
    return device_type in FUSED_DEVICES


def _warn(what: str, cure: str) -> None:
    warnings.warn(
        f"`fused` (=True) {what}: the lists are used instead, the same rule in more passes over memory. {cure}, or set "
        "fused=False.",
        RuntimeWarning,
        stacklevel=3,
    )
