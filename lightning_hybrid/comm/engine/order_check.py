"""Verification that all ranks submit the same buckets in the same order.

Gloo matches collectives only by their order. If two ranks submit two buckets of equal size in different order, Gloo
silently adds different buckets. To detect this, every rank computes a rolling hash of the buckets that it has
submitted. The 64 bits b of the hash are appended to the last bucket of a step, as a checksum of 128 elements that are
0 or 1:

    copy = [tail of the bucket | b | 1 - b]        summed over ranks        sum == 0 where this rank's element is 0

If two ranks differ in a bit, every rank finds a non-zero sum at a position where its own element is 0. Sums of zeros
are exact in any dtype. The check does not need an additional message, but it copies one chunk.

On CUDA, an additional message would be needed. Instead, ranks compare their hashes through the store in some steps.
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

# Number of recent buckets that a rank stores, so that an error can name the first difference.
NUM_RECENT = 64

# On CUDA, ranks compare new buckets, the first steps, and later steps at growing intervals. The order changes when
# DistributedDataParallel rebuilds its buckets after the first step, or when the plan changes. The hash covers all
# previous steps, so every difference is detected eventually.
NUM_COMPARED_STEPS = 8
MOST_STEPS_BETWEEN = 1024

# Maximum number of different sizes of buffers in a pool. Two sizes are in use before DistributedDataParallel rebuilds
# its buckets.
MOST_SIZES_IN_POOL = 4


class RollingHash:
    """64-bit rolling hash of a sequence of strings, which also depends on the order of the strings.

    >>> first, second = RollingHash(), RollingHash()
    >>> for record in ("a", "b"): first.add(record)
    >>> for record in ("b", "a"): second.add(record)
    >>> first.value == second.value
    False
    """

    def __init__(self) -> None:
        self.value = 0

    def add(self, record: str) -> None:
        """Update the hash with one more record."""
        # The previous hash is the key, so that the result depends on the order of records. Python's `hash()` differs
        # between processes.
        digest = hashlib.blake2b(
            record.encode(), digest_size=8, key=self.value.to_bytes(8, "little")
        ).digest()
        self.value = int.from_bytes(digest, "little")


class BucketOrder:
    """History of the submitted buckets, with a hash that ranks compare.

    Attributes:
        num_submitted: Number of submitted buckets.
        num_steps: Number of finished steps.
        value: Hash of all submitted buckets.
        recent: Records of the latest buckets, oldest first.
    """

    def __init__(self) -> None:
        self.num_submitted = 0
        self.num_steps = 0
        self.value = 0
        self.recent: deque[str] = deque(maxlen=NUM_RECENT)
        self._all = RollingHash()
        self._step = RollingHash()
        # Hashes of the bucket sequences with which steps have begun.
        self._compared: set[int] = set()

    def add(self, bucket: BucketPlan, *, is_last: bool, reduction: str = "") -> str | None:
        """Record a submitted bucket, and return the record if ranks must compare the bucket, or None otherwise.

        Ranks must compare a bucket if no earlier step began with the same buckets.

        Args:
            bucket: Plan of the bucket.
            is_last: Whether this is the last bucket of its step.
            reduction: Description of the reduction, appended to the record.

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
        is_new = self._step.value not in self._compared
        self._compared.add(self._step.value)
        if is_last:
            self._step = RollingHash()
            self.num_steps += 1
        if is_new:
            return record
        return None

    @property
    def is_step_to_compare(self) -> bool:
        """True if ranks must compare the buckets of the latest step through the store.

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
    """Reusable buffer for a copy of a tensor that is followed by a checksum.

    Attributes:
        whole: Tensor to all-reduce, with `numel + NUM_CHECKSUM_ELEMENTS` elements of `dtype`.
        body: Copy of the tensor, a view of `whole`.

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
        """Copy the tensor `flat` into the buffer, and append the checksum of the number `value`."""
        self.body.copy_(flat)
        self._checksum.copy_(_elements(value))

    def is_wrong(self, value: int) -> bool:
        """Return whether the all-reduced checksum reveals a different checksum on another rank.

        `value` is the number from which this rank's checksum was computed.
        """
        # This counts the ones of other ranks at positions where this rank's element is 0. They cannot cancel out,
        # because no element is negative.
        return bool(self._checksum.dot(_elements(~value).to(self._checksum.dtype)))


class CopyPool:
    """Pool of reusable `ChecksummedCopy` buffers, by size and dtype.

    Allocating new memory pages would cost more time than the copy itself.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[ChecksummedCopy]] = {}
        self._lock = threading.Lock()

    def take(self, part: Tensor, value: int) -> ChecksummedCopy:
        """Take a buffer from the pool, and fill it with a tensor and the checksum of `value`."""
        copy = None
        with self._lock:
            free = self._free.get((part.numel(), part.dtype))
            if free:
                copy = free.pop()
        if copy is None:
            copy = ChecksummedCopy(part.numel(), part.dtype)
        copy.fill(part, value)
        return copy

    def give_back(self, copy: ChecksummedCopy) -> None:
        """Return a buffer to the pool for reuse."""
        key = (copy.body.numel(), copy.body.dtype)
        with self._lock:
            # Sizes change when the plan changes and when DDP rebuilds its buckets. Buffers of old sizes must not stay
            # in memory forever.
            if key not in self._free and len(self._free) >= MOST_SIZES_IN_POOL:
                self._free.clear()
            self._free.setdefault(key, []).append(copy)


def _elements(value: int) -> Tensor:
    """Return the 64 lowest bits of `value`, followed by their complements, as a `uint8` tensor.

    The lowest bit comes first.

    >>> _elements(1)[:3].tolist(), _elements(1)[64:67].tolist()
    ([1, 0, 0], [0, 1, 1])
    """
    words = np.array([value & _MASK, ~value & _MASK], dtype="<u8")
    return torch.from_numpy(np.unpackbits(words.view(np.uint8), bitorder="little"))
