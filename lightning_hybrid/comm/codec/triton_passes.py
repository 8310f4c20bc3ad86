"""Triton implementation of the int8 and int4 codecs for CUDA tensors.

It has been tested only in Triton's interpreter, not yet on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.comm.codec import block_format, triton_kernels
from lightning_hybrid.comm.codec.block_format import BLOCK, NoiseKey, num_blocks_of

# With one warp, each thread processes 8 elements of a block. Fused multiply-adds do not change the result, but Triton
# warns if the option is not set.
_LAUNCH: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": True}


class TritonPasses:
    """Triton implementation of the codec on CUDA, bitwise equal to `TorchPasses`.

    Each call launches one kernel, and the host never waits.

    Args:
        bits: Number of bits per element.
        signs: Signs of the rotation, or None if blocks are not rotated.
    """

    def __init__(self, bits: int, signs: Tensor | None) -> None:
        self._largest_code = block_format.most_code(bits)
        self._block_bytes = block_format.message_bytes(BLOCK, bits)
        self._signs = signs

    def try_out(self, device: torch.device) -> None:
        """Check that both kernels work, by compiling and launching them on one block."""
        flat = torch.zeros(BLOCK, device=device)
        ids = torch.zeros(1, dtype=torch.int32, device=device)
        messages = torch.zeros(1, self._block_bytes, dtype=torch.uint8, device=device)
        self.encode(flat, ids, (0, 0, 0, 0), messages[0], None)
        self.add(messages, flat)

    def encode(
        self,
        flat: Tensor,
        ids: Tensor,
        key: NoiseKey | None,
        message: Tensor,
        noise: Tensor | None,
    ) -> None:
        """Encode a float32 tensor into `message`, which may be a matrix with one message per row.

        The arguments are those of `TorchPasses.encode`, but `noise` is ignored, because rounding errors are not
        measured.
        """
        num_blocks = num_blocks_of(flat.numel())
        row_bytes = message.shape[-1]
        message_bytes = message.view(-1)
        num_scales = message_bytes.numel() // 2
        message_scales = message_bytes[: 2 * num_scales].view(torch.int16)
        is_nearest = key is None
        if key is None:
            key = (0, 0, 0, 0)
        seed, step, sender, turn = key

        # Triton launches kernels on the current device, which may not be the device of the tensors.
        with torch.cuda.device_of(flat):
            triton_kernels.encode_block[(num_blocks,)](
                flat,
                flat.numel(),
                ids,
                self._signs_or(ids),
                seed | step << 32,
                sender,
                turn,
                message_scales,
                message_bytes,
                self._blocks_in(row_bytes),
                row_bytes,
                num_blocks,
                MOST=self._largest_code,
                RECIPROCAL=block_format.reciprocal_of(self._largest_code),
                LEAST=block_format.LEAST_MAXIMUM_BITS,
                IS_NEAREST=is_nearest,
                **_LAUNCH,
            )

    def add(self, messages: Tensor, to: Tensor) -> None:
        """Decode messages and write their sum into `to`, as `TorchPasses.add` does."""
        num_blocks = num_blocks_of(to.numel())
        num_messages = len(messages)
        message_bytes = messages.stride(0)
        # Each message contains all blocks, so there is only one row.
        row_blocks = num_blocks
        row_bytes = 0
        with torch.cuda.device_of(to):
            triton_kernels.add_block[(num_blocks,)](
                messages,
                num_messages,
                message_bytes,
                num_blocks,
                row_blocks,
                row_bytes,
                to.numel(),
                self._signs_or(messages),
                to,
                MOST=self._largest_code,
                **_LAUNCH,
            )

    def decode(self, rows: Tensor, to: Tensor) -> None:
        """Decode the message in each row of a matrix into consecutive ranges of `to`."""
        num_blocks = num_blocks_of(to.numel())
        # There is only one message for each block, so the distance between messages is not used.
        num_messages = 1
        message_bytes = 0
        row_bytes = rows.shape[-1]
        row_blocks = self._blocks_in(row_bytes)
        with torch.cuda.device_of(to):
            triton_kernels.add_block[(num_blocks,)](
                rows,
                num_messages,
                message_bytes,
                num_blocks,
                row_blocks,
                row_bytes,
                to.numel(),
                self._signs_or(rows),
                to,
                MOST=self._largest_code,
                **_LAUNCH,
            )

    def _blocks_in(self, row_bytes: int) -> int:
        return row_bytes // self._block_bytes

    def _signs_or(self, unused: Tensor) -> Tensor:
        """Return the signs of the rotation, or the placeholder `unused` if blocks are not rotated."""
        if self._signs is None:
            return unused
        return self._signs
