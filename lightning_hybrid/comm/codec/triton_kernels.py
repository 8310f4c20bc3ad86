"""The passes of the codec on CUDA, one program for each block of 256 elements; the format is that of `block_format`.

They have run in Triton's interpreter, and on no GPU yet.
"""

import triton
import triton.language as tl

_BLOCK = tl.constexpr(256)
_LANES = tl.constexpr(64)


@triton.jit
def _butterflies(y, HALF: tl.constexpr):
    pairs = tl.permute(tl.reshape(y, [_BLOCK // (2 * HALF), 2, HALF]), (0, 2, 1))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [_BLOCK])


@triton.jit
def _hadamard(y):
    """Compute H y, (256): 8 stages of sums and differences, of neighbours first."""
    for stage in tl.static_range(8):
        y = _butterflies(y, 1 << stage)
    return y


@triton.jit
def _addends(ids, block, key, sender, turn):
    """Draw 23 bits for each element: word w of counter j is that of element 64 w + j."""
    lanes = tl.arange(0, _LANES)
    number = (lanes * 0 + tl.load(ids + block)).to(tl.uint32)
    sender = (lanes * 0 + sender).to(tl.uint32)
    turn = (lanes * 0 + turn).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(key, lanes.to(tl.uint32), number, sender, turn)
    words = tl.join(tl.join(w0, w1), tl.join(w2, w3))  # (counter, lower bit of the word, upper bit)
    return (tl.reshape(tl.permute(words, (2, 1, 0)), [_BLOCK]) >> 9).to(tl.int32)


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
    """Write scale and codes of a block of `flat`, float32. `key`: the seed, and the step from bit 32 on.

    Each `row_blocks` blocks are a message of their own, `row_bytes` behind the one before; the last may have fewer.
    """
    block = tl.program_id(0)
    row = block // row_blocks
    in_row = block - row * row_blocks
    scales += row.to(tl.int64) * (row_bytes // 2) + in_row
    codes += row.to(tl.int64) * row_bytes + 2 * tl.minimum(
        num_blocks - row * row_blocks, row_blocks
    )
    inside = tl.arange(0, _BLOCK)
    at = block.to(tl.int64) * _BLOCK + inside
    y = tl.load(flat + at, mask=at < numel, other=0.0)
    if MOST == 7:
        y = _hadamard(y * tl.load(signs + inside))
    maximum = tl.max(
        y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0
    )  # of bits: inf and nan are the largest
    is_finite = maximum < 0x7F800000
    is_coded = is_finite & (maximum >= LEAST)
    maximum = tl.where(is_coded, maximum, 0).to(tl.float32, bitcast=True)
    # Rounded up to bfloat16, so that no code is above the largest.
    upper = ((maximum * RECIPROCAL).to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    scale = tl.where(is_coded, (upper << 16).to(tl.float32, bitcast=True), 1.0)
    steps = tl.div_rn(8388608.0, scale)  # rounded as IEEE says, as on the CPU
    fixed = (tl.where(is_coded, y, 0.0) * steps).to(tl.int32)
    fixed = tl.minimum(tl.maximum(fixed, -MOST * 8388608), MOST * 8388608)
    if IS_NEAREST:
        fixed += 4194304
    else:
        fixed += _addends(ids, block, key, sender, turn)
    code = fixed >> 23
    tl.store(scales, tl.where(is_finite, upper, 0x7FC0).to(tl.int16))
    if MOST == 7:
        lower, higher = tl.split(tl.permute(tl.reshape(code, [2, _BLOCK // 2]), (1, 0)))
        packed = (lower & 15) | ((higher & 15) << 4)
        tl.store(
            codes + in_row.to(tl.int64) * (_BLOCK // 2) + tl.arange(0, _BLOCK // 2),
            packed.to(tl.uint8),
        )
    else:
        tl.store(codes + in_row.to(tl.int64) * _BLOCK + inside, code.to(tl.uint8))


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
    """Write the sum of a block over messages, in their order, into `to`, float32; rows are those of `encode_block`."""
    block = tl.program_id(0)
    inside = tl.arange(0, _BLOCK)
    total = tl.zeros([_BLOCK], tl.float32)
    row = block // row_blocks
    in_row = block - row * row_blocks
    message = messages + row.to(tl.int64) * row_bytes
    for _ in range(num_messages):
        scale_at = message + 2 * in_row
        upper = tl.load(scale_at).to(tl.int32) | (tl.load(scale_at + 1).to(tl.int32) << 8)
        scale = (upper << 16).to(tl.float32, bitcast=True)
        codes = message + 2 * tl.minimum(num_blocks - row * row_blocks, row_blocks)
        if MOST == 7:
            half = tl.arange(0, _BLOCK // 2)
            packed = tl.load(codes + in_row.to(tl.int64) * (_BLOCK // 2) + half).to(tl.int32)
            both = tl.permute(tl.join(packed << 28, packed << 24), (1, 0))
            code = tl.reshape(both, [_BLOCK]) >> 28  # of the sign too
        else:
            code = (
                tl.load(codes + in_row.to(tl.int64) * _BLOCK + inside)
                .to(tl.int8, bitcast=True)
                .to(tl.int32)
            )
        total += code.to(tl.float32) * scale
        message += stride
    if MOST == 7:
        total = _hadamard(total) * tl.load(signs + inside)
    at = block.to(tl.int64) * _BLOCK + inside
    tl.store(to + at, total, mask=at < numel)
