"""Sizes of DDP's buckets, of the chunks of a bucket, and of what nodes exchange whole. `plan.py` chooses algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

# Names of what ranks that share the update exchange in it, those of a node or all, in engine/node_exchange.py.
Exchange = Literal[
    "node_sum", "node_gather", "node_collect", "world_sum", "world_gather", "world_collect"
]
_EXCHANGES = get_args(Exchange)  # once: it is asked for each bucket

KIB = 1024
MIB = 1024 * KIB

# Size at which torch's DistributedDataParallel closes its first bucket.
DDP_FIRST_BUCKET_BYTES = MIB

# Chunks and parts of chunks begin at multiples of this many elements, which vector instructions find aligned.
ALIGNMENT = 16

# Up to here a rank sends all it has to every other rank across nodes: 4 nodes at 100 Mbit/s and 200 us took 2.5 ms for
# 4 KiB against 4.4 in two rounds and 6.5 in Gloo's ring; for 64 KiB, which is more than this, 18, 12 and 15 ms.
EXCHANGE_BYTES = 64 * KIB

# Up to here in two rounds: 4 nodes at 1 Gbit/s and 2 ms took 11 ms for 64 KiB against 29 in Gloo's ring. Far beyond it
# too, but at 100 Mbit/s and 200 us 44 ms against 40 for 256 KiB, and 679 against 518 for 4 MiB.
SCATTER_BYTES = 128 * KIB

Form = Literal["exchange", "scatter_gather", "ring"]


def between_nodes_form(num_ranks: int, num_bytes: float) -> Form:
    """Choose how ranks on `num_ranks` nodes, one on each, sum `num_bytes` over Gloo.

        exchange          1 round               every rank sends all it has to every other: fewest delays
        scatter_gather    2 rounds              every rank sums one part and sends it to all others
        ring              2 (n - 1) rounds      Gloo's own: a slow link is fullest with one flow at a time

    >>> [between_nodes_form(4, num_bytes) for num_bytes in (16 * KIB, 128 * KIB, 129 * KIB)]
    ['exchange', 'scatter_gather', 'ring']
    >>> between_nodes_form(2, 10**9)    # with one other rank an exchange moves no more bytes than a ring
    'exchange'
    """
    if num_ranks == 2 or (num_ranks - 1) * num_bytes <= EXCHANGE_BYTES:
        return "exchange"
    return "scatter_gather" if num_bytes <= SCATTER_BYTES else "ring"


def chunk_numels(numel: int, num_chunks: int, *, alignment: int = ALIGNMENT) -> list[int]:
    """Cut `numel` elements into at most `num_chunks` chunks, at least one, at multiples of `alignment`.

    Of four or more the first and the last have a quarter of the others.

    >>> chunk_numels(100, 3), chunk_numels(1600, 4), chunk_numels(0, 3)
    ([48, 48, 4], [160, 640, 640, 160], [0])
    """
    if not numel:
        return [0]
    # Short ends: while the first chunk is in its first stage, and the last in its last, no other stage has work.
    has_short_ends = num_chunks >= 4
    num_units = (
        4 * num_chunks - 6 if has_short_ends else num_chunks
    )  # ends are one unit long, others four
    end = middle = _rounded_up(-(-numel // num_units), alignment)
    if has_short_ends:
        middle = max(_rounded_up(-(-(numel - 2 * end) // (num_chunks - 2)), alignment), alignment)
    starts = [0, *range(end, numel, middle)]
    return [stop - start for start, stop in zip(starts, [*starts[1:], numel], strict=True)]


def _rounded_up(number: int, multiple_of: int) -> int:
    return -(-number // multiple_of) * multiple_of


def ddp_limits(bucket_bytes: int) -> tuple[int, int]:
    """Return the sizes at which DDP closes its first bucket, and each further one.

    >>> ddp_limits(25 * 2**20), ddp_limits(1000)
    ((1048576, 26214400), (1000, 1000))
    """
    return min(DDP_FIRST_BUCKET_BYTES, bucket_bytes), bucket_bytes


def ddp_buckets(tensor_bytes: Sequence[int], bucket_bytes: int) -> list[int]:
    """Return the bytes of DDP's buckets of tensors in this order (`compute_bucket_assignment_by_size`).

    A bucket is closed once it has its size, so most have more.

    >>> mib = 2**20
    >>> [size / mib for size in ddp_buckets([mib // 2, mib, 20 * mib, 20 * mib, 5 * mib], 25 * mib)]
    [1.5, 40.0, 5.0]
    """
    first, other_bytes = ddp_limits(bucket_bytes)
    caps: list[int] = []
    open_bytes = 0
    for size in tensor_bytes:
        open_bytes += size
        if open_bytes >= (other_bytes if caps else first):
            caps.append(open_bytes)
            open_bytes = 0
    return [*caps, open_bytes] if open_bytes else caps


def is_exchange(name: str) -> bool:
    """Return whether it names what ranks exchange in the update, and no all-reduce."""
    return name in _EXCHANGES


def words_of(name: str) -> str:
    """Say what carries a bucket, for errors.

    >>> words_of("two_level"), words_of("node_gather")
    ('two_level all-reduce', 'node_gather exchange')
    """
    return f"{name} exchange" if is_exchange(name) else f"{name} all-reduce"
