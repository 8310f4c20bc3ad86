"""Guard that prevents learning-rate schedules from advancing after a skipped optimizer step.

Otherwise the search for a loss scale would use up steps of the warm-up, and PyTorch would warn that the scheduler ran
before the optimizer. The schedule runs on the host, but the flag that shows whether a step was skipped is on the
device. With forward F, backward B and update U:

    device   | F1 B1 U1 | F2 B2 U2 | F3 ..
    host     queue F1 B1 U1, F2 B2 | wait for U1's flag | schedule of step 1 | queue U2, F3 B3 | wait for U2's flag ..

The learning rate is not needed before U2 is queued, so step 1 of the schedule is deferred until then. The host waits
once per step, while the device still has F2 and B2 in its queue. In other cases the host waits at once: on a CPU,
before a logged step, after the last batch of an epoch, and at a checkpoint. While a step of the schedule is deferred on
CUDA, `optimizer.param_groups[0]["lr"]` and `scheduler.get_last_lr()` are the values of the last optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_hybrid.precision.skipped_steps import SkipFlag

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import LRSchedulerConfig


class ScheduleGuard:
    """Guard that lets learning-rate schedules advance only if the optimizer step was not skipped.

    Args:
        skip_flags_of: Function that returns the flags of the last step of an optimizer, or of all optimizers for None.
        may_put_off: Function that returns whether a step of a schedule may be deferred until the next optimizer step.
    """

    def __init__(
        self,
        skip_flags_of: Callable[[Optimizer | None], Iterable[SkipFlag]],
        may_put_off: Callable[[], bool] = lambda: False,
    ) -> None:
        self._skip_flags_of = skip_flags_of
        self._may_put_off = may_put_off
        self._guarded: list[LRSchedulerConfig] = []
        self._waiting: list[tuple[list[SkipFlag], Callable[[], None]]] = []

    def __len__(self) -> int:
        return len(self._guarded)

    def guard(self, config: LRSchedulerConfig) -> None:
        """Make a scheduler's `step()` do nothing if the last step of its optimizer was skipped.

        This applies to schedulers with `interval="step"`. A scheduler that counts epochs must step in any case, and
        `ReduceLROnPlateau` follows a metric.
        """
        # The scheduler's class becomes a subclass with another `step`. So the scheduler remains the same object and an
        # instance of its class, and `state_dict()`, which contains the instance's attributes, is unchanged.
        scheduler = config.scheduler
        if (
            config.interval != "step"
            # A schedule that advances after several optimizer steps also advances if one of them is skipped.
            or config.frequency > 1
            or isinstance(scheduler, ReduceLROnPlateau)
            or is_guarded(scheduler)
        ):
            return
        original = type(scheduler)
        advance_when_known = self._advance_when_known

        def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
            advance_when_known(
                getattr(self, "optimizer", None), lambda: original.step(self, *args, **kwargs)
            )

        scheduler.__class__ = type(
            original.__name__, (original,), {"step": step, "_unguarded": original}
        )
        self._guarded.append(config)

    def _advance_when_known(self, optimizer: Optimizer | None, advance: Callable[[], None]) -> None:
        self._waiting.append((list(self._skip_flags_of(optimizer)), advance))
        if not self._may_put_off():
            self.run_deferred()

    def run_deferred(self) -> None:
        """Run the deferred schedule steps in order, except those of skipped optimizer steps.

        This waits for the optimizer steps that they follow.
        """
        waiting = self._waiting
        self._waiting = []
        for flags, advance in waiting:
            if not any(flag.was_skipped() for flag in flags):
                advance()

    def release(self) -> None:
        """Restore the original classes of all guarded schedulers."""
        for config in self._guarded:
            release_schedule(config)
        self._guarded.clear()
        self._waiting.clear()


def release_schedule(config: LRSchedulerConfig) -> None:
    """Restore a scheduler's original class, so that it also advances after skipped optimizer steps."""
    scheduler: Any = config.scheduler
    if is_guarded(scheduler):
        scheduler.__class__ = type(scheduler)._unguarded


def is_guarded(scheduler: object) -> bool:
    """Return whether a `ScheduleGuard` controls a learning-rate scheduler."""
    return hasattr(type(scheduler), "_unguarded")
