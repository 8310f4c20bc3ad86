"""Overflow handling for optimizers that evaluate the loss through a closure, such as LBFGS and SAM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from lightning_hybrid.precision.half_window import HalfPrecisionWindow
from lightning_hybrid.precision.skipped_steps import (
    MAX_SKIPPED_STEPS_IN_A_ROW,
    EndlessOverflowError,
)


class _StepSkipped(Exception):  # noqa: N818  no error
    """Exception that aborts an optimizer's step after an overflow in the first closure evaluation."""


class ClosureStep:
    """Optimizer step that evaluates the loss through a closure and handles overflows.

    If the gradients of the first evaluation overflow and no weight has changed since the step began, an exception exits
    the optimizer, and the step is skipped. If weights have changed, as in SAM's second evaluation, an exception would
    leave the changed weights in place. In this case the closure is evaluated again, with a lower loss scale.

    Args:
        window: Half-precision window, which must be closed.
        evaluate: Function that evaluates the closure and returns the loss.
        has_overflowed: Function that returns whether gradients contain inf or nan, and if so, lowers the loss scale.
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
        """Run the step, and return the optimizer's result, or the closure's result if the step is skipped."""
        self._window.cast()  # Later writes are detected by comparing with these copies.
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
            f"Gradients were inf or nan in {MAX_SKIPPED_STEPS_IN_A_ROW} consecutive evaluations of a step's closure, "
            "each with a lower loss scale, so the loss itself is probably inf or nan. Check the learning rate and the "
            "data."
        )
