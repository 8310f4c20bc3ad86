"""From measured times to a described cluster: links by lines, then the costs of software by the timed sums.

    links       `ping` inside and across, each a line with intervals (link_fit.py); a node's link by its `flows`
    latency     of the wire: across less inside, as a message inside costs the same software and no wire
    software    what the simulator needs so that its times of the measured sums have the least error (overhead_fit.py)
    codec       rates of encoding and decoding
    curves      the rest: for each algorithm, and for sums through a codec, measured over modelled time by bytes

`Calibration.notes` names each link that is no line, and the error of the predicted sums.
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

# Several flows must carry this many times the bytes of one to count as more than noise. Our choice.
CLEARLY_MORE = 1.1

# A median error of sums beyond this is reported. Our choice: near the simulator's error on our records.
WELL_FITTED = 0.15


@dataclass(frozen=True, kw_only=True)
class TimedAllReduce:
    """A timed all-reduce and its time as the described cluster predicts it from those of other sizes."""

    algorithm: str
    num_bytes: int
    measured_s: float
    predicted_s: float

    @property
    def ratio(self) -> float:
        """Predicted over measured time."""
        return self.predicted_s / self.measured_s


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A described cluster and the fits that it is made of.

    Attributes:
        cluster: The description.
        inside: The fitted link inside a node; None with one rank per node.
        across: The fitted link between nodes; None with one node.
        consent_s: Additional time of a message whose receiver does not wait yet, by level.
        flow_bytes_per_s: Rate of a node by the number of flows at the same time.
        add_bytes_per_s: Rate of additions of a rank, by dtype, while all ranks add.
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
        """Median error of the predicted sums."""
        return statistics.median(abs(checked_sum.ratio - 1) for checked_sum in self.sums)

    @property
    def worst(self) -> TimedAllReduce:
        """The sum with the largest error."""
        return max(self.sums, key=lambda found: abs(math.log(found.ratio)))


def calibrate(samples: Measurements, setup: MeasuredSetup) -> Calibration:
    """Fit the cluster that explains these times best.

    Raises:
        ValueError: Too few sizes were measured for a line, or no sum at all.
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
            f"`limit_s` (={samples.took_s:.3g}) must leave time for messages and sums of several sizes: nothing can be "
            "fitted to what came about. Give it more: measure.limit_s=<seconds>."
        )
    # A core that receives and adds is no faster than at either alone.
    core_bytes_per_s = min(
        [fit.bytes_per_s for fit in [fits["inside"]] if fit is not None] + list(adds.values())
    )
    bare = _bare_cluster(
        fits["inside"], fits["across"], flows, setup, core_bytes_per_s=core_bytes_per_s
    )
    bare = replace(bare, codec=_codec_rates(samples, bare))
    fitted = fit_overheads(bare, measured, setup, most_bytes_per_s=core_bytes_per_s)
    modelled_s = {case: predicted_all_reduce_s(fitted, *case, setup) for case in measured}
    curves: dict[str, dict[float, float]] = {}
    for name, size in measured:
        curves.setdefault(name, {})[size] = round(measured[name, size] / modelled_s[name, size], 3)
    cluster = replace(fitted, curves=curves, measured_nodes=setup.num_nodes)
    sums = []
    for (name, size), time_s in measured.items():
        other_points = {
            other_size: ratio for other_size, ratio in curves[name].items() if other_size != size
        }
        predicted_s = curve_at(other_points, size) * modelled_s[name, size]
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
    # A node's bytes per second by the number of flows, at the largest size that all were timed at.
    by_flows = {int(flows): samples.of("flows", flows) for flows in samples.whats("flows")}
    common = (
        set.intersection(*(set(times_s) for times_s in by_flows.values())) if by_flows else set()
    )
    if not common or across is None:
        return {}
    size = max(common)
    medians_s = {num: statistics.median(times_s[size]) for num, times_s in sorted(by_flows.items())}
    # Without the time of the consent and of the first byte, which is not the wire's.
    return {
        num: size / (time_s - min(2 * across.latency_s, time_s / 2))
        for num, time_s in medians_s.items()
    }


def _gain(flows: dict[int, float], across: LineFit) -> float:
    # The rate of all flows of a node together over that of one message; 1 within noise.
    gain = max(flows.values(), default=0.0) / across.bytes_per_s
    return gain if gain > CLEARLY_MORE else 1.0


def _add_rates(samples: Measurements) -> dict[str, float]:
    return {
        dtype: size / statistics.median(times_s)
        for dtype in samples.whats("add")
        for size, times_s in samples.of("add", dtype).items()
    }


def _codec_rates(samples: Measurements, cluster: Cluster) -> CodecRates:
    # All ranks encoded at once: where they share cores, the model has each wait for its turn, so rates are a core's.
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


def _consent_s(samples: Measurements, place: str) -> float | None:
    # An exchange less a message that its receiver waits for; at the fewest bytes, where nothing hides the consent.
    pings = samples.of("ping", place)
    exchanges = samples.of("exchange", place)
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
    # The links alone; costs of software are 0 so far. With one rank per node, `inside` is only additions.
    near = Link(
        latency_s=0.0, bytes_per_s=core_bytes_per_s if inside is None else inside.bytes_per_s
    )
    far = near
    num_nics = 1
    burst_bytes = 0
    if across is not None:
        # A message inside a node costs the same software and no wire: the difference is the wire's latency. Where
        # several flows carry more, that is several cards under NCCL, and one card that one flow does not fill over TCP.
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
            payload_share=1.0,  # rates are measured
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
                f"the link {name} is no straight line: a message of {size} bytes takes {1 + error:.2f} times what "
                "latency and rate say. Other traffic, a busy host, or a protocol that changes with size; measure "
                "again on quiet nodes, and trust sizes near this one less."
            )
    if found.across is None:
        notes.append(
            "links between nodes were not measured, because there was one node. Measure on several nodes before you "
            "plan for them."
        )
    flows = found.flow_bytes_per_s
    if found.across is not None and _gain(flows, found.across) > 1:
        num, rate = max(flows.items(), key=lambda pair: pair[1])
        notes.append(
            f"one flow does not fill a node's link: {found.across.bytes_per_s:.3g} bytes/s, {num} side by side "
            f"{rate:.3g}. The rate that is described is that of all."
        )
    if found.typical_error > WELL_FITTED:
        worst = found.worst
        notes.append(
            f"sums are predicted badly: {found.typical_error:.0%} off at the median, {worst.algorithm} of "
            f"{worst.num_bytes} bytes {worst.ratio:.2f} of the measured time. The plan is a guess: compare plans by "
            "`lightning-hybrid bench`."
        )
    return notes


def calibration_values(found: Calibration) -> dict[str, object]:
    """Convert a calibration to JSON's types."""
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
