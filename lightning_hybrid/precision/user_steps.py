"""Global optimizer hooks for optimizer steps that user code runs without Lightning.

Such a step runs on fp32 parameters with fp32 gradients. After an overflow, the gradients are None.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_hybrid.precision.half_window import HalfPrecisionWindow
from lightning_hybrid.precision.optimizer_protocol import closure_in, parameters_of


class UserSteps:
    """Global optimizer hooks that switch parameters to fp32 for optimizer steps that user code calls.

    Args:
        window: Half-precision window, which is closed during such a step.
        owns: Function that returns whether an optimizer trains parameters of the run.
        has_overflowed: Function that counts a step, and returns whether the optimizer's gradients contain inf or nan.
        evaluate: Function that evaluates a closure in an open window, and closes the window.
        update_context: Function that returns a context for the update. The context is left while a closure is
            evaluated.
    """

    def __init__(
        self,
        window: HalfPrecisionWindow,
        *,
        owns: Callable[[Optimizer], bool],
        has_overflowed: Callable[[Optimizer], bool],
        evaluate: Callable[[Callable[[], Any]], Any],
        update_context: Callable[[Optimizer], AbstractContextManager[Any]],
    ) -> None:
        self._window = window
        self._owns = owns
        self._has_overflowed = has_overflowed
        self._evaluate = evaluate
        self._update_context = update_context
        self._stepping: Optimizer | None = None
        self._entered: AbstractContextManager[Any] | None = None
        self._reopens = False
        self.are_ignored = False  # True while Lightning's own step runs
        self.is_in_backward = False
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.are_ignored or not self._owns(optimizer):
            return None
        # A wrapped optimizer steps within the step of its wrapper, and is ignored. If the same optimizer steps again,
        # its previous step has raised an error.
        if self._stepping is not None and self._stepping is not optimizer:
            return None
        if self.is_in_backward:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step must not be called inside backward, because gradients are still in "
                "half precision, multiplied by the loss scale, and not averaged over ranks. Call it after `backward`, "
                'or use precision="32-true".'
            )
        self._stepping = optimizer
        self._reopens = self._window.is_open
        self._window.close()
        if self._has_overflowed(optimizer):
            for parameter in parameters_of(optimizer):
                parameter.grad = None
        closure = closure_in(args, kwargs)
        self._enter()
        if closure is None:
            return None
        return (args[0],), {
            **kwargs,
            "closure": partial(self._evaluate_outside, closure, self._reopens),
        }

    def _enter(self) -> None:
        assert self._stepping is not None
        self._entered = self._update_context(self._stepping)
        self._entered.__enter__()

    def _leave(self) -> None:
        entered = self._entered
        self._entered = None
        if entered is not None:
            entered.__exit__(None, None, None)

    def _evaluate_outside(self, closure: Callable[[], Any], was_open: bool) -> Any:
        self._leave()
        if was_open:
            result = self._evaluate(closure)
        else:
            result = closure()
        self._enter()
        return result

    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._stepping is not optimizer:
            return
        self._stepping = None
        self._leave()
        if self._reopens:
            self._window.open()

    def begin_step(self) -> None:
        """Reset the hooks' state at the beginning of a training step.

        A previous optimizer step may have raised an error.
        """
        self._stepping = None
        self._entered = None

    def remove(self) -> None:
        """Remove the global optimizer hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
