"""Report of the simulator, with a summary in sentences, tables, JSON and a timeline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from lightning_hybrid.formatting import time_text
from lightning_hybrid.planning.estimates.layers import flops_per_image
from lightning_hybrid.planning.estimates.parallelism import PipelineChoice, pipeline_choices
from lightning_hybrid.planning.estimates.run_time import PlannedRun, RunTime
from lightning_hybrid.planning.estimates.scenario import Scenario, Search
from lightning_hybrid.planning.estimates.step_trace import to_trace
from lightning_hybrid.planning.model.plan_search import (
    CLEARLY_LESS,
    CLEARLY_LESS_BY_HIERARCHY,
    FLAT_ON_CUDA,
    Candidate,
    chosen,
)
from lightning_hybrid.planning.model.simulate import NO_JITTER, SimulatedSteps
from lightning_hybrid.planning.report.compression_report import CompressionReport
from lightning_hybrid.planning.report.memory_report import MemoryReport, MemorySettings
from lightning_hybrid.planning.report.pipeline_report import pipeline_table, what_pays
from lightning_hybrid.planning.report.run_lines import confidence, run_lines

QUANTILES = (0.5, 0.9, 0.99)
SHOWN_TIMES = 4  # the curve is printed up to this multiple of the requested ranks
FAR_RANKS = (256, 1024, 4096, 16384)  # additional ranks of the curve in table.md


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """Result of a simulated training step for one number of ranks.

    `least_s` is a lower bound for the time of any all-reduce of all gradients between these nodes.
    """

    num_ranks: int
    step_s: float
    exposed_s: float
    efficiency: float
    images_per_s: float
    least_s: float


@dataclass(frozen=True, kw_only=True)
class SimulationReport:
    """Results of a simulated training run.

    Args:
        planned: Length, failures and rates of the run.
        preset: Keys of the cluster's description that the user did not give, with the assumed values.
        is_own_curve: Whether the user chose the numbers of ranks of the curve, so that all points are printed.
    """

    scenario: Scenario
    outcome: SimulatedSteps
    curve: tuple[ScalingPoint, ...]
    candidates: tuple[Candidate, ...]
    num_shown: int
    memory: MemoryReport
    compression: CompressionReport | None
    pipelines: tuple[PipelineChoice, ...]
    preset: Mapping[str, str]
    is_own_curve: bool
    planned: PlannedRun

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        network: nn.Module,
        planned: PlannedRun,
        memory_settings: MemorySettings,
        *,
        search: Search | None = None,
        scaling_ranks: Sequence[int] | None = None,
        preset: Mapping[str, str],
    ) -> SimulationReport:
        """Simulate the run with several numbers of ranks and with other communication plans.

        Args:
            scenario: Training run for which a step is simulated.
            network: Network whose memory is measured.
            planned: Length and rates of the run.
            memory_settings: Settings on which the memory of a rank depends.
            search: Search for other plans. None: no search.
            scaling_ranks: Numbers of ranks of the scaling curve. None: the result of `scales`.
            preset: As in the class.
        """
        if scenario.is_local:
            search = None  # its plans all-reduce over all ranks
        cluster = scenario.cluster
        ranks = scaling_ranks
        if ranks is None:
            ranks = scales(cluster.world_size, ranks_per_node=cluster.ranks_per_node)
        outcome = scenario.run()
        memory = MemoryReport.of(scenario, network, memory_settings, step_s=outcome.step_s)
        candidates = [] if search is None else search.run(scenario)
        curve: dict[int, ScalingPoint] = {}
        for num_ranks in ranks:
            point = scaling_point(scenario.at(num_ranks))
            curve[point.num_ranks] = point
        return cls(
            scenario=scenario,
            outcome=outcome,
            curve=tuple(curve.values()),
            candidates=tuple(candidates),
            num_shown=0 if search is None else search.num_shown,
            memory=memory,
            compression=_compression(scenario, search, candidates),
            pipelines=tuple(_pipelines(scenario, memory)),
            preset=preset,
            is_own_curve=scaling_ranks is not None,
            planned=planned,
        )

    def numbers(self) -> dict[str, float]:
        """Return the main results of the run by name, such as step time and efficiency.

        Energy and price are included if the cluster's description has rates for them.
        """
        scenario = self.scenario
        outcome = self.outcome
        steps = self.planned.images_per_epoch / scenario.global_batch_size
        num_nodes = scenario.cluster.num_nodes
        totals = {}
        if self.planned.watts_per_node is not None:
            totals["run_kwh"] = self.run.costs(num_nodes * self.planned.watts_per_node / 3.6e6)[0]
        if self.planned.price_per_node_hour is not None:
            totals["run_price"] = self.run.costs(
                num_nodes * self.planned.price_per_node_hour / 3600
            )[0]
        return {
            "num_ranks": scenario.cluster.world_size,
            "global_batch_size": scenario.global_batch_size,
            "step_alone_s": outcome.alone_s,
            "step_s": outcome.step_s,
            **{f"step_s_quantile_{share:g}": outcome.quantile_s(share) for share in QUANTILES},
            "exposed_s": float(outcome.exposed_s.mean()),
            "efficiency": outcome.efficiency,
            "images_per_s": scenario.global_batch_size / outcome.step_s,
            "epoch_s": steps * outcome.step_s,
            "run_hours": self.run.work_s / 3600,
            "training_flops_per_image": float(flops_per_image(scenario.layers)),
            **totals,
            "run_with_failures_s": self.run.run_s,
            "run_with_failures_s_quantile_0.1": self.run.low_s,
            "run_with_failures_s_quantile_0.9": self.run.high_s,
            "elastic_run_s": self.run.elastic_s,
        }

    def answer(self) -> str:
        """Return a summary of duration, bottleneck, best plan, confidence and assumptions in sentences."""
        scenario = self.scenario
        outcome = self.outcome
        numbers = self.numbers()
        cluster = scenario.cluster
        lines = run_lines(scenario, self.planned, self.run, step_s=outcome.step_s)
        lines.append(self._limit(numbers))
        if self.candidates:
            lines.append(self._best_plan())
        if self.compression is not None:
            lines.append(self.compression.sentence())
        for name in ("comm_dtype_across_nodes", "sync_across_nodes_every"):
            if cluster.num_nodes == 1 and getattr(scenario, name) not in (None, 1):
                lines.append(f"{name}={getattr(scenario, name)} has no effect on one node.")
        if scenario.is_local:
            lines.append(
                f"Every {scenario.sync_across_nodes_every} steps nodes average master weights and momentum, which "
                f"takes {time_text(scenario.average_s)}. In between, every node trains independently, so the "
                "steps differ from those of one large batch."
            )
        lines.append(self.memory.sentence(self.pipelines, "GPU" if scenario.on_cuda else "rank"))
        if self.pipelines and self.memory.is_data_parallel_possible:
            lines.append(what_pays(self.pipelines, outcome.step_s))
        lines.append(confidence(scenario, self.run.step_bounds_s))
        if self.preset:
            words = " ".join(f"{key}={value}" for key, value in self.preset.items())
            lines.append(
                f"Not measured, but assumed by {self.planned.about}. Set your own values where these differ:\n  {words}"
            )
        if self.planned.price_per_node_hour is None:
            lines.append("Set cluster.price_per_node_hour=<price> to estimate the cost.")
        return "\n".join(lines)

    @cached_property
    def run(self) -> RunTime:
        """Expected duration of the run, including start-up, checkpoints and failures."""
        num_steps = self.planned.num_steps(self.scenario.global_batch_size)
        return RunTime.of(self.scenario, self.outcome.step_s, num_steps, self.planned.failures)

    def _limit(self, numbers: Mapping[str, float]) -> str:
        """Return a sentence on the step time, its bottleneck and the training throughput."""
        scenario = self.scenario
        outcome = self.outcome
        if scenario.work().input_s >= outcome.step_s:
            bound = "input-bound"
        elif outcome.step_s > 2 * outcome.alone_s:
            bound = "communication-bound"
        elif scenario.cluster.slowdown > 1:
            bound = "compute-bound on its slowest nodes"
        else:
            bound = "compute-bound"

        error = "error unknown"
        bounds_s = self.run.step_bounds_s
        if bounds_s is not None:
            low_s, high_s = bounds_s
            error = f"80 %: {time_text(low_s)} to {time_text(high_s)}"
        return (
            f"The run is {bound}: a step of {scenario.global_batch_size:,} images takes {time_text(outcome.step_s)} "
            f"({error}), of which ranks wait {time_text(numbers['exposed_s'])} for gradients. That is "
            f"{numbers['images_per_s']:,.0f} images/s, an efficiency of {outcome.efficiency:.1%}."
        )

    def _best_plan(self) -> str:
        """Return a sentence that names the fastest plan, or explains why the default plan is kept."""
        scenario = self.scenario
        own_s = replace(scenario, jitter=NO_JITTER, num_steps=1).run().step_s
        best, comparison = self._best_and_flat(own_s)
        if best.step_s > (1 - CLEARLY_LESS) * own_s:
            return (
                f"None of {len(self.candidates)} other plans saves {CLEARLY_LESS:.0%} "
                f"over the configured one.{comparison}"
            )

        bounds_s = self.run.step_bounds_s
        is_clear = bounds_s is not None and best.step_s < bounds_s[0]
        if scenario.cluster.num_nodes > 1 and scenario.on_cuda and not is_clear:
            doubt = "its error is unknown on this cluster"
            if bounds_s is not None:
                doubt = "that is within its error"
            return (
                f"The prediction favors {best} (saves {1 - best.step_s / own_s:.1%}), but {doubt}.{comparison} "
                "Keep the default, or measure with `lightning-hybrid tune`."
            )

        run_s = self.planned.num_steps(scenario.global_batch_size) * best.step_s
        calm = ""
        if scenario.jitter != NO_JITTER:
            calm = " without jitter"
        return (
            f"The best of {len(self.candidates)} plans{calm} is {best}: {time_text(best.step_s)} a step, an efficiency "
            f"of {self.outcome.alone_s / best.step_s:.1%}, {time_text(run_s)} in all. The configured plan takes "
            f"{_longer(own_s, best.step_s)}.{comparison} To train with the best plan, set "
            f"strategy.comm.algorithm={best.plan.algorithm} strategy.comm.bucket_bytes={best.plan.bucket_bytes}."
        )

    def _best_and_flat(self, own_s: float) -> tuple[Candidate, str]:
        """Return the plan to recommend instead of the configured one, and a sentence on flat all-reduces.

        The plan is chosen as in `plan_search`.

        Args:
            own_s: Step time of the configured plan in seconds.
        """
        best = self.candidates[0]
        # No other plan saves time, so there is nothing to compare with flat all-reduces.
        if own_s <= best.step_s:
            return best, ""
        scenario = self.scenario
        names: tuple[str, ...] = ("flat",)
        if scenario.on_cuda:
            names = FLAT_ON_CUDA
        flat = next(
            (candidate for candidate in self.candidates if candidate.plan.algorithm in names), None
        )
        if flat is None or flat is best:
            return best, ""
        flat_s = flat.step_s
        if (scenario.algorithm or scenario.plan.algorithm) in names:
            flat_s = min(flat_s, own_s)
        if scenario.on_cuda and best.step_s > (1 - CLEARLY_LESS_BY_HIERARCHY) * flat_s:
            saved = f"{1 - best.step_s / flat_s:.1%}"
            return flat, f" {best} would save {saved}, but its additional kernels may cost as much."
        return best, f" The best flat plan takes {_longer(flat_s, best.step_s)}."

    def printed(self) -> str:
        """Return the summary and the scaling curve as text, without points far beyond the requested number of ranks."""
        asked = self.scenario.cluster.world_size
        near = [
            point
            for point in self.curve
            if self.is_own_curve or point.num_ranks <= SHOWN_TIMES * asked
        ]
        return "\n\n".join([self.answer(), *([curve_table(near)] if near else [])])

    def markdown(self) -> str:
        """Return the full report in Markdown, with results, buckets, scaling curve and plans."""
        scenario = self.scenario
        numbers = self.numbers()
        # Because all quantiles are equal without jitter.
        if numbers["step_s_quantile_0.5"] == numbers["step_s_quantile_0.99"]:
            numbers = {name: value for name, value in numbers.items() if "quantile" not in name}
        notes = {
            "run_hours": f"run_hours, {self.planned.epochs:g} epochs",
            "epoch_s": f"epoch_s, {self.planned.images_per_epoch:,} images",
        }
        lines = [self.answer(), "", "| what | value |", "|---|---|"]
        lines += [f"| {notes.get(name, name)} | {value:.6g} |" for name, value in numbers.items()]
        lines += ["", "| bucket | MiB | algorithm | ready s | done s |", "|---|---|---|---|---|"]
        first = self.outcome.first
        for bucket, ready_s in zip(self.outcome.buckets, first.ready_s, strict=True):
            ends_s = [span.end_s for span in first.spans if span.chunk.bucket == bucket.index]
            name = scenario.algorithm or bucket.algorithm
            size = bucket.num_bytes / 2**20
            lines.append(
                f"| {bucket.index} | {size:.3g} | {name} | {ready_s:.6g} | {max(ends_s, default=ready_s):.6g} |"
            )
        lines += ["", self.memory.table()]
        if self.compression is not None:
            lines += ["", self.compression.table()]
        if self.pipelines:
            lines += ["", pipeline_table(self.pipelines)]
        if self.curve:
            lines += ["", curve_table(self.curve)]
        if self.candidates:
            lines += ["", plan_table(self.candidates, self.num_shown)]
        return "\n".join(lines)

    def write(self, folder: Path, config: dict[str, Any], environment: dict[str, Any]) -> None:
        """Write `simulate.json`, `table.md` and the timeline of one step to a folder.

        `config` and `environment` are written to `simulate.json` unchanged.
        """
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "config": config,
            "environment": environment,
            "numbers": self.numbers(),
            "steps_s": [float(step_s) for step_s in self.outcome.steps_s],
            "scaling": [asdict(point) for point in self.curve],
            "plans": [asdict(candidate) for candidate in self.candidates],
            "memory": self.memory.numbers(),
            "compression": None if self.compression is None else self.compression.numbers(),
            "pipelines": [
                {name: value for name, value in vars(choice).items() if name != "tasks"}
                for choice in self.pipelines
            ],
        }
        (folder / "simulate.json").write_text(json.dumps(content, indent=1) + "\n")
        (folder / "table.md").write_text(self.markdown() + "\n")
        to_trace(self.outcome).write(folder / "trace" / "rank-0.json", rank=0)


def _pipelines(scenario: Scenario, memory: MemoryReport) -> list[PipelineChoice]:
    # If no pipeline fits otherwise, try those that recompute blocks in backward.
    blocks = memory.blocks
    state = memory.state
    room = memory.usable_bytes
    choices = pipeline_choices(scenario, blocks, state, usable_bytes=room)
    return choices or pipeline_choices(scenario, blocks, state, usable_bytes=room, recomputes=True)


def _compression(
    scenario: Scenario, search: Search | None, candidates: Sequence[Candidate]
) -> CompressionReport | None:
    # Compare with the better of the configured plan and the best plan without compression.
    if scenario.cluster.num_nodes == 1 or scenario.is_local:
        return None
    calm = replace(scenario, jitter=NO_JITTER, num_steps=1, comm_dtype_across_nodes=None)
    plans = [scenario.plan]
    outcomes = [calm.run()]
    if search is not None:
        candidates = candidates if scenario.wire is None else search.run(calm)
        best = chosen(candidates, on_cuda=scenario.on_cuda).plan
        plans += [best, candidates[0].plan]
        outcomes.append(replace(calm, plan=best, algorithm=None, cuts=None, num_columns=None).run())
    return CompressionReport.of(
        min(outcomes, key=lambda outcome: outcome.step_s),
        calm.work(),
        calm.cluster,
        list(dict.fromkeys(plans)),
        itemsize=scenario.itemsize,
        on_cuda=scenario.on_cuda,
    )


def plan_table(candidates: Sequence[Candidate], num_shown: int) -> str:
    """Return a Markdown table of the best plans and the slowest one.

    The column "more" says how much longer a step takes with each plan than with the best one.
    """
    best = candidates[0]
    lines = ["| plan | buckets | step s | exposed s | more |", "|---|---|---|---|---|"]
    shown = [*candidates[:num_shown], *([candidates[-1]] if len(candidates) > num_shown else [])]
    lines += [
        f"| {c} | {c.num_buckets} | {c.step_s:.5g} | {c.exposed_s:.3g} | {max(0.0, c.step_s / best.step_s - 1):.1%} |"
        for c in shown
    ]
    return "\n".join(lines)


def _longer(step_s: float, best_s: float) -> str:
    return f"{max(0.0, step_s / best_s - 1):.1%} longer"


def scales(num_ranks: int, *, ranks_per_node: int) -> list[int]:
    """Return the world sizes at which the scaling curve is simulated.

    They go from one to four times `num_ranks`, followed by numbers of up to 16,384.

    >>> scales(24, ranks_per_node=8)
    [1, 6, 8, 12, 24, 48, 96, 256, 1024, 4096, 16384]
    """
    near = {
        1,
        ranks_per_node,
        num_ranks // 4,
        num_ranks // 2,
        num_ranks,
        2 * num_ranks,
        SHOWN_TIMES * num_ranks,
    }
    return sorted(near - {0}) + [far for far in FAR_RANKS if far > SHOWN_TIMES * num_ranks]


def scaling_point(scenario: Scenario) -> ScalingPoint:
    """Simulate the scenario, and return its point on the scaling curve."""
    outcome = scenario.run()
    return ScalingPoint(
        num_ranks=scenario.cluster.world_size,
        step_s=outcome.step_s,
        exposed_s=float(outcome.exposed_s.mean()),
        efficiency=outcome.efficiency,
        images_per_s=scenario.global_batch_size / outcome.step_s,
        least_s=scenario.cluster.least_s(scenario.node_bytes(outcome)),
    )


def curve_table(points: Sequence[ScalingPoint]) -> str:
    """Return a Markdown table of the scaling curve."""
    lines = [
        "| ranks | step s | exposed s | efficiency | images/s | byte bound s |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {p.num_ranks} | {p.step_s:.4g} | {p.exposed_s:.3g} | {p.efficiency:.1%} | {p.images_per_s:,.0f} "
        f"| {p.least_s:.3g} |"
        for p in points
    ]
    return "\n".join(lines)
