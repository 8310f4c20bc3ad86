"""The codec in C++, for tensors on the CPU: one read of the tensor, without Python's lock."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from torch import Tensor

from lightning_hybrid.cpp.library import ADDRESS, COUNT, FLOAT_BITS, CppSource

# The error of every 16th block of a message is measured: that of all would take time.
SAMPLE_EVERY = 16

SOURCE = CppSource(
    files=(Path(__file__).with_name("passes.cpp"), FLOAT_BITS),
    functions={
        "encode": (ADDRESS, COUNT, COUNT, ADDRESS, ADDRESS, ADDRESS, COUNT, ADDRESS, ADDRESS),
        "add_messages": (ADDRESS, COUNT, COUNT, COUNT, COUNT, ADDRESS, ADDRESS),
    },
)


@functools.cache
def _library() -> ctypes.CDLL:
    return SOURCE.library()


class CppPasses:
    """As `TorchPasses`, bit for bit; one thread, the caller's.

    Raises:
        CannotBuildError: there is no compiler, or it fails.
    """

    def __init__(self, bits: int, signs: Tensor | None) -> None:
        self._library = _library()
        self._bits, self._signs = bits, signs  # held here, as calls only take its address

    def encode(
        self,
        flat: Tensor,
        ids: Tensor,
        key: tuple[int, int, int, int] | None,
        message: Tensor,
        noise: Tensor | None,
    ) -> None:
        """Write `flat` into `message`; see `TorchPasses`."""
        words = None if key is None else (ctypes.c_uint32 * 4)(*key)
        self._library.encode(
            *(flat.data_ptr(), flat.numel(), self._bits, ids.data_ptr(), self._signs_at, words),
            *(SAMPLE_EVERY, message.data_ptr(), None if noise is None else noise.data_ptr()),
        )

    def add(self, messages: Tensor, to: Tensor) -> None:
        """Write the sum of messages into `to`; see `TorchPasses`."""
        self._library.add_messages(
            *(
                messages.data_ptr(),
                len(messages),
                messages.stride(0),
                to.numel(),
                self._bits,
                self._signs_at,
            ),
            to.data_ptr(),
        )

    @property
    def _signs_at(self) -> int | None:
        return None if self._signs is None else self._signs.data_ptr()
