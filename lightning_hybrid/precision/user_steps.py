"""Steps of optimizers that user code makes by itself, past Lightning: torch's hooks for all optimizers see them.

Such a step runs outside of the window, on fp32 parameters with fp32 gradients, and on none after an overflow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_hybrid.precision.optimizer_protocol import closure_in, parameters_of
from lightning_hybrid.precision.window import HalfPrecisionWindow


class UserSteps:
    """Hooks around the steps of every torch optimizer that holds parameters of a window.

    Args:
        window: is closed for the time of such a step.
        owns: returns whether an optimizer trains parameters of the run.
        has_overflowed: returns whether the gradients of an optimizer hold inf or nan, after counting the step.
        evaluate: evaluates a closure in an open window and closes it.
    """

    def __init__(
        self,
        window: HalfPrecisionWindow,
        *,
        owns: Callable[[Optimizer], bool],
        has_overflowed: Callable[[Optimizer], bool],
        evaluate: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self._window = window
        self._owns = owns
        self._has_overflowed = has_overflowed
        self._evaluate = evaluate
        self._reopens_after: Optimizer | None = None
        self.are_ignored = False  # while Lightning's own step runs
        self.is_in_backward = False
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.are_ignored or self._reopens_after is not None or not self._owns(optimizer):
            return None
        if self.is_in_backward:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step was called inside of backward, where gradients are in half "
                "precision, multiplied by the loss scale and not yet averaged over ranks. Step after `backward`, or "
                'use precision="32-true".'
            )
        if self._window.is_open:
            self._reopens_after = optimizer
            self._window.close()
        if self._has_overflowed(optimizer):
            for parameter in parameters_of(optimizer):
                parameter.grad = None
        closure = closure_in(args, kwargs)
        if closure is None or self._reopens_after is None:
            return None
        return (args[0],), {**kwargs, "closure": partial(self._evaluate, closure)}

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._reopens_after is optimizer:
            self._reopens_after = None
            self._window.open()

    def begin_step(self) -> None:
        """Begin a training step: a step of an optimizer that raised an error has left nothing to reopen."""
        self._reopens_after = None

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
