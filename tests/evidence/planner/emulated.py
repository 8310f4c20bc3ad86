"""Simulator against measurements on the emulated cluster: `python -m tests.evidence.planner.emulated`.

Predicts the steps of the records that the record of the check names, with the machine that was fitted there.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_hybrid.comm.plan import MIB, CommPlan
from lightning_hybrid.planning.cluster import Cluster
from lightning_hybrid.planning.cost import Link
from lightning_hybrid.planning.cost_gloo import Gloo
from lightning_hybrid.planning.node_wire import NodeWire
from lightning_hybrid.planning.simulate import simulate
from lightning_hybrid.planning.workload import StepWorkload
from recipes.benchmarks.gradient_sets import GRADIENT_SETS, numel
from tests.checkout import ROOT

RECORD = ROOT / "recipes/records/simulate/2026-11-23_check_emulated"
STOCK, COMPRESSED, BACKEND = "ddp", "fp16_compress", "torch"
WIRE_SHARE = 0.989  # recipes/records/bench/README.md: headers and acknowledgements are 1.1 % of the traffic
BURST_BYTES = 16384  # tests/netlab/cluster.py: the largest burst that a network card holds
BYTES_PER_ELEMENT = 40  # by count: what backward, bucket, unscaling, SGD and the half copy read and write
BACKWARD_SHARE = 0.2  # of these, before the bucket is handed over
DDP_FIRST_BYTES, DDP_BYTES = MIB, 25 * MIB  # torch's defaults
MARGIN = 0.1  # times that are nearer to one another have no order
GLOO_THREADS = 2  # torch's default: collectives of one group that run side by side


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Fitted parameters: processor times and rates of one core, as in `Gloo`.

    `step_s`: of a rank, for Lightning's loop. `memory_bytes_per_s`: of a core's passes over memory.
    """

    stage_s: float
    message_s: float
    segment_s: float
    bytes_per_s: float
    ring_share: float
    step_s: float
    memory_bytes_per_s: float

    def cluster(self, setting: Setting) -> Cluster:
        """Return the cluster: all ranks of all hosts on two cores."""
        gloo = Gloo(
            stage_s=self.stage_s,
            message_s=self.message_s,
            segment_s=self.segment_s,
            ring_share=self.ring_share,
            wire_share=WIRE_SHARE,
            burst_bytes=BURST_BYTES,
            num_shared_cores=2,
        )
        return Cluster(
            num_nodes=setting.num_hosts,
            ranks_per_node=setting.ranks_per_host,
            inside=Link(latency_s=0.0, bytes_per_s=self.bytes_per_s),  # of a loopback: within stage_s
            across=Link(latency_s=setting.delay_s, bytes_per_s=setting.bytes_per_s),
            transport=gloo,
            is_interleaved=setting.is_interleaved,
        )


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Emulated cluster, as in the title of a record."""

    num_hosts: int
    ranks_per_host: int
    bytes_per_s: float
    delay_s: float
    is_interleaved: bool

    @classmethod
    def from_title(cls, title: str) -> Setting:
        """Parse the title of a record.

        >>> Setting.from_title("emulated: 2 hosts x 4 ranks host by host, 100 Mbit/s, 200 us").delay_s
        0.0002
        """
        layout, rate, delay = title.partition("emulated: ")[2].split(", ")
        words = layout.split()
        return cls(
            num_hosts=int(words[0]),
            ranks_per_host=int(words[3]),
            bytes_per_s=float(rate.split()[0]) * 1e6 / 8,
            delay_s=float(delay.split()[0]) / 1e6,
            is_interleaved="interleaved" in layout,
        )

    def __str__(self) -> str:
        order = " interleaved" if self.is_interleaved else ""
        rate, delay = self.bytes_per_s * 8e-6, self.delay_s * 1e3
        return f"{self.num_hosts} x {self.ranks_per_host}{order}, {rate:g} Mbit/s, {delay:g} ms"


@dataclass(frozen=True, kw_only=True)
class MeasuredCase:
    """Row of a record: what was measured, and how."""

    record: str
    setting: Setting
    section: str
    case: str
    arm: str
    num_bytes: int
    measured_s: float
    backward_s: float
    plan: CommPlan

    def predicted_s(self, machine: Machine) -> float:
        """Predict the seconds by the simulator."""
        cluster = machine.cluster(self.setting)
        if self.section == "allreduce":
            return self._allreduce_s(cluster)
        return self._step_s(cluster, machine)

    def _allreduce_s(self, cluster: Cluster) -> float:
        itemsize = 4 if self.case == "float32" else 2
        work = StepWorkload(forward_s=0.0, gradients=((self.num_bytes // itemsize, 0.0),))
        name = "gloo_ring" if self.arm == BACKEND else None
        plan = self.plan if name else replace(self.plan, algorithm=self.arm)  # type: ignore[arg-type]
        return simulate(work, cluster, plan, itemsize=itemsize, on_cuda=False, algorithm=name, cuts=[]).step_s

    def _step_s(self, cluster: Cluster, machine: Machine) -> float:
        shapes = list(reversed(GRADIENT_SETS[self.case]()))
        gloo = cluster.transport
        assert isinstance(gloo, Gloo)
        loop_s = gloo.work_s(machine.step_s, of_busiest=1, of_all=cluster.world_size)
        passes_s = gloo.work_s(
            BYTES_PER_ELEMENT / machine.memory_bytes_per_s,
            of_busiest=numel(shapes),
            of_all=cluster.world_size * numel(shapes),
        )
        in_backward_s = BACKWARD_SHARE * passes_s + self.backward_s
        work = StepWorkload(
            forward_s=loop_s / 2,
            gradients=tuple((numel([shape]), in_backward_s * numel([shape]) / numel(shapes)) for shape in shapes),
            update_s=loop_s / 2 + (1 - BACKWARD_SHARE) * passes_s,
        )
        arm = self.arm.partition(",")[0]
        if "silent" in self.arm:
            return work.alone_s
        itemsize = 4 if arm == STOCK or arm.endswith("_fp32") else 2
        if arm in (STOCK, COMPRESSED):
            cuts = ddp_cuts([4 * numel([shape]) for shape in shapes])
            return simulate(
                work,
                cluster,
                self.plan,
                itemsize=itemsize,
                on_cuda=False,
                algorithm="gloo_ring",
                cuts=cuts,
                num_columns=GLOO_THREADS,
            ).step_s
        algorithm, _, codec = arm.removesuffix("_fp32").rpartition("_")
        wire = NodeWire(name=codec, itemsize=itemsize) if codec in ("int8", "int4") else None  # type: ignore[arg-type]
        plan = replace(self.plan, algorithm=algorithm if wire else arm.removesuffix("_fp32"))  # type: ignore[arg-type]
        return simulate(work, cluster, plan, itemsize=itemsize, on_cuda=False, wire=wire).step_s


def ddp_cuts(sizes_bytes: Sequence[int]) -> list[int]:
    """Return where DistributedDataParallel ends its buckets: a tensor that passes the limit is the bucket's last.

    >>> ddp_cuts([MIB // 2, MIB, 20 * MIB, 6 * MIB, 5])
    [2, 4]
    """
    cuts, open_bytes, limit = list[int](), 0, DDP_FIRST_BYTES
    for place, size in enumerate(sizes_bytes, 1):
        open_bytes += size
        if open_bytes >= limit:
            cuts.append(place)
            open_bytes, limit = 0, DDP_BYTES
    return [cut for cut in cuts if cut < len(sizes_bytes)]


def cases_of(folder: Path) -> list[MeasuredCase]:
    """Return every row of a record that was measured between hosts.

    The networks' steps are of an earlier commit, whose buckets were of up to 25 MiB whatever their number.
    """
    head, *rows = map(json.loads, (folder / "rows.jsonl").read_text().splitlines())
    setting = Setting.from_title(head["title"])
    is_network = "step_resnet50" in folder.name or "step_alexnet" in folder.name
    plan = CommPlan(num_buckets=1) if is_network else CommPlan()
    return [
        MeasuredCase(
            record=folder.name,
            setting=setting,
            section=row["section"],
            case=row["case"],
            arm=row["arm"],
            num_bytes=row["num_bytes"],
            measured_s=row["median_s"],
            backward_s=row["backward_s"],
            plan=plan,
        )
        for row in rows
    ]


# ---- report ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Case and its prediction."""

    case: MeasuredCase
    predicted_s: float

    @property
    def ratio(self) -> float:
        """Predicted over measured time."""
        return self.predicted_s / self.case.measured_s

    @property
    def group(self) -> tuple[object, ...]:
        """Key of the cases whose arms are compared."""
        case = self.case
        size = case.num_bytes if case.section == "allreduce" else 0
        return case.record, case.section, case.case, size, case.backward_s


def ranked(found: Sequence[Checked]) -> list[tuple[Checked, Checked]]:
    """Return pairs of arms of one case that differ by more than `MARGIN`, the faster first."""
    groups: dict[object, list[Checked]] = {}
    for one in found:
        if "silent" not in one.case.arm:
            groups.setdefault(one.group, []).append(one)
    pairs = [(a, b) for group in groups.values() for a in group for b in group]
    return [(a, b) for a, b in pairs if a.case.measured_s * (1 + MARGIN) < b.case.measured_s]


def markdown(found: Sequence[Checked]) -> str:
    """Format a row for each case."""
    head = "| record | setting | what | arm | measured ms | predicted ms | predicted / measured |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for one in found:
        case = one.case
        what = f"{case.section} {case.case}" + (f" {case.num_bytes >> 10} KiB" if case.section == "allreduce" else "")
        cells = [f"{1e3 * case.measured_s:.4g}", f"{1e3 * one.predicted_s:.4g}", f"{one.ratio:.2f}"]
        lines.append("| " + " | ".join([case.record, str(case.setting), what, case.arm, *cells]) + " |")
    return "\n".join(lines)


def error_summary(found: Sequence[Checked]) -> dict[str, dict[str, float]]:
    """Return median and worst relative error by section."""
    content = {}
    for section in ("step", "overlap", "allreduce"):
        errors = [abs(one.ratio - 1) for one in found if one.case.section == section]
        if errors:
            within = sum(error <= 0.2 for error in errors) / len(errors)
            content[section] = {
                "num": len(errors),
                "median": round(statistics.median(errors), 4),
                "worst": round(max(errors), 4),
                "share_within_20_percent": round(within, 4),
            }
    return content


def check_ranking(records: Sequence[Path], machine: Machine) -> tuple[list[Checked], dict[str, Any]]:
    """Predict every row of these records; return predictions and a summary."""
    cases = [case for record in records for case in cases_of(record)]
    found = [Checked(case=case, predicted_s=case.predicted_s(machine)) for case in cases]
    pairs = ranked(found)
    wrong = [(a, b) for a, b in pairs if a.predicted_s > b.predicted_s]
    content = {
        "settings": sorted({str(case.setting) for case in cases}),
        "error": error_summary(found),
        "pairs_that_differ_by_10_percent": len(pairs),
        "of_these_in_the_wrong_order": [f"{a.group}: {a.case.arm} is faster than {b.case.arm}" for a, b in wrong],
    }
    return found, content


def checked_again() -> tuple[dict[str, Any], list[Checked], dict[str, Any]]:
    """Return what the record of the check says, and predictions and their summary by the simulator of today."""
    content = json.loads((RECORD / "rows.jsonl").read_text())
    records = [RECORD.parents[2] / path for path in content["records"]]
    return content, *check_ranking(records, Machine(**content["machine"]))


if __name__ == "__main__":
    _, found, summary = checked_again()
    print(markdown(found), json.dumps(summary, indent=1), sep="\n")
