"""Implementation of the int8 and int4 codecs with torch operations, which needs no compiler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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

_ONE = 1 << FRACTION_BITS  # the number 1 in fixed point
_NAN_SCALE = 0x7FC0  # bfloat16 bits of nan
_MAGNITUDE_BITS = 0x7FFFFFFF  # all bits of a float32 except its sign
# Number of blocks processed at a time. It limits memory, because intermediate results take 8 bytes per element.
_SLAB = 1 << 10


@dataclass(frozen=True)
class _Slab:
    """Consecutive blocks of a tensor that are processed at a time.

    Attributes:
        blocks: Indices of the blocks.
        elements: Indices of their elements in the flat tensor.
    """

    blocks: slice
    elements: slice


class TorchPasses:
    """Reference implementation of the codec with torch operations, for all devices.

    `block_format` describes the message format.

    Args:
        bits: Number of bits per element, 8 or 4.
        signs: Signs of the rotation, 256 elements of +-1/16, float32, or None if blocks are not rotated.
    """

    def __init__(self, bits: int, signs: Tensor | None) -> None:
        self._bits = bits
        self._largest_code = most_code(bits)
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
        for slab in _slabs(num_blocks):
            y = _blocks(flat[slab.elements])
            if self._signs is not None:
                y = hadamard(y * self._signs)

            scale_bits, is_finite = self._scales_of(y)
            scale = _as_float(scale_bits)
            fixed = self._fixed_point(y, scale)
            addends = self._addends(ids[slab.blocks], key)
            code = (fixed + addends) >> FRACTION_BITS

            sent_scale_bits = scale_bits.where(is_finite, _NAN_SCALE)
            scales[slab.blocks] = sent_scale_bits.flatten().to(torch.int16)
            codes[slab.blocks] = _packed(code, self._bits)
            if noise is not None:
                noise += _squared_sums(code, fixed, scale)

    def add(self, messages: Tensor, to: Tensor) -> None:
        """Decode the message in each row of a uint8 matrix, and write the sum of all messages into `to`.

        The messages are added in order, in float32.
        """
        num_blocks = num_blocks_of(to.numel())
        for slab in _slabs(num_blocks):
            total = self._decode(messages[0], num_blocks, slab.blocks)
            for message in messages[1:]:
                total.add_(self._decode(message, num_blocks, slab.blocks))

            if self._signs is not None:
                total = hadamard(total) * self._signs
            target = to[slab.elements]
            elements = total.flatten()[: target.numel()]  # the last block may be padded
            target.copy_(elements)

    def _decode(self, message: Tensor, num_blocks: int, blocks: slice) -> Tensor:
        """Decode some blocks of a message of `num_blocks` blocks, without undoing the rotation."""
        scales, codes = self._split(message, num_blocks)
        scale_bits = scales[blocks].to(torch.int32)
        scale = _as_float(scale_bits)[:, None]
        code = _unpacked(codes[blocks], self._bits)
        return code * scale

    def _split(self, message: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Return views of a message's scales (int16 [blocks]) and codes (uint8 [blocks, bytes])."""
        scale_bytes = SCALE_BYTES * num_blocks
        code_bytes_per_block = BLOCK * self._bits // 8
        scales = message[:scale_bytes].view(torch.int16)
        codes = message[scale_bytes:].view(num_blocks, code_bytes_per_block)
        return scales, codes

    def _scales_of(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bfloat16 bits of each block's scale, and a mask of the finite blocks.

        Both have the shape [blocks, 1].
        """
        # Magnitudes are compared by their bit patterns, which are largest for inf and nan.
        magnitude_bits = y.view(torch.int32) & _MAGNITUDE_BITS
        maximum_bits = magnitude_bits.amax(1, keepdim=True)
        is_finite = maximum_bits < INFINITE_BITS
        is_coded = is_finite & (maximum_bits >= LEAST_MAXIMUM_BITS)
        maximum = maximum_bits.view(torch.float32).where(is_coded, 0.0)
        exact_scale = maximum * reciprocal_of(self._largest_code)
        # The scale is rounded up to bfloat16, so that no code exceeds the largest code.
        float32_bits = exact_scale.view(torch.int32)
        scale_bits = (float32_bits + 0xFFFF) >> 16
        return scale_bits, is_finite

    def _fixed_point(self, y: Tensor, scale: Tensor) -> Tensor:
        """Return y / scale as int32 fixed-point numbers, clamped to the range of the codes."""
        is_coded = scale > 0
        fixed_point_per_unit = float(_ONE) / scale
        # A block with the scale 0 would give inf or nan.
        factor = fixed_point_per_unit.where(is_coded, 0.0)
        quotient = y.where(is_coded, 0.0) * factor
        fixed = quotient.to(torch.int32)
        limit = self._largest_code * _ONE
        return fixed.clamp_(-limit, limit)

    def _addends(self, ids: Tensor, key: NoiseKey | None) -> Tensor | int:
        """Return the fixed-point offsets that are added before rounding down.

        The offsets are uniform noise for stochastic rounding, or one half for rounding to the nearest code.
        """
        if key is None:
            return _ONE // 2
        return _uniform_noise(ids, key)


def _uniform_noise(ids: Tensor, key: NoiseKey) -> Tensor:
    """Return a fixed-point number in [0, 1) for each element of some blocks, int32 [blocks, 256].

    Word w of counter j belongs to element 64 w + j of its block.
    """
    seed, step, sender, turn = key
    lane = torch.arange(BLOCK // 4, device=ids.device)
    block = ids.long()[:, None]
    senders = torch.full_like(lane[:1], sender)
    turns = torch.full_like(lane[:1], turn)
    counter = (lane, block, senders, turns)
    columns = []
    for word in philox(counter, (seed, step)):
        word_of_block = word.expand(len(ids), -1)
        columns.append(word_of_block >> 9)  # keeps 23 of 32 bits, the number of fractional bits
    noise = torch.cat(columns, 1)
    return noise.to(torch.int32)


def _slabs(num_blocks: int) -> Iterator[_Slab]:
    for first in range(0, num_blocks, _SLAB):
        last = min(first + _SLAB, num_blocks)
        elements = slice(first * BLOCK, last * BLOCK)
        yield _Slab(blocks=slice(first, last), elements=elements)


def hadamard(y: Tensor) -> Tensor:
    """Return the Walsh-Hadamard transform of each row of 256 elements.

    The transform is computed in 8 stages of sums and differences, beginning with neighbors.

    >>> y = torch.zeros(1, 256); y[0, 1] = 1.0
    >>> hadamard(y)[0, :4].tolist(), bool((hadamard(hadamard(y)) == 256 * y).all())
    ([1.0, -1.0, 1.0, -1.0], True)
    """
    num_rows = len(y)
    for stage in range(8):
        distance = 1 << stage
        pairs = y.view(num_rows, -1, 2, distance)
        a, b = pairs.unbind(2)
        sums = a + b
        differences = a - b
        transformed = torch.stack([sums, differences], 2)
        y = transformed.view(num_rows, BLOCK)
    return y


def _squared_sums(code: Tensor, fixed: Tensor, scale: Tensor) -> Tensor:
    """Return the sum of squared rounding errors and the sum of squared values, float64 [2].

    Args:
        code: Integer code of each element.
        fixed: Elements divided by their block's scale, as fixed-point numbers.
        scale: Scale of each block.
    """
    decoded = code * _ONE
    fixed_error = decoded - fixed
    error = fixed_error.double() * scale / _ONE
    value = fixed.double() * scale / _ONE
    squared_error = error.square().sum()
    squared_value = value.square().sum()
    return torch.stack([squared_error, squared_value])


def _as_float(bits: Tensor) -> Tensor:
    """Convert bfloat16 bit patterns, stored as int32, to float32."""
    return (bits << 16).view(torch.float32)


def _blocks(flat: Tensor) -> Tensor:
    """Return a flat tensor as a matrix with one block per row, padded with zeros."""
    num_missing = -flat.numel() % BLOCK
    if num_missing > 0:
        flat = torch.nn.functional.pad(flat, (0, num_missing))
    return flat.view(-1, BLOCK)


def _packed(code: Tensor, bits: int) -> Tensor:
    """Pack integer codes into bytes, with 4 bits two codes per byte."""
    code = code.to(torch.uint8)  # conversion modulo 256 gives the two's complement
    if bits == 8:
        return code
    halves = code.view(len(code), 2, -1)
    halves.bitwise_and_(15)
    lower, upper = halves.unbind(1)
    return lower | upper << 4


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """Unpack the codes of `_packed`, as float32."""
    signed = packed.view(torch.int8)
    if bits == 8:
        return signed.float()
    # Arithmetic shifts to the right extend the sign.
    lower = signed.bitwise_left_shift(4) >> 4
    upper = signed >> 4
    code = torch.cat([lower, upper], 1)
    return code.float()
