"""Steps of optimizers that user code makes by itself, past Lightning, on parameters without masters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_hybrid.precision.optimizer_protocol import closure_in


class DirectSteps:
    """Torch's hooks for the steps of all optimizers, which enter a context around those of some optimizers.

    With half precision the precision plugin's own hooks enter it.

    Args:
        is_concerned: returns whether an optimizer's steps need the context.
        update_context: returns the context for the step of an optimizer.
        is_ignored: returns whether the context is entered already, by Lightning's step.
    """

    def __init__(
        self,
        is_concerned: Callable[[Optimizer], bool],
        update_context: Callable[[Optimizer], AbstractContextManager[None]],
        *,
        is_ignored: Callable[[], bool],
    ) -> None:
        self._is_concerned = is_concerned
        self._update_context = update_context
        self._is_ignored = is_ignored
        self._entered: AbstractContextManager[None] | None = None
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._is_ignored() or not self._is_concerned(optimizer):
            return
        if closure_in(args, kwargs) is not None:
            raise RuntimeError(
                f"`closure` of {type(optimizer).__name__}.step must go through Lightning's optimizer with "
                "`shard_update`: the step runs on this rank's parts of the parameters, and a closure needs whole ones. "
                "Use the optimizer that `self.optimizers()` returns, without `use_pl_optimizer=False`."
            )
        self._entered = self._update_context(optimizer)
        self._entered.__enter__()

    def _after_step(self, *_: Any) -> None:
        entered = self._entered
        self._entered = None
        if entered is not None:
            entered.__exit__(None, None, None)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
