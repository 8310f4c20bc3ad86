"""Communication summaries, with traffic, times, and the time that backward does not hide."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_hybrid.comm.stats.link_bytes import Traffic


@dataclass(frozen=True, kw_only=True)
class BucketSummary:
    """Summary of one bucket's all-reduces, with the number of calls, the traffic and the times.

    Times are None if they were not measured.

    Args:
        index, numel, num_bytes, dtype, algorithm, num_chunks: As in the `BucketPlan`.
        traffic: Bytes of one all-reduce of the bucket.
        num_times: Number of times that the bucket was averaged.
        in_flight_s: Seconds from submission until the bucket is averaged. Buckets overlap, so the sum over buckets may
            exceed the `busy_s` of a `CommSummary`.
        exposed_s: Exposed time of the step that is attributed to the bucket, in seconds. It begins when the previous
            bucket is finished, and ends when this bucket is finished.
    """

    index: int
    numel: int
    num_bytes: int
    dtype: str
    algorithm: str
    num_chunks: int
    traffic: Traffic = dataclasses.field(default_factory=Traffic)
    num_times: int = 0
    in_flight_s: float | None = 0.0
    exposed_s: float | None = 0.0

    @property
    def contents(self) -> tuple[int, int, str, str, int, Traffic]:
        """Key that identifies the bucket when summaries are merged."""
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
    """Summary of one rank's communication since the previous summary.

    Summaries of successive periods can be added. Times are in seconds of wall-clock time. On CUDA, they are measured by
    events, from the moment when a bucket's gradients are available. Times that were not measured are None, as in
    summaries of older checkpoints.

    Args:
        num_steps: Number of backward passes whose gradients were averaged.
        num_buckets: Number of submitted buckets.
        num_bytes: Bytes submitted, in the wire dtype.
        busy_s: Time with at least one bucket in flight.
        exposed_s: Communication time that backward did not hide, from the submission of a step's last bucket until all
            buckets of the step are averaged.
        least_bytes_across, bytes_across, bytes_inside: Bytes on the links of the busiest node, as in `Traffic`.
        rounding_error: Sum of the squared errors of a codec between nodes, over a sample of blocks.
        rounded: Sum of the squares of the encoded values in the same sample.
        buckets: Summaries of the buckets that were averaged, by index.
    """

    num_steps: int = 0
    num_buckets: int = 0
    num_bytes: int = 0
    busy_s: float | None = 0.0
    exposed_s: float | None = 0.0
    least_bytes_across: float = 0.0
    bytes_across: float = 0.0
    bytes_inside: float = 0.0
    rounding_error: float = 0.0
    rounded: float = 0.0
    buckets: tuple[BucketSummary, ...] = ()

    @property
    def exposed_by_bucket_s(self) -> dict[int, float]:
        """Communication time in seconds that backward does not hide, by bucket index.

        The dictionary is empty if the time was not measured.
        """
        seconds: dict[int, float] = {}
        for bucket in self.buckets:
            if bucket.exposed_s is not None:
                seconds[bucket.index] = seconds.get(bucket.index, 0.0) + bucket.exposed_s
        return seconds

    @property
    def achieved_bytes_per_s(self) -> float | None:
        """Achieved bandwidth between nodes in bytes per second.

        The bandwidth is the minimum number of bytes that must be sent between nodes, divided by the time with a bucket
        in flight. It is None on one node, or if times were not measured.
        """
        if not self.busy_s or not self.least_bytes_across:
            return None
        return self.least_bytes_across / self.busy_s

    @property
    def quantization_nmse(self) -> float | None:
        """Normalized mean squared error of the codec's quantization.

        The value is None if no codec is used, if values were inf or nan, and on CUDA.
        """
        if not self.rounded:
            return None
        return self.rounding_error / self.rounded

    def __add__(self, other: CommSummary) -> CommSummary:
        # Buckets are matched by their contents, because another bucket has the same index after the plan changes.
        buckets: dict[Any, BucketSummary] = {}
        for bucket in (*self.buckets, *other.buckets):
            summary = bucket
            if bucket.contents in buckets:
                summary = buckets[bucket.contents] + bucket
            buckets[bucket.contents] = summary
        names = [field.name for field in dataclasses.fields(self) if field.name != "buckets"]
        sums: dict[str, Any] = {
            name: _sum(getattr(self, name), getattr(other, name)) for name in names
        }
        by_index = sorted(
            buckets.values(), key=lambda bucket: (bucket.index, bucket.numel, bucket.dtype)
        )
        return CommSummary(**sums, buckets=tuple(by_index))

    def state_dict(self) -> dict[str, Any]:
        """Return the summary as a dictionary of plain Python types, for a checkpoint."""
        state = asdict(self)
        return {**state, "buckets": list(state["buckets"])}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> CommSummary:
        """Create a summary from a dictionary that `state_dict` returned.

        >>> bucket = BucketSummary(index=0, numel=2, num_bytes=4, dtype="float16", algorithm="flat", num_chunks=1)
        >>> summary = CommSummary(buckets=(bucket,))
        >>> CommSummary.from_state_dict(summary.state_dict()) == summary
        True
        """
        buckets = (
            BucketSummary(**{**bucket, "traffic": Traffic(**bucket["traffic"])})
            for bucket in state["buckets"]
        )
        return cls(**{**state, "buckets": tuple(buckets)})


def _sum(first: float | None, second: float | None) -> float | None:
    if first is None or second is None:
        return None
    return first + second
