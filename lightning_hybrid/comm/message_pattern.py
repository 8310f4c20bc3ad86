"""Choice of the message pattern of all-reduces between nodes."""

from __future__ import annotations

from typing import Literal

from lightning_hybrid.comm.bucket_sizes import KIB

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
