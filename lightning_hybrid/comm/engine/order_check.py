"""The check that every rank submits the same tensors in the same order.

Gloo matches collectives by order of arrival and nothing else: two ranks that submit two buckets of equal size in
different order get sums of different buckets, without a word. So every rank keeps a rolling hash of what it submitted,
and its 64 bits b travel at the end of the last bucket of a step, as a checksum of 128 elements 0 or 1:

    copy = [tail of the bucket | b | 1 - b]        summed over ranks        sum == 0 wherever own element is 0

Where two ranks differ in a bit, each finds a 1 of the other's where its own element is 0, and so does every rank that
agrees with either. Sums of zeros are exact, in any dtype. It costs no message of its own, but a copy of one chunk.

On CUDA it would be a message of its own. There ranks compare their hashes in some of the steps, through the store.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque

import numpy as np
import torch
from torch import Tensor

from lightning_hybrid.comm.plan import BucketPlan

NUM_BITS = 64
NUM_CHECKSUM_ELEMENTS = 2 * NUM_BITS
_MASK = (1 << NUM_BITS) - 1

# How many records of buckets a rank remembers, to say where it went another way than others.
NUM_RECENT = 64

# On CUDA ranks compare what is new, as everywhere, the first steps, and later ones more and more rarely. The order
# changes where DistributedDataParallel rebuilds its buckets, after the first step, or where somebody changes the plan.
# The hash is of all steps so far, so that none is left out.
NUM_COMPARED_STEPS = 8
MOST_STEPS_BETWEEN = 1024

# A pool has copies of so many sizes; before DistributedDataParallel rebuilds its buckets there are two.
MOST_SIZES_IN_POOL = 4


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
        """Append a record."""
        # The hash so far is the key, so that the order of records counts. Not `hash()`: Python salts that.
        digest = hashlib.blake2b(
            record.encode(), digest_size=8, key=self.value.to_bytes(8, "little")
        ).digest()
        self.value = int.from_bytes(digest, "little")


class BucketOrder:
    """The buckets submitted so far, in order. `value`: hash of all of them."""

    def __init__(self) -> None:
        self.num_submitted = self.num_steps = self.value = 0
        self.recent: deque[str] = deque(maxlen=NUM_RECENT)
        self._all = RollingHash()
        self._step = RollingHash()
        self._known: set[int] = set()  # hashes of the beginnings of steps

    def add(self, bucket: BucketPlan, *, is_last: bool, reduction: str = "") -> str | None:
        """Append a bucket, and how it is reduced. Returns its record if no step began like this before, else None.

        >>> bucket = BucketPlan(index=0, numel=4, num_bytes=16, dtype="float32", algorithm="flat", num_chunks=1)
        >>> order = BucketOrder()
        >>> order.add(bucket, is_last=True)
        'bucket 0 (4 x float32, flat x 1), the last'
        >>> order.add(bucket, is_last=True) is None
        True
        """
        record = f"bucket {bucket.index} ({bucket.numel} x {bucket.dtype}, {bucket.algorithm} x {bucket.num_chunks})"
        if is_last:
            record += ", the last"
        record += reduction
        self.num_submitted += 1
        self.recent.append(record)
        self._all.add(record)
        self._step.add(record)
        self.value = self._all.value
        is_new = self._step.value not in self._known  # else it was compared in an earlier step
        self._known.add(self._step.value)
        if is_last:
            self._step = RollingHash()
            self.num_steps += 1
        return record if is_new else None

    @property
    def is_step_to_compare(self) -> bool:
        """True if ranks compare the last step through the store.

        >>> order = BucketOrder()
        >>> steps = []
        >>> for order.num_steps in range(1, 3000):
        ...     if order.is_step_to_compare:
        ...         steps.append(order.num_steps)
        >>> steps
        [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
        """
        if self.num_steps <= NUM_COMPARED_STEPS or self.num_steps % MOST_STEPS_BETWEEN == 0:
            return True
        is_power_of_two = self.num_steps & (self.num_steps - 1) == 0
        return is_power_of_two and self.num_steps < MOST_STEPS_BETWEEN


class ChecksummedCopy:
    """Memory for a copy of a tensor with a checksum behind it, to be filled again and again.

    `whole`: what is to be summed, `numel + NUM_CHECKSUM_ELEMENTS` elements of `dtype`.

    >>> equal = [ChecksummedCopy(3, torch.float32) for _ in range(2)]
    >>> for copy in equal: copy.fill(torch.ones(3), 5)
    >>> _ = equal[0].whole.add_(equal[1].whole)
    >>> equal[0].is_wrong(5), equal[0].is_wrong(4), equal[0].body
    (False, True, tensor([2., 2., 2.]))
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.whole = torch.empty(numel + NUM_CHECKSUM_ELEMENTS, dtype=dtype)
        self.body = self.whole[:numel]
        self._checksum = self.whole[numel:]

    def fill(self, flat: Tensor, value: int) -> None:
        """Copy `flat` and put the checksum of `value` behind it."""
        self.body.copy_(flat)
        self._checksum.copy_(_elements(value))

    def is_wrong(self, value: int) -> bool:
        """Return whether the checksum of some rank was not that of `value`."""
        # The ones of other ranks where the own element is 0 are counted: no term is negative, so none hides another.
        return bool(self._checksum.dot(_elements(~value).to(self._checksum.dtype)))


class CopyPool:
    """Copies that are not in use, by size and dtype: fresh pages of memory cost more than the copy itself."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[ChecksummedCopy]] = {}
        self._lock = threading.Lock()

    def take(self, part: Tensor, value: int) -> ChecksummedCopy:
        """Return a copy of `part` with the checksum of `value` behind it."""
        with self._lock:
            free = self._free.get((part.numel(), part.dtype))
            copy = free.pop() if free else None
        copy = copy or ChecksummedCopy(part.numel(), part.dtype)
        copy.fill(part, value)
        return copy

    def give_back(self, copy: ChecksummedCopy) -> None:
        """Take a copy back."""
        key = copy.body.numel(), copy.body.dtype
        with self._lock:
            # Sizes change with the plan and when DDP rebuilds its buckets: old ones must not stay for good.
            if key not in self._free and len(self._free) >= MOST_SIZES_IN_POOL:
                self._free.clear()
            self._free.setdefault(key, []).append(copy)


def _elements(value: int) -> Tensor:
    """Return the 64 lowest bits of `value`, lowest first, and their complements, as `uint8`.

    >>> _elements(1)[:3].tolist(), _elements(1)[64:67].tolist()
    ([1, 0, 0], [0, 1, 1])
    """
    words = np.array([value & _MASK, ~value & _MASK], dtype="<u8")
    return torch.from_numpy(np.unpackbits(words.view(np.uint8), bitorder="little"))
