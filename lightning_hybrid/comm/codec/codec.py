"""Options of the int8 and int4 codecs, and the coder that encodes tensors and sums encoded messages."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from lightning_hybrid.comm.codec import block_format
from lightning_hybrid.comm.codec.block_format import BLOCK, OF_A_SUM, NoiseKey, num_blocks_of
from lightning_hybrid.comm.codec.philox import random_signs
from lightning_hybrid.comm.codec.torch_passes import TorchPasses
from lightning_hybrid.cpp.library import CannotBuildError


def _ignore(*_: float) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Codec:
    """Options of the int8 or int4 codec for reductions between nodes.

    `block_format` describes the message format.

    Args:
        bits: Number of bits per element. With 4 bits, each block is rotated before it is rounded.
        seed: Seed of the rounding noise and of the rotation's signs. It must be equal on all ranks.
        error_feedback: Whether the sum of a node is rounded to the nearest code, and the rounding error is added to its
            next sum. If False, rounding is stochastic.

    >>> str(Codec(bits=4, seed=1)), Codec(bits=4).message_bytes(2**20) / 2**20
    ('int4 (seed 1)', 0.5078125)
    """

    bits: Literal[8, 4]
    seed: int = 0
    error_feedback: bool = False

    def __str__(self) -> str:
        suffix = ""
        if self.error_feedback:
            suffix = " with error feedback"
        return f"int{self.bits}{suffix} (seed {self.seed})"

    def signs(self, device: torch.device) -> Tensor | None:
        """Return the random signs of the rotation divided by 16, or None if blocks are not rotated."""
        if self.bits == 8:
            return None
        return random_signs(BLOCK, self.seed).to(device) / 16

    def message_bytes(self, numel: int) -> int:
        """Return the size in bytes of a message of `numel` elements."""
        return block_format.message_bytes(numel, self.bits)


class Passes(Protocol):
    """Interface that the C++, Triton and torch implementations of the codec share.

    All implementations are bitwise equal to `TorchPasses`.
    """

    def encode(
        self,
        flat: Tensor,
        ids: Tensor,
        key: NoiseKey | None,
        message: Tensor,
        noise: Tensor | None,
    ) -> None:
        """Encode the tensor `flat` into `message`."""

    def add(self, messages: Tensor, to: Tensor) -> None:
        """Decode messages and write their sum into `to`."""


class Coder:
    """Encoder and decoder of messages on one device.

    Several threads may call its methods at the same time.

    Args:
        codec: Number format.
        device: Device of the tensors.
        count_rounding: Function called after each message of this rank on a CPU. Its arguments are the sum of squared
            errors and the sum of squared values, both over every 16th block.

    Attributes:
        step: Training step, which seeds the rounding noise. The caller sets it, so that a resumed run draws the same
            noise as an uninterrupted run.
        turn: Number of times that all gradients have been reduced in this step so far.
    """

    def __init__(
        self,
        codec: Codec,
        device: torch.device,
        count_rounding: Callable[[float, float], None] = _ignore,
    ) -> None:
        self.codec = codec
        self.step = 0
        self.turn = 0
        self._count_rounding = count_rounding
        self._passes = _passes_for(device, codec)
        self._measures = device.type == "cpu"  # on CUDA, the host would have to wait for the result

    def begin_step(self, step: int) -> None:
        """Set the training step, and reset the count of reductions if the step has changed."""
        if step != self.step:
            self.step = step
            self.turn = 0

    def encode(self, flat: Tensor, ids: Tensor, key: NoiseKey | None, message: Tensor) -> None:
        """Encode a float32 tensor into `message`, with stochastic rounding or to the nearest code.

        Args:
            flat: Elements to encode, 1-D, float32.
            ids: Number of each block, int32.
            key: Seed, step, sender and turn, which determine the noise. If None, elements are rounded to the nearest
                code.
            message: Encoded blocks, uint8. A matrix holds one message in each row.
        """
        is_matrix = message.dim() == 2
        if is_matrix and not hasattr(self._passes, "decode"):
            for first_block, elements, row in self._split_rows(flat, message):
                num_blocks = num_blocks_of(elements.numel())
                self.encode(elements, ids[first_block : first_block + num_blocks], key, row)
            return

        is_of_this_rank = key is None or key[2] != OF_A_SUM
        noise = None
        if self._measures and is_of_this_rank:
            noise = torch.zeros(2, dtype=torch.float64)
        self._passes.encode(flat, ids, key, message, noise)
        if noise is not None:
            error, power = noise.tolist()
            self._count_rounding(error, power)

    def encode_nearest(self, flat: Tensor, ids: Tensor, message: Tensor) -> None:
        """Encode a float32 tensor into `message`, rounding each element to the nearest code."""
        self.encode(flat, ids, None, message)

    def add(self, messages: Tensor, to: Tensor) -> None:
        """Decode the message in each row of a matrix, and write the sum of all messages into `to`.

        The messages are added in order, in float32.
        """
        self._passes.add(messages, to)

    def decode(self, rows: Tensor, to: Tensor) -> None:
        """Decode the message in each row of a matrix into consecutive ranges of `to`.

        `to` is 1-D and float32. The rows have the layout that `Blocks.encode` writes.
        """
        if hasattr(self._passes, "decode"):  # One kernel decodes all rows.
            self._passes.decode(rows, to)
            return
        for _, elements, row in self._split_rows(to, rows):
            self._passes.add(row[None], elements)

    def _split_rows(self, flat: Tensor, rows: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield one tuple (first block index, elements of `flat`, message) for each row.

        The last row may contain fewer elements.
        """
        row_blocks = rows.shape[-1] // self.codec.message_bytes(BLOCK)
        row_numel = row_blocks * BLOCK
        for begin, row in zip(range(0, flat.numel(), row_numel), rows, strict=False):
            elements = flat[begin : begin + row_numel]
            yield begin // BLOCK, elements, row[: self.codec.message_bytes(elements.numel())]


def _passes_for(device: torch.device, codec: Codec) -> Passes:
    bits = codec.bits
    signs = codec.signs(device)
    if device.type == "cuda":
        try:
            # Imported here, because the module needs triton.
            from lightning_hybrid.comm.codec.triton_passes import TritonPasses

            passes = TritonPasses(bits, signs)
            passes.try_out(device)
            return passes
        except Exception as error:
            # The compiler, the linker, the driver or Triton itself may fail.
            problem = (
                f"needs Triton kernels on CUDA, but these could not be compiled ({type(error).__name__}: "
                f"{error!s:.300})"
            )
            remedy = (
                "Install Triton, a C compiler (`apt install gcc`) and Python's headers (python3-dev), and use a GPU "
                "that Triton supports"
            )
            _warn_of_slow_passes(bits, problem, remedy)
    if device.type == "cpu":
        # Imported here, because the module may build a library.
        from lightning_hybrid.comm.codec.cpp_passes import CppPasses

        try:
            return CppPasses(bits, signs)
        except CannotBuildError as error:
            problem = f"needs a C++ compiler to be fast on a CPU, but {error}"
            remedy = "Install a C++ compiler (`apt install g++`), or name one in the environment variable CXX"
            _warn_of_slow_passes(bits, problem, remedy)
    return TorchPasses(bits, signs)


def _warn_of_slow_passes(bits: int, problem: str, remedy: str) -> None:
    warnings.warn(
        f"`between_nodes.dtype` (='int{bits}') {problem}. PyTorch operations are used instead. Their results are "
        f"bit-identical, but they take several times as long. {remedy}.",
        RuntimeWarning,
        stacklevel=3,
    )
