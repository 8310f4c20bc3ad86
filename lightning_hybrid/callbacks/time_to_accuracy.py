"""The time until a run reaches its target accuracy."""

from __future__ import annotations

from time import perf_counter
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info

from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.checks import plain_value, require_choice


class TimeToAccuracy(Callback):
    """A clock of the training until a metric of validation first reaches a target; it stops the run there, if asked.

    Two times, both of this process's clock since training began, start-up not counted:

        time_to_accuracy/train_s   validation not counted
        time_to_accuracy/total_s   validation counted, that which saw it included

    and the step, as finely as validation is done. The clock travels in the checkpoint: what an interrupted run did
    after its last checkpoint is not counted. *Every rank must have this callback.*

    Args:
        target: value of the metric to reach.
        monitor: a metric that validation logs.
        mode: `"max"`: reached at `target` or more; `"min"`: or less.
        stop: whether to end training there.

    Raises:
        ValueError: an unknown mode, or a target that no accuracy reaches; in training, a metric that validation does
            not log.
    """

    def __init__(
        self,
        target: float,
        monitor: str = m.VAL_ACC,
        mode: Literal["max", "min"] = "max",
        stop: bool = False,
    ) -> None:
        target = plain_value(target)
        why = f"whether `{monitor}` reaches {target} from below, as accuracy does, or from above, as loss does"
        require_choice("mode", mode, ("max", "min"), why)
        if monitor in (m.VAL_ACC, m.VAL_ACC_TOP5) and not 0 < target <= 1:
            raise ValueError(
                f"`target` (={target}) must be above 0 and at most 1: `{monitor}` is a share and no percentage. Write "
                "target=0.759 for 75.9 %."
            )
        self.target = target
        self.monitor = monitor
        self.mode = mode
        self.stop = stop
        self.reached: dict[str, float] | None = None
        self._before_s = self._validation_s = (
            0.0  # of fits that were interrupted; of validation in all
        )
        self._began_s: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the clock, and whether the target was reached."""
        return {
            "elapsed_s": self.elapsed_s,
            "validation_s": self._validation_s,
            "reached": self.reached,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the clock of the interrupted run."""
        self._before_s = state_dict["elapsed_s"]
        self._validation_s = state_dict["validation_s"]
        self.reached = state_dict["reached"]

    @property
    def elapsed_s(self) -> float:
        """Seconds since training began, validation included."""
        return self._before_s + (0.0 if self._began_s is None else perf_counter() - self._began_s)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._began_s = perf_counter()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock."""
        self._before_s = self.elapsed_s
        self._began_s = None

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note when validation began."""
        self._validation_began_s = perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the metric. Collective."""
        if self._began_s is None or trainer.sanity_checking:  # `trainer.validate` trains nothing
            return
        # Before the check: the clock of training must not count the validation that saw the target.
        self._validation_s += perf_counter() - self._validation_began_s
        if self.reached is None and self._is_reached(trainer):
            self.reached = {
                m.TIME_TO_ACCURACY_TRAIN_S: self.elapsed_s - self._validation_s,
                m.TIME_TO_ACCURACY_TOTAL_S: self.elapsed_s,
                m.TIME_TO_ACCURACY_STEP: float(trainer.global_step),
            }
            for logger in trainer.loggers:
                logger.log_metrics(self.reached, step=trainer.global_step)
            rank_zero_info(self.describe())
        if self.reached is not None and self.stop:
            trainer.should_stop = True

    def _is_reached(self, trainer: pl.Trainer) -> bool:
        value = trainer.callback_metrics.get(self.monitor)
        if value is None:
            logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            raise ValueError(
                f"`monitor` (={self.monitor!r}) must be a metric that validation logs: logged so far were {logged}. "
                "Name one of them, or log it with `self.log` in `validation_step`."
            )
        number = float(value)
        here = number >= self.target if self.mode == "max" else number <= self.target
        # A metric that is each rank's own would let ranks stop at different steps, and those that go on would hang.
        return bool(trainer.strategy.reduce_boolean_decision(here, all=True))

    def describe(self) -> str:
        """Say in a sentence when the target was reached.

        >>> TimeToAccuracy(target=0.75).describe()
        'val/acc has not reached 0.75'
        """
        if self.reached is None:
            return f"{self.monitor} has not reached {self.target}"
        step = self.reached[m.TIME_TO_ACCURACY_STEP]
        train_s = self.reached[m.TIME_TO_ACCURACY_TRAIN_S]
        total_s = self.reached[m.TIME_TO_ACCURACY_TOTAL_S]
        times = f"{train_s:.1f} s of training, {total_s:.1f} s with validation"
        return f"{self.monitor} reached {self.target} after {step:.0f} steps: {times}"
