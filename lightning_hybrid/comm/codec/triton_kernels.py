"""Triton kernels of the int8 and int4 codecs, with one program for each block of 256 elements.

`block_format` describes the message format. The kernels have been tested only in Triton's interpreter, not yet on a
GPU.
"""

import triton
import triton.language as tl

_BLOCK = tl.constexpr(256)
_LANES = tl.constexpr(64)


@triton.jit
def _butterflies(y, HALF: tl.constexpr):
    shaped = tl.reshape(y, [_BLOCK // (2 * HALF), 2, HALF])
    a, b = tl.split(tl.permute(shaped, (0, 2, 1)))
    pairs = tl.join(a + b, a - b)
    return tl.reshape(tl.permute(pairs, (0, 2, 1)), [_BLOCK])


@triton.jit
def _hadamard(y):
    """Return the Walsh-Hadamard transform of a block of 256 elements.

    The transform is computed in 8 stages, beginning with neighbours.
    """
    for stage in tl.static_range(8):
        y = _butterflies(y, 1 << stage)
    return y


@triton.jit
def _addends(ids, block, key, sender, turn):
    """Return 23 random bits for each element of a block.

    Word w of counter j belongs to element 64 w + j.
    """
    lanes = tl.arange(0, _LANES)
    number = (lanes * 0 + tl.load(ids + block)).to(tl.uint32)
    sender = (lanes * 0 + sender).to(tl.uint32)
    turn = (lanes * 0 + turn).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(key, lanes.to(tl.uint32), number, sender, turn)
    # The axes are the counter, the lower bit of the word's index, and the upper bit of the word's index.
    words = tl.join(tl.join(w0, w1), tl.join(w2, w3))
    in_order = tl.reshape(tl.permute(words, (2, 1, 0)), [_BLOCK])
    return (in_order >> 9).to(tl.int32)


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
    maximum_bits = tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    is_finite = maximum_bits < 0x7F800000
    is_coded = is_finite & (maximum_bits >= LEAST)
    maximum = tl.where(is_coded, maximum_bits, 0).to(tl.float32, bitcast=True)
    # The scale is rounded up to bfloat16, so that no code exceeds the largest code.
    upper = ((maximum * RECIPROCAL).to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    scale = tl.where(is_coded, (upper << 16).to(tl.float32, bitcast=True), 1.0)

    steps = tl.div_rn(8388608.0, scale)  # IEEE 754 rounding, as on the CPU
    fixed = (tl.where(is_coded, y, 0.0) * steps).to(tl.int32)
    fixed = tl.minimum(tl.maximum(fixed, -MOST * 8388608), MOST * 8388608)
    if IS_NEAREST:
        fixed += 4194304
    else:
        fixed += _addends(ids, block, key, sender, turn)
    code = fixed >> 23

    tl.store(scales, tl.where(is_finite, upper, 0x7FC0).to(tl.int16))
    if MOST == 7:
        halves = tl.permute(tl.reshape(code, [2, _BLOCK // 2]), (1, 0))
        lower, higher = tl.split(halves)
        packed = (lower & 15) | ((higher & 15) << 4)
        codes += block_in_row.to(tl.int64) * (_BLOCK // 2)
        tl.store(codes + tl.arange(0, _BLOCK // 2), packed.to(tl.uint8))
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
        scale_bytes = message + 2 * block_in_row
        lower_byte = tl.load(scale_bytes).to(tl.int32)
        upper_byte = tl.load(scale_bytes + 1).to(tl.int32)
        scale = ((lower_byte | (upper_byte << 8)) << 16).to(tl.float32, bitcast=True)

        codes = message + 2 * num_blocks_in_row
        if MOST == 7:
            codes += block_in_row.to(tl.int64) * (_BLOCK // 2)
            packed = tl.load(codes + tl.arange(0, _BLOCK // 2)).to(tl.int32)
            halves = tl.permute(tl.join(packed << 28, packed << 24), (1, 0))
            code = tl.reshape(halves, [_BLOCK]) >> 28  # an arithmetic shift, which extends the sign
        else:
            codes += block_in_row.to(tl.int64) * _BLOCK
            code = tl.load(codes + elements).to(tl.int8, bitcast=True).to(tl.int32)
        total += code.to(tl.float32) * scale
        message += stride

    if MOST == 7:
        total = _hadamard(total) * tl.load(signs + elements)
    offsets = block.to(tl.int64) * _BLOCK + elements
    tl.store(to + offsets, total, mask=offsets < numel)
