"""Computation of bucket and chunk sizes, and choice of the message pattern between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

# Names of the collectives of a sharded update, over the ranks of a node or over all ranks (engine/node_exchange.py).
Exchange = Literal[
    "node_sum", "node_gather", "node_collect", "world_sum", "world_gather", "world_collect"
]
_EXCHANGES = get_args(Exchange)

KIB = 1024
MIB = 1024 * KIB

# Size at which torch's DistributedDataParallel closes its first bucket.
DDP_FIRST_BUCKET_BYTES = MIB

# Chunks and shards of chunks begin at multiples of this many elements, to be aligned for vector instructions.
ALIGNMENT = 16

# A rank sends its tensor to every other rank ("exchange") if it sends at most this many bytes in total. On 4 nodes at
# 100 Mbit/s and 200 us, 4 KiB took 2.5 ms, against 4.4 ms in two rounds and 6.5 ms in Gloo's ring. A tensor of 64 KiB,
# which exceeds the limit there, took 18, 12 and 15 ms.
EXCHANGE_BYTES = 64 * KIB

# A reduction of up to this many bytes takes two rounds ("scatter_gather"). On 4 nodes at 1 Gbit/s and 2 ms, 64 KiB took
# 11 ms, against 29 ms in Gloo's ring, and two rounds were also faster for far larger tensors. At 100 Mbit/s and 200 us,
# two rounds were slower: 44 ms against 40 ms for 256 KiB, and 679 ms against 518 ms for 4 MiB.
SCATTER_BYTES = 128 * KIB

Form = Literal["exchange", "scatter_gather", "ring"]


def between_nodes_form(num_ranks: int, num_bytes: float) -> Form:
    """Choose the message pattern of an all-reduce over `num_ranks` ranks on different nodes.

        exchange          1 round               every rank sends its tensor to every other rank: lowest latency
        scatter_gather    2 rounds              every rank reduces one shard and sends it to all other ranks
        ring              2 (n - 1) rounds      Gloo's own ring: a single flow makes the best use of a slow link

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


def is_exchange(name: str) -> bool:
    """Return whether `name` is a collective of a sharded update rather than an all-reduce algorithm."""
    return name in _EXCHANGES


def words_of(name: str) -> str:
    """Describe an algorithm for error messages, such as `two_level all-reduce`.

    >>> words_of("two_level"), words_of("node_gather")
    ('two_level all-reduce', 'node_gather exchange')
    """
    if is_exchange(name):
        return f"{name} exchange"
    return f"{name} all-reduce"
