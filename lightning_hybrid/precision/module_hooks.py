"""Module hooks that are active while a model's parameters are in half precision.

normalization layers     compute in fp32 and return outputs in half precision
state dicts              contain and load fp32 values, for any submodule of the model
other threads            get an error if they call the model
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_hybrid.precision.living_modules import LivingModules
from lightning_hybrid.precision.parameter_pair import ParameterPair


class Window(Protocol):
    """Protocol for the members of `HalfPrecisionWindow` that the module hooks use."""

    is_open: bool

    def pair_of(self, parameter: Tensor) -> ParameterPair | None:
        """Return the fp32 and half-precision pair of a parameter, or None if the parameter has no copy."""


class ModuleHooks:
    """Forward hooks and state-dict hooks of modules whose parameters switch between fp32 and half precision.

    Forward hooks are registered only while the window is open. Outside of a step, modules can therefore be scripted,
    exported, copied and pickled without hooks. State-dict hooks stay registered, but do nothing while the window is
    closed.

    Args:
        window: Window that holds the parameters.
        dtype: Dtype that normalization layers return.
    """

    def __init__(self, window: Window, dtype: torch.dtype) -> None:
        self._window = window
        self._dtype = dtype
        self._normalization_layers = LivingModules()
        self._checked_modules = LivingModules()
        self._attached: list[Any] = []
        self._permanent: list[Any] = []
        self._with_state_hooks: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._thread: int | None = None
        self.is_in_backward = False

    def compute_in_fp32(self, module: nn.Module) -> None:
        """Make a normalization layer compute in fp32 and return half-precision outputs during a step."""
        if not isinstance(module, torch.jit.ScriptModule):
            self._normalization_layers.append(module)

    def show_fp32_in_state_dicts(self, module: nn.Module) -> None:
        """Make a module save and load fp32 parameter values in its state dict during a step.

        This applies to the module's own parameters, and not to those of its children.
        """
        if module in self._with_state_hooks:
            return
        self._with_state_hooks.add(module)
        self._permanent += [
            module.register_state_dict_post_hook(ModuleHook(self._give_fp32)),
            module.register_load_state_dict_pre_hook(ModuleHook(self._take_fp32)),
        ]

    def refuse_other_threads(self, module: nn.Module) -> None:
        """Make a module and its submodules raise an error if another thread calls them during a step."""
        for child in (module, *module.children()):
            if not isinstance(child, torch.jit.ScriptModule):
                self._checked_modules.append(child)

    def attach(self) -> None:
        """Register the forward hooks on the modules for the current thread."""
        self._thread = threading.get_ident()
        for layer in self._normalization_layers:
            self._attached += [
                layer.register_forward_pre_hook(ModuleHook(self._inputs_to_fp32), with_kwargs=True),
                layer.register_forward_hook(ModuleHook(self._outputs_to_half)),
            ]
        for module in self._checked_modules:
            self._attached.append(
                module.register_forward_pre_hook(ModuleHook(self._check_thread), prepend=True)
            )

    def detach(self) -> None:
        """Remove the forward hooks from the modules."""
        for handle in self._attached:
            handle.remove()
        self._attached.clear()

    def forget_dead(self) -> None:
        """Drop the references to modules that no longer exist."""
        self._normalization_layers.forget_dead()
        self._checked_modules.forget_dead()
        self._permanent = [
            handle for handle in self._permanent if handle.hooks_dict_ref() is not None
        ]

    def remove(self) -> None:
        """Remove all forward hooks and state-dict hooks."""
        self.detach()
        for handle in self._permanent:
            handle.remove()
        self._permanent.clear()
        self._with_state_hooks.clear()
        self._normalization_layers.clear()
        self._checked_modules.clear()

    def to_fp32(self, values: Any) -> Any:
        """Convert half-precision tensors in nested containers to fp32."""
        return tree_map_only(Tensor, self.tensor_to_fp32, values)

    def tensor_to_fp32(self, tensor: Tensor) -> Tensor:
        """Convert a tensor to fp32 if it is in half precision."""
        if tensor.dtype is self._dtype:
            return tensor.float()
        return tensor

    def _tensor_to_half(self, tensor: Tensor) -> Tensor:
        if tensor.dtype is torch.float32:
            return tensor.to(self._dtype)
        return tensor

    def _inputs_to_fp32(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self.to_fp32((args, kwargs))

    def _outputs_to_half(self, module: nn.Module, args: Any, output: Any) -> Any:
        return tree_map_only(Tensor, self._tensor_to_half, output)

    def _check_thread(self, module: nn.Module, args: Any) -> None:
        # `torch.compile` cannot trace the query of the thread, and would break the graph at every module.
        if torch.compiler.is_compiling():
            return
        # On CUDA, autograd has its own threads, in which activation checkpoints recompute the forward.
        if self.is_in_backward or threading.get_ident() == self._thread:
            return
        raise RuntimeError(
            f"`{type(module).__name__}` was called in thread `{threading.current_thread().name}` during a training "
            "step in another thread. This is not supported, because parameters are in half precision during a step "
            "and change at its end. Use a copy of the module in that thread (`copy.deepcopy` in a hook such as "
            "`on_train_batch_end`), or call the module between steps."
        )

    def _give_fp32(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        """Replace a module's half-precision values in a state dict with fp32 values during a step."""
        if not self._window.is_open:
            return
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            pair = self._window.pair_of(parameter)
            # With `keep_vars=True` the state dict holds the parameter itself, which is not replaced.
            if pair is not None and state.get(prefix + name, parameter) is not parameter:
                state[prefix + name] = pair.shown_in_fp32()

    def _take_fp32(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Load a module's values from a state dict into the fp32 parameters during a step."""
        if not self._window.is_open:
            return
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            pair = self._window.pair_of(parameter)
            value = state.get(prefix + name)
            if pair is not None and isinstance(value, Tensor) and value.shape == pair.half.shape:
                pair.load_(value)


class ModuleHook(partial[Any]):
    """Module hook whose copies and unpickled versions do nothing.

    Hooks of a copied module must not change the original module.
    """

    __name__ = "half_precision_hook"  # TorchScript needs a name.

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        return ModuleHook(_do_nothing)

    def __reduce__(self) -> Any:
        return ModuleHook, (_do_nothing,)


def _do_nothing(*_: Any, **__: Any) -> None:
    pass
