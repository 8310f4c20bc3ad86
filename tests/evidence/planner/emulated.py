"""Simulator compared with measurements on the emulated cluster, as checked by `tests/recipes/test_simulate.py`.

It predicts the steps of the records that the record of the check lists, with the machine that was fitted there.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import _compute_bucket_assignment_by_size

from lightning_hybrid.comm.plan import MIB, CommPlan
from lightning_hybrid.planning.model.cluster import Cluster, bounds
from lightning_hybrid.planning.model.cost import Link, NodeGroup
from lightning_hybrid.planning.model.cost_gloo import Gloo
from lightning_hybrid.planning.model.node_wire import NodeWire
from lightning_hybrid.planning.model.simulate import SimulatedSteps, simulate
from lightning_hybrid.planning.model.workload import StepWorkload
from recipes.benchmarks.gradient_sets import GRADIENT_SETS, numel
from tests.checkout import ROOT
from tests.evidence.planner import known_clusters

RECORD = ROOT / "recipes/records/simulate/2026-11-26_check_emulated"
STOCK = "ddp"
COMPRESSED = "fp16_compress"
BACKEND = "torch"
# By count: bytes that backward, bucket, unscaling, SGD and the half-precision copy read and write.
BYTES_PER_ELEMENT = 40
BACKWARD_SHARE = 0.2  # share of these bytes before the bucket is handed over
GLOO_THREADS = 2  # torch's default number of concurrent collectives in a group


def cluster_of(machine: Mapping[str, float], title: str) -> Cluster:
    """Describe the cluster in the title of a record: ranks on two cores, with fitted times and core speeds."""
    layout, rates, delay = title.partition("emulated: ")[2].split(", ")
    words = layout.split()
    described = known_clusters.cluster_of("netlab", int(words[0]))
    assert isinstance(described.transport, Gloo)
    fitted = {name: machine[name] for name in ("stage_s", "message_s", "segment_s", "ring_share")}
    latency_s = float(delay.split()[0]) / 1e6
    links = []
    for mbit_per_s in rates.split()[0].split(","):  # one per host, or a single one for all
        bytes_per_s = float(mbit_per_s) * 1e6 / 8
        links.append(Link(latency_s=latency_s, bytes_per_s=bytes_per_s))
    return replace(
        described,
        ranks_per_node=int(words[3]),
        inside=replace(described.inside, bytes_per_s=machine["bytes_per_s"]),
        across=max(links, key=lambda link: link.bytes_per_s),
        groups=tuple(NodeGroup(across=link) for link in links),
        transport=replace(described.transport, **fitted),
        is_interleaved="interleaved" in layout,
    )


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Row of a record of measurements between hosts, in the setting of its title, with its prediction.

    The steps of the networks are from an earlier commit, in which buckets had up to 25 MiB regardless of their number.
    """

    record: str
    setting: str
    row: Mapping[str, Any]
    machine: Mapping[str, float]

    @cached_property
    def ratio(self) -> float:
        """Ratio of predicted to measured time."""
        return self.seconds(cluster_of(self.machine, self.setting)) / float(self.row["median_s"])

    @property
    def is_held(self) -> bool:
        """Return whether the predicted interval contains the measurement."""
        ends = bounds(cluster_of(self.machine, self.setting))
        if ends is None:
            return False
        fastest, slowest = ends
        return self.seconds(fastest) <= self.row["median_s"] <= self.seconds(slowest)

    def seconds(self, cluster: Cluster) -> float:
        """Predict the seconds on a cluster."""
        plan = CommPlan()
        if "step_resnet50" in self.record or "step_alexnet" in self.record:
            plan = CommPlan(num_buckets=1)
        run = partial(simulate, cluster=cluster, on_cuda=False)
        if self.row["section"] != "allreduce":
            return self._step_s(cluster, plan, run)
        itemsize = 4 if self.row["case"] == "float32" else 2
        work = StepWorkload(forward_s=0.0, gradients=((self.row["num_bytes"] // itemsize, 0.0),))
        if self.row["arm"] == BACKEND:
            return run(work, plan=plan, itemsize=itemsize, algorithm="gloo_ring", cuts=[]).step_s
        plan = replace(plan, algorithm=self.row["arm"])
        return run(work, plan=plan, itemsize=itemsize, cuts=[]).step_s

    def _step_s(
        self, cluster: Cluster, plan: CommPlan, run: Callable[..., SimulatedSteps]
    ) -> float:
        shapes = list(reversed(GRADIENT_SETS[self.row["case"]]()))
        gloo = cluster.transport
        ranks = cluster.world_size
        assert isinstance(gloo, Gloo)
        loop_s = gloo.work_s(self.machine["step_s"], of_busiest=1, of_all=ranks)
        pass_s = BYTES_PER_ELEMENT / self.machine["memory_bytes_per_s"]
        total = numel(shapes)
        passes_s = gloo.work_s(pass_s, of_busiest=total, of_all=ranks * total)
        in_backward_s = BACKWARD_SHARE * passes_s + self.row["backward_s"]
        numels = [numel([shape]) for shape in shapes]
        work = StepWorkload(
            forward_s=loop_s / 2,
            gradients=tuple((number, in_backward_s * number / total) for number in numels),
            update_s=loop_s / 2 + (1 - BACKWARD_SHARE) * passes_s,
        )
        arm = self.row["arm"].partition(",")[0]
        if "silent" in self.row["arm"]:
            return work.alone_s
        itemsize = 4 if arm == STOCK or arm.endswith("_fp32") else 2
        if arm in (STOCK, COMPRESSED):
            tensors = [torch.empty(shape, device="meta") for shape in shapes]
            buckets, _ = _compute_bucket_assignment_by_size(tensors, [MIB, 25 * MIB])
            ring_of_ddp: dict[str, Any] = {
                "algorithm": "gloo_ring",
                "cuts": [max(bucket) + 1 for bucket in buckets],
                "num_columns": GLOO_THREADS,
            }
            return run(work, plan=plan, itemsize=itemsize, **ring_of_ddp).step_s
        algorithm = arm.removesuffix("_fp32")
        wire = None
        before, _, codec = algorithm.rpartition("_")
        if codec in ("int8", "int4"):
            algorithm = before
            wire = NodeWire(name=codec, itemsize=itemsize)
        plan = replace(plan, algorithm=algorithm)
        return run(work, plan=plan, itemsize=itemsize, wire=wire).step_s


def checked_of(name: str, lines: Sequence[str], machine: Mapping[str, float]) -> list[Checked]:
    """Return all rows of a record."""
    head, *rows = map(json.loads, lines)
    setting = head["title"].splitlines()[-1]
    return [Checked(record=name, setting=setting, row=row, machine=machine) for row in rows]


def error_summary(checked_rows: Sequence[Checked]) -> dict[str, dict[str, float]]:
    """Return the median and the maximum relative error by section."""
    content = {}
    for section in ("step", "overlap", "allreduce"):
        errors = []
        for checked in checked_rows:
            if checked.row["section"] == section:
                errors.append(abs(checked.ratio - 1))
        if errors:
            share_within = sum(error <= 0.2 for error in errors) / len(errors)
            content[section] = {
                "num": len(errors),
                "median": round(statistics.median(errors), 4),
                "worst": round(max(errors), 4),
                "share_within_20_percent": round(share_within, 4),
            }
    return content


def lines_of(folder: Path) -> list[str]:
    """Return the lines of a record, from its own file or from the common file of its topic."""
    path = folder / "rows.jsonl"
    if path.exists():
        return path.read_text().splitlines()
    lines = (folder.parent / "emulated.jsonl").read_text().splitlines()
    return [line for line in lines if json.loads(line)["record"] == folder.name]


def checked_again() -> tuple[dict[str, Any], list[Checked], list[Checked]]:
    """Return the record of the check, and current predictions for equal links and for unequal links."""
    first, *lines = (RECORD / "rows.jsonl").read_text().splitlines()
    content = json.loads(first)
    machine = content["machine"]

    equal = list[Checked]()
    for path in content["records"]:
        folder = RECORD.parents[2] / path
        equal += checked_of(folder.name, lines_of(folder), machine)

    sections = list[list[str]]()
    for line in lines:
        if "title" in json.loads(line):
            sections.append([])
        sections[-1].append(line)
    unequal = list[Checked]()
    for section in sections:
        unequal += checked_of(RECORD.name, section, machine)
    return content, equal, unequal
