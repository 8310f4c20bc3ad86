"""The codec in Triton, for tensors on CUDA. It has run in Triton's interpreter, and on no GPU yet."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.comm.codec import triton_kernels
from lightning_hybrid.comm.codec.block_format import LEAST_MAXIMUM_BITS, most_code, num_blocks_of, reciprocal_of

# A block is 8 elements for each thread of a warp; the fusion of products and sums changes no bit, and triton warns
# until one is chosen.
_LAUNCH: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": True}


class TritonPasses:
    """As `TorchPasses`, bit for bit: one kernel for each call, and no wait."""

    def __init__(self, bits: int, signs: Tensor | None) -> None:
        self._most, self._signs = most_code(bits), signs

    def try_out(self, device: torch.device) -> None:
        """Compile and launch both kernels on one block; where that fails, let Triton's error pass."""
        flat, ids = torch.zeros(256, device=device), torch.zeros(1, dtype=torch.int32, device=device)
        message = torch.zeros(1, 2 + 256, dtype=torch.uint8, device=device)
        self.encode(flat, ids, (0, 0, 0, 0), message[0], None)
        self.add(message, flat)

    def encode(
        self, flat: Tensor, ids: Tensor, key: tuple[int, int, int, int] | None, message: Tensor, noise: Tensor | None
    ) -> None:
        """Write `flat` into `message`; see `TorchPasses`. Noise is not measured."""
        num_blocks = num_blocks_of(flat.numel())
        seed, step, sender, turn = key or (0, 0, 0, 0)
        with _current(flat.device):
            triton_kernels.encode_block[(num_blocks,)](
                *(flat, flat.numel(), ids, ids if self._signs is None else self._signs),
                *(seed | step << 32, sender, turn),
                *(message[: 2 * num_blocks].view(torch.int16), message[2 * num_blocks :]),
                MOST=self._most,
                RECIPROCAL=reciprocal_of(self._most),
                LEAST=LEAST_MAXIMUM_BITS,
                IS_NEAREST=key is None,
                **_LAUNCH,
            )

    def add(self, messages: Tensor, to: Tensor) -> None:
        """Write the sum of messages into `to`; see `TorchPasses`."""
        num_blocks = num_blocks_of(to.numel())
        with _current(to.device):
            triton_kernels.add_block[(num_blocks,)](
                *(messages, len(messages), messages.stride(0), num_blocks, to.numel()),
                *(messages if self._signs is None else self._signs, to),
                MOST=self._most,
                **_LAUNCH,
            )


def _current(device: torch.device) -> AbstractContextManager[Any]:
    # Triton launches on the current device, whichever device the tensors are on.
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
