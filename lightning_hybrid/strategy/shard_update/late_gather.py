"""Weights that are gathered while the next forward has begun: who reads one of them waits for it.

step      update of parts -> gather of all weights, asked for
forward   layer 1: waits for its weights | layer 2: for its own, most of which have come meanwhile | ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.futures import Future
from torch.overrides import TorchFunctionMode

from lightning_hybrid.comm.stats.trace import CommTrace

# Attributes that have nothing of a weight's values and do not lead to its memory: `zero_grad`, for one, reads them.
OF_NO_VALUE = {"grad", "requires_grad", "shape", "dtype", "device"}


class LateGather(TorchFunctionMode):
    """Waits for a weight that is on its way as soon as a function of torch is given it, whatever code that is.

    Not hooks of modules: a weight may be read without its module, by a callback, another layer or by an optimizer's
    groups. It is on for a whole fit, in the thread that trains. On a GPU it makes the stream wait, and not the host.
    """

    def __init__(self, trace: CommTrace) -> None:
        super().__init__()
        self._trace = trace
        self._under_way: dict[int, tuple[Tensor, list[Future[Tensor]]]] = {}

    def add(self, future: Future[Tensor], weights: Iterable[Tensor]) -> None:
        """Note that `future` brings parts of these weights."""
        for weight in {id(one): one for one in weights}.values():
            self._under_way.setdefault(id(weight), (weight, []))[1].append(future)

    def wait(self, keys: Iterable[int] | None = None) -> None:
        """Wait for the weights with these ids, if they are under way; None: for all."""
        began_s = self._trace.now_s()
        for key in list(self._under_way) if keys is None else keys:
            _, futures = self._under_way.pop(key, (None, []))
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
        """Call `function`, once what it is given is there."""
        if (
            self._under_way
            and getattr(getattr(function, "__self__", None), "__name__", "") not in OF_NO_VALUE
        ):
            given = (*args, *(kwargs or {}).values())
            lists = (one if isinstance(one, list | tuple) else (one,) for one in given)
            if keys := [
                id(value) for some in lists for value in some if id(value) in self._under_way
            ]:
                self.wait(keys)
        return function(*args, **(kwargs or {}))


def is_compiled(module: nn.Module) -> bool:
    """Return whether a part of the module is compiled: its graph asks no one before it reads weights."""
    return any(
        one._compiled_call_impl is not None or hasattr(one, "_orig_mod") for one in module.modules()
    )
