"""Trials with a known outcome, for processes that avoid heavy imports."""

import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from recipes.hyperparams.outcome import Outcome
from recipes.hyperparams.processes import Report


@dataclass(frozen=True)
class Planted:
    """Trial whose loss is the squared distance in decades from the planted optimum. Each call is recorded in a file."""

    optimum: float = 1.0
    calls: str = ""
    kill_at: int = 0  # number of the call in which the search is killed
    exit_above: float = math.inf
    fail_above: float = math.inf
    diverge_above: float = math.inf

    def __call__(self, overrides, ask_pruner):
        if self.calls:
            with open(self.calls, "a") as file:
                file.write(" ".join(overrides) + "\n")
            if self.kill_at and len(Path(self.calls).read_text().splitlines()) == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        (override,) = overrides
        lr = float(override.removeprefix("lr="))
        if lr > self.exit_above:
            os._exit(3)
        if lr > self.fail_above:
            raise RuntimeError("no memory\nleft")
        if lr > self.diverge_above:
            return Outcome(status="diverged", reason="loss is nan")
        value = (math.log10(lr) - math.log10(self.optimum)) ** 2
        if ask_pruner(Report(percent=50, value=value)):
            return Outcome(status="stopped", reason="behind")
        return Outcome(status="done", value=value)
