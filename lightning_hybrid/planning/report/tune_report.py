"""Report of `recipes/tune.py`, with tables, a cluster description, a plan and JSON."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_hybrid.comm.plan import CommPlan
from lightning_hybrid.formatting import counted, size
from lightning_hybrid.planning.calibration.calibrate import (
    Calibration,
    calibrate,
    calibration_values,
)
from lightning_hybrid.planning.calibration.link_fit import LineFit
from lightning_hybrid.planning.calibration.microbenchmarks import Measurements
from lightning_hybrid.planning.calibration.overhead_fit import MeasuredSetup
from lightning_hybrid.planning.model.cost_gloo import Gloo
from lightning_hybrid.planning.model.plan_search import Candidate, candidates
from lightning_hybrid.planning.model.simulate import simulate
from lightning_hybrid.planning.model.workload import StepWorkload
from lightning_hybrid.planning.report.compression_report import CompressionReport

LEVELS = {"inside": "inside a node", "across": "between nodes"}


@dataclass(frozen=True, kw_only=True)
class TuneWords:
    """Names and descriptions that appear in a report on measured links.

    Args:
        name: Name of the cluster's description.
        network: Name of the network whose gradients are planned for.
        about: Description of the cluster. None: its nodes, ranks and transport.
        num_shown: Number of plans in the table.
    """

    name: str
    network: str
    about: str | None = None
    num_shown: int = 5


@dataclass(frozen=True, kw_only=True)
class TuneReport:
    """Report with a calibrated cluster description and the communication plans simulated on it."""

    samples: Measurements
    world: MeasuredSetup
    found: Calibration
    work: StepWorkload
    plans: tuple[Candidate, ...]
    compression: CompressionReport | None
    base: CommPlan
    name: str
    about: str
    network: str
    num_shown: int

    @classmethod
    def of(
        cls,
        samples: Measurements,
        world: MeasuredSetup,
        work: StepWorkload,
        base: CommPlan,
        words: TuneWords,
    ) -> TuneReport:
        """Fit a cluster description to measurements, and choose a communication plan for a training step.

        Args:
            samples: Measured times.
            world: Ranks that were measured.
            work: Step to plan for.
            base: The library's own plan.
            words: Names in the report.
        """
        calibration = calibrate(samples, world)
        about = words.about
        if not about:
            transport = "GPUs, NCCL" if world.on_cuda else "CPU, Gloo"
            about = f"{counted(world.num_nodes, 'node')} x {counted(world.ranks_per_node, 'rank')}, {transport}"
        about += ", measured"
        if calibration.across is None:
            about += ", one node only"
        ask: Any = {"itemsize": world.itemsize, "on_cuda": world.on_cuda}
        plans = candidates(work, calibration.cluster, base=base, **ask)
        plain = simulate(work, calibration.cluster, plans[0].plan, **ask)
        return cls(
            samples=samples,
            world=world,
            found=calibration,
            work=work,
            plans=plans,
            compression=CompressionReport.of(
                plain, work, calibration.cluster, list(dict.fromkeys([plans[0].plan, base])), **ask
            ),
            base=base,
            name=words.name,
            about=about,
            network=words.network,
            num_shown=words.num_shown,
        )

    # ---- words -------------------------------------------------------------------------------------------------------

    def markdown(self) -> str:
        """Return a Markdown report of links, all-reduces, plans and notes."""
        calibration = self.found
        lines = [f"{self.about}; {self.samples.took_s:.1f} s of measuring", ""]
        lines += [
            "| link | alpha us | 90 % interval | beta GB/s | 90 % interval | error, median / worst | handshake us |"
        ]
        lines += ["|---|---|---|---|---|---|---|"]
        for name, fit in (("inside", calibration.inside), ("across", calibration.across)):
            if fit is not None:
                lines.append(_row(LEVELS[name], fit, calibration.consent_s.get(name)))
        cluster = calibration.cluster
        if calibration.across is not None:
            lines += [
                "",
                f"wire between nodes, one way: {1e6 * cluster.across.latency_s:.4g} us (between nodes minus inside)",
            ]
        if isinstance(transport := cluster.transport, Gloo):
            costs = {
                name: f"{1e6 * getattr(transport, name):.3g} us"
                for name in ("stage_s", "message_s", "segment_s")
            }
            costs["inside.bytes_per_s"] = f"{cluster.inside.bytes_per_s:.3g}"
            costs["ring_share"] = f"{transport.ring_share:.3g}"
        else:
            costs = {"launch_s": f"{1e6 * transport.launch_s:.3g} us"}
        lines.append(
            "software costs, fitted to the all-reduces: "
            + ", ".join(f"{k} {v}" for k, v in costs.items())
        )
        if calibration.flow_bytes_per_s:
            rates = ", ".join(
                f"{num}: {rate / 1e9:.4g}" for num, rate in calibration.flow_bytes_per_s.items()
            )
            lines.append(f"GB/s of a node, by number of parallel flows: {rates}")
        lines.append(
            "GB/s at which each rank adds tensors while all ranks add: "
            + ", ".join(
                f"{dtype} {rate / 1e9:.3g}" for dtype, rate in calibration.add_bytes_per_s.items()
            )
        )
        if cluster.codec.is_measured:
            codec = cluster.codec
            lines.append(
                f"GB/s of float32 that a {'rank' if self.world.on_cuda else 'core'} encodes and decodes: "
                f"int8 {codec.int8_bytes_per_s / 1e9:.3g}, int4 {codec.int4_bytes_per_s / 1e9:.3g}"
            )
        worst = calibration.worst
        lines.append(
            f"all-reduces: {len(calibration.sums)} timed; median prediction error {calibration.typical_error:.1%}; "
            f"worst prediction: {worst.algorithm}, {size(worst.num_bytes)}, {worst.ratio:.2f} of the measured time"
        )
        lines += [f"note: {note}" for note in calibration.notes]
        lines += ["", self.why()]
        if self.compression is not None:
            lines += ["", self.compression.sentence(), "", self.compression.table()]
        return "\n".join(lines)

    def why(self) -> str:
        """Return a text that compares the best plan with the default and with other plans.

        It lists the runners-up, the library's default and the slowest plan, with the time that each
        takes more.
        """
        best = self.plans[0]
        ours = next(candidate for candidate in self.plans if candidate.plan == self.base)
        shown = list(dict.fromkeys([*self.plans[: self.num_shown], ours, self.plans[-1]]))
        backward_s = self.work.backward_s
        num_bytes = sum(numel for numel, _ in self.work.gradients) * self.world.itemsize
        hidden = (
            f"{1e3 * backward_s:.4g} ms of backward to hide them"
            if backward_s
            else "no backward to hide them"
        )
        lines = [
            f"plan for {self.network}, {num_bytes / 2**20:.4g} MiB of gradients, {hidden}: {best}",
            "",
            "| plan | buckets | step ms | exposed ms | more |",
            "|---|---|---|---|---|",
        ]
        for candidate in shown:
            mark = " (the library's own)" if candidate is ours else ""
            lines.append(
                f"| {candidate}{mark} | {candidate.num_buckets} | {1e3 * candidate.step_s:.5g} "
                f"| {1e3 * candidate.exposed_s:.4g} | {candidate.step_s / best.step_s - 1:.1%} |"
            )
        return "\n".join(
            [*lines, "", f"The last row is the slowest of the {len(self.plans)} simulated plans."]
        )

    # ---- files -------------------------------------------------------------------------------------------------------

    def write(self, folder: Path, config: dict[str, Any], environment: dict[str, Any]) -> None:
        """Write the cluster description, the plan, the summary and the tables to a folder.

        The files are `cluster/<name>.yaml`, `plan.json`, `summary.json` and `table.md`.
        """
        (folder / "cluster").mkdir(parents=True, exist_ok=True)
        content = {
            "config": config,
            "environment": environment,
            "world": asdict(self.world),
            "took_s": self.samples.took_s,
            "calibration": calibration_values(self.found),
            "cluster": asdict(self.found.cluster),
            "plan": asdict(self.plans[0].plan),
            "plans": [asdict(candidate) for candidate in self.plans],
            "compression": None if self.compression is None else self.compression.numbers(),
            "samples": [
                asdict(case) | {"times_s": times_s}
                for case, times_s in sorted(self.samples.times_s.items())
            ],
        }
        (folder / "summary.json").write_text(json.dumps(content, indent=1) + "\n")
        (folder / "cluster" / f"{self.name}.yaml").write_text(self.description())
        (folder / "plan.json").write_text(self.plans[0].plan.to_json() + "\n")
        (folder / "table.md").write_text(self.markdown() + "\n")

    def description(self) -> str:
        """Return a YAML description of the cluster, with the source of each number as a comment."""
        calibration = self.found
        cluster = self.found.cluster
        transport = self.found.cluster.transport
        inside = _interval(calibration.inside)
        across = _interval(calibration.across)
        nodes = (
            "${num_nodes}"
            if calibration.across is not None
            else "1 # links between nodes were not measured"
        )
        lines = [
            f"# Measured by lightning-hybrid on {datetime.date.today()}, {self.samples.took_s:.0f} s, on {self.about}.",
            "# Links: lines fitted to message times (90 % intervals). The rest is fitted to all-reduces, with errors",
            f"# of {calibration.typical_error:.1%} at the median and {abs(calibration.worst.ratio - 1):.0%} at worst.",
            *(f"# {note}" for note in calibration.notes),
            f"about: {json.dumps(self.about)}",
            "links:",
            "  _target_: lightning_hybrid.planning.model.cluster.Cluster",
            "  _convert_: all",
            f"  num_nodes: {nodes}",
            f"  ranks_per_node: {cluster.ranks_per_node}",
            "  inside:",
            "    _target_: lightning_hybrid.planning.model.cost.Link",
            f"    latency_s: {_yaml(cluster.inside.latency_s)} # inside one host: part of the software costs",
            f"    bytes_per_s: {_yaml(cluster.inside.bytes_per_s)} # messages: {inside}",
            "  across:",
            "    _target_: lightning_hybrid.planning.model.cost.Link",
            f"    latency_s: {_yaml(cluster.across.latency_s)} # messages between nodes minus messages inside a node",
            f"    bytes_per_s: {_yaml(cluster.across.bytes_per_s)} # messages: {across}",
            f"  nics_per_node: {cluster.nics_per_node}",
            f"  is_interleaved: {str(cluster.is_interleaved).lower()}",
            f"  measured_nodes: {cluster.measured_nodes} # curves hold for up to 8 times as many",
            "  curves: # measured over modeled time, by the bytes of an all-reduce",
            *(f"    {what}: {dict(curve)}" for what, curve in cluster.curves.items()),
            "  transport:",
        ]
        lines.append(f"    _target_: {type(transport).__module__}.{type(transport).__name__}")
        for name, value in asdict(transport).items():
            lines.append(f"    {name}: {_yaml(value)}")
        lines += ["  codec:", "    _target_: lightning_hybrid.planning.model.node_wire.CodecRates"]
        lines += [f"    {name}: {_yaml(value)}" for name, value in asdict(cluster.codec).items()]
        lines += [
            f"on_cuda: {str(self.world.on_cuda).lower()}",
            "images_per_s: {} # of one rank alone, by model: add your own",
        ]
        unknown = (
            "input_images_per_s",
            "gpu_memory_bytes",
            "watts_per_node",
            "price_per_node_hour",
        )
        lines += [f"{name}: null" for name in unknown]
        return "\n".join(lines) + "\n"


def _row(name: str, fit: LineFit, consent_s: float | None) -> str:
    low_s, high_s = fit.latency_interval_s
    slow, fast = fit.rate_interval_bytes_per_s
    worst_bytes, worst = fit.worst
    cells: Sequence[str] = [
        name,
        f"{1e6 * fit.latency_s:.4g}",
        f"{1e6 * low_s:.4g} to {1e6 * high_s:.4g}",
        f"{fit.bytes_per_s / 1e9:.4g}",
        f"{slow / 1e9:.4g} to {fast / 1e9:.4g}",
        f"{fit.typical_error:.1%} / {worst:+.0%} at {size(worst_bytes)}"
        + ("" if fit.is_line else ", not linear"),
        "" if consent_s is None else f"{1e6 * consent_s:.4g}",
    ]
    return "| " + " | ".join(cells) + " |"


def _interval(fit: LineFit | None) -> str:
    """Return the latency and bandwidth of a link as text, with their intervals."""
    if fit is None:
        return "not measured"
    (low_s, high_s) = fit.latency_interval_s
    (slow, fast) = fit.rate_interval_bytes_per_s
    return (
        f"{1e6 * fit.latency_s:.4g} us ({1e6 * low_s:.4g} to {1e6 * high_s:.4g}), "
        f"{fit.bytes_per_s:.4g} bytes/s ({slow:.4g} to {fast:.4g})"
    )


def _yaml(value: Any) -> str:
    """Format a value for YAML 1.1, which needs a point before an exponent and before `inf`.

    Lists and None are formatted as in JSON.

    >>> _yaml(1.25e-05), _yaml(2e10), _yaml(None), _yaml(0.0), _yaml(float("inf"))
    ('1.25e-05', '2.0e+10', 'null', '0.0', '.inf')
    """
    if value == math.inf:
        return ".inf"
    if isinstance(value, float) and value != 0:
        text = f"{value:.6g}"
        mantissa, e, exponent = text.partition("e")
        return mantissa + (".0" if "." not in mantissa else "") + e + exponent
    return json.dumps(value)
