"""The codec in operations of torch: on any device, and where there is no compiler."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_hybrid.comm.codec.block_format import (
    BLOCK,
    FRACTION_BITS,
    INFINITE_BITS,
    LEAST_MAXIMUM_BITS,
    most_code,
    num_blocks_of,
    reciprocal_of,
)
from lightning_hybrid.comm.codec.philox import philox

_ONE = 1 << FRACTION_BITS
_NAN_SCALE = 0x7FC0
_SLAB = 1 << 10  # blocks at a time: what is computed on the way has 8 bytes an element


class TorchPasses:
    """Encoding of float32 tensors, and sums of messages; see `block_format`.

    `signs`: 256 elements, +-1/16, float32, where blocks are rotated; None: they are not.
    """

    def __init__(self, bits: int, signs: Tensor | None) -> None:
        self._bits = bits
        self._signs = signs

    def encode(
        self,
        flat: Tensor,
        ids: Tensor,
        key: tuple[int, int, int, int] | None,
        message: Tensor,
        noise: Tensor | None,
    ) -> None:
        """Write `flat` (1-D, float32) into `message` (uint8).

        `ids`: int32, the number of each block. `key`: seed, step, sender, sum in the step; None: to the nearest code.
        `noise`: float64, to which sums of squares are added: of errors, and of what was encoded.
        """
        num_blocks = num_blocks_of(flat.numel())
        most = most_code(self._bits)
        scales = message[: 2 * num_blocks].view(torch.int16)
        codes = message[2 * num_blocks :].view(num_blocks, BLOCK * self._bits // 8)
        for first in range(0, num_blocks, _SLAB):
            last = min(first + _SLAB, num_blocks)
            y = _blocks(flat[first * BLOCK : last * BLOCK])
            if self._signs is not None:
                y = hadamard(y * self._signs)
            maximum = (y.view(torch.int32) & 0x7FFFFFFF).amax(
                1, keepdim=True
            )  # of bits: inf and nan are the largest
            is_finite = maximum < INFINITE_BITS
            maximum = maximum.view(torch.float32).where(
                is_finite & (maximum >= LEAST_MAXIMUM_BITS), 0.0
            )
            # Rounded up to bfloat16, so that no code is above the largest.
            upper = (maximum * reciprocal_of(most)).view(torch.int32) + 0xFFFF >> 16
            scale = (upper << 16).view(torch.float32)
            is_coded = scale > 0
            steps = (float(_ONE) / scale).where(is_coded, 0.0)
            fixed = (
                (y.where(is_coded, 0.0) * steps).to(torch.int32).clamp_(-most * _ONE, most * _ONE)
            )
            code = (fixed + self._addends(ids[first:last], key)) >> FRACTION_BITS
            scales[first:last] = upper.where(is_finite, _NAN_SCALE).flatten().to(torch.int16)
            codes[first:last] = _packed(code, self._bits)
            if noise is not None:
                error = (code * _ONE - fixed).double() * scale / _ONE
                noise += torch.stack(
                    [error.square().sum(), (fixed.double() * scale / _ONE).square().sum()]
                )

    def add(self, messages: Tensor, to: Tensor) -> None:
        """Write the sum of `messages` (one in each row, uint8), in their order and in float32, into `to`."""
        num_blocks = num_blocks_of(to.numel())
        for first in range(0, num_blocks, _SLAB):
            last = min(first + _SLAB, num_blocks)
            total: Tensor | None = None
            for message in messages:
                codes = message[2 * num_blocks :].view(num_blocks, BLOCK * self._bits // 8)
                upper = message[: 2 * num_blocks].view(torch.int16)[first:last].to(torch.int32)
                scale = (upper << 16).view(torch.float32)[:, None]
                code = _unpacked(codes[first:last], self._bits)
                total = code * scale if total is None else total.add_(code * scale)
            assert total is not None
            if self._signs is not None:
                total = hadamard(total) * self._signs
            part = to[first * BLOCK : last * BLOCK]
            part.copy_(total.flatten()[: part.numel()])

    def _addends(self, ids: Tensor, key: tuple[int, int, int, int] | None) -> Tensor | int:
        if key is None:
            return _ONE // 2
        seed, step, sender, turn = key
        lane = torch.arange(BLOCK // 4, device=ids.device)
        counter = (
            lane,
            ids.long()[:, None],
            *(torch.full_like(lane[:1], word) for word in (sender, turn)),
        )
        words = philox(counter, (seed, step))
        return torch.cat([word.expand(len(ids), -1) >> 9 for word in words], 1).to(torch.int32)


def hadamard(y: Tensor) -> Tensor:
    """Return H y of each row of 256: 8 stages of sums and differences, of neighbours first.

    >>> y = torch.zeros(1, 256); y[0, 1] = 1.0
    >>> hadamard(y)[0, :4].tolist(), bool((hadamard(hadamard(y)) == 256 * y).all())
    ([1.0, -1.0, 1.0, -1.0], True)
    """
    num_rows = len(y)
    for half in (1 << stage for stage in range(8)):
        a, b = y.view(num_rows, -1, 2, half).unbind(2)
        y = torch.stack([a + b, a - b], 2).view(num_rows, BLOCK)
    return y


def _blocks(flat: Tensor) -> Tensor:
    missing = -flat.numel() % BLOCK
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK)


def _packed(code: Tensor, bits: int) -> Tensor:
    code = code.to(torch.uint8)  # modulo 256: two's complement
    if bits == 8:
        return code
    lower, upper = code.view(len(code), 2, -1).bitwise_and_(15).unbind(1)
    return lower | upper << 4


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return packed.view(torch.int8).float()
    signed = packed.view(torch.int8)
    return torch.cat([signed.bitwise_left_shift(4) >> 4, signed >> 4], 1).float()
