"""All-gather of updated weights that overlaps with the next forward pass.

    step      update of this rank's shards -> the gather of all weights is started
    forward   layer 1: waits for its weights | layer 2: waits for its own, most of which have arrived meanwhile | ...

Code that reads a weight waits until it has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.futures import Future
from torch.overrides import TorchFunctionMode

from lightning_hybrid.comm.stats.trace import CommTrace

# Attributes that can be read without waiting, because they do not give access to a weight's values. `zero_grad`, for
# example, reads them.
OF_NO_VALUE = {"grad", "grad_dtype", "requires_grad", "shape", "dtype", "device"}


class LateGather(TorchFunctionMode):
    """Torch function mode that makes any read of a weight wait until its all-gather is complete.

    Module hooks would not suffice, because a callback, another layer or an optimizer's groups may read a weight without
    its module. The mode is active for the whole run, in the training thread. On a GPU the stream waits, not the host.

    Args:
        trace: Communication counters, to which the waiting time is added.
    """

    def __init__(self, trace: CommTrace) -> None:
        super().__init__()
        self._trace = trace
        # The keys are `id`s of weights. The weight is kept, so that no other object gets its `id`.
        self._weights: dict[int, Tensor] = {}
        self._futures: dict[int, list[Future[Tensor]]] = {}

    def add(self, future: Future[Tensor], weights: Iterable[Tensor]) -> None:
        """Register a future that must complete before any of these weights is read."""
        weights_by_key = {id(weight): weight for weight in weights}  # each weight once
        self._weights.update(weights_by_key)
        for key in weights_by_key:
            futures = self._futures.setdefault(key, [])
            futures.append(future)

    def wait(self, keys: Iterable[int] | None = None) -> None:
        """Wait until the all-gather of weights is complete.

        Args:
            keys: `id`s of the weights. Weights that are not being gathered are skipped. None: all weights.
        """
        began_s = self._trace.now_s()
        if keys is None:
            keys = list(self._futures)
        for key in keys:
            futures = self._futures.pop(key, [])
            self._weights.pop(key, None)
            with self._trace.waiting():
                for future in futures:
                    future.wait()
        self._trace.count_wait(began_s)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `function` after the weights among its arguments have been gathered."""
        if kwargs is None:
            kwargs = {}
        if self._futures and _reads_values(function):
            keys = self._pending_among((*args, *kwargs.values()))
            if keys:
                self.wait(keys)
        return function(*args, **kwargs)

    def _pending_among(self, arguments: Iterable[Any]) -> list[int]:
        """Return the `id`s of weights among the arguments whose all-gather is not complete.

        Lists and tuples among the arguments are searched as well.
        """
        keys = []
        for argument in arguments:
            values = argument if isinstance(argument, list | tuple) else (argument,)
            for value in values:
                if id(value) in self._futures:
                    keys.append(id(value))
        return keys


def _reads_values(function: Callable[..., Any]) -> bool:
    # Reading an attribute calls `__get__` of the attribute's descriptor.
    descriptor = getattr(function, "__self__", None)
    return getattr(descriptor, "__name__", "") not in OF_NO_VALUE


def is_compiled(module: nn.Module) -> bool:
    """Return whether the module or a submodule is compiled by `torch.compile`.

    A compiled graph reads weights without calling a torch function mode.
    """
    return any(
        layer._compiled_call_impl is not None or hasattr(layer, "_orig_mod")
        for layer in module.modules()
    )
