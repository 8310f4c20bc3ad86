"""C++ implementation of the int8 and int4 codecs for CPU tensors.

It reads each tensor once, and releases Python's interpreter lock.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from torch import Tensor

from lightning_hybrid.comm.codec.block_format import NoiseKey
from lightning_hybrid.cpp.library import ADDRESS, COUNT, FLOAT_BITS, CppSource

# The error of every 16th block of a message is measured, because measuring every block would take too long.
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
    """C++ implementation of the codec, whose results are bit-identical to those of `TorchPasses`.

    It runs in the calling thread only.

    Args:
        bits: Number of bits per element.
        signs: Signs of the rotation, or None if blocks are not rotated.

    Raises:
        CannotBuildError: There is no compiler, or compilation fails.
    """

    def __init__(self, bits: int, signs: Tensor | None) -> None:
        self._library = _library()
        self._bits = bits
        self._signs = signs  # kept alive here, because calls take only its address

    def encode(
        self,
        flat: Tensor,
        ids: Tensor,
        key: NoiseKey | None,
        message: Tensor,
        noise: Tensor | None,
    ) -> None:
        """Encode a float32 tensor into `message`.

        The arguments are those of `TorchPasses.encode`.
        """
        key_words = None
        if key is not None:
            key_words = (ctypes.c_uint32 * 4)(*key)
        self._library.encode(
            flat.data_ptr(),
            flat.numel(),
            self._bits,
            ids.data_ptr(),
            _address_of(self._signs),
            key_words,
            SAMPLE_EVERY,
            message.data_ptr(),
            _address_of(noise),
        )

    def add(self, messages: Tensor, to: Tensor) -> None:
        """Decode messages and write their sum into `to`, as `TorchPasses.add` does."""
        self._library.add_messages(
            messages.data_ptr(),
            len(messages),
            messages.stride(0),
            to.numel(),
            self._bits,
            _address_of(self._signs),
            to.data_ptr(),
        )


def _address_of(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    return tensor.data_ptr()
