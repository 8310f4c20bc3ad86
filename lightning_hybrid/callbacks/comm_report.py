"""A run's communication in numbers: for loggers, for `summary.json` and as one line of text."""

from __future__ import annotations

from typing import Any

from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.comm.stats.summary import BucketSummary, CommSummary


def byte_metrics(comm: CommSummary) -> dict[str, float]:
    """Return bytes per step, those between nodes only where there are several; and what a codec there lost."""
    if not comm.num_steps:
        return {}
    values = {
        m.COMM_BYTES: comm.num_bytes / comm.num_steps,
        m.COMM_NODE_BYTES: comm.bytes_inside / comm.num_steps,
    }
    if comm.least_bytes_across:
        values[m.COMM_LINK_BYTES] = comm.bytes_across / comm.num_steps
        values[m.COMM_LEAST_LINK_BYTES] = comm.least_bytes_across / comm.num_steps
    if comm.quantisation_nmse is not None:
        values[m.COMM_QUANTISATION_NMSE] = comm.quantisation_nmse
    return values


def clock_metrics(
    comm: CommSummary, *, elapsed_s: float, link_bytes_per_s: float | None
) -> dict[str, float]:
    """Return seconds per step and the achieved rate of the link; nothing where no time was measured.

    `elapsed_s`: time of these steps in all; `link_bytes_per_s`: rate of a node's link, None: not known.
    """
    if not comm.num_steps or comm.busy_s is None or comm.exposed_s is None:
        return {}
    values = {
        m.COMM_BUSY_S: comm.busy_s / comm.num_steps,
        m.COMM_EXPOSED_S: comm.exposed_s / comm.num_steps,
        m.COMM_EXPOSED_SHARE: comm.exposed_s / elapsed_s,
    }
    for index, exposed_s in comm.exposed_by_bucket_s.items():
        values[m.with_index(m.COMM_EXPOSED_S, index)] = exposed_s / comm.num_steps
    achieved = comm.achieved_bytes_per_s
    if achieved is not None:
        values[m.COMM_ACHIEVED_BYTES_PER_S] = achieved
        if link_bytes_per_s is not None:
            values[m.COMM_ACHIEVED_SHARE] = achieved / link_bytes_per_s
    return values


def as_json(comm: CommSummary, *, link_bytes_per_s: float | None) -> dict[str, Any]:
    """Return the section of `summary.json` on all steps; None where a time was not measured, or with one node only."""
    same = (
        "num_steps",
        "num_buckets",
        "num_bytes",
        "quantisation_nmse",
        "busy_s",
        "exposed_s",
        "achieved_bytes_per_s",
    )
    return {
        **{name: getattr(comm, name) for name in same},
        "link_bytes": comm.bytes_across,
        "least_link_bytes": comm.least_bytes_across,
        "node_bytes": comm.bytes_inside,
        "exposed_s_per_step": _ratio(comm.exposed_s, comm.num_steps),
        "link_bytes_per_s": link_bytes_per_s,
        "achieved_share": _ratio(comm.achieved_bytes_per_s, link_bytes_per_s),
        "per_bucket": [_bucket(bucket, link_bytes_per_s) for bucket in comm.buckets],
    }


def _bucket(bucket: BucketSummary, link_bytes_per_s: float | None) -> dict[str, Any]:
    in_flight_s = _ratio(bucket.in_flight_s, bucket.num_times)
    least = bucket.traffic.least_across
    achieved = least / in_flight_s if in_flight_s and least else None
    same = ("index", "numel", "dtype", "num_bytes", "algorithm", "num_chunks", "num_times")
    return {
        **{name: getattr(bucket, name) for name in same},
        "link_bytes": bucket.traffic.across,
        "least_link_bytes": least,
        "node_bytes": bucket.traffic.inside,
        "mean_exposed_s": _ratio(bucket.exposed_s, bucket.num_times),
        "mean_in_flight_s": in_flight_s,
        "achieved_bytes_per_s": achieved,
        "achieved_share": _ratio(achieved, link_bytes_per_s),
    }


def describe(
    comm: CommSummary | None,
    *,
    exposed_s: float | None = None,
    exposed_share: float | None = None,
    link_bytes_per_s: float | None = None,
) -> str:
    """Format the summary as one line of text.

    Args:
        comm: all steps; None: not measured.
        exposed_s: exposed seconds per step without the first steps of a run; None: the mean of all steps is shown.
        exposed_share: the same as a share of the step.
        link_bytes_per_s: rate of a node's link; None: not known.

    >>> comm = CommSummary(num_steps=2, num_buckets=2, num_bytes=2_000_000, busy_s=1.0, exposed_s=0.1,
    ...                    least_bytes_across=2e6, bytes_across=3e6)
    >>> describe(comm, exposed_s=0.05, exposed_share=0.05, link_bytes_per_s=4e6)
    '50 ms exposed per logged step (5.0 %), 1.5 MB per node and step, 2 MB/s = 50 % of the link'
    >>> describe(CommSummary(num_steps=1, num_buckets=1, num_bytes=8))
    '0 ms exposed per step, none between nodes'
    """
    if comm is None or not comm.num_steps:
        return "not measured"
    steps = "logged step"
    if exposed_s is None:
        steps = "step"
        exposed_s = _ratio(comm.exposed_s, comm.num_steps)
    achieved = comm.achieved_bytes_per_s
    share = "" if exposed_share is None else f" ({100 * exposed_share:.1f} %)"
    parts = [
        "time not measured"
        if exposed_s is None
        else f"{1e3 * exposed_s:.3g} ms exposed per {steps}{share}"
    ]
    across = comm.bytes_across / comm.num_steps
    parts.append(f"{across / 1e6:.3g} MB per node and step" if across else "none between nodes")
    if achieved is not None:
        of_link = (
            ""
            if link_bytes_per_s is None
            else f" = {100 * achieved / link_bytes_per_s:.3g} % of the link"
        )
        parts.append(f"{achieved / 1e6:.3g} MB/s{of_link}")
    return ", ".join(parts)


def _ratio(total: float | None, by: float | None) -> float | None:
    return None if total is None or not by else total / by
