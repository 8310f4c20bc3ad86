"""Trials whose outcome is known beforehand, for processes that import nothing heavy."""

import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from recipes.hyperparams.coarse_to_fine import axis_values_of
from recipes.hyperparams.trial_log import TrialOutcome


@dataclass(frozen=True)
class Planted:
    """The loss is the squared distance, in powers of ten, from the planted optimum; every call leaves a line."""

    optimum: float = 1.0
    calls: str = ""
    kill_at: int = 0  # kill this process in the call of this number
    exit_above: float = math.inf
    fail_above: float = math.inf
    diverge_above: float = math.inf

    def __call__(self, overrides, limits):
        if self.calls:
            with open(self.calls, "a") as file:
                file.write(" ".join(overrides) + "\n")
            if self.kill_at and len(Path(self.calls).read_text().splitlines()) == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        lr = axis_values_of(overrides, ["lr"])["lr"]
        if lr > self.exit_above:
            os._exit(3)
        if lr > self.fail_above:
            raise RuntimeError("no memory\nleft")
        if lr > self.diverge_above:
            return TrialOutcome(overrides=overrides, status="diverged", reason="loss is nan")
        value = (math.log10(lr) - math.log10(self.optimum)) ** 2
        return TrialOutcome(overrides=overrides, status="done", value=value, curve=((0.5, value), (1.0, value)))
