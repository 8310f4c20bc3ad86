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

import torch
from torch import Tensor

NUM_BITS = 64
NUM_SEAL_ELEMENTS = 2 * NUM_BITS


class OrderHash:
    """64 bits that differ where two sequences of records do.

    >>> one, other = OrderHash(), OrderHash()
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


def attach_seal(flat: Tensor, value: int) -> Tensor:
    """A copy of ``flat`` (1-D) with the seal behind it: ``NUM_SEAL_ELEMENTS`` elements more.

    >>> attach_seal(torch.tensor([7.0]), 1)[:3].tolist(), attach_seal(torch.tensor([7.0]), 1)[65:67].tolist()
    ([7.0, 1.0, 0.0], [0.0, 1.0])
    """
    sealed = flat.new_empty(flat.numel() + NUM_SEAL_ELEMENTS)
    sealed[: flat.numel()].copy_(flat)
    sealed[flat.numel() :].copy_(_elements(value))
    return sealed


def broken_seal(sealed: Tensor, value: int) -> Tensor:
    """Whether the seal of a sum says that some rank's differs from ``value``: a boolean, on the tensor's device.

    >>> two_alike = attach_seal(torch.zeros(3), 5) + attach_seal(torch.zeros(3), 5)
    >>> broken_seal(two_alike, 5), broken_seal(attach_seal(torch.zeros(3), 5) + attach_seal(torch.zeros(3), 4), 5)
    (tensor(False), tensor(True))
    """
    own_is_zero = _elements(value).logical_not().to(sealed.device, non_blocking=True)
    return (sealed[-NUM_SEAL_ELEMENTS:].ne(0) & own_is_zero).any()


def _elements(value: int) -> Tensor:
    bits = torch.tensor([value >> index & 1 for index in range(NUM_BITS)], dtype=torch.uint8)
    return torch.cat([bits, 1 - bits])
