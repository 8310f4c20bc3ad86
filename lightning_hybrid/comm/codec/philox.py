"""Philox-4x32-10, random words as a function of a counter, in torch's integers."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
NUM_ROUNDS = 10


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return four words for each counter of four words: int64 in [0, 2^32), of the shape to which these broadcast.

    Source: Salmon et al. 2011 (SC '11); cuRAND, torch and Triton use the same.

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> [hex(int(word)) for word in philox((zero, zero, zero, zero), (0, 0))]     # of Random123's known answers
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        # The product has 64 bits: its sign is one of them, and the mask takes it off the upper half.
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
    """Return `numel` signs, -1.0 or 1.0, float32: a function of `seed` alone."""
    counter = torch.arange(-(-numel // 4))
    zero = torch.zeros((), dtype=torch.int64)
    # The step of a run is never this one: the signs are no words of its noise.
    words = torch.stack(philox((counter, zero, zero, zero), (seed & _MASK, _MASK))).flatten()[
        :numel
    ]
    return 1.0 - 2.0 * (words & 1).float()
