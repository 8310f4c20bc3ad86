"""Expected time of a planned run with its start, checkpoints and failures, and its 80 % interval."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hybrid.planning.estimates.failures import SHARES, Failures
from lightning_hybrid.planning.estimates.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """Length, failures and rates of a run on a named cluster.

    Args:
        about: Cluster and network, in words.
        epochs: Passes over the training set.
        images_per_epoch: Images of the training set.
        failures: How often ranks fail, and what a failure costs.
        watts_per_node: For the energy of the run; None: unknown.
        price_per_node_hour: For the price of the run; None: unknown.
    """

    about: str
    epochs: float
    images_per_epoch: int
    failures: Failures
    watts_per_node: float | None = None
    price_per_node_hour: float | None = None

    def num_steps(self, global_batch_size: int) -> float:
        """Return the steps of the whole run."""
        return self.epochs * self.images_per_epoch / global_batch_size


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
        both = scenario.bounds()
        gpus = scenario.cluster.world_size
        ends_s = None if both is None else (both[0].run().step_s, both[1].run().step_s)
        simulated = [
            failures.simulated_s(num_steps * each_s, gpus) for each_s in ends_s or (step_s, step_s)
        ]
        low_s, high_s = (
            each[int(share * len(each))] for each, share in zip(simulated, SHARES, strict=True)
        )
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
