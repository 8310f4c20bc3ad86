"""The format in which sums travel between nodes: blocks of 256 elements, each with one scale.

    message    | scales: uint16 per block | codes: 256 bytes per block (8 bits) or 128 (4 bits) |
    scale      the upper half of a float32 (bfloat16): max |y| / MOST, rounded up; nan where an element is inf or nan
    code       floor(y / scale + u), in [-MOST, MOST]        MOST = 127 or 7;  u: uniform in [0, 1), or 1/2 (nearest)
    8 bits     y = x                       element i in byte i
    4 bits     y = H (signs * x) / 16      elements i and i + 128 in the lower and upper half of byte i

H is the Walsh-Hadamard matrix of order 256: H H / 256 is the identity, so that |y| = |x|. It spreads a few large
elements over their block, whose maximum, and with it the scale, is then about 3 roots of the mean square, whatever the
gradients are. Its entries are sums and differences only, and 16 is a power of two.

u is a function of (seed, step, sum in the step, sender, block, element): Philox-4x32-10 of these words.
So there is no state of a generator, and a run that is resumed draws what it would have drawn. A code is unbiased:
E[scale * code] = y but for 2^-23 of a scale, as the quotient is cut to 23 bits after the point; |scale * code - y| is
below one scale, or half of one for the nearest. Blocks whose maximum is below 2^-96 count as zeros. With 4 bits finite
elements from 2e36 on may decode to inf, as the rotation adds up 256 of them before it divides; 1e35 are safe.

A decoded element, scale * code, is exact in float32: 8 bits by 8 bits. All else that is rounded is one operation at a
time. So C++, torch and Triton give the same bits, with fused multiply-adds and without.

Why 256: an element costs 258 / 256 and 130 / 256 bytes. Scales of 128 elements would cost twice as much, and squared
errors would be 0.86 times as large; 1,024 save 0.6 and 1.2 % of the bytes and cost 1.3 times the error. As parts of the
sum of squares, on 2^20 normal numbers, errors are 9.8e-5 with 8 bits and 3.2e-2 with 4, half of that to the nearest; on
Student's t with 3 degrees of freedom 4 bits have 2.9e-2, and without the rotation 0.17.

Source: counters, Salmon et al. 2011 (SC '11); blocks with a maximum, Alistarh et al. 2017 (QSGD, arXiv:1610.02132);
the rotation, Suresh et al. 2017 (arXiv:1611.00429).
"""

from __future__ import annotations

import struct

BLOCK = 256
SCALE_BYTES = 2

# Of the words of a counter that are no number of a sender: the second encoding, of a sum.
OF_A_SUM = 2**32 - 1

# One step of a code in fixed point. The largest code, 127 of them, and one step more fit into 31 bits.
FRACTION_BITS = 23

# The bits in float32 of inf, and of 2^-96: blocks of which no element reaches it count as zeros, so that all that is
# computed from their maximum stays normal.
INFINITE_BITS = 0x7F800000
LEAST_MAXIMUM_BITS = 31 << 23


def num_blocks_of(numel: int) -> int:
    """Return the number of blocks of `numel` elements.

    >>> num_blocks_of(0), num_blocks_of(256), num_blocks_of(257)
    (0, 1, 2)
    """
    return -(-numel // BLOCK)


def most_code(bits: int) -> int:
    """Return the largest code, MOST.

    >>> most_code(8), most_code(4)
    (127, 7)
    """
    return (1 << (bits - 1)) - 1


def reciprocal_of(most: int) -> float:
    """Return 1 / MOST, rounded to float32: by it a maximum is multiplied.

    >>> reciprocal_of(7) == 1 / 7, abs(reciprocal_of(7) * 7 - 1) < 2**-24
    (False, True)
    """
    return float(struct.unpack("f", struct.pack("f", 1 / most))[0])


def message_bytes(numel: int, bits: int) -> int:
    """Return the bytes of a message of `numel` elements: blocks are sent whole.

    >>> message_bytes(1024, 8), message_bytes(1024, 4), message_bytes(1, 8)
    (1032, 520, 258)
    """
    return num_blocks_of(numel) * (SCALE_BYTES + BLOCK * bits // 8)
