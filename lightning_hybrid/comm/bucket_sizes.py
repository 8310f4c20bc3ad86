"""Sizes of buckets and chunks.

DDP packs the gradients into buckets of these sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

KIB = 1024
MIB = 1024 * KIB

# Size at which torch's DistributedDataParallel closes its first bucket.
DDP_FIRST_BUCKET_BYTES = MIB

# Chunks and shards of chunks begin at multiples of this many elements, to be aligned for vector instructions.
ALIGNMENT = 16


def chunk_numels(numel: int, num_chunks: int, *, alignment: int = ALIGNMENT) -> list[int]:
    """Split `numel` elements into at most `num_chunks` chunks, and return the size of each chunk.

    Chunks begin at multiples of `alignment`. With four chunks or more, the first and the last chunk have a quarter of
    the size of the other chunks.

    >>> chunk_numels(100, 3), chunk_numels(1600, 4), chunk_numels(0, 3)
    ([48, 48, 4], [160, 640, 640, 160], [0])
    """
    if not numel:
        return [0]
    # The first and the last chunk are short, because the other stages are idle while the first chunk is in the first
    # stage and while the last chunk is in the last stage.
    has_short_ends = num_chunks >= 4
    num_units = num_chunks
    if has_short_ends:
        num_units = 4 * num_chunks - 6  # The ends are one unit long, and the others four units.
    end = _rounded_up(-(-numel // num_units), alignment)
    middle = end
    if has_short_ends:
        numel_of_middle = -(-(numel - 2 * end) // (num_chunks - 2))
        middle = max(_rounded_up(numel_of_middle, alignment), alignment)
    starts = [0, *range(end, numel, middle)]
    return [stop - start for start, stop in zip(starts, [*starts[1:], numel], strict=True)]


def _rounded_up(number: int, multiple_of: int) -> int:
    return -(-number // multiple_of) * multiple_of


def ddp_limits(bucket_bytes: int) -> tuple[int, int]:
    """Return the size limits in bytes of DDP's first bucket and of its later buckets.

    >>> ddp_limits(25 * 2**20), ddp_limits(1000)
    ((1048576, 26214400), (1000, 1000))
    """
    return min(DDP_FIRST_BUCKET_BYTES, bucket_bytes), bucket_bytes


def ddp_buckets(tensor_bytes: Sequence[int], bucket_bytes: int) -> list[int]:
    """Group tensors into buckets as DDP does, and return the size of each bucket in bytes.

    The rule is that of torch's `_compute_bucket_assignment_by_size`. DDP closes a bucket once it has reached the limit,
    so most buckets exceed the limit.

    >>> mib = 2**20
    >>> [size / mib for size in ddp_buckets([mib // 2, mib, 20 * mib, 20 * mib, 5 * mib], 25 * mib)]
    [1.5, 40.0, 5.0]
    """
    limit, later_limit = ddp_limits(bucket_bytes)
    sizes: list[int] = []
    open_bytes = 0
    for size in tensor_bytes:
        open_bytes += size
        if open_bytes >= limit:
            sizes.append(open_bytes)
            open_bytes = 0
            limit = later_limit
    if open_bytes > 0:
        sizes.append(open_bytes)
    return sizes
