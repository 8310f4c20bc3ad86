"""Hooks for sharded optimizer steps that user code runs without Lightning or master weights."""

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
    """Global optimizer hooks that run each step of selected optimizers inside a given context.

    With half precision the hooks of the precision plugin enter the context instead.

    Args:
        is_concerned: Function that returns whether an optimizer's steps need the context.
        update_context: Function that returns the context for a step of an optimizer.
        is_ignored: Function that returns whether Lightning's own step has already entered the context.
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
        self._context: AbstractContextManager[None] | None = None
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
                f"`closure` cannot be passed to {type(optimizer).__name__}.step directly with `shard_update`, because "
                "the step updates this rank's shards of the parameters, but a closure needs the full parameters. "
                "Call `step` of the optimizer that `self.optimizers()` returns, without `use_pl_optimizer=False`."
            )
        self._context = self._update_context(optimizer)
        self._context.__enter__()

    def _after_step(self, *_: Any) -> None:
        context = self._context
        self._context = None
        if context is not None:
            context.__exit__(None, None, None)

    def remove(self) -> None:
        """Remove the optimizer hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
