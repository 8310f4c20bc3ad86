"""Seconds of messages over Gloo: its ring, and our direct messages.

Gloo asks for consent: a message leaves only when its receiver has said that it waits for it. The cost depends:

    direct (gloo_p2p.py)        receivers wait from the start, all messages are on their way at once:
                                consent and data, 2 latencies per round
    Gloo's ring                 every rank passes on 2 (P - 1) chunks in two or more segments; two segments may be
                                on their way, and an arrival gives the consent for the next. So a segment takes t,
                                its time on the wire, where that hides the consent, else latency + t / 2:

        segments * max(t, latency + t / 2)          = 4 (P - 1) latencies for few bytes
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_hybrid.checks import require_number, require_positive, require_share
from lightning_hybrid.planning.cost import Link

# Gloo cuts a chunk of its ring in two, and further where a segment would be larger than this (gloo/allreduce.cc).
SEGMENTS_OF_CHUNK = 2
MOST_SEGMENT_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Gloo:
    """The costs of Gloo and of our Python threads per rank, on hosts without accelerators.

    Args:
        stage_s: Processor time of one rank for one stage of an algorithm: waking its thread, finding the tensor.
        message_s: Processor time at either end of one of our messages.
        segment_s: Processor time at either end of one segment of Gloo's ring.
        ring_share: The part of a link that one ring fills; several rings at the same time fill it up.
        wire_share: The part of a link's rate that is payload; the rest are headers and acknowledgements.
        burst_bytes: Bytes that switches store before they pass them on: a message waits for its last burst twice.
        num_shared_cores: None, or the cores that all ranks of all nodes share, where one machine emulates them.
    """

    stage_s: float
    message_s: float
    segment_s: float
    ring_share: float = 1.0
    wire_share: float = 1.0
    burst_bytes: float = 0.0
    num_shared_cores: int | None = None

    def __post_init__(self) -> None:
        for name in ("stage_s", "message_s", "segment_s", "burst_bytes"):
            require_number(name, getattr(self, name), "it is a cost of the host or the switch, 0 where there is none")
        require_share("ring_share", self.ring_share, "it is how much of a link one ring fills")
        require_share("wire_share", self.wire_share, "it is how much of a link's rate is payload")
        if self.num_shared_cores is not None:
            require_positive("num_shared_cores", self.num_shared_cores, "emulated ranks run on something")

    def work_s(self, seconds: float, *, of_busiest: float, of_all: float) -> float:
        """Compute the time of work: `seconds` per unit, by units of the busiest rank and of all ranks together.

        >>> Gloo(stage_s=0, message_s=0, segment_s=0, num_shared_cores=2).work_s(1.0, of_busiest=3, of_all=10)
        5.0
        """
        # In an emulated cluster all ranks share few cores: the work of all of them over these cores is a lower limit.
        shared = 0.0 if self.num_shared_cores is None else of_all / self.num_shared_cores
        return seconds * max(of_busiest, shared)

    def latency_s(self, link: Link, num_bytes: float) -> float:
        """Compute the time of one message beyond its bytes on the wire."""
        # A switch stores a burst before it passes it on, so that a message waits for its last burst twice.
        return link.latency_s + min(num_bytes, self.burst_bytes) / link.bytes_per_s

    def wait_of_ring_s(self, num_bytes: float, num_ranks: int, link: Link) -> float:
        """Compute the time of a ring beyond its bytes at the link's rate: the consents that the wire does not hide.

        >>> gloo = Gloo(stage_s=0, message_s=0, segment_s=0)
        >>> gloo.wait_of_ring_s(0, 8, Link(latency_s=2e-3, bytes_per_s=1e8)) == 4 * 7 * 2e-3
        True
        """
        if num_ranks == 1:
            return 0.0
        num_segments = segments_of_ring(num_bytes, num_ranks)
        segment = 2 * (num_ranks - 1) / num_ranks * num_bytes / num_segments
        on_wire_s = segment / (link.bytes_per_s * self.wire_share)
        # segments * (max(t, latency + t / 2) - t): the wire's own time is counted elsewhere.
        return num_segments * max(0.0, self.latency_s(link, segment) - on_wire_s / 2)


def segments_of_ring(num_bytes: float, num_ranks: int) -> int:
    """Count the segments that each rank passes on in one all-reduce.

    >>> segments_of_ring(8 * 2**20, 4), segments_of_ring(64 * 2**20, 4)
    (12, 96)
    """
    in_chunk = max(SEGMENTS_OF_CHUNK, math.ceil(num_bytes / num_ranks / MOST_SEGMENT_BYTES))
    return 2 * (num_ranks - 1) * in_chunk
