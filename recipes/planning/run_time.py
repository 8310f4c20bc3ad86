"""How long a planned run takes with start, checkpoints and failures, and how sure that is; on several clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig

from lightning_hybrid.planning.cluster import HOLDS_TO, MEASURED_FROM, times_measured
from recipes.cli.markdown import markdown_table
from recipes.cli.results import time_text
from recipes.planning.estimates.failures import SHARES, Failures
from recipes.planning.scenario import LEAST_SHARE, MOST_SHARE, PEAK_SHARE, Scenario, scenario_of

if TYPE_CHECKING:
    from recipes.planning.simulate_report import SimulationReport

IMAGENET = 1_281_167  # training images
NO_MATTER = 0.005  # of the time


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """Expected seconds of a run, and the ends of what 80 % of runs take.

    Args:
        work_s: Steps alone.
        run_s: With start, checkpoints and failures.
        low_s: The shortest likely steps with few failures.
        high_s: The longest likely steps with many.
        elastic_s: `run_s` of an elastic run.
        step_bounds_s: Ends of the steps; None: unknown, and `low_s` and `high_s` are of failures alone.
    """

    work_s: float
    run_s: float
    low_s: float
    high_s: float
    elastic_s: float
    step_bounds_s: tuple[float, float] | None

    @classmethod
    def of(cls, scenario: Scenario, step_s: float, num_steps: float, failures: Failures) -> RunTime:
        """Simulate the run with steps of `step_s`."""
        both, gpus = scenario.bounds(), scenario.cluster.world_size
        ends_s = None if both is None else (both[0].run().step_s, both[1].run().step_s)
        simulated = [failures.simulated_s(num_steps * each_s, gpus) for each_s in ends_s or (step_s, step_s)]
        low_s, high_s = (each[int(share * len(each))] for each, share in zip(simulated, SHARES, strict=True))
        work_s = num_steps * step_s
        return cls(
            work_s=work_s,
            run_s=failures.start_s + failures.restarted_s(work_s, gpus),
            low_s=failures.start_s + low_s,
            high_s=failures.start_s + high_s,
            elastic_s=failures.start_s + failures.elastic_s(work_s, gpus),
            step_bounds_s=ends_s,
        )

    def costs(self, rate_per_s: float) -> tuple[float, float, float]:
        """Return what the run costs at a rate, and the ends."""
        return rate_per_s * self.run_s, rate_per_s * self.low_s, rate_per_s * self.high_s


def days(seconds: float) -> str:
    """Format the time of a run; infinite where it never ends.

    >>> days(60.0), days(3 * 86400.0), days(float("inf"))
    ('60 s', '3 days', 'no end')
    """
    if seconds == float("inf"):
        return "no end"
    return f"{seconds / 86400:,.3g} days" if seconds >= 2 * 86400 else time_text(seconds)


def comparison(cfg: DictConfig) -> str:
    """Plan the same run on each cluster of `compare`; return one table, the cheapest run first.

    Raises:
        ValueError: There are other numbers of clusters than of prices.
    """
    names, prices = list(cfg.compare), list(cfg.prices_per_node_hour or [])
    if prices and len(prices) != len(names):
        raise ValueError(
            f"`prices_per_node_hour` (={prices}) must have a price for each of `compare` (={names}): the order is the "
            "same. Give as many, or leave it out."
        )
    own = ("cluster=", "compare=", "prices_per_node_hour=")
    given = [each for each in HydraConfig.get().overrides.task if not each.lstrip("+").startswith(own)]
    rows = []
    for name, price in zip(names, prices or [None] * len(names), strict=True):
        one = compose("simulate", [*given, f"cluster={name}"])
        scenario = scenario_of(one)
        num_steps, step_s = one.epochs * one.images_per_epoch / scenario.global_batch_size, scenario.run().step_s
        run = RunTime.of(scenario, step_s, num_steps, instantiate(one.failures))
        price = one.cluster.price_per_node_hour if price is None else price
        cost = None if price is None else run.costs(scenario.cluster.num_nodes * price / 3600)
        ends = "unknown" if run.step_bounds_s is None else " to ".join(map(time_text, run.step_bounds_s))
        rows.append(
            (
                float("inf") if cost is None else cost[0],
                [
                    name,
                    f"{scenario.cluster.world_size:,}",
                    f"{scenario.images_per_s:,.0f}{' (estimated)' * scenario.is_rate_estimated}",
                    f"{time_text(step_s)} ({ends})",
                    f"{days(run.run_s)} ({days(run.low_s)} to {days(run.high_s)})",
                    "no price" if cost is None else f"{cost[0]:,.2f} ({cost[1]:,.2f} to {cost[2]:,.2f})",
                ],
            )
        )
    header = ["cluster", "GPUs", "images/s of one", "step (80 %)", "run (80 %)", "cost of the run (80 %)"]
    return markdown_table(header, [row for _, row in sorted(rows, key=lambda pair: pair[0])])


def run_lines(report: SimulationReport) -> list[str]:
    """Say how long the run takes and what it costs; then what failures have to do with it."""
    # How long and how much; then what failures have to do with it.
    failures, cluster, run = report.failures, report.scenario.cluster, report.run
    what = f"{report.epochs:g} epochs of {report.images_per_epoch:,} images"
    what += " (ImageNet)" * (report.images_per_epoch == IMAGENET)
    unit = ("GPU" if report.scenario.on_cuda else "rank") + "s" * (cluster.world_size > 1)
    known = "" if run.step_bounds_s else ", of failures alone"
    costs = ""
    if report.price_per_node_hour is not None:
        each, low, high = run.costs(cluster.num_nodes * report.price_per_node_hour / 3600)
        rate = f"{report.price_per_node_hour:g} per node and hour"
        costs += f"; cost {each:,.2f} ({low:,.2f} to {high:,.2f}) at {rate}"
    if report.watts_per_node is not None:
        energy = [f"{kwh:,.3g}" for kwh in run.costs(cluster.num_nodes * report.watts_per_node / 3.6e6)]
        costs += f"; {energy[0]} kWh ({energy[1]} to {energy[2]})"
    between_s, every_s = failures.between_s(cluster.world_size), failures.interval_s(cluster.world_size)
    lost, text = 1 - run.work_s / (run.run_s - failures.start_s), f"A failure every {days(between_s)} on average"
    if run.work_s < every_s or lost < NO_MATTER:
        text += f": failures do not matter for {days(run.work_s)} of work; save when you like."
    else:
        steps = max(1, round(every_s / report.outcome.step_s))
        text += (
            f", with checkpoints, costs {lost:.1%}; best is one every {time_text(every_s)} (Daly 2006): "
            f"callbacks.last.every_n_train_steps={steps}. An elastic run takes {days(run.elastic_s)}."
        )
    return [
        f"{what} on {cluster.world_size:,} {unit} ({cluster.num_nodes} x {cluster.ranks_per_node}): "
        f"{days(run.run_s)} with start and failures (80 % of runs: {days(run.low_s)} to "
        f"{days(run.high_s)}{known}), {days(run.work_s)} without{costs}.",
        text,
    ]


def how_sure(report: SimulationReport) -> str:
    """Say what is known of the errors, and what to measure next."""
    scenario, cluster = report.scenario, report.scenario.cluster
    rate = ""
    if scenario.is_rate_estimated:
        rate = (
            f" images_per_s is estimated: {PEAK_SHARE:.0%} of the peak ({LEAST_SHARE:.0%} to {MOST_SHARE:.0%}, "
            "inside the interval); measure it first."
        )
    if cluster.num_nodes == 1:
        return f"How sure: nothing crosses nodes; sums inside one have no known error.{rate}"
    if report.run.step_bounds_s is None:
        return (
            "How sure: unknown, as no sums on such nodes and links were compared with the model. Keep the default "
            f"plan, and measure on 4 nodes: `lightning-hybrid tune`.{rate}"
        )
    if (measured := cluster.measured_nodes or 0) >= MEASURED_FROM:
        holds = f"and their curve holds to {HOLDS_TO * measured}"
        if times_measured(cluster) > HOLDS_TO:
            holds = f"beyond {HOLDS_TO * measured} its curve is not known to hold: the interval is wider"
        return f"How sure: sums were measured on {measured} nodes, {holds}.{rate}"
    return (
        "How sure: intervals are those of published sums on such links, each source alike; rates, failures and "
        f"other traffic are as given. To know more, measure on 4 nodes: `lightning-hybrid tune`.{rate}"
    )


def preset_of(scenario: Scenario, cfg: DictConfig, overrides: Sequence[str]) -> dict[str, str]:
    """Return the keys that tell the device and the links from others, with their values, where they were not given."""
    cluster = scenario.cluster
    values = {
        "images_per_s": None if cfg.images_per_s is not None else scenario.images_per_s,
        "cluster.links.ranks_per_node": cluster.ranks_per_node,
        "cluster.links.inside.bytes_per_s": cluster.inside.bytes_per_s,
        "cluster.links.across.bytes_per_s": cluster.across.bytes_per_s,
        "cluster.links.across.latency_s": cluster.across.latency_s,
        "cluster.links.nics_per_node": cluster.nics_per_node,
    }
    given = {override.lstrip("+").partition("=")[0] for override in overrides}
    return {name: f"{value:g}" for name, value in values.items() if value is not None and name not in given}
