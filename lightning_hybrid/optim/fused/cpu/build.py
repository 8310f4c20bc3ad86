"""Functions that compile and load the C++ library for fused steps, and locate torch's thread pool."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch

from lightning_hybrid.cpp.library import ADDRESS, COUNT, FLOAT_BITS, CppSource

_FOLDER = Path(__file__).parent
PASSES = CppSource(
    files=(_FOLDER / "passes.cpp", _FOLDER / "blocks.h", FLOAT_BITS),
    functions={
        "measure_grads": (ADDRESS, ADDRESS),
        "measure_layers": (ADDRESS, ADDRESS, ADDRESS),
        "add_up": (ADDRESS, ADDRESS),
        "lars_numbers": (ADDRESS, COUNT, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS),
        "lars_update": (ADDRESS, ADDRESS, ADDRESS),
        "lamb_numbers": (ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS),
        "lamb_rates": (ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS),
        "lamb_moments": (ADDRESS, ADDRESS, ADDRESS),
        "lamb_update": (ADDRESS, ADDRESS, ADDRESS, ADDRESS),
        "half_to_float": (ADDRESS, ADDRESS, COUNT),
        "float_to_half": (ADDRESS, ADDRESS, COUNT),
    },
)


@functools.cache
def library() -> ctypes.CDLL:
    """Load the C++ library for fused steps, building it first if it is not in the user's cache.

    Raises:
        CannotBuildError: There is no compiler, or it fails.
    """
    return PASSES.library()


def openmp_parallel() -> int:
    """Return the address of `GOMP_parallel` in torch's OpenMP runtime, or 0 if the runtime does not have it."""
    # With this function, torch and the fused passes share one thread pool. The OpenMP runtimes of gcc, LLVM and
    # Intel have it. Without it, the passes use one thread.
    libraries = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            # RTLD_NOLOAD loads no library. The look-up finds the symbol in the libraries that torch is linked with.
            linked = ctypes.CDLL(str(libraries / name), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return ctypes.cast(linked.GOMP_parallel, ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    return 0
