"""The buckets that torch's DistributedDataParallel makes by itself: `compute_bucket_assignment_by_size`."""

from __future__ import annotations

from collections.abc import Sequence

DDP_FIRST_BUCKET_BYTES = 2**20


def ddp_limits(bucket_bytes: int) -> tuple[int, int]:
    """Return the sizes at which the first bucket is closed, and each further one.

    >>> ddp_limits(25 * 2**20), ddp_limits(1000)
    ((1048576, 26214400), (1000, 1000))
    """
    return min(DDP_FIRST_BUCKET_BYTES, bucket_bytes), bucket_bytes


def ddp_buckets(tensor_bytes: Sequence[int], bucket_bytes: int) -> list[int]:
    """Return the bytes of the buckets of tensors in this order: one is closed once it has its size, so most have more.

    >>> mib = 2**20
    >>> [size / mib for size in ddp_buckets([mib // 2, mib, 20 * mib, 20 * mib, 5 * mib], 25 * mib)]
    [1.5, 40.0, 5.0]
    """
    first, other = ddp_limits(bucket_bytes)
    caps: list[int] = []
    open_bytes = 0
    for size in tensor_bytes:
        open_bytes += size
        if open_bytes >= (other if caps else first):
            caps.append(open_bytes)
            open_bytes = 0
    return [*caps, open_bytes] if open_bytes else caps
