"""Sizes of DDP's buckets and of their chunks, and the message pattern of reductions between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

# Names of the exchanges in a sharded update, over the ranks of a node or over all ranks (engine/node_exchange.py).
Exchange = Literal[
    "node_sum", "node_gather", "node_collect", "world_sum", "world_gather", "world_collect"
]
_EXCHANGES = get_args(Exchange)

KIB = 1024
MIB = 1024 * KIB

# Size at which torch's DistributedDataParallel closes its first bucket.
DDP_FIRST_BUCKET_BYTES = MIB

# Chunks and shards of chunks begin at multiples of this many elements, so that vector instructions find them aligned.
ALIGNMENT = 16

# Bytes that a rank sends in total, up to which it sends its tensor to every other rank ("exchange"). On 4 nodes at
# 100 Mbit/s and 200 us, 4 KiB took 2.5 ms, against 4.4 ms in two rounds and 6.5 ms in Gloo's ring. For 64 KiB, which
# exceed the limit there, the times were 18, 12 and 15 ms.
EXCHANGE_BYTES = 64 * KIB

# Bytes up to which a reduction takes two rounds ("scatter_gather"). On 4 nodes at 1 Gbit/s and 2 ms, 64 KiB took 11 ms,
# against 29 ms in Gloo's ring, and two rounds were also faster for far larger tensors. At 100 Mbit/s and 200 us they
# were slower: 44 ms against 40 ms for 256 KiB, and 679 ms against 518 ms for 4 MiB.
SCATTER_BYTES = 128 * KIB

Form = Literal["exchange", "scatter_gather", "ring"]


def between_nodes_form(num_ranks: int, num_bytes: float) -> Form:
    """Return the communication pattern that all-reduces `num_bytes` over `num_ranks` ranks on different nodes.

        exchange          1 round               every rank sends its tensor to every other rank: lowest latency
        scatter_gather    2 rounds              every rank reduces one shard and sends it to all others
        ring              2 (n - 1) rounds      Gloo's own ring: one flow at a time uses a slow link best

    >>> [between_nodes_form(4, num_bytes) for num_bytes in (16 * KIB, 128 * KIB, 129 * KIB)]
    ['exchange', 'scatter_gather', 'ring']
    >>> between_nodes_form(2, 10**9)    # with one other rank an exchange moves no more bytes than a ring
    'exchange'
    """
    if num_ranks == 2 or (num_ranks - 1) * num_bytes <= EXCHANGE_BYTES:
        return "exchange"
    return "scatter_gather" if num_bytes <= SCATTER_BYTES else "ring"


def chunk_numels(numel: int, num_chunks: int, *, alignment: int = ALIGNMENT) -> list[int]:
    """Split `numel` elements into at most `num_chunks` chunks, and return the size of each chunk.

    Chunks begin at multiples of `alignment`. With four chunks or more, the first and the last chunk have a quarter of
    the size of the other chunks.

    >>> chunk_numels(100, 3), chunk_numels(1600, 4), chunk_numels(0, 3)
    ([48, 48, 4], [160, 640, 640, 160], [0])
    """
    if not numel:
        return [0]
    # The first and last chunk are short, because no other stage has work while the first one is in its first stage and
    # the last one in its last stage.
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
    """Return the sizes in bytes at which DDP closes its first bucket and each later bucket.

    >>> ddp_limits(25 * 2**20), ddp_limits(1000)
    ((1048576, 26214400), (1000, 1000))
    """
    return min(DDP_FIRST_BUCKET_BYTES, bucket_bytes), bucket_bytes


def ddp_buckets(tensor_bytes: Sequence[int], bucket_bytes: int) -> list[int]:
    """Return the sizes in bytes of the buckets into which DDP groups tensors of the given sizes.

    This is the rule of torch's `_compute_bucket_assignment_by_size`. DDP closes a bucket once it has reached the limit,
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


def is_exchange(name: str) -> bool:
    """Return whether `name` names a collective of a sharded update rather than an all-reduce algorithm."""
    return name in _EXCHANGES


def words_of(name: str) -> str:
    """Return the name of an algorithm with its kind, such as `two_level all-reduce`, for error messages.

    >>> words_of("two_level"), words_of("node_gather")
    ('two_level all-reduce', 'node_gather exchange')
    """
    if is_exchange(name):
        return f"{name} exchange"
    return f"{name} all-reduce"
