"""Sentences on the duration, price and reliability of a predicted run, and a table of clusters."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from lightning_hybrid.formatting import markdown_table, time_text
from lightning_hybrid.planning.estimates.run_time import PlannedRun, RunTime
from lightning_hybrid.planning.estimates.scenario import (
    LEAST_SHARE,
    MOST_SHARE,
    PEAK_SHARE,
    Scenario,
)
from lightning_hybrid.planning.model.cluster import HOLDS_TO, MEASURED_FROM, times_measured

IMAGENET = 1_281_167  # training images
NO_MATTER = 0.005  # fraction of the time below which failures are negligible


def days(seconds: float) -> str:
    """Format a duration in days, or in smaller units if it is short.

    An infinite duration is formatted as 'no end'.

    >>> days(60.0), days(3 * 86400.0), days(float("inf"))
    ('60 s', '3 days', 'no end')
    """
    if seconds == float("inf"):
        return "no end"
    return f"{seconds / 86400:,.3g} days" if seconds >= 2 * 86400 else time_text(seconds)


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """Predicted run on one of several clusters, for a comparison.

    Args:
        cluster: Name of the cluster.
        step_s: Time of a step.
        run: Duration of the whole run.
        price_per_node_hour: Price of a node per hour. None: unknown.
    """

    cluster: str
    scenario: Scenario
    step_s: float
    run: RunTime
    price_per_node_hour: float | None

    def costs(self) -> tuple[float, float, float] | None:
        """Return the price of the run with its lower and upper bounds, or None if it is unknown."""
        if self.price_per_node_hour is None:
            return None
        return self.run.costs(self.scenario.cluster.num_nodes * self.price_per_node_hour / 3600)

    def cells(self) -> list[str]:
        """Return the cells of the run's row in the comparison table."""
        scenario = self.scenario
        run = self.run
        rate = f"{scenario.images_per_s:,.0f}"
        if scenario.images_per_s < 10:
            rate = f"{scenario.images_per_s:.3g}"
        if scenario.is_rate_estimated:
            rate += " (estimated)"
        ends = "unknown"
        if run.step_bounds_s is not None:
            ends = " to ".join(map(time_text, run.step_bounds_s))
        price = "no price"
        costs = self.costs()
        if costs is not None:
            price = f"{costs[0]:,.2f} ({costs[1]:,.2f} to {costs[2]:,.2f})"
        return [
            self.cluster,
            f"{scenario.cluster.world_size:,}",
            rate,
            f"{time_text(self.step_s)} ({ends})",
            f"{days(run.run_s)} ({days(run.low_s)} to {days(run.high_s)})",
            price,
        ]


def comparison_table(runs: Sequence[ComparedRun]) -> str:
    """Return a Markdown table with one row per cluster, sorted by the price of the run.

    Runs without a price come last.
    """

    def price(compared: ComparedRun) -> float:
        costs = compared.costs()
        return float("inf") if costs is None else costs[0]

    header = [
        "cluster",
        "GPUs",
        "images/s of one",
        "step (80 %)",
        "run (80 %)",
        "cost of the run (80 %)",
    ]
    return markdown_table(header, [compared.cells() for compared in sorted(runs, key=price)])


def run_lines(scenario: Scenario, planned: PlannedRun, run: RunTime, *, step_s: float) -> list[str]:
    """Return a sentence on the duration and price of the run, and one on the effect of failures."""
    failures = planned.failures
    cluster = scenario.cluster
    what = f"{planned.epochs:g} epochs of {planned.images_per_epoch:,} images"
    what += " (ImageNet)" * (planned.images_per_epoch == IMAGENET)
    unit = ("GPU" if scenario.on_cuda else "rank") + "s" * (cluster.world_size > 1)
    caveat = "" if run.step_bounds_s else ", of failures alone"
    costs = ""
    if planned.price_per_node_hour is not None:
        price, low, high = run.costs(cluster.num_nodes * planned.price_per_node_hour / 3600)
        rate = f"{planned.price_per_node_hour:g} per node and hour"
        costs += f"; cost {price:,.2f} ({low:,.2f} to {high:,.2f}) at {rate}"
    if planned.watts_per_node is not None:
        energy = [
            f"{kwh:,.3g}" for kwh in run.costs(cluster.num_nodes * planned.watts_per_node / 3.6e6)
        ]
        costs += f"; {energy[0]} kWh ({energy[1]} to {energy[2]})"
    between_s = failures.between_s(cluster.world_size)
    every_s = failures.interval_s(cluster.world_size)
    lost = 1 - run.work_s / (run.run_s - failures.start_s)
    text = f"A failure occurs every {days(between_s)} on average"
    if run.work_s < every_s or lost < NO_MATTER:
        text += f", so failures hardly matter for {days(run.work_s)} of work. Save as often as you like."
    else:
        steps = max(1, round(every_s / step_s))
        text += (
            f", which costs {lost:.1%} of the time if the run saves a checkpoint every {time_text(every_s)}, the best "
            f"interval (Daly 2006): callbacks.last.every_n_train_steps={steps}. An elastic run takes "
            f"{days(run.elastic_s)}."
        )
    return [
        f"{what} on {cluster.world_size:,} {unit} ({cluster.num_nodes} x {cluster.ranks_per_node}): "
        f"{days(run.run_s)} including start-up and failures (80 % of runs: {days(run.low_s)} to "
        f"{days(run.high_s)}{caveat}), {days(run.work_s)} without{costs}.",
        text,
    ]


def confidence(scenario: Scenario, step_bounds_s: tuple[float, float] | None) -> str:
    """Return sentences on how well the prediction is validated, and on what to measure next.

    Args:
        scenario: The planned run.
        step_bounds_s: Bounds of the step time in seconds. None: unknown.
    """
    cluster = scenario.cluster
    rate = ""
    if scenario.is_rate_estimated:
        scope = "which the interval includes"
        if step_bounds_s is None:
            scope = "which no interval above includes"
        rate = (
            f" images_per_s is estimated as {PEAK_SHARE:.0%} of the peak ({LEAST_SHARE:.0%} to {MOST_SHARE:.0%}, "
            f"{scope}). Measure it first."
        )
    if cluster.num_nodes == 1:
        return (
            "Confidence: no data crosses nodes, and the error of all-reduces inside a node is unknown."
            f"{rate}"
        )
    if step_bounds_s is None:
        return (
            "Confidence: unknown. The model has not been validated on this type of node and network. Keep the default "
            f"plan, and measure on 4 nodes with `lightning-hybrid tune`.{rate}"
        )
    measured_nodes = cluster.measured_nodes or 0
    if measured_nodes >= MEASURED_FROM:
        holds = f"and their curve holds up to {HOLDS_TO * measured_nodes} nodes"
        if times_measured(cluster) > HOLDS_TO:
            holds = (
                f"but their curve is not known to hold beyond {HOLDS_TO * measured_nodes} nodes, so the interval is "
                "wider"
            )
        return f"Confidence: all-reduces were measured on {measured_nodes} nodes, {holds}.{rate}"
    return (
        "Confidence: intervals come from published all-reduces on such links. Rates, failures and other traffic are "
        f"taken as given. Measure on 4 nodes with `lightning-hybrid tune` to know more.{rate}"
    )


def preset_of(scenario: Scenario, given: Container[str]) -> dict[str, str]:
    """Return the device and link settings that the user did not specify, with their assumed values.

    Args:
        scenario: The planned run.
        given: Keys that the user gave, which are left out.
    """
    cluster = scenario.cluster
    values = {
        "images_per_s": scenario.images_per_s,
        "cluster.links.ranks_per_node": cluster.ranks_per_node,
        "cluster.links.inside.bytes_per_s": cluster.inside.bytes_per_s,
        "cluster.links.across.bytes_per_s": cluster.across.bytes_per_s,
        "cluster.links.across.latency_s": cluster.across.latency_s,
        "cluster.links.nics_per_node": cluster.nics_per_node,
    }
    return {name: f"{value:g}" for name, value in values.items() if name not in given}
