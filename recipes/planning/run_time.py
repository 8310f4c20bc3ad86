"""How long a planned run takes with start, checkpoints and failures, and how sure that is; on several clusters."""

from __future__ import annotations

from dataclasses import dataclass

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig

from lightning_hybrid.planning.failures import SHARES, Failures
from recipes.cli.markdown import markdown_table
from recipes.cli.results import time_text
from recipes.planning.scenario import Scenario, scenario_of


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
