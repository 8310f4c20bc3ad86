"""Expected duration of a planned run, including start-up, checkpoints and failures, with an 80 % interval."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hybrid.planning.estimates.failures import SHARES, Failures
from lightning_hybrid.planning.estimates.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """Planned run on a named cluster, with its length, failure rates and prices.

    Args:
        about: Description of the cluster and the network.
        epochs: Number of passes over the training set.
        images_per_epoch: Number of images in the training set.
        failures: Failure rate of the ranks, and the cost of a failure.
        watts_per_node: Power of a node, for the energy of the run. None: unknown.
        price_per_node_hour: Price of a node, for the price of the run. None: unknown.
    """

    about: str
    epochs: float
    images_per_epoch: int
    failures: Failures
    watts_per_node: float | None = None
    price_per_node_hour: float | None = None

    def num_steps(self, global_batch_size: int) -> float:
        """Return the number of steps of the run, which may be fractional."""
        return self.epochs * self.images_per_epoch / global_batch_size


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """Expected duration of a run in seconds, with an 80 % interval.

    Args:
        work_s: Seconds of the steps without start, checkpoints and failures.
        run_s: Seconds of the run with start, checkpoints and failures.
        low_s: Lower bound, with the shortest likely steps and few failures.
        high_s: Upper bound, with the longest likely steps and many failures.
        elastic_s: `run_s` of an elastic run.
        step_bounds_s: Shortest and longest likely seconds of a step. None: unknown, so that `low_s` and
            `high_s` differ by failures only.
    """

    work_s: float
    run_s: float
    low_s: float
    high_s: float
    elastic_s: float
    step_bounds_s: tuple[float, float] | None

    @classmethod
    def of(cls, scenario: Scenario, step_s: float, num_steps: float, failures: Failures) -> RunTime:
        """Calculate the expected duration of a run, with lower and upper bounds from simulated failures."""
        gpus = scenario.cluster.world_size
        step_bounds_s: tuple[float, float] | None = None
        fastest_step_s = step_s
        slowest_step_s = step_s
        bounds = scenario.bounds()
        if bounds is not None:
            fastest, slowest = bounds
            fastest_step_s = fastest.run().step_s
            slowest_step_s = slowest.run().step_s
            step_bounds_s = (fastest_step_s, slowest_step_s)

        fast_runs_s = failures.simulated_s(num_steps * fastest_step_s, gpus)
        slow_runs_s = failures.simulated_s(num_steps * slowest_step_s, gpus)
        low_share, high_share = SHARES
        low_s = fast_runs_s[int(low_share * len(fast_runs_s))]
        high_s = slow_runs_s[int(high_share * len(slow_runs_s))]

        work_s = num_steps * step_s
        return cls(
            work_s=work_s,
            run_s=failures.start_s + failures.restarted_s(work_s, gpus),
            low_s=failures.start_s + low_s,
            high_s=failures.start_s + high_s,
            elastic_s=failures.start_s + failures.elastic_s(work_s, gpus),
            step_bounds_s=step_bounds_s,
        )

    def costs(self, rate_per_s: float) -> tuple[float, float, float]:
        """Return the cost of the run at a rate per second, with a lower and an upper bound."""
        return rate_per_s * self.run_s, rate_per_s * self.low_s, rate_per_s * self.high_s
