"""Counter-based random number generator Philox-4x32-10, in torch's integer operations."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
# Constants of the generator, M0, M1, W0 and W1 in the docstring of `philox`.
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
NUM_ROUNDS = 10


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return four 32-bit random words for each Philox counter of four words.

    The words are int64 in [0, 2^32). Their shape is the broadcast shape of the counter's words. cuRAND, torch and
    Triton use the same generator. Each of its 10 rounds replaces the counter (c0, c1, c2, c3) and the key (k0, k1):

        c0, c1  <-  high(M1 c2) xor c1 xor k0,  low(M1 c2)
        c2, c3  <-  high(M0 c0) xor c3 xor k1,  low(M0 c0)
        k0, k1  <-  k0 + W0,  k1 + W1  mod 2^32

    `high` and `low` are the upper and the lower 32 bits of a product. All right-hand sides use the old values.

    Source: Salmon et al. 2011 (SC '11).

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> [hex(int(word)) for word in philox((zero, zero, zero, zero), (0, 0))]     # of Random123's known answers
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        product_of_c0 = c0 * _MULTIPLIER_0
        product_of_c2 = c2 * _MULTIPLIER_1
        c0 = _high_word(product_of_c2) ^ c1 ^ k0
        c1 = _low_word(product_of_c2)
        c2 = _high_word(product_of_c0) ^ c3 ^ k1
        c3 = _low_word(product_of_c0)
        k0 = (k0 + _WEYL_0) & _MASK
        k1 = (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def _high_word(product: Tensor) -> Tensor:
    # The product has 64 bits, the highest of which is the sign. The mask removes the copies of the sign.
    return product >> 32 & _MASK


def _low_word(product: Tensor) -> Tensor:
    return product & _MASK


def random_signs(numel: int, seed: int) -> Tensor:
    """Return `numel` random signs (-1.0 or 1.0, float32) that depend only on `seed`."""
    num_counters = -(-numel // 4)  # each counter gives four words
    counter = torch.arange(num_counters)
    zero = torch.zeros((), dtype=torch.int64)
    # No step of a run has the number `_MASK`, so these words do not occur in the run's noise.
    key = (seed & _MASK, _MASK)
    words = torch.stack(philox((counter, zero, zero, zero), key))
    bits = words.flatten()[:numel] & 1
    return 1.0 - 2.0 * bits.float()
