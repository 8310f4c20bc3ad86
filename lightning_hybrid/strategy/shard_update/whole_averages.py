"""Context that shows full fp32 weights to weight-averaging callbacks if master weights are sharded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from lightning_hybrid.averaged_models import averaged_models_of
from lightning_hybrid.lightning_names import lightning_types
from lightning_hybrid.precision.optimizer_protocol import temporary_attributes

_METHODS_BY_CALLBACK = {
    "WeightAveraging": ("_swap_models", "_copy_average_to_current"),
    "StochasticWeightAveraging": ("update_parameters", "transfer_weights"),
}
"""Methods of Lightning's callbacks that average weights, or write an average into the weights."""


@contextmanager
def averaging_whole_values(
    callbacks: Iterable[object], whole_values: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Return a context in which weight-averaging callbacks see full fp32 weights.

    The callbacks see the full weights while they average, swap or transfer weights.

    Args:
        callbacks: Callbacks of the trainer, after their setup.
        whole_values: Function that returns a context in which the parameters hold full fp32 values. Entering it is
            collective, and so are the calls of the callbacks from now on.
    """
    callbacks = list(callbacks)
    with ExitStack() as stack:
        for name, methods in _METHODS_BY_CALLBACK.items():
            types = tuple(lightning_types(f"pytorch.callbacks.{name}"))
            for callback in callbacks:
                if isinstance(callback, types):
                    stack.enter_context(_within(whole_values, callback, methods))
        for averaged_model in averaged_models_of(callbacks):
            stack.enter_context(_within(whole_values, averaged_model, ("update_parameters",)))
        yield


def _within(
    whole_values: Callable[[], AbstractContextManager[None]], owner: object, methods: Iterable[str]
) -> AbstractContextManager[None]:
    wrapped: dict[str, Any] = {}
    for name in methods:
        wrapped[name] = _wrapped(getattr(owner, name), whole_values)
    return temporary_attributes(owner, **wrapped)


def _wrapped(
    method: Callable[..., Any], whole_values: Callable[[], AbstractContextManager[None]]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with whole_values():
            return method(*args, **kwargs)

    return call
