"""A seal on the order of sums: that every rank handed over the same tensors, in the same order, up to here.

Gloo matches collectives by order of arrival and nothing else: two ranks that hand over two buckets of equal size in
different order get sums of different buckets, without a word. So every rank keeps a rolling hash of what it handed
over, and its 64 bits b travel at the end of the last bucket of a step, as 128 elements 0 or 1:

    sealed = [tail of the bucket | b | 1 - b]        summed over ranks        sum == 0 wherever own element is 0

Where two ranks differ in a bit, each finds a 1 of the other's where its own element is 0, and so does whoever sides
with either. Sums of zeros are exact, so this holds for any number of ranks and in any dtype. It costs no message of
its own: 128 elements more in one that goes anyway, and a copy of the piece that carries them.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

NUM_BITS = 64
NUM_SEAL_ELEMENTS = 2 * NUM_BITS
_MASK = (1 << NUM_BITS) - 1


class RollingHash:
    """64 bits that differ where two sequences of records do.

    >>> one, other = RollingHash(), RollingHash()
    >>> for record in ("a", "b"): one.add(record)
    >>> for record in ("b", "a"): other.add(record)
    >>> one.value == other.value
    False
    """

    def __init__(self) -> None:
        self.value = 0

    def add(self, record: str) -> None:
        """One more record at the end."""
        digest = hashlib.blake2b(record.encode(), digest_size=8, key=self.value.to_bytes(8, "little")).digest()
        self.value = int.from_bytes(digest, "little")


class ChecksummedCopy:
    """Memory for a copy of a tensor with a seal behind it, used again and again: fresh pages cost more than the copy.

    ``whole``: what is to be summed, ``numel + NUM_SEAL_ELEMENTS`` elements of ``dtype`` on ``device``, and zeros up to
    ``multiple_of``.

    >>> alike = ChecksummedCopy(3, torch.float32, torch.device("cpu")), ChecksummedCopy(3, torch.float32, torch.device("cpu"))
    >>> for copy in alike: copy.fill(torch.ones(3), 5)
    >>> _ = alike[0].whole.add_(alike[1].whole)
    >>> bool(alike[0].is_broken(5)), bool(alike[0].is_broken(4)), alike[0].body
    (False, True, tensor([2., 2., 2.]))
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, multiple_of: int = 1) -> None:
        end = numel + NUM_SEAL_ELEMENTS
        self.whole = torch.empty(-(-end // multiple_of) * multiple_of, dtype=dtype, device=device)
        self.body, self._seal, rest = self.whole[:numel], self.whole[numel:end], self.whole[end:]
        if rest.numel():
            rest.zero_()

    def fill(self, flat: Tensor, value: int) -> None:
        """Copy ``flat`` and put the seal behind it."""
        self.body.copy_(flat)
        self._seal.copy_(_ready_to_copy(_elements(value), self._seal), non_blocking=True)

    def is_broken(self, value: int) -> Tensor:
        """Whether the seal of a sum says that some rank's differs from ``value``: 0-dim, 0 or not, on the device.

        The ones of others where the own element is 0 are counted: terms are not negative, so none hides another.
        """
        own_is_zero = _ready_to_copy(_elements(~value), self._seal).to(self._seal.device, non_blocking=True)
        return torch.dot(self._seal, own_is_zero)


def _ready_to_copy(elements: Tensor, target: Tensor) -> Tensor:
    """In the target's dtype; for a GPU pinned, as from other memory a copy may wait for what its stream has to do."""
    elements = elements.to(target.dtype)
    return elements.pin_memory() if target.is_cuda else elements


def _elements(value: int) -> Tensor:
    """The 64 lowest bits of ``value``, lowest first, and their complements: ``uint8``.

    >>> _elements(1)[:3].tolist(), _elements(1)[64:67].tolist()
    ([1, 0, 0], [0, 1, 1])
    """
    words = np.array([value & _MASK, ~value & _MASK], dtype="<u8")
    return torch.from_numpy(np.unpackbits(words.view(np.uint8), bitorder="little"))
