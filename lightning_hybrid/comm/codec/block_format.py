"""Message format of the int8 and int4 codecs, with one scale for each block of 256 elements.

    message    | scales: uint16 per block | codes: 256 bytes per block (8 bits) or 128 (4 bits) |
    scale      the upper half of a float32 (bfloat16): max |y| / MOST, rounded up; nan if an element is inf or nan
    code       floor(y / scale + u), in [-MOST, MOST]        MOST = 127 or 7;  u: uniform in [0, 1), or 1/2 (nearest)
    8 bits     y = x                       element i in byte i
    4 bits     y = H (signs * x) / 16      elements i and i + 128 in the lower and upper half of byte i

H is the Walsh-Hadamard matrix of order 256. H H / 256 is the identity, so |y| = |x|. The rotation spreads large
elements over their block, so that for any gradients the maximum of a block is about 3 times its root mean square. The
rotation needs only sums, differences and a division by 16, which is exact.

u is the Philox-4x32-10 function of the words (seed, step, sum in the step, sender, block, element). There is no
generator state, so a resumed run draws the same noise as an uninterrupted run. A code is unbiased:
E[scale * code] = y except for 2^-23 of a scale, because the quotient is truncated to 23 fractional bits.
|scale * code - y| is below one scale, or below half a scale when rounding to the nearest. Blocks whose maximum is below
2^-96 count as zeros. With 4 bits, finite elements of 2e36 or more may decode to inf, because the rotation adds 256 of
them before it divides. Elements up to 1e35 are safe.

A decoded element, scale * code, is exact in float32, because it is the product of two 8-bit numbers. Every other result
that is rounded comes from a single operation. Therefore C++, torch and Triton give bitwise equal results, with and
without fused multiply-adds.

A block has 256 elements, because an element then costs 258 / 256 bytes with 8 bits and 130 / 256 bytes with 4 bits.
Blocks of 128 elements would double the cost of the scales and multiply squared errors by 0.86. Blocks of 1,024 elements
would save 0.6 % of the bytes with 8 bits and 1.2 % with 4 bits, and multiply squared errors by 1.3. Squared errors,
relative to the sum of squares:

    2^20 normal numbers                         9.8e-5 with 8 bits, 3.2e-2 with 4 bits; half of that to the nearest
    Student's t with 3 degrees of freedom       2.9e-2 with 4 bits, 0.17 without the rotation

Sources: Salmon et al. 2011 (SC '11) for counters, Alistarh et al. 2017 (QSGD, arXiv:1610.02132) for blocks with a
maximum, Suresh et al. 2017 (arXiv:1611.00429) for the rotation.
"""

from __future__ import annotations

import struct

BLOCK = 256
SCALE_BYTES = 2

# Seed, step, sender, and index of the sum in the step. The noise depends on these, on the block and on the element.
NoiseKey = tuple[int, int, int, int]

# Sender number for the second encoding, which rounds a sum. No rank has this number.
OF_A_SUM = 2**32 - 1

# Number of fractional bits of a code in fixed point. The largest code, 127, plus one step fits into 31 bits.
FRACTION_BITS = 23

# float32 bit patterns of inf and of 2^-96. Blocks whose maximum is below 2^-96 count as zeros, so that all numbers
# computed from a maximum are normal.
INFINITE_BITS = 0x7F800000
LEAST_MAXIMUM_BITS = 31 << 23


def num_blocks_of(numel: int) -> int:
    """Return the number of blocks needed for `numel` elements.

    >>> num_blocks_of(0), num_blocks_of(256), num_blocks_of(257)
    (0, 1, 2)
    """
    return -(-numel // BLOCK)


def most_code(bits: int) -> int:
    """Return the largest integer code for a number of bits.

    This is MOST in the docstring of the module.

    >>> most_code(8), most_code(4)
    (127, 7)
    """
    return (1 << (bits - 1)) - 1


def reciprocal_of(most: int) -> float:
    """Return 1 / `most`, rounded to float32.

    The scale of a block is its maximum multiplied by this number.

    >>> reciprocal_of(7) == 1 / 7, abs(reciprocal_of(7) * 7 - 1) < 2**-24
    (False, True)
    """
    return float(struct.unpack("f", struct.pack("f", 1 / most))[0])


def message_bytes(numel: int, bits: int) -> int:
    """Return the size in bytes of a message of `numel` elements.

    The last block is padded.

    >>> message_bytes(1024, 8), message_bytes(1024, 4), message_bytes(1, 8)
    (1032, 520, 258)
    """
    return num_blocks_of(numel) * (SCALE_BYTES + BLOCK * bits // 8)
