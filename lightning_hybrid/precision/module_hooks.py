"""Hooks on the modules of a half-precision model, so that user code sees fp32 where mixed precision shows it.

normalisation layers     compute in fp32 and return the compute dtype
state dicts              hold and take the fp32 masters, of any part of the model
a call outside a step    runs as in a step, and returns fp32
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class ModuleHooks:
    """The hooks of one conversion; `pair_of` returns the `MasterPair` of a parameter, or None."""

    def __init__(self, pair_of: Callable[[Tensor], Any], dtype: torch.dtype) -> None:
        self.pair_of = pair_of
        self.dtype = dtype
        self.is_in_step = False
        self.step_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.opened: list[tuple[nn.Module, ExitStack]] = []
        self._handles: list[Any] = []
        self._shown: set[nn.Module] = set()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Mark what runs inside as part of a step: normalisation layers return the compute dtype."""
        before, self.is_in_step = self.is_in_step, True
        try:
            yield
        finally:
            self.is_in_step = before

    def compute_in_fp32(self, module: nn.Module) -> None:
        """Let a normalisation layer compute in fp32 and return the compute dtype."""
        self._handles += [
            module.register_forward_pre_hook(_Hook(self._inputs_to_fp32), with_kwargs=True),
            module.register_forward_hook(_Hook(self._outputs_to_low)),
        ]

    def show_masters(self, module: nn.Module) -> None:
        """Let the state dict of `module` hold the masters of its own parameters, and loading reach them."""
        if module not in self._shown:
            self._shown.add(module)
            self._handles += [
                module.register_state_dict_post_hook(_Hook(self._give_masters)),
                module.register_load_state_dict_pre_hook(_Hook(self._take_masters)),
            ]

    def compute_as_in_a_step(self, module: nn.Module) -> None:
        """Let a call of `module`, or of one of its children, outside of a step run in the context of one."""
        children = [child for child in module.children() if child.forward != nn.Module.forward]
        for child in (module, *children):
            self._handles += [
                child.register_forward_pre_hook(_Hook(self._enter_step), prepend=True),
                child.register_forward_hook(_Hook(self._leave_step), always_call=True),
            ]

    def to_fp32(self, values: Any) -> Any:
        """Return `values` with its tensors of the compute dtype in fp32."""
        return tree_map_only(Tensor, lambda tensor: tensor.float() if tensor.dtype is self.dtype else tensor, values)

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._shown.clear()

    def _inputs_to_fp32(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self.to_fp32((args, kwargs)) if self.is_in_step else None

    def _outputs_to_low(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.is_in_step:
            return None
        return tree_map_only(Tensor, lambda t: t.to(self.dtype) if t.dtype is torch.float32 else t, output)

    def _give_masters(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, parameter in module._parameters.items():
            pair = None if parameter is None else self.pair_of(parameter)
            # With `keep_vars=True` the parameter is itself there.
            if pair is not None and state.get(prefix + name, parameter) is not parameter:
                pair.absorb_outside_writes_()
                state[prefix + name] = pair.whole()

    @torch.no_grad()
    def _take_masters(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in module._parameters.items():
            pair = None if parameter is None else self.pair_of(parameter)
            value = state.get(prefix + name)
            if pair is not None and isinstance(value, Tensor) and value.shape == pair.low.shape:
                pair.absorb_outside_writes_()
                pair.load_(value)

    def _enter_step(self, module: nn.Module, args: Any) -> None:
        if self.is_in_step:
            return
        # User code calls the module or a child of it, to sample or to evaluate. A hook cannot wrap the call, so the
        # context is entered here and left in the forward hook; `always_call` runs that one after an error too.
        stack = ExitStack()
        stack.enter_context(self.step_context())
        self.opened.append((module, stack))

    def _leave_step(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.opened or self.opened[-1][0] is not module:
            return None
        self.opened.pop()[1].close()
        return self.to_fp32(output)


class _Hook(partial[Any]):
    # A copy or pickle does nothing: hooks of a copied module must not reach the masters of the original.
    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook(_do_nothing)

    def __reduce__(self) -> Any:
        return _Hook, (_do_nothing,)


def _do_nothing(*_: Any, **__: Any) -> None:
    pass
