"""Result of the simulator: tables, a picture, JSON and a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from matplotlib.figure import Figure
from omegaconf import DictConfig

from lightning_hybrid.planning.plan_search import Candidate
from lightning_hybrid.planning.run_price import run_totals
from lightning_hybrid.planning.simulate import SimulatedSteps, to_trace
from recipes.cli.results import environment, write_json
from recipes.planning.layers import flops_per_image
from recipes.planning.scenario import Scenario

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """Scale on the curve. `least_s`: what no all-reduce of all gradients can beat between these nodes."""

    num_ranks: int
    step_s: float
    exposed_s: float
    efficiency: float
    images_per_s: float
    least_s: float


@dataclass(frozen=True, kw_only=True)
class SimulationReport:
    """Simulated run."""

    scenario: Scenario
    outcome: SimulatedSteps
    curve: tuple[ScalingPoint, ...]
    candidates: tuple[Candidate, ...]
    num_shown: int
    about: str
    epochs: float
    images_per_epoch: int
    watts_per_node: float | None
    price_per_node_hour: float | None

    @classmethod
    def of(cls, scenario: Scenario, cfg: DictConfig) -> SimulationReport:
        """Simulate all that the configuration asks for."""
        search = None if cfg.search is None else instantiate(cfg.search)
        return cls(
            scenario=scenario,
            outcome=scenario.run(),
            curve=tuple(scaling_point(scenario.at(num_ranks)) for num_ranks in cfg.scaling_ranks),
            candidates=() if search is None else tuple(search.run(scenario)),
            num_shown=0 if search is None else search.num_shown,
            about=cfg.cluster.about,
            epochs=cfg.epochs,
            images_per_epoch=cfg.images_per_epoch,
            watts_per_node=cfg.cluster.watts_per_node,
            price_per_node_hour=cfg.cluster.price_per_node_hour,
        )

    def numbers(self) -> dict[str, float]:
        """Return the run in numbers; energy and price where the cluster has rates for them."""
        scenario, outcome = self.scenario, self.outcome
        steps = self.images_per_epoch / scenario.global_batch_size
        totals = run_totals(
            step_s=outcome.step_s,
            num_steps=self.epochs * steps,
            num_nodes=scenario.cluster.num_nodes,
            watts_per_node=self.watts_per_node,
            price_per_node_hour=self.price_per_node_hour,
        )
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
            "run_hours": totals.pop("run_hours"),
            "training_flops_per_image": float(flops_per_image(scenario.layers)),
            **totals,
        }

    def markdown(self) -> str:
        """Format run, buckets, scaling and plans."""
        scenario = self.scenario
        lines = [f"{self.about}; {scenario.cluster.num_nodes} nodes", "", "| what | value |", "|---|---|"]
        lines += [f"| {name} | {value:.6g} |" for name, value in self.numbers().items()]
        lines += ["", "| bucket | MiB | algorithm | ready s | done s |", "|---|---|---|---|---|"]
        first = self.outcome.first
        for bucket, ready_s in zip(self.outcome.buckets, first.ready_s, strict=True):
            ends_s = [span.end_s for span in first.spans if span.bucket == bucket.index]
            name = scenario.algorithm or bucket.algorithm
            size = bucket.num_bytes / 2**20
            lines.append(
                f"| {bucket.index} | {size:.3g} | {name} | {ready_s:.6g} | {max(ends_s, default=ready_s):.6g} |"
            )
        if self.curve:
            lines += [
                "",
                "| ranks | step s | exposed s | efficiency | images/s | byte bound s |",
                "|---|---|---|---|---|---|",
            ]
            lines += [
                f"| {p.num_ranks} | {p.step_s:.4g} | {p.exposed_s:.3g} | {p.efficiency:.1%} | {p.images_per_s:.4g} "
                f"| {p.least_s:.3g} |"
                for p in self.curve
            ]
        if self.candidates:
            lines += ["", plan_table(self.candidates, self.num_shown)]
        return "\n".join(lines)

    def write(self, folder: Path, config: dict[str, Any]) -> None:
        """Write all files into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "config": config,
            "environment": environment(),
            "numbers": self.numbers(),
            "steps_s": [float(step_s) for step_s in self.outcome.steps_s],
            "scaling": [asdict(point) for point in self.curve],
            "plans": [asdict(candidate) for candidate in self.candidates],
        }
        write_json(folder / "simulate.json", content)
        (folder / "table.md").write_text(self.markdown() + "\n")
        to_trace(self.outcome).write(folder / "trace" / "rank-0.json", rank=0)
        self.picture().savefig(folder / "simulate.png", dpi=90)

    def picture(self) -> Figure:
        """Draw the timeline of one step, and efficiency over ranks."""
        figure = Figure(figsize=(13, 4.2), layout="constrained")
        timeline, scaling = figure.subplots(1, 2, width_ratios=(2, 1))
        work, first = self.scenario.work(), self.outcome.first
        compute = [("forward", 0.0, work.forward_s, "0.7"), ("backward", work.forward_s, work.backward_s, "0.5")]
        for name, begin_s, time_s, colour in compute:
            timeline.barh("compute", 1e3 * time_s, left=1e3 * begin_s, color=colour, label=name)
        names = list(dict.fromkeys(f"{span.algorithm} {span.stage}" for span in first.spans))
        for span in first.spans:
            place = names.index(f"{span.algorithm} {span.stage}")
            timeline.barh(
                f"{span.algorithm} {span.stage}",
                1e3 * (span.end_s - span.begin_s),
                left=1e3 * span.begin_s,
                color=f"C{place}",
                edgecolor="white",
                linewidth=0.5,
            )
        timeline.invert_yaxis()
        timeline.set_xlabel("ms")
        timeline.set_title(f"one step, {self.scenario.cluster.world_size} ranks")
        timeline.legend(fontsize=8)
        if self.curve:
            ranks = [point.num_ranks for point in self.curve]
            scaling.semilogx(ranks, [100 * point.efficiency for point in self.curve], marker="o", base=2)
            scaling.set_ylim(0, 105)
            scaling.set_xlabel("ranks")
            scaling.set_ylabel("% of one rank alone")
            scaling.grid(alpha=0.3)
        scaling.set_title(self.about, fontsize=9)
        return figure


def scaling_point(scenario: Scenario) -> ScalingPoint:
    """Simulate one scale."""
    outcome = scenario.run()
    num_bytes = sum(bucket.num_bytes for bucket in outcome.buckets)
    return ScalingPoint(
        num_ranks=scenario.cluster.world_size,
        step_s=outcome.step_s,
        exposed_s=float(outcome.exposed_s.mean()),
        efficiency=outcome.efficiency,
        images_per_s=scenario.global_batch_size / outcome.step_s,
        least_s=scenario.cluster.least_s(num_bytes),
    )


def plan_table(candidates: Sequence[Candidate], num_shown: int) -> str:
    """Format the best plan, and what the runners-up and the worst cost more."""
    best = candidates[0]
    lines = [f"best plan: {best} ({best.num_buckets} of them); the others, by what a step takes more:", ""]
    lines += ["| plan | buckets | step s | exposed s | more |", "|---|---|---|---|---|"]
    shown = [*candidates[:num_shown], *([candidates[-1]] if len(candidates) > num_shown else [])]
    lines += [
        f"| {c} | {c.num_buckets} | {c.step_s:.5g} | {c.exposed_s:.3g} | {c.step_s / best.step_s - 1:.1%} |"
        for c in shown
    ]
    return "\n".join(lines)
