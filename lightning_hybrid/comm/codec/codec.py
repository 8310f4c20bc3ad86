"""The codec of sums between nodes: what a user chooses, and what encodes and adds up on a device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from lightning_hybrid.comm.codec import block_format
from lightning_hybrid.comm.codec.block_format import BLOCK, OF_A_SUM, num_blocks_of
from lightning_hybrid.comm.codec.philox import random_signs
from lightning_hybrid.comm.codec.torch_passes import TorchPasses
from lightning_hybrid.cpp.library import CannotBuildError


def _nothing(*_: float) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Codec:
    """A number of bits in which an element travels between nodes: 8, or 4 after a rotation; see `block_format`.

    `seed`: of the noise of stochastic rounding, and of the rotation's signs; the same on every rank.
    `error_feedback`: whether sums of a node are rounded to the nearest, and what that takes is added to the next ones.

    >>> str(Codec(bits=4, seed=1)), Codec(bits=4).message_bytes(2**20) / 2**20
    ('int4 (seed 1)', 0.5078125)
    """

    bits: Literal[8, 4]
    seed: int = 0
    error_feedback: bool = False

    def __str__(self) -> str:
        return f"int{self.bits}{' with error feedback' if self.error_feedback else ''} (seed {self.seed})"

    def signs(self, device: torch.device) -> Tensor | None:
        """Return the signs of the rotation by 16, float32; None where blocks are not rotated."""
        return random_signs(BLOCK, self.seed).to(device) / 16 if self.bits == 4 else None

    def message_bytes(self, numel: int) -> int:
        """Return the bytes of a message of `numel` elements."""
        return block_format.message_bytes(numel, self.bits)


class Passes(Protocol):
    """What encodes and adds up on one type of device; all of them give the same bits as `TorchPasses`."""

    def encode(
        self,
        flat: Tensor,
        ids: Tensor,
        key: tuple[int, int, int, int] | None,
        message: Tensor,
        noise: Tensor | None,
    ) -> None:
        """Write `flat` into `message`."""

    def add(self, messages: Tensor, to: Tensor) -> None:
        """Write the sum of messages into `to`."""


class Coder:
    """A codec on one device, and the place in the training that its noise is a function of.

    `step` is set by who knows it, so that a run that is resumed draws what it would have drawn; `turn` counts the sums
    of all gradients since then. Methods may be called by several threads at once.

    `count_rounding`: called on the CPU, after each message of this rank, with two sums of squares over each 16th of its
    blocks: of errors, and of what was encoded.
    """

    def __init__(
        self,
        codec: Codec,
        device: torch.device,
        count_rounding: Callable[[float, float], None] = _nothing,
    ) -> None:
        self.codec = codec
        self.step = self.turn = 0
        self._count_rounding = count_rounding
        self._passes = _passes_for(device, codec)
        self._measures = device.type == "cpu"  # on CUDA the host would have to wait for it

    def begin_step(self, step: int) -> None:
        """Set the place in the training, where it is another."""
        if step != self.step:
            self.step = step
            self.turn = 0

    def encode(
        self, flat: Tensor, ids: Tensor, key: tuple[int, int, int, int] | None, message: Tensor
    ) -> None:
        """Write `flat` into `message` with the noise of (seed, step, sender, turn), or to the nearest code (None)."""
        if message.dim() == 2 and not hasattr(self._passes, "decode"):
            for first, part, row in self._cut(flat, message):
                self.encode(part, ids[first : first + num_blocks_of(part.numel())], key, row)
            return
        is_own = key is None or key[2] != OF_A_SUM
        noise = torch.zeros(2, dtype=torch.float64) if self._measures and is_own else None
        self._passes.encode(flat, ids, key, message, noise)
        if noise is not None:
            self._count_rounding(*noise.tolist())

    def encode_nearest(self, flat: Tensor, ids: Tensor, message: Tensor) -> None:
        """Write `flat` (1-D, float32) into `message` (uint8), each element to the nearest code."""
        self.encode(flat, ids, None, message)

    def add(self, messages: Tensor, to: Tensor) -> None:
        """Write the sum of `messages`, one in each row, in their order and in float32, into `to` (1-D, float32)."""
        self._passes.add(messages, to)

    def decode(self, rows: Tensor, to: Tensor) -> None:
        """Write into `to` (1-D, float32) what each row holds of it, as `Blocks.encode` wrote them."""
        if hasattr(self._passes, "decode"):  # all by one kernel
            self._passes.decode(rows, to)
            return
        for _, part, message in self._cut(to, rows):
            self._passes.add(message[None], part)

    def _cut(self, flat: Tensor, rows: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        # The first block, the elements and the message of each row, of which the last may be shorter.
        numel = rows.shape[-1] // self.codec.message_bytes(BLOCK) * BLOCK
        for begin, row in zip(range(0, flat.numel(), numel), rows, strict=False):
            part = flat[begin : begin + numel]
            yield begin // BLOCK, part, row[: self.codec.message_bytes(part.numel())]


def _passes_for(device: torch.device, codec: Codec) -> Passes:
    bits = codec.bits
    signs = codec.signs(device)
    if device.type == "cuda":
        try:
            from lightning_hybrid.comm.codec.triton_passes import TritonPasses  # needs triton

            passes = TritonPasses(bits, signs)
            passes.try_out(device)
            return passes
        except Exception as error:  # of the compiler, the linker, the driver, or Triton's own
            cure = (
                "It needs triton, a C compiler (`apt install gcc`), Python's headers (python3-dev), "
                "a GPU of its list"
            )
            failed = f"a first one failed ({type(error).__name__}: {error!s:.300})"
            _warn(bits, f"on CUDA needs kernels that triton can build, and {failed}", cure)
    if device.type == "cpu":
        from lightning_hybrid.comm.codec.cpp_passes import CppPasses  # here: it may build

        try:
            return CppPasses(bits, signs)
        except CannotBuildError as error:
            cure = "Install one (`apt install g++`), or name it in the environment variable CXX"
            _warn(bits, f"on a CPU needs a C++ compiler to be fast, and {error}", cure)
    return TorchPasses(bits, signs)


def _warn(bits: int, what: str, cure: str) -> None:
    warnings.warn(
        f"`between_nodes.dtype` (='int{bits}') {what}: operations of torch do the same, bit for bit, several times "
        f"slower. {cure}.",
        RuntimeWarning,
        stacklevel=3,
    )
