"""The codec in Triton, for tensors on CUDA. It has run in Triton's interpreter, and on no GPU yet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.comm.codec import block_format, triton_kernels
from lightning_hybrid.comm.codec.block_format import BLOCK, SCALE_BYTES, num_blocks_of

# A block is 8 elements for each thread of a warp; the fusion of products and sums changes no bit, and triton warns
# until one is chosen.
_LAUNCH: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": True}


class TritonPasses:
    """As `TorchPasses`, bit for bit: one kernel for each call, and no wait."""

    def __init__(self, bits: int, signs: Tensor | None) -> None:
        self._most = block_format.most_code(bits)
        self._signs = signs

    def try_out(self, device: torch.device) -> None:
        """Compile and launch both kernels on one block; where that fails, let Triton's error pass."""
        flat = torch.zeros(BLOCK, device=device)
        ids = torch.zeros(1, dtype=torch.int32, device=device)
        message = torch.zeros(
            1,
            SCALE_BYTES + BLOCK // (2 if self._most == 7 else 1),
            dtype=torch.uint8,
            device=device,
        )
        self.encode(flat, ids, (0, 0, 0, 0), message[0], None)
        self.add(message, flat)

    def encode(
        self,
        flat: Tensor,
        ids: Tensor,
        key: tuple[int, int, int, int] | None,
        message: Tensor,
        noise: Tensor | None,
    ) -> None:
        """Write `flat` into `message`, or cut into the rows of a matrix; see `TorchPasses`. Noise is not measured."""
        num_blocks = num_blocks_of(flat.numel())
        rows = self._rows(message)
        whole = message.view(-1)
        seed, step, sender, turn = key or (0, 0, 0, 0)
        with torch.cuda.device_of(
            flat
        ):  # Triton launches on the current device, whichever the tensors are on
            triton_kernels.encode_block[(num_blocks,)](
                *(flat, flat.numel(), ids, ids if self._signs is None else self._signs),
                *(seed | step << 32, sender, turn),
                *(whole[: whole.numel() // 2 * 2].view(torch.int16), whole, *rows, num_blocks),
                MOST=self._most,
                RECIPROCAL=block_format.reciprocal_of(self._most),
                LEAST=block_format.LEAST_MAXIMUM_BITS,
                IS_NEAREST=key is None,
                **_LAUNCH,
            )

    def add(self, messages: Tensor, to: Tensor) -> None:
        """Write the sum of messages into `to`; see `TorchPasses`."""
        self._add(messages, len(messages), messages.stride(0), num_blocks_of(to.numel()), 0, to)

    def decode(self, rows: Tensor, to: Tensor) -> None:
        """Write what each row holds of `to` into it."""
        self._add(rows, 1, 0, *self._rows(rows), to)

    def _rows(self, message: Tensor) -> tuple[int, int]:
        # Blocks in a row, and its bytes.
        num_bytes = message.shape[-1]
        return num_bytes // (SCALE_BYTES + (BLOCK // 2 if self._most == 7 else BLOCK)), num_bytes

    def _add(
        self, messages: Tensor, num: int, stride: int, row_blocks: int, row_bytes: int, to: Tensor
    ) -> None:
        num_blocks = num_blocks_of(to.numel())
        with torch.cuda.device_of(to):
            triton_kernels.add_block[(num_blocks,)](
                *(messages, num, stride, num_blocks, row_blocks, row_bytes, to.numel()),
                *(messages if self._signs is None else self._signs, to),
                MOST=self._most,
                **_LAUNCH,
            )
