"""Steps of optimizers that evaluate the loss themselves: LBFGS, SAM, and any that is neither torch's nor ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from lightning_hybrid.precision.skipped_steps import (
    MAX_SKIPPED_STEPS_IN_A_ROW,
    EndlessOverflowError,
)
from lightning_hybrid.precision.window import HalfPrecisionWindow


class _StepSkipped(Exception):  # noqa: N818  no error
    """The first evaluation overflowed, before the optimizer had changed anything."""


class ClosureStep:
    """One step of an optimizer that is given a closure.

    If the gradients of the first evaluation overflow and no weight has changed since the step began, the step is
    skipped: an exception leaves the optimizer before it has done anything. If weights have changed, as SAM's have at
    its second evaluation, leaving would keep them changed. Then the closure is evaluated again, at a lower loss scale.

    Args:
        window: closed.
        evaluate: evaluates the closure and returns the loss.
        has_overflowed: returns whether the gradients are inf or nan, and lowers the loss scale if so.
    """

    def __init__(
        self,
        window: HalfPrecisionWindow,
        *,
        evaluate: Callable[[], Any],
        has_overflowed: Callable[[], bool],
    ) -> None:
        self._window = window
        self._evaluate = evaluate
        self._has_overflowed = has_overflowed
        self._is_first = True
        self._result: Any = None
        self.was_skipped = False

    def run(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Step, and return the optimizer's result, or the loss of a step that was skipped."""
        self._window.cast()  # a later write is seen in the difference to these copies
        try:
            return optimizer.step(closure=self._closure, **kwargs)
        except _StepSkipped:
            self.was_skipped = True
            return self._result

    def _closure(self) -> Any:
        may_skip = self._is_first and not self._window.is_written()
        self._is_first = False
        for _ in range(MAX_SKIPPED_STEPS_IN_A_ROW):
            self._result = self._evaluate()
            if not self._has_overflowed():
                return self._result
            if may_skip:
                raise _StepSkipped
        raise EndlessOverflowError(
            f"Gradients were inf or nan in {MAX_SKIPPED_STEPS_IN_A_ROW} evaluations of one step's closure, each at a "
            "lower loss scale. The loss itself is probably inf or nan: look at the learning rate and at the data."
        )
