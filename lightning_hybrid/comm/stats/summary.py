"""Summaries of communication: how much, for how long, and how much of that a step had to wait for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_hybrid.comm.stats.link_bytes import Traffic


@dataclass(frozen=True, kw_only=True)
class BucketSummary:
    """The counts and times of one bucket. Times are None where none was taken."""

    # The first six are as in its `BucketPlan`.
    index: int
    numel: int
    num_bytes: int
    dtype: str
    algorithm: str
    num_chunks: int
    traffic: Traffic = dataclasses.field(default_factory=Traffic)  # of one all-reduce of it
    num_times: int = 0  # how often it was averaged
    in_flight_s: float | None = (
        0.0  # from submit until averaged; buckets overlap: their sum may exceed `busy_s`
    )
    exposed_s: float | None = (
        0.0  # of the step's exposed time, from the end of the bucket done before it to its own
    )

    @property
    def contents(self) -> tuple[int, int, str, str, int, Traffic]:
        """The fields that are equal for the same bucket."""
        return self.index, self.numel, self.dtype, self.algorithm, self.num_chunks, self.traffic

    def __add__(self, other: BucketSummary) -> BucketSummary:
        return dataclasses.replace(
            self,
            num_times=self.num_times + other.num_times,
            in_flight_s=_sum(self.in_flight_s, other.in_flight_s),
            exposed_s=_sum(self.exposed_s, other.exposed_s),
        )


@dataclass(frozen=True, kw_only=True)
class CommSummary:
    """The communication of one rank since the last summary. Summaries of successive times add up.

    Times are of the wall clock, on CUDA of the device's, by events, from when a bucket's gradients are there; None
    where none was taken, as in summaries of older checkpoints.
    """

    num_steps: int = 0  # backward passes that were averaged
    num_buckets: int = 0
    num_bytes: int = 0  # submitted, as on the wire, before any algorithm multiplies them
    busy_s: float | None = 0.0  # with at least one bucket in flight
    exposed_s: float | None = (
        0.0  # not hidden: from the submit of a step's last bucket until all of the step are done
    )
    least_bytes_across: float = 0.0  # these three on the links of the busiest node, see `Traffic`
    bytes_across: float = 0.0
    bytes_inside: float = 0.0
    rounding_error: float = (
        0.0  # of a codec between nodes: sum of the squares of its errors, in a sample of blocks
    )
    rounded: float = 0.0  # the sum of the squares of what was rounded there
    buckets: tuple[BucketSummary, ...] = ()  # those averaged since, by index

    @property
    def exposed_by_bucket_s(self) -> dict[int, float]:
        """The exposed seconds of each bucket, by index, which is empty if no time was taken."""
        seconds: dict[int, float] = {}
        for bucket in self.buckets:
            if bucket.exposed_s is not None:
                seconds[bucket.index] = seconds.get(bucket.index, 0.0) + bucket.exposed_s
        return seconds

    @property
    def achieved_bytes_per_s(self) -> float | None:
        """Least bytes between nodes by the time in flight, or None on one node, or where no time was taken."""
        return (
            self.least_bytes_across / self.busy_s
            if self.busy_s and self.least_bytes_across
            else None
        )

    @property
    def quantisation_nmse(self) -> float | None:
        """Normalised mean squared error of a codec's rounding. None without a codec, after inf or nan, and on CUDA."""
        return self.rounding_error / self.rounded if self.rounded else None

    def __add__(self, other: CommSummary) -> CommSummary:
        buckets: dict[Any, BucketSummary] = {}
        for bucket in (*self.buckets, *other.buckets):
            seen = buckets.get(
                bucket.contents
            )  # a plan that changed makes another bucket of the same index
            buckets[bucket.contents] = bucket if seen is None else seen + bucket
        names = [field.name for field in dataclasses.fields(self) if field.name != "buckets"]
        sums: dict[str, Any] = {
            name: _sum(getattr(self, name), getattr(other, name)) for name in names
        }
        by_index = sorted(
            buckets.values(), key=lambda bucket: (bucket.index, bucket.numel, bucket.dtype)
        )
        return CommSummary(**sums, buckets=tuple(by_index))

    def state_dict(self) -> dict[str, Any]:
        """Return numbers, strings, lists and dictionaries only, for a checkpoint."""
        state = asdict(self)
        return {**state, "buckets": list(state["buckets"])}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> CommSummary:
        """Read what `state_dict` wrote.

        >>> one = CommSummary(buckets=(BucketSummary(index=0, numel=2, num_bytes=4, dtype="float16", algorithm="flat",
        ...                                          num_chunks=1),))
        >>> CommSummary.from_state_dict(one.state_dict()) == one
        True
        """
        buckets = (
            BucketSummary(**{**bucket, "traffic": Traffic(**bucket["traffic"])})
            for bucket in state["buckets"]
        )
        return cls(**{**state, "buckets": tuple(buckets)})


def _sum(one: float | None, other: float | None) -> float | None:
    return (
        None if one is None or other is None else one + other
    )  # a sum with an unknown part is unknown
