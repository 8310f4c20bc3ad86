"""Callback that measures the time until a run reaches its target accuracy."""

from __future__ import annotations

from time import perf_counter
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info

from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.checks import plain_value, require_choice


class TimeToAccuracy(Callback):
    """Callback that measures the training time until a validation metric first reaches a target.

    Two times since the beginning of training are measured, without start-up:

        time_to_accuracy/train_s   without validation
        time_to_accuracy/total_s   with validation, including the one that reached the target

    The step is also recorded. The resolution of all three values is the interval between
    validations. Checkpoints store the elapsed time. If a run is interrupted and resumed, the time
    between the last checkpoint and the interruption is therefore not counted. *Every rank must have
    this callback.*

    Args:
        target: Value that the metric must reach.
        monitor: Name of a metric that validation logs.
        mode: `"max"` if the metric must be at least `target`, `"min"` if it must be at most
            `target`.
        stop: Whether to end training when the target is reached.

    Raises:
        ValueError: The mode is unknown, or no accuracy can reach the target. Also raised during
            training if validation does not log the metric.
    """

    def __init__(
        self,
        target: float,
        monitor: str = m.VAL_ACC,
        mode: Literal["max", "min"] = "max",
        stop: bool = False,
    ) -> None:
        target = plain_value(target)
        why = (
            f"set 'max' if `{monitor}` should rise to {target}, as an accuracy does, and 'min' if it should fall, as a "
            "loss does"
        )
        require_choice("mode", mode, ("max", "min"), why)
        if monitor in (m.VAL_ACC, m.VAL_ACC_TOP5) and not 0 < target <= 1:
            raise ValueError(
                f"`target` (={target}) must be above 0 and at most 1, because `{monitor}` is a fraction, not a "
                "percentage. Set target=0.759 for 75.9 %."
            )
        self.target = target
        self.monitor = monitor
        self.mode = mode
        self.stop = stop
        self.reached: dict[str, float] | None = None
        self._earlier_fits_s = 0.0
        self._validation_s = 0.0  # over all `fit` calls
        self._validation_began_s = 0.0
        self._fit_began_s: float | None = None  # None while no fit is running

    def state_dict(self) -> dict[str, Any]:
        """Return the elapsed times and the result."""
        return {
            "elapsed_s": self.elapsed_s,
            "validation_s": self._validation_s,
            "reached": self.reached,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the elapsed times and the result of the interrupted run."""
        self._earlier_fits_s = state_dict["elapsed_s"]
        self._validation_s = state_dict["validation_s"]
        self.reached = state_dict["reached"]

    @property
    def elapsed_s(self) -> float:
        """Training time so far in seconds, including validation and earlier `fit` calls."""
        current_fit_s = 0.0
        if self._fit_began_s is not None:
            current_fit_s = perf_counter() - self._fit_began_s
        return self._earlier_fits_s + current_fit_s

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._fit_began_s = perf_counter()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock."""
        self._stop_clock()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Stop the clock, so that the time until the next `fit` call is not counted."""
        self._stop_clock()

    def _stop_clock(self) -> None:
        self._earlier_fits_s = self.elapsed_s
        self._fit_began_s = None

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record when validation begins."""
        self._validation_began_s = perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check whether the validation metric has reached the target.

        Collective: every rank must call it, in the same order.
        """
        if self._fit_began_s is None or trainer.sanity_checking:  # no training is running
            return
        # This precedes the check, so that the training time excludes the validation that reached
        # the target.
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
            logged = ", ".join(sorted(trainer.callback_metrics)) or "none"
            raise ValueError(
                f"`monitor` (={self.monitor!r}) must be a metric that validation logs, but the logged "
                f"metrics are: {logged}. Set one of these metrics, or log `monitor` with `self.log` in "
                "`validation_step`."
            )
        if self.mode == "max":
            is_reached = float(value) >= self.target
        else:
            is_reached = float(value) <= self.target
        # Ranks may have different values of the metric. If only some ranks stopped, the others
        # would hang.
        return bool(trainer.strategy.reduce_boolean_decision(is_reached, all=True))

    def describe(self) -> str:
        """Describe in one sentence whether and when the target was reached.

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
