"""Gather of weights that continues during the next forward: code that reads a weight waits for it.

step      update of this rank's parts -> gather of all weights is started
forward   layer 1: waits for its weights | layer 2: waits for its own, most of which have arrived meanwhile | ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.futures import Future
from torch.overrides import TorchFunctionMode

from lightning_hybrid.comm.stats.trace import CommTrace

# Attributes that neither hold a weight's values nor lead to its memory. `zero_grad`, for example, reads them.
OF_NO_VALUE = {"grad", "grad_dtype", "requires_grad", "shape", "dtype", "device"}


class LateGather(TorchFunctionMode):
    """Mode that waits for a weight as soon as any function of torch receives it while it is being gathered.

    Hooks of modules would not suffice: a callback, another layer or an optimizer's groups may read a weight without
    its module. The mode is on for a whole fit, in the thread that trains. On a GPU the stream waits, not the host.

    Args:
        trace: Counters of the communication, to which the time of waiting is added.
    """

    def __init__(self, trace: CommTrace) -> None:
        super().__init__()
        self._trace = trace
        # By `id` of a weight. The weight is kept, so that no other object gets its `id`.
        self._weights: dict[int, Tensor] = {}
        self._futures: dict[int, list[Future[Tensor]]] = {}

    def add(self, future: Future[Tensor], weights: Iterable[Tensor]) -> None:
        """Register `future`, which completes parts of these weights."""
        for weight in {id(weight): weight for weight in weights}.values():
            self._weights[id(weight)] = weight
            self._futures.setdefault(id(weight), []).append(future)

    def wait(self, keys: Iterable[int] | None = None) -> None:
        """Wait for the weights with these `id`s, if they are being gathered. None: wait for all."""
        began_s = self._trace.now_s()
        for key in keys if keys is not None else list(self._futures):
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
        """Call `function`, after its arguments have arrived."""
        if kwargs is None:
            kwargs = {}
        if self._futures and _reads_values(function):
            keys = self._pending_among((*args, *kwargs.values()))
            if keys:
                self.wait(keys)
        return function(*args, **kwargs)

    def _pending_among(self, arguments: Iterable[Any]) -> list[int]:
        """Return the `id`s of the weights among arguments, and in lists among them, that are being gathered."""
        keys = []
        for argument in arguments:
            values = argument if isinstance(argument, list | tuple) else (argument,)
            for value in values:
                if id(value) in self._futures:
                    keys.append(id(value))
        return keys


def _reads_values(function: Callable[..., Any]) -> bool:
    # The getter of an attribute is a method of the attribute's descriptor.
    descriptor = getattr(function, "__self__", None)
    return getattr(descriptor, "__name__", "") not in OF_NO_VALUE


def is_compiled(module: nn.Module) -> bool:
    """Return whether a part of the module is compiled. A compiled graph reads weights without calling any mode."""
    return any(
        layer._compiled_call_impl is not None or hasattr(layer, "_orig_mod")
        for layer in module.modules()
    )
