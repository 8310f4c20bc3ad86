"""Learning-rate schedules that wait when a step was skipped.

After an overflow the optimizer does not step, so neither may a schedule that counts steps: otherwise a warm-up of a few
hundred steps loses some of them to the first search for a loss scale, and PyTorch warns that the scheduler ran first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


def guard(config: LRSchedulerConfig, was_skipped: Callable[[Optimizer | None], bool]) -> None:
    """Make ``config.scheduler.step()`` do nothing while ``was_skipped(its optimizer)``.

    Only schedulers with ``interval="step"`` are guarded: one that counts epochs has to move however its last step
    ended. ``ReduceLROnPlateau`` follows a metric, not steps. The object stays itself and an instance of its class; its
    class becomes a subclass whose namespace, not the instance's, holds the check, so ``state_dict()`` is unchanged.
    """
    scheduler = config.scheduler
    if config.interval != "step" or isinstance(scheduler, ReduceLROnPlateau) or is_guarded(scheduler):
        return
    original = type(scheduler)

    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        if not was_skipped(getattr(self, "optimizer", None)):
            original.step(self, *args, **kwargs)

    scheduler.__class__ = type(original.__name__, (original,), {"step": step, "_unguarded": original})


def unguard(config: LRSchedulerConfig) -> None:
    """Give the scheduler its own class back."""
    if is_guarded(config.scheduler):
        config.scheduler.__class__ = type(config.scheduler)._unguarded  # type: ignore[attr-defined]


def is_guarded(scheduler: object) -> bool:
    """Whether :func:`guard` is in force."""
    return hasattr(type(scheduler), "_unguarded")
