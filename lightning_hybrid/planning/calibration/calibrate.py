"""Calibration of a cluster description with measured times of messages and all-reduces.

    links       `ping` inside and across, each a line with intervals (link_fit.py); a node's link by its `flows`
    latency     of the wire: across less inside, because a message inside has the same software costs and no wire
    software    costs with which simulated times of the measured all-reduces have the smallest error (overhead_fit.py)
    codec       rates of encoding and decoding
    curves      remaining error: measured over modeled time by bytes, for each algorithm, also through a codec

`Calibration.notes` names each link whose message times are not linear in the size, and states the error of predicted
all-reduces.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from lightning_hybrid.planning.calibration.link_fit import LineFit, fit_line
from lightning_hybrid.planning.calibration.microbenchmarks import Measurements
from lightning_hybrid.planning.calibration.overhead_fit import (
    MeasuredSetup,
    fit_overheads,
    predicted_all_reduce_s,
)
from lightning_hybrid.planning.model.cluster import Cluster
from lightning_hybrid.planning.model.cost import Link, curve_at
from lightning_hybrid.planning.model.cost_gloo import Gloo
from lightning_hybrid.planning.model.cost_nccl import Nccl
from lightning_hybrid.planning.model.node_wire import KERNEL_S, CodecRates

# If several flows carry less than this multiple of the bytes of one flow, the gain counts as noise. Our choice.
CLEARLY_MORE = 1.1

# Larger median errors of all-reduces are reported. Our choice, near the simulator's error on our records.
WELL_FITTED = 0.15


@dataclass(frozen=True, kw_only=True)
class TimedAllReduce:
    """Measured time of an all-reduce, and the time predicted from measurements of other sizes."""

    algorithm: str
    num_bytes: int
    measured_s: float
    predicted_s: float

    @property
    def ratio(self) -> float:
        """Predicted time divided by measured time."""
        return self.predicted_s / self.measured_s


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Cluster description fitted to measurements, with the fitted links and the remaining errors.

    Attributes:
        cluster: The description.
        inside: The fitted link inside a node. None with one rank per node.
        across: The fitted link between nodes. None with one node.
        consent_s: Additional time of a message whose receiver is not ready yet, by level (inside, across).
        flow_bytes_per_s: Bandwidth of a node, by the number of simultaneous flows.
        add_bytes_per_s: Rate at which each rank adds tensors while all ranks add, by dtype.
        sums: The timed all-reduces.
        notes: Sentences for the user.
    """

    cluster: Cluster
    inside: LineFit | None
    across: LineFit | None
    consent_s: dict[str, float]
    flow_bytes_per_s: dict[int, float]
    add_bytes_per_s: dict[str, float]
    sums: tuple[TimedAllReduce, ...]
    notes: tuple[str, ...]

    @property
    def typical_error(self) -> float:
        """Median relative error of the predicted all-reduce times."""
        return statistics.median(abs(checked_sum.ratio - 1) for checked_sum in self.sums)

    @property
    def worst(self) -> TimedAllReduce:
        """Measured all-reduce whose prediction has the largest error."""
        return max(self.sums, key=lambda found: abs(math.log(found.ratio)))


def calibrate(samples: Measurements, setup: MeasuredSetup) -> Calibration:
    """Fit a cluster description to measured times of messages and all-reduces.

    Raises:
        ValueError: Too few sizes were measured for a line, or no all-reduce was measured.
    """
    fits = {
        level: fit_line(times_s) if (times_s := samples.of("ping", level)) else None
        for level in _LEVELS
    }
    measured = {
        (name, size): statistics.median(times_s)
        for name in samples.whats("sum")
        for size, times_s in samples.of("sum", name).items()
    }
    flows = _flow_rates(samples, fits["across"])
    adds = _add_rates(samples)
    if not measured or not adds or not any(fits.values()):
        raise ValueError(
            "`limit_s` is too small, because messages and all-reduces of several sizes could not be measured in "
            f"{samples.took_s:.3g} s. Increase the limit with measure.limit_s=<seconds>."
        )
    # A core that receives and adds is not faster than one that only receives or only adds.
    core_bytes_per_s = min(
        [fit.bytes_per_s for fit in [fits["inside"]] if fit is not None] + list(adds.values())
    )
    bare = _bare_cluster(
        fits["inside"], fits["across"], flows, setup, core_bytes_per_s=core_bytes_per_s
    )
    bare = replace(bare, codec=_codec_rates(samples, bare))
    fitted = fit_overheads(bare, measured, setup, most_bytes_per_s=core_bytes_per_s)
    modeled_s = {case: predicted_all_reduce_s(fitted, *case, setup) for case in measured}
    curves: dict[str, dict[float, float]] = {}
    for name, size in measured:
        curves.setdefault(name, {})[size] = round(measured[name, size] / modeled_s[name, size], 3)
    cluster = replace(fitted, curves=curves, measured_nodes=setup.num_nodes)
    sums = []
    for (name, size), time_s in measured.items():
        other_points = {
            other_size: ratio for other_size, ratio in curves[name].items() if other_size != size
        }
        predicted_s = curve_at(other_points, size) * modeled_s[name, size]
        sums.append(
            TimedAllReduce(
                algorithm=name, num_bytes=size, measured_s=time_s, predicted_s=predicted_s
            )
        )
    calibration = Calibration(
        cluster=cluster,
        inside=fits["inside"],
        across=fits["across"],
        consent_s={
            level: consent_s
            for level in _LEVELS
            if (consent_s := _consent_s(samples, level)) is not None
        },
        flow_bytes_per_s=flows,
        add_bytes_per_s=adds,
        sums=tuple(sums),
        notes=(),
    )
    return replace(calibration, notes=tuple(_notes(calibration)))


_LEVELS: tuple[str, ...] = ("inside", "across")


# ---- links -----------------------------------------------------------------------------------------------------------


def _flow_rates(samples: Measurements, across: LineFit | None) -> dict[int, float]:
    # Bandwidth of a node by the number of flows, at the largest size that was timed for all of them.
    by_flows = {int(flows): samples.of("flows", flows) for flows in samples.whats("flows")}
    common = (
        set.intersection(*(set(times_s) for times_s in by_flows.values())) if by_flows else set()
    )
    if not common or across is None:
        return {}
    size = max(common)
    medians_s = {num: statistics.median(times_s[size]) for num, times_s in sorted(by_flows.items())}
    # Subtract the time of the handshake and of the first byte, which is not spent on the wire.
    return {
        num: size / (time_s - min(2 * across.latency_s, time_s / 2))
        for num, time_s in medians_s.items()
    }


def _gain(flows: dict[int, float], across: LineFit) -> float:
    # Bandwidth of all flows of a node together relative to one message, or 1 within noise.
    gain = max(flows.values(), default=0.0) / across.bytes_per_s
    return gain if gain > CLEARLY_MORE else 1.0


def _add_rates(samples: Measurements) -> dict[str, float]:
    return {
        dtype: size / statistics.median(times_s)
        for dtype in samples.whats("add")
        for size, times_s in samples.of("add", dtype).items()
    }


def _codec_rates(samples: Measurements, cluster: Cluster) -> CodecRates:
    # All ranks encoded at once. If they share cores, the model makes them take turns, so rates are those of one core.
    transport = cluster.transport
    turns = (
        transport.work_s(1.0, of_busiest=1, of_all=cluster.world_size)
        if isinstance(transport, Gloo)
        else 1.0
    )
    rates = {
        f"{name}_bytes_per_s": turns * size / statistics.median(times_s)
        for name in samples.whats("codec")
        for size, times_s in samples.of("codec", name).items()
    }
    return replace(cluster.codec, **rates, is_measured=True) if len(rates) == 2 else cluster.codec


def _consent_s(samples: Measurements, level: str) -> float | None:
    # Time of an exchange minus that of a message whose receiver waits, at the smallest size, where nothing hides the
    # handshake.
    pings = samples.of("ping", level)
    exchanges = samples.of("exchange", level)
    common = set(pings) & set(exchanges)
    if not common:
        return None
    size = min(common)
    return statistics.median(exchanges[size]) - statistics.median(pings[size])


def _bare_cluster(
    inside: LineFit | None,
    across: LineFit | None,
    flows: dict[int, float],
    setup: MeasuredSetup,
    *,
    core_bytes_per_s: float,
) -> Cluster:
    # The links without software costs. With one rank per node, `inside` is the rate of additions.
    near = Link(
        latency_s=0.0, bytes_per_s=core_bytes_per_s if inside is None else inside.bytes_per_s
    )
    far = near
    num_nics = 1
    burst_bytes = 0
    if across is not None:
        # A message inside a node has the same software costs and no wire, so the difference is the wire's latency. If
        # several flows carry more, there are several cards under NCCL, or one TCP flow does not fill a card.
        software_s = 0.0 if inside is None else inside.latency_s
        gain = _gain(flows, across)
        num_nics = max(1, round(gain)) if setup.on_cuda else 1
        burst_bytes = across.burst_bytes
        far = Link(
            latency_s=max(0.0, across.latency_s - software_s),
            bytes_per_s=across.bytes_per_s * gain / num_nics,
        )
    transport: Gloo | Nccl
    codec = CodecRates()
    if setup.on_cuda:
        algorithms: Sequence[Literal["ring", "tree"]] = ["ring", "tree"]
        transport = Nccl(
            inside=setup.inside,
            version=setup.nccl_version,
            algorithms=algorithms,
            channels=setup.channels,
            payload_share=1.0,  # because the rates are measured
        )
        codec = CodecRates(kernel_s=KERNEL_S)
    else:
        transport = Gloo(
            stage_s=0.0,
            message_s=0.0,
            segment_s=0.0,
            burst_bytes=burst_bytes,
            num_shared_cores=setup.num_shared_cores,
        )
    return Cluster(
        num_nodes=setup.num_nodes,
        ranks_per_node=setup.ranks_per_node,
        inside=near,
        across=far,
        transport=transport,
        nics_per_node=num_nics,
        is_interleaved=setup.is_interleaved,
        codec=codec,
    )


# ---- report ----------------------------------------------------------------------------------------------------------


def _notes(found: Calibration) -> list[str]:
    notes = []
    for name, fit in (("inside a node", found.inside), ("between nodes", found.across)):
        if fit is not None and not fit.is_line:
            size, error = fit.worst
            notes.append(
                f"the message time {name} is not linear in the size: a message of {size} bytes takes {1 + error:.2f} "
                "times the time that latency and bandwidth predict. Possible causes are other traffic, a busy host, "
                "or a protocol that changes with the size. Measure again on idle nodes, and trust predictions near "
                "this size less."
            )
        if fit is not None and math.isinf(fit.bytes_per_s):
            longest = max(size for size, _ in fit.errors)
            notes.append(
                f"the bandwidth {name} could not be determined and is treated as unlimited, because messages of up to "
                f"{longest} bytes take no longer than the shortest ones. Measure longer messages with "
                "measure.max_bytes=<bytes> and measure.limit_s=<seconds> before you use the description."
            )
    if found.across is None:
        notes.append(
            "links between nodes were not measured, because the job had only one node. Measure on several nodes "
            "before you plan for them."
        )
    flows = found.flow_bytes_per_s
    if found.across is not None and _gain(flows, found.across) > 1:
        num, rate = max(flows.items(), key=lambda pair: pair[1])
        notes.append(
            f"one flow does not saturate a node's link: it reaches {found.across.bytes_per_s:.3g} bytes/s, but {num} "
            f"parallel flows reach {rate:.3g}. The description contains the total bandwidth of all flows."
        )
    if found.typical_error > WELL_FITTED:
        worst = found.worst
        notes.append(
            f"all-reduce times are predicted poorly: the median error is {found.typical_error:.0%}, and the "
            f"prediction for {worst.algorithm} of {worst.num_bytes} bytes is {worst.ratio:.2f} of the measured time. "
            "The plan is unreliable. Compare plans with `lightning-hybrid bench`."
        )
    return notes


def calibration_values(found: Calibration) -> dict[str, object]:
    """Convert a calibration to a dictionary that can be written as JSON."""
    fits = {"inside": found.inside, "across": found.across}
    return {
        "links": {name: None if fit is None else asdict(fit) for name, fit in fits.items()},
        "consent_s": found.consent_s,
        "flow_bytes_per_s": {str(num): rate for num, rate in found.flow_bytes_per_s.items()},
        "add_bytes_per_s": found.add_bytes_per_s,
        "sums": [asdict(checked_sum) | {"ratio": checked_sum.ratio} for checked_sum in found.sums],
        "sums_typical_error": found.typical_error,
        "sums_worst": asdict(found.worst),
        "notes": list(found.notes),
    }
