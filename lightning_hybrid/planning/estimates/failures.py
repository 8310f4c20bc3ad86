"""Failures of nodes: how often to save, and how long a run takes with them.

    tau = sqrt(2 c M) (1 + sqrt(x) / 3 + x / 9) - c,   x = c / (2 M) < 1         work between two checkpoints
    T   = M exp(R / M) (exp((tau + c) / M) - 1) W / tau                          expected time, by restart
    T   = W / (1 - r / M)                                                        expected time, elastic

    M   mean time between failures of the whole job      c   a checkpoint     W   work without failures
    R   detection and restart                            r   detection and rejoin

An elastic run loses no step, as the others go on with what they hold; that they are fewer for a while is left out.
Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps"; failures come at
random, at a constant rate.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from lightning_hybrid.checks import require_number

NUM_RUNS = 200
SHARES = (0.1, 0.9)
NO_END = 50  # times the work: a run that takes longer is not simulated


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Rates of failures, and their costs.

    Args:
        gpu_hours: Between failures. Default: 419 in 54 days of 16,384 GPUs (Dubey et al. 2024, arXiv:2407.21783).
        checkpoint_s: Training stands still for a checkpoint.
        detection_s: Until a loss is known.
        restart_s: From there until a restarted job trains, with a new node.
        rejoin_s: From there until the others of an elastic run train.
        start_s: From the job's start until its first step.

    >>> failures = Failures(checkpoint_s=10, detection_s=0, restart_s=600)
    >>> round(failures.interval_s(1024)), round(1 - 30 / (failures.restarted_s(30 * 86400, 1024) / 86400), 3)
    (1881, 0.014)
    """

    gpu_hours: float = 54 * 24 * 16384 / 419
    checkpoint_s: float = 10.0
    detection_s: float = 60.0
    restart_s: float = 600.0
    rejoin_s: float = 60.0
    start_s: float = 120.0

    def __post_init__(self) -> None:
        require_number(
            "gpu_hours",
            self.gpu_hours,
            "it is the mean time between two failures of a GPU",
            above=True,
        )
        require_number(
            "checkpoint_s", self.checkpoint_s, "a checkpoint takes time, 1.0 or less", above=True
        )
        for name in ("detection_s", "restart_s", "rejoin_s", "start_s"):
            require_number(
                name, getattr(self, name), "it is a time in seconds, 0 where there is none"
            )

    def between_s(self, num_gpus: int) -> float:
        """Compute the mean time between failures of a job."""
        return 3600 * self.gpu_hours / num_gpus

    def interval_s(self, num_gpus: int) -> float:
        """Compute the best work between two checkpoints."""
        mean_s = self.between_s(num_gpus)
        cost_s = self.checkpoint_s
        part = cost_s / (2 * mean_s)
        if part >= 1:
            return mean_s
        return math.sqrt(2 * cost_s * mean_s) * (1 + math.sqrt(part) / 3 + part / 9) - cost_s

    def restarted_s(self, work_s: float, num_gpus: int, every_s: float | None = None) -> float:
        """Compute the expected time with checkpoints after each `every_s` of work. None: the best."""
        mean_s = self.between_s(num_gpus)
        every_s = min(work_s, every_s or self.interval_s(num_gpus))
        back_s = self.detection_s + self.restart_s
        each_s = (
            mean_s * math.exp(back_s / mean_s) * math.expm1((every_s + self.checkpoint_s) / mean_s)
        )
        return each_s * work_s / every_s

    def elastic_s(self, work_s: float, num_gpus: int) -> float:
        """Compute the expected time of an elastic run, infinite if it loses more than it works."""
        lost = (self.detection_s + self.rejoin_s) / self.between_s(num_gpus)
        return work_s / (1 - lost) if lost < 1 else math.inf

    def simulated_s(
        self, work_s: float, num_gpus: int, *, elastic: bool = False, seed: int = 0
    ) -> list[float]:
        """Simulate runs failure by failure. Return their times, the shortest first."""
        mean_s = self.between_s(num_gpus)
        every_s = min(work_s, self.interval_s(num_gpus))
        back_s = self.detection_s + (self.rejoin_s if elastic else self.restart_s)
        if (self.elastic_s if elastic else self.restarted_s)(work_s, num_gpus) > NO_END * work_s:
            return [math.inf] * NUM_RUNS
        chance = random.Random(seed)
        return sorted(
            self._once(work_s, every_s, mean_s, back_s, elastic, chance) for _ in range(NUM_RUNS)
        )

    def _once(
        self,
        work_s: float,
        every_s: float,
        mean_s: float,
        back_s: float,
        elastic: bool,
        chance: random.Random,
    ) -> float:
        # Work that counts is whole intervals; of an elastic run all that was done.
        time_s = 0.0
        left = work_s if elastic else work_s / every_s
        unit_s = 1.0 if elastic else every_s + self.checkpoint_s
        while (up_s := chance.expovariate(1 / mean_s)) < left * unit_s:
            left -= up_s if elastic else up_s // unit_s
            time_s += up_s + back_s
            while not elastic and (again_s := chance.expovariate(1 / mean_s)) < back_s:
                time_s += again_s
        return time_s + left * unit_s
