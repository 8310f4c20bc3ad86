"""Formatting of communication metrics for loggers, for `summary.json` and as one line of text."""

from __future__ import annotations

from typing import Any

from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.comm.stats.summary import BucketSummary, CommSummary


def byte_metrics(comm: CommSummary) -> dict[str, float]:
    """Return the number of bytes communicated per step, as metrics for loggers.

    If there are several nodes, the metrics include the bytes sent between nodes. If a codec is
    used, they include its quantization error.
    """
    if not comm.num_steps:
        return {}
    values = {
        m.COMM_BYTES: comm.num_bytes / comm.num_steps,
        m.COMM_NODE_BYTES: comm.bytes_inside / comm.num_steps,
    }
    if comm.least_bytes_across:
        values[m.COMM_LINK_BYTES] = comm.bytes_across / comm.num_steps
        values[m.COMM_LEAST_LINK_BYTES] = comm.least_bytes_across / comm.num_steps
    if comm.quantization_nmse is not None:
        values[m.COMM_QUANTIZATION_NMSE] = comm.quantization_nmse
    return values


def clock_metrics(
    comm: CommSummary, *, elapsed_s: float, link_bytes_per_s: float | None
) -> dict[str, float]:
    """Return the communication time per step and the achieved link bandwidth, as metrics for loggers.

    Times are in seconds. If no times were measured, the result is empty.

    Args:
        comm: Communication summary of some steps.
        elapsed_s: Duration of these steps, in seconds.
        link_bytes_per_s: Bandwidth of a node's link, or None if it is unknown.
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
    """Return the communication section of `summary.json` as a dictionary.

    Values that were not measured, or that need several nodes, are None.
    """
    return {
        "num_steps": comm.num_steps,
        "num_buckets": comm.num_buckets,
        "num_bytes": comm.num_bytes,
        "quantization_nmse": comm.quantization_nmse,
        "busy_s": comm.busy_s,
        "exposed_s": comm.exposed_s,
        "achieved_bytes_per_s": comm.achieved_bytes_per_s,
        "link_bytes": comm.bytes_across,
        "least_link_bytes": comm.least_bytes_across,
        "node_bytes": comm.bytes_inside,
        "exposed_s_per_step": _ratio(comm.exposed_s, comm.num_steps),
        "link_bytes_per_s": link_bytes_per_s,
        "achieved_share": _ratio(comm.achieved_bytes_per_s, link_bytes_per_s),
        "per_bucket": [_bucket_as_json(bucket, link_bytes_per_s) for bucket in comm.buckets],
    }


def _bucket_as_json(bucket: BucketSummary, link_bytes_per_s: float | None) -> dict[str, Any]:
    in_flight_s = _ratio(bucket.in_flight_s, bucket.num_times)
    least_bytes = bucket.traffic.least_across
    achieved = None
    if in_flight_s and least_bytes:
        achieved = least_bytes / in_flight_s
    return {
        "index": bucket.index,
        "numel": bucket.numel,
        "dtype": bucket.dtype,
        "num_bytes": bucket.num_bytes,
        "algorithm": bucket.algorithm,
        "num_chunks": bucket.num_chunks,
        "num_times": bucket.num_times,
        "link_bytes": bucket.traffic.across,
        "least_link_bytes": least_bytes,
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
    """Format a communication summary as one line of text.

    Args:
        comm: Communication summary of all steps, or None if it was not measured.
        exposed_s: Exposed seconds per step, without the first steps of a run. If None, the mean of
            all steps is shown.
        exposed_share: Exposed time as a fraction of the step time.
        link_bytes_per_s: Bandwidth of a node's link, or None if it is unknown.

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

    exposed_text = "time not measured"
    if exposed_s is not None:
        exposed_text = f"{1e3 * exposed_s:.3g} ms exposed per {steps}"
        if exposed_share is not None:
            exposed_text += f" ({100 * exposed_share:.1f} %)"

    bytes_text = "none between nodes"
    bytes_per_step = comm.bytes_across / comm.num_steps
    if bytes_per_step:
        bytes_text = f"{bytes_per_step / 1e6:.3g} MB per node and step"

    texts = [exposed_text, bytes_text]
    achieved = comm.achieved_bytes_per_s
    if achieved is not None:
        rate_text = f"{achieved / 1e6:.3g} MB/s"
        if link_bytes_per_s is not None:
            rate_text += f" = {100 * achieved / link_bytes_per_s:.3g} % of the link"
        texts.append(rate_text)
    return ", ".join(texts)


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    if numerator is None or not denominator:
        return None
    return numerator / denominator
