"""Effect of node failures on a run: optimal checkpoint interval and expected duration.

    tau = sqrt(2 c M) (1 + sqrt(x) / 3 + x / 9) - c,   x = c / (2 M) < 1         work between two checkpoints
    T   = M exp(R / M) (exp((tau + c) / M) - 1) W / tau                          expected time, by restart
    T   = W / (1 - r / M)                                                        expected time, elastic

    M   mean time between failures of the whole job      c   a checkpoint     W   work without failures
    R   detection and restart                            r   detection and rejoin

An elastic run loses no step, because the other nodes continue with their state. The model ignores that the run then
has fewer nodes for a while. Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart
dumps". Failures occur at random at a constant rate.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from lightning_hybrid.checks import require_number

NUM_RUNS = 200
SHARES = (0.1, 0.9)
NO_END = (
    50  # A run that takes longer than this multiple of its work counts as a run without an end.
)


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Failure model with the rate of GPU failures and the time lost by each failure.

    Args:
        gpu_hours: GPU hours between two failures. Default: 419 failures in 54 days of 16,384 GPUs (Dubey et al. 2024,
            arXiv:2407.21783).
        checkpoint_s: Time for which training stops for a checkpoint.
        detection_s: Time until a failure is detected.
        restart_s: Time from detection until a restarted job trains, with a new node.
        rejoin_s: Time from detection until the other nodes of an elastic run train.
        start_s: Time from the start of the job until its first step.

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
            "one failure per GPU is expected in this number of hours. Set gpu_hours=50000, for example",
            above=True,
        )
        require_number(
            "checkpoint_s",
            self.checkpoint_s,
            "writing a checkpoint always takes some time. Set checkpoint_s=10, for example",
            above=True,
        )
        for name in ("detection_s", "restart_s", "rejoin_s", "start_s"):
            require_number(name, getattr(self, name), "a time cannot be negative. Set 0 for none")

    def between_s(self, num_gpus: int) -> float:
        """Return the mean time between failures of a job, in seconds."""
        return 3600 * self.gpu_hours / num_gpus

    def interval_s(self, num_gpus: int) -> float:
        """Return the optimal training time between two checkpoints, in seconds."""
        mean_s = self.between_s(num_gpus)
        cost_s = self.checkpoint_s
        part = cost_s / (2 * mean_s)
        if part >= 1:
            return mean_s
        return math.sqrt(2 * cost_s * mean_s) * (1 + math.sqrt(part) / 3 + part / 9) - cost_s

    def restarted_s(self, work_s: float, num_gpus: int, every_s: float | None = None) -> float:
        """Return the expected duration in seconds of a run that restarts from checkpoints after failures.

        The duration is infinite if failures are so frequent that the run makes hardly any progress.

        Args:
            work_s: Duration without failures, in seconds.
            num_gpus: Number of GPUs.
            every_s: Time of training between two checkpoints, in seconds. The default is the optimal interval.
        """
        mean_s = self.between_s(num_gpus)
        every_s = min(work_s, every_s or self.interval_s(num_gpus))
        back_s = self.detection_s + self.restart_s
        try:
            factor = math.exp(back_s / mean_s) * math.expm1((every_s + self.checkpoint_s) / mean_s)
        except OverflowError:
            return math.inf
        expected_s = mean_s * factor * work_s / every_s
        # The last checkpoint also belongs to a run without failures.
        if expected_s > NO_END * (work_s + self.checkpoint_s):
            return math.inf
        return expected_s

    def elastic_s(self, work_s: float, num_gpus: int) -> float:
        """Return the expected duration of an elastic run in seconds.

        It is infinite if failures cost more time than the run makes progress.
        """
        lost = (self.detection_s + self.rejoin_s) / self.between_s(num_gpus)
        return work_s / (1 - lost) if lost < 1 else math.inf

    def simulated_s(
        self, work_s: float, num_gpus: int, *, elastic: bool = False, seed: int = 0
    ) -> list[float]:
        """Simulate runs with random failures, and return their durations in seconds, in ascending order."""
        mean_s = self.between_s(num_gpus)
        every_s = min(work_s, self.interval_s(num_gpus))
        back_s = self.detection_s + (self.rejoin_s if elastic else self.restart_s)
        expected_s = self.restarted_s(work_s, num_gpus)
        if elastic:
            expected_s = self.elastic_s(work_s, num_gpus)
        if expected_s > NO_END * (work_s + self.checkpoint_s):
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
        # Only whole intervals of work count. In an elastic run, all work counts.
        time_s = 0.0
        left = work_s if elastic else work_s / every_s
        unit_s = 1.0 if elastic else every_s + self.checkpoint_s
        while (up_s := chance.expovariate(1 / mean_s)) < left * unit_s:
            left -= up_s if elastic else up_s // unit_s
            time_s += up_s + back_s
            while not elastic and (again_s := chance.expovariate(1 / mean_s)) < back_s:
                time_s += again_s
        return time_s + left * unit_s
