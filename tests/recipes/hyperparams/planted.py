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


@dataclass(frozen=True)
class PlantedStudy:
    """A study's trials: the best rate grows with the batch, and accuracy is a number made of arm, batch and seed.

    With LARS the second is lost: at batch 10 its loss is inf, at 20 it ends at chance with a loss like any other.
    """

    def __call__(self, overrides, limits):
        given = dict(override.split("=", 1) for override in overrides)
        lr, batch_size = float(given["optim.lr"]), int(given["global_batch_size"])
        best = 0.1 if batch_size == 10 else 0.2
        metrics = {"val/loss": abs(math.log(lr / best))}
        if given.get("trainer.limit_test_batches") != "0":
            accuracy, is_lost = (
                {"1": 0.9, "2": 0.8, "3": 0.7}[given["seed"]],
                given["optim"] == "lars" and given["seed"] == "2",
            )
            if is_lost and batch_size == 10:
                return TrialOutcome(overrides=overrides, status="diverged", reason="loss is inf")
            metrics |= (
                {"test/acc": 0.1, "test/acc_running": 0.1}
                if is_lost
                else {"test/acc": accuracy, "test/acc_running": accuracy - 0.1}
            )
        return TrialOutcome(overrides=overrides, status="done", value=metrics["val/loss"], metrics=metrics)
