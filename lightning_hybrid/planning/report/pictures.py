"""Charts of a simulated run and of measured links.

This is the only module of the planner that imports matplotlib.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from matplotlib.axes import Axes

from lightning_hybrid.callbacks.run_report.figure import MUTED, SERIES, Panel, in_units, write_svg
from lightning_hybrid.formatting import time_text
from lightning_hybrid.planning.estimates.parallelism import PipelineChoice
from lightning_hybrid.planning.report.simulate_report import SimulationReport
from lightning_hybrid.planning.report.tune_report import LEVELS, TuneReport


def draw_simulation(report: SimulationReport, folder: Path) -> None:
    """Draw a simulated run as `simulate.svg`, and its pipeline, if any, as `pipeline.svg`."""
    curve: list[Panel] = [(partial(_draw_scaling, report), 220)] if report.curve else []
    write_svg(folder / "simulate.svg", [(partial(_draw_step, report), 260), *curve])
    if report.pipelines:
        write_svg(folder / "pipeline.svg", [schedule_panel(report.pipelines[0])])


def schedule_panel(choice: PipelineChoice) -> Panel:
    """Return a chart panel that shows when each pipeline rank computes which micro-batch."""

    def draw(axes: Axes) -> None:
        axes.set_title(
            f"{choice.schedule}, {choice.num_microbatches} micro-batches: ranks wait {choice.bubble:.1%}"
        )
        total_s = max(task.end_s for tasks in choice.tasks for task in tasks)
        for rank, tasks in enumerate(choice.tasks):
            for task in tasks:
                width_s = task.end_s - task.begin_s
                turn = task.stage // choice.num_ranks
                color = SERIES[not task.is_forward]  # the second stage of a rank is darker
                axes.barh(
                    rank,
                    0.94 * width_s,
                    left=task.begin_s,
                    color=color,
                    alpha=min(0.35 + 0.25 * turn, 1),
                )
                if width_s > 0.06 * total_s:  # room for a number
                    axes.text(
                        task.begin_s + width_s / 2,
                        rank,
                        str(task.microbatch),
                        ha="center",
                        va="center",
                    )
        axes.set_yticks(
            range(choice.num_ranks), [f"rank {rank}" for rank in range(choice.num_ranks)]
        )
        axes.invert_yaxis()
        axes.set_xlabel("blue: forward, orange: backward")
        in_units(axes, x="s")

    return draw, 90 + 34 * choice.num_ranks


def _draw_step(report: SimulationReport, axes: Axes) -> None:
    work = report.scenario.work()
    outcome = report.outcome
    exposed = time_text(float(outcome.exposed_s.mean()))
    axes.set_title(
        f"A step takes {time_text(outcome.step_s)}, {exposed} of it waiting for gradients"
    )
    spans = [
        ("forward", 0.0, work.forward_s),
        ("backward", work.forward_s, work.forward_s + work.backward_s),
    ]
    for span in outcome.first.spans:
        spans.append(
            (f"{span.chunk.algorithm} {span.stage}".replace("_", " "), span.begin_s, span.end_s)
        )
    names = list(dict.fromkeys(name for name, *_ in spans))
    for name, begin_s, end_s in spans:
        color = MUTED if name in ("forward", "backward") else SERIES[0]
        axes.barh(name, end_s - begin_s, left=begin_s, height=0.7, color=color)
    exposed_from_s = work.forward_s + work.backward_s
    axes.axvspan(
        exposed_from_s,
        max(exposed_from_s, *(end_s for *_, end_s in spans)),
        color=SERIES[1],
        alpha=0.3,
    )
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("orange: waiting without other work")
    in_units(axes, x="s")


def _draw_scaling(report: SimulationReport, axes: Axes) -> None:
    asked = report.scenario.cluster.world_size
    efficiency = next(
        (p.efficiency for p in report.curve if p.num_ranks == asked), report.outcome.efficiency
    )
    axes.set_title(
        f"{asked:,} ranks reach {efficiency:.0%} efficiency compared with one rank alone"
    )
    shares = [100 * point.efficiency for point in report.curve]
    axes.semilogx([point.num_ranks for point in report.curve], shares, marker="o")
    axes.set_ylim(max(0, 10 * (min(shares) // 10) - 10), 105)
    axes.set_xlabel("ranks")
    in_units(axes, x="", y="%")


def draw_links(report: TuneReport, folder: Path) -> None:
    """Draw measured messages and all-reduces with their fits and predictions, as `tune.svg`."""
    panels: list[Panel] = [
        (partial(_draw_messages, report), 280),
        (partial(_draw_sums, report), 280),
    ]
    write_svg(folder / "tune.svg", panels)


def _draw_messages(report: TuneReport, axes: Axes) -> None:
    _use_log_scales(axes)
    rates = []
    for number, (level, fit) in enumerate(
        (("inside", report.found.inside), ("across", report.found.across))
    ):
        if fit is not None:
            times_s = report.samples.of("ping", level)
            for num_bytes, samples_s in times_s.items():
                axes.plot(
                    [num_bytes] * len(samples_s), samples_s, ".", color=SERIES[number], alpha=0.4
                )
            axes.plot(
                list(times_s),
                [fit.seconds(n) for n in times_s],
                color=SERIES[number],
                label=LEVELS[level],
            )
            rates.append(f"{fit.bytes_per_s / 1e9:.3g} GB/s {LEVELS[level]}")
    axes.set_title(f"Messages: {', '.join(rates)}")
    axes.set_xlabel("dots: samples; lines: latency + bytes / rate")
    in_units(axes, x="B", y="s")


def _draw_sums(report: TuneReport, axes: Axes) -> None:
    _use_log_scales(axes)
    algorithms = dict.fromkeys(timed.algorithm for timed in report.found.sums)
    for number, name in enumerate(algorithms):
        color = SERIES[number % len(SERIES)]
        points = []
        for timed in report.found.sums:
            if timed.algorithm == name:
                points.append((timed.num_bytes, timed.measured_s, timed.predicted_s))
        sizes, measured_s, predicted_s = zip(*sorted(points), strict=True)
        axes.plot(sizes, measured_s, "o", color=color)
        axes.plot(sizes, predicted_s, "--", color=color, label=name.replace("_", " "))
    axes.set_title(f"All-reduces: median prediction error {report.found.typical_error:.1%}")
    axes.set_xlabel("dots: measured; dashed: predicted")
    in_units(axes, x="B", y="s")


def _use_log_scales(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
