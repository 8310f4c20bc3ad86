"""Implementation of the int8 and int4 codecs with torch operations, which needs no compiler."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_hybrid.comm.codec.block_format import (
    BLOCK,
    FRACTION_BITS,
    INFINITE_BITS,
    LEAST_MAXIMUM_BITS,
    SCALE_BYTES,
    NoiseKey,
    most_code,
    num_blocks_of,
    reciprocal_of,
)
from lightning_hybrid.comm.codec.philox import philox

_ONE = 1 << FRACTION_BITS
_NAN_SCALE = 0x7FC0
# Number of blocks processed at a time. It limits memory, because intermediate results take 8 bytes per element.
_SLAB = 1 << 10


class TorchPasses:
    """Reference implementation of the codec with torch operations, for all devices.

    `block_format` describes the message format.

    Args:
        bits: Number of bits per element, 8 or 4.
        signs: Signs of the rotation, 256 elements of +-1/16, float32, or None if blocks are not rotated.
    """

    def __init__(self, bits: int, signs: Tensor | None) -> None:
        self._bits = bits
        self._signs = signs

    def encode(
        self,
        flat: Tensor,
        ids: Tensor,
        key: NoiseKey | None,
        message: Tensor,
        noise: Tensor | None,
    ) -> None:
        """Encode a float32 tensor into `message`.

        Args:
            flat: Elements to encode, 1-D, float32.
            ids: Number of each block, int32.
            key: Seed, step, sender, and index of the reduction in the step. If None, elements are rounded to the
                nearest code.
            message: Encoded blocks, 1-D, uint8.
            noise: Tensor, float64 [2], to which the sum of squared errors and the sum of squared values are added.
                If None, these sums are not computed.
        """
        num_blocks = num_blocks_of(flat.numel())
        scales, codes = self._split(message, num_blocks)
        for first in range(0, num_blocks, _SLAB):
            last = min(first + _SLAB, num_blocks)
            y = _blocks(flat[first * BLOCK : last * BLOCK])
            if self._signs is not None:
                y = hadamard(y * self._signs)
            upper, is_finite = self._scales_of(y)
            scale = _as_float(upper)
            fixed = self._fixed_point(y, scale)
            code = (fixed + self._addends(ids[first:last], key)) >> FRACTION_BITS

            scales[first:last] = upper.where(is_finite, _NAN_SCALE).flatten().to(torch.int16)
            codes[first:last] = _packed(code, self._bits)
            if noise is not None:
                decoded = code * _ONE
                error = (decoded - fixed).double() * scale / _ONE
                value = fixed.double() * scale / _ONE
                squared_error = error.square().sum()
                squared_value = value.square().sum()
                noise += torch.stack([squared_error, squared_value])

    def add(self, messages: Tensor, to: Tensor) -> None:
        """Decode the message in each row of a uint8 matrix, and write the sum of all messages into `to`.

        The messages are added in order, in float32.
        """
        num_blocks = num_blocks_of(to.numel())
        for first in range(0, num_blocks, _SLAB):
            last = min(first + _SLAB, num_blocks)
            total: Tensor | None = None
            for message in messages:
                scales, codes = self._split(message, num_blocks)
                scale = _as_float(scales[first:last].to(torch.int32))[:, None]
                code = _unpacked(codes[first:last], self._bits)
                if total is None:
                    total = code * scale
                else:
                    total.add_(code * scale)
            assert total is not None
            if self._signs is not None:
                total = hadamard(total) * self._signs
            target = to[first * BLOCK : last * BLOCK]
            target.copy_(total.flatten()[: target.numel()])

    def _split(self, message: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Return views of a message's scales (int16 [blocks]) and codes (uint8 [blocks, bytes])."""
        scale_bytes = SCALE_BYTES * num_blocks
        scales = message[:scale_bytes].view(torch.int16)
        codes = message[scale_bytes:].view(num_blocks, BLOCK * self._bits // 8)
        return scales, codes

    def _scales_of(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bfloat16 bits of each block's scale, and a mask of the finite blocks.

        Both have the shape [blocks, 1].
        """
        # Magnitudes are compared by their bit patterns, which are largest for inf and nan.
        maximum_bits = (y.view(torch.int32) & 0x7FFFFFFF).amax(1, keepdim=True)
        is_finite = maximum_bits < INFINITE_BITS
        is_coded = is_finite & (maximum_bits >= LEAST_MAXIMUM_BITS)
        maximum = maximum_bits.view(torch.float32).where(is_coded, 0.0)
        # The scale is rounded up to bfloat16, so that no code exceeds the largest code.
        exact_scale = maximum * reciprocal_of(most_code(self._bits))
        upper = (exact_scale.view(torch.int32) + 0xFFFF) >> 16
        return upper, is_finite

    def _fixed_point(self, y: Tensor, scale: Tensor) -> Tensor:
        """Return y / scale as int32 fixed-point numbers, clamped to the range of the codes."""
        is_coded = scale > 0
        steps = (float(_ONE) / scale).where(is_coded, 0.0)
        limit = most_code(self._bits) * _ONE
        return (y.where(is_coded, 0.0) * steps).to(torch.int32).clamp_(-limit, limit)

    def _addends(self, ids: Tensor, key: NoiseKey | None) -> Tensor | int:
        """Return the fixed-point offsets that are added before rounding down.

        The offsets are uniform noise for stochastic rounding, or one half for rounding to the nearest code.
        """
        if key is None:
            return _ONE // 2
        seed, step, sender, turn = key
        lane = torch.arange(BLOCK // 4, device=ids.device)
        block = ids.long()[:, None]
        senders = torch.full_like(lane[:1], sender)
        turns = torch.full_like(lane[:1], turn)
        words = philox((lane, block, senders, turns), (seed, step))
        columns = [word.expand(len(ids), -1) >> 9 for word in words]
        return torch.cat(columns, 1).to(torch.int32)


def hadamard(y: Tensor) -> Tensor:
    """Return the Walsh-Hadamard transform of each row of 256 elements.

    The transform is computed in 8 stages of sums and differences, beginning with neighbours.

    >>> y = torch.zeros(1, 256); y[0, 1] = 1.0
    >>> hadamard(y)[0, :4].tolist(), bool((hadamard(hadamard(y)) == 256 * y).all())
    ([1.0, -1.0, 1.0, -1.0], True)
    """
    num_rows = len(y)
    for stage in range(8):
        half = 1 << stage
        a, b = y.view(num_rows, -1, 2, half).unbind(2)
        y = torch.stack([a + b, a - b], 2).view(num_rows, BLOCK)
    return y


def _as_float(upper: Tensor) -> Tensor:
    """Convert bfloat16 bit patterns, stored as int32, to float32."""
    return (upper << 16).view(torch.float32)


def _blocks(flat: Tensor) -> Tensor:
    num_missing = -flat.numel() % BLOCK
    if num_missing > 0:
        flat = torch.nn.functional.pad(flat, (0, num_missing))
    return flat.view(-1, BLOCK)


def _packed(code: Tensor, bits: int) -> Tensor:
    code = code.to(torch.uint8)  # conversion modulo 256 gives the two's complement
    if bits == 8:
        return code
    lower, upper = code.view(len(code), 2, -1).bitwise_and_(15).unbind(1)
    return lower | upper << 4


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return packed.view(torch.int8).float()
    signed = packed.view(torch.int8)
    lower = signed.bitwise_left_shift(4) >> 4
    upper = signed >> 4
    return torch.cat([lower, upper], 1).float()
