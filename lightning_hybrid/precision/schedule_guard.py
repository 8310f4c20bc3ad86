"""Learning-rate schedules that wait when a step was skipped.

A warm-up would lose steps to the first search for a loss scale, and PyTorch would warn that the scheduler ran first.
The schedule runs on the host; whether the step was skipped is known on the device. F forward, B backward, U update:

    device   | F1 B1 U1 | F2 B2 U2 | F3 ..
    host     queue F1 B1 U1, F2 B2 | wait for U1's flag | schedule of step 1 | queue U2, F3 B3 | wait for U2's flag ..

The rate is needed when U2 is queued, not before, so the schedule's step 1 is put off until then: the one wait of a
step, while the device still has F2 and B2 in store. Elsewhere the host waits at once: on a CPU, which knows the flag;
before a logged step and after the last batch of an epoch; and at a checkpoint. In between, on CUDA,
`optimizer.param_groups[0]["lr"]` and `scheduler.get_last_lr()` are those of the step just made.
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
    """Guard that lets schedules step when, and only if, the optimizer's step is known to have been made.

    Args:
        skip_flags_of: returns the flags of an optimizer's last step; of every optimizer, for None.
        may_put_off: returns whether a schedule's step may be made later, before the next optimizer step.
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
        """Make `config.scheduler.step()` do nothing where its optimizer's last step was skipped.

        Only schedulers with `interval="step"`, and not `ReduceLROnPlateau`, which follows a metric.
        """
        # One that counts epochs has to move however its last step ended. The object stays itself and an instance of its
        # class; the check is in the namespace of a subclass, not of the instance, so `state_dict()` is unchanged.
        scheduler = config.scheduler
        if (
            config.interval != "step"
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
        """Make the steps that were put off, in order. Wait for the optimizer steps that they follow."""
        waiting = self._waiting
        self._waiting = []
        for flags, advance in waiting:
            if not any(flag.was_skipped() for flag in flags):
                advance()

    def release(self) -> None:
        """Give the schedulers their own classes back."""
        for config in self._guarded:
            release_schedule(config)
        self._guarded.clear()
        self._waiting.clear()


def release_schedule(config: LRSchedulerConfig) -> None:
    """Give a scheduler its own class back, with which it steps however its optimizer's step ended."""
    scheduler: Any = config.scheduler
    if is_guarded(scheduler):
        scheduler.__class__ = type(scheduler)._unguarded


def is_guarded(scheduler: object) -> bool:
    """Return whether a `ScheduleGuard` guards the scheduler."""
    return hasattr(type(scheduler), "_unguarded")
