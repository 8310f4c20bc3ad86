"""Counter-based random number generator Philox-4x32-10, in torch's integer operations."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return four 32-bit random words for each Philox counter of four words.

    The words are int64 in [0, 2^32). Their shape is the broadcast shape of the counter's words. cuRAND, torch and
    Triton use the same generator.

    Source: Salmon et al. 2011 (SC '11).

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> [hex(int(word)) for word in philox((zero, zero, zero, zero), (0, 0))]     # of Random123's known answers
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        # The product has 64 bits, the highest of which is the sign. The mask removes the copies of the sign.
        first = c0 * _MULTIPLIERS[0]
        second = c2 * _MULTIPLIERS[1]
        c0 = (second >> 32 & _MASK) ^ c1 ^ k0
        c1 = second & _MASK
        c2 = (first >> 32 & _MASK) ^ c3 ^ k1
        c3 = first & _MASK
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def random_signs(numel: int, seed: int) -> Tensor:
    """Return `numel` random signs (-1.0 or 1.0, float32) that depend only on `seed`."""
    num_counters = -(-numel // 4)
    counter = torch.arange(num_counters)
    zero = torch.zeros((), dtype=torch.int64)
    # No step of a run has the number `_MASK`, so these words do not occur in the run's noise.
    words = torch.stack(philox((counter, zero, zero, zero), (seed & _MASK, _MASK)))
    bits = words.flatten()[:numel] & 1
    return 1.0 - 2.0 * bits.float()
