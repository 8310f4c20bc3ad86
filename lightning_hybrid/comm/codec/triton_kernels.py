"""Triton kernels of the int8 and int4 codecs, with one program for each block of 256 elements.

`block_format` describes the message format. The kernels have been tested only in Triton's interpreter, not yet on a
GPU.
"""

import triton
import triton.language as tl

_BLOCK = tl.constexpr(256)
_HALF_BLOCK = tl.constexpr(128)
_LANES = tl.constexpr(64)  # Philox counters of a block, each of which gives four words

# The numbers 1 and 1/2 as fixed-point numbers with 23 fractional bits.
_FRACTION_BITS = tl.constexpr(23)
_ONE = tl.constexpr(1 << 23)
_ONE_AS_FLOAT = tl.constexpr(8388608.0)
_ONE_HALF = tl.constexpr(1 << 22)

_MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)  # all bits of a float32 except its sign
_INFINITE_BITS = tl.constexpr(0x7F800000)  # float32 bits of inf
_NAN_SCALE = tl.constexpr(0x7FC0)  # bfloat16 bits of nan


@triton.jit
def _butterflies(y, DISTANCE: tl.constexpr):
    """Replace each pair of elements at a distance in a block by its sum and difference."""
    groups = tl.reshape(y, [_BLOCK // (2 * DISTANCE), 2, DISTANCE])
    pairs = tl.permute(groups, (0, 2, 1))  # `split` and `join` need the pairs in the last axis
    a, b = tl.split(pairs)
    transformed = tl.join(a + b, a - b)
    in_order = tl.permute(transformed, (0, 2, 1))
    return tl.reshape(in_order, [_BLOCK])


@triton.jit
def _hadamard(y):
    """Return the Walsh-Hadamard transform of a block of 256 elements.

    The transform is computed in 8 stages, beginning with neighbors.
    """
    for stage in tl.static_range(8):
        y = _butterflies(y, 1 << stage)
    return y


@triton.jit
def _uniform_noise(ids, block, key, sender, turn):
    """Return 23 random bits for each element of a block.

    Word w of counter j belongs to element 64 w + j.
    """
    lanes = tl.arange(0, _LANES)
    zeros = lanes * 0
    # `philox` takes its counter as four vectors of words.
    lane = lanes.to(tl.uint32)
    number = (zeros + tl.load(ids + block)).to(tl.uint32)
    sender = (zeros + sender).to(tl.uint32)
    turn = (zeros + turn).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(key, lane, number, sender, turn)

    # The axes are the counter, the lower bit of the word's index, and the upper bit of the word's index.
    words_0_and_1 = tl.join(w0, w1)
    words_2_and_3 = tl.join(w2, w3)
    words = tl.join(words_0_and_1, words_2_and_3)
    words_in_order = tl.permute(words, (2, 1, 0))
    bits = tl.reshape(words_in_order, [_BLOCK]) >> 9
    return bits.to(tl.int32)


@triton.jit
def _float_of(scale_bits):
    """Convert bfloat16 bit patterns, stored as int32, to float32."""
    float32_bits = scale_bits << 16
    return float32_bits.to(tl.float32, bitcast=True)


@triton.jit
def _scale_bits_of(maximum, RECIPROCAL: tl.constexpr):
    """Return the bfloat16 bits of a block's scale, given its largest magnitude."""
    exact_scale = maximum * RECIPROCAL
    # The scale is rounded up to bfloat16, so that no code exceeds the largest code.
    float32_bits = exact_scale.to(tl.int32, bitcast=True)
    return (float32_bits + 0xFFFF) >> 16


@triton.jit
def _pack_halves(code):
    """Pack elements i and i + 128 of a block's int4 codes into byte i."""
    halves = tl.reshape(code, [2, _HALF_BLOCK])
    pairs = tl.permute(halves, (1, 0))
    lower, upper = tl.split(pairs)
    return (lower & 15) | ((upper & 15) << 4)


@triton.jit
def _unpack_halves(packed):
    """Unpack the int4 codes of `_pack_halves`, given as int32."""
    # Both codes are moved to the upper 4 bits. The arithmetic shift to the right then extends the sign.
    lower = packed << 28
    upper = packed << 24
    pairs = tl.join(lower, upper)
    halves = tl.permute(pairs, (1, 0))
    return tl.reshape(halves, [_BLOCK]) >> 28


@triton.jit
def _load_scale(address):
    """Load a bfloat16 scale, given the address of its first byte, and return it in float32."""
    lower_byte = tl.load(address).to(tl.int32)
    upper_byte = tl.load(address + 1).to(tl.int32)
    scale_bits = lower_byte | (upper_byte << 8)
    return _float_of(scale_bits)


@triton.jit(do_not_specialize=["key", "sender", "turn"])
def encode_block(
    flat,
    numel,
    ids,
    signs,
    key,
    sender,
    turn,
    scales,
    codes,
    row_blocks,
    row_bytes,
    num_blocks,
    MOST: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    LEAST: tl.constexpr,
    IS_NEAREST: tl.constexpr,
):
    """Encode one block of a float32 tensor, and write its scale and codes into a message.

    `key` holds the seed in its lower 32 bits and the step in its upper 32 bits. Every `row_blocks` blocks form a
    message. Messages begin `row_bytes` apart, and the last one may have fewer blocks.
    """
    block = tl.program_id(0)
    row = block // row_blocks
    block_in_row = block - row * row_blocks
    num_blocks_in_row = tl.minimum(num_blocks - row * row_blocks, row_blocks)
    scales += row.to(tl.int64) * (row_bytes // 2) + block_in_row
    codes += row.to(tl.int64) * row_bytes + 2 * num_blocks_in_row

    elements = tl.arange(0, _BLOCK)
    offsets = block.to(tl.int64) * _BLOCK + elements
    y = tl.load(flat + offsets, mask=offsets < numel, other=0.0)
    if MOST == 7:
        y = _hadamard(y * tl.load(signs + elements))

    # Magnitudes are compared by their bit patterns, which are largest for inf and nan.
    magnitude_bits = y.to(tl.int32, bitcast=True) & _MAGNITUDE_BITS
    maximum_bits = tl.max(magnitude_bits, 0)
    is_finite = maximum_bits < _INFINITE_BITS
    is_coded = is_finite & (maximum_bits >= LEAST)
    coded_maximum_bits = tl.where(is_coded, maximum_bits, 0)
    maximum = coded_maximum_bits.to(tl.float32, bitcast=True)
    scale_bits = _scale_bits_of(maximum, RECIPROCAL)
    scale = tl.where(is_coded, _float_of(scale_bits), 1.0)

    # y / scale as a fixed-point number, clamped to the range of the codes.
    fixed_point_per_unit = tl.div_rn(_ONE_AS_FLOAT, scale)  # IEEE 754 rounding, as on the CPU
    quotient = tl.where(is_coded, y, 0.0) * fixed_point_per_unit
    fixed = quotient.to(tl.int32)
    fixed = tl.maximum(fixed, -MOST * _ONE)
    fixed = tl.minimum(fixed, MOST * _ONE)
    if IS_NEAREST:
        fixed += _ONE_HALF
    else:
        fixed += _uniform_noise(ids, block, key, sender, turn)
    code = fixed >> _FRACTION_BITS

    sent_scale_bits = tl.where(is_finite, scale_bits, _NAN_SCALE)
    tl.store(scales, sent_scale_bits.to(tl.int16))
    if MOST == 7:
        packed = _pack_halves(code)
        bytes_of_block = tl.arange(0, _HALF_BLOCK)
        codes += block_in_row.to(tl.int64) * _HALF_BLOCK
        tl.store(codes + bytes_of_block, packed.to(tl.uint8))
    else:
        codes += block_in_row.to(tl.int64) * _BLOCK
        tl.store(codes + elements, code.to(tl.uint8))


@triton.jit
def add_block(
    messages,
    num_messages,
    stride,
    num_blocks,
    row_blocks,
    row_bytes,
    numel,
    signs,
    to,
    MOST: tl.constexpr,
):
    """Decode one block of every message, and write the sum over all messages into `to`.

    The messages are added in order, in float32. Rows are laid out as in `encode_block`.
    """
    block = tl.program_id(0)
    elements = tl.arange(0, _BLOCK)
    total = tl.zeros([_BLOCK], tl.float32)
    row = block // row_blocks
    block_in_row = block - row * row_blocks
    num_blocks_in_row = tl.minimum(num_blocks - row * row_blocks, row_blocks)
    message = messages + row.to(tl.int64) * row_bytes
    for _ in range(num_messages):
        scale = _load_scale(message + 2 * block_in_row)
        codes = message + 2 * num_blocks_in_row
        if MOST == 7:
            codes += block_in_row.to(tl.int64) * _HALF_BLOCK
            bytes_of_block = tl.arange(0, _HALF_BLOCK)
            packed = tl.load(codes + bytes_of_block)
            code = _unpack_halves(packed.to(tl.int32))
        else:
            codes += block_in_row.to(tl.int64) * _BLOCK
            unsigned = tl.load(codes + elements)
            signed = unsigned.to(tl.int8, bitcast=True)
            code = signed.to(tl.int32)
        total += code.to(tl.float32) * scale
        message += stride

    if MOST == 7:
        total = _hadamard(total) * tl.load(signs + elements)
    offsets = block.to(tl.int64) * _BLOCK + elements
    tl.store(to + offsets, total, mask=offsets < numel)
