"""Capture of the state that determines a module's output, for exact repetition of a forward pass.

* `Buffers`: running statistics, queues, vectors of spectral norm.
* `Parameters`: trained parameters, which are swapped for separate leaves, and frozen parameters.
* `Environment`: autocast, function modes, default dtype, training or evaluation mode.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.lightning_names import lightning_types
from lightning_hybrid.models.activation_checkpointing import current_function_modes

# ---- buffers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BufferValue:
    """Captured value of a module's buffer."""

    module: nn.Module
    name: str
    value: Tensor | None


class Buffers:
    """Buffers of modules, whose values can be captured repeatedly and restored.

    Captured values that are equal share memory.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._latest: dict[tuple[int, str], Tensor] = {}

    def capture(self) -> list[BufferValue]:
        """Return the current values of all buffers."""
        values = []
        for module in self._modules:
            for name, buffer in module._buffers.items():
                key = (id(module), name)
                if buffer is None:
                    values.append(BufferValue(module, name, None))
                    continue
                if key not in self._latest or not _is_equal(self._latest[key], buffer):
                    # Values are compared, because BatchNorm kernels do not increase torch's version counter.
                    self._latest[key] = buffer.detach().clone()
                values.append(BufferValue(module, name, self._latest[key]))
        return values

    @contextmanager
    def at(self, values: list[BufferValue]) -> Iterator[None]:
        """Set buffers to copies of earlier values within a context.

        Changes made within the context are discarded.
        """
        current = []
        for module in self._modules:
            for name, buffer in module._buffers.items():
                current.append((module, name, buffer))
        try:
            for captured in values:
                value = None if captured.value is None else captured.value.clone()
                setattr(captured.module, captured.name, value)
            yield
        finally:
            for module, name, buffer in current:
                setattr(module, name, buffer)


def _is_equal(first: Tensor, second: Tensor) -> bool:
    is_same_kind = (
        first.dtype is second.dtype
        and first.device == second.device
        and first.shape == second.shape
    )
    return is_same_kind and torch.equal(first, second)


# ---- parameters ------------------------------------------------------------------------------------------------------


class ParameterValue:
    """Record of a parameter and its value at creation, which detects later changes.

    Args:
        name: Name of the parameter, for error messages.
        module: Module that holds the parameter.
        attribute: Name of the parameter in that module.
        parameter: The parameter.
    """

    def __init__(self, name: str, module: nn.Module, attribute: str, parameter: Tensor) -> None:
        self.name = name
        self.parameter = parameter
        self.requires_grad = parameter.requires_grad
        self.value = parameter.detach()  # the same memory
        self._module = module
        self._attribute = attribute
        self._version: int = self.value._version
        self._fingerprint: Tensor | None = None
        # An embedding with `max_norm` renormalizes rows before it reads them. Doing so again has no effect.
        self._may_be_written = getattr(module, "max_norm", None) is not None

    def take_fingerprint(self) -> None:
        """Record a checksum of the value, so that `is_written` can detect in-place changes.

        The checksum detects writes that torch's version counter misses, such as
        `parameter.data.mul_(0.99)`.
        """
        self._fingerprint = _fingerprint(self.value)

    def is_written(self) -> bool:
        """Return whether the value has been changed in place."""
        if self._may_be_written:
            return False
        if self.value._version != self._version:
            return True
        return self._fingerprint is not None and not torch.equal(
            self._fingerprint, _fingerprint(self.value)
        )

    def is_replaced(self) -> bool:
        """Return whether the module now holds a different parameter object under the same name."""
        return self._module._parameters.get(self._attribute) is not self.parameter

    def is_moved(self) -> bool:
        """Return whether the parameter now uses different memory, for example after `parameter.data = ...`."""
        return self.parameter.data_ptr() != self.value.data_ptr()


def _fingerprint(value: Tensor) -> Tensor:
    """Return an integer checksum that almost certainly differs if any bit of the value differs."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    real = torch.view_as_real(value) if value.is_complex() else value
    return real.contiguous().view(integers[real.element_size()]).sum(dtype=torch.int64)


class Parameters:
    """Records of all parameters of modules and their values at creation.

    Args:
        root: Module whose parameter names are used in error messages.
        modules: All modules whose parameters are recorded.
        takes_fingerprints: Whether to call `ParameterValue.take_fingerprint`, which reads all values.

    Raises:
        ValueError: A parameter is a kind of tensor that cannot be swapped for another tensor.
    """

    def __init__(
        self, root: nn.Module, modules: Iterable[nn.Module], *, takes_fingerprints: bool = False
    ) -> None:
        names = {id(parameter): name for name, parameter in root.named_parameters()}
        self._values: dict[int, ParameterValue] = {}
        for module in modules:
            for attribute, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in self._values:
                    name = names.get(id(parameter), f"{type(module).__name__}.{attribute}")
                    _refuse_special_tensor(name, module, parameter)
                    self._values[id(parameter)] = ParameterValue(name, module, attribute, parameter)
        self.trained: list[Tensor] = []
        for value in self._values.values():
            if value.requires_grad:
                self.trained.append(value.parameter)
            if takes_fingerprints:
                value.take_fingerprint()

    def names_of_changed(self) -> list[str]:
        """Return the names of parameters that were changed in place or use different memory."""
        return [
            value.name for value in self._values.values() if value.is_written() or value.is_moved()
        ]

    def names_of_lost(self) -> list[str]:
        """Return the names of parameters whose earlier values cannot be restored."""
        return [
            value.name
            for value in self._values.values()
            if value.is_written() or value.is_replaced()
        ]

    @contextmanager
    def as_leaves(self) -> Iterator[None]:
        """Swap parameters within a context for leaf tensors with the earlier values and no hooks.

        Within the context, each parameter object points to a different C++ tensor, which has its own gradient. This
        covers every reference to the parameter, including references in lists and in `torch.nn.LSTM`. Hooks of the user
        and of DistributedDataParallel belong to the original tensor and do not run.
        """
        torch.clear_autocast_cache()  # its references would prevent the swap
        exchanged: list[tuple[Tensor, Tensor]] = []
        try:
            for value in self._values.values():
                leaf: Tensor = nn.Parameter(value.value, requires_grad=value.requires_grad)
                torch._C._swap_tensor_impl(value.parameter, leaf)
                exchanged.append((value.parameter, leaf))
            yield
        finally:
            torch.clear_autocast_cache()
            for parameter, leaf in exchanged:
                torch._C._swap_tensor_impl(parameter, leaf)


def _refuse_special_tensor(name: str, module: nn.Module, parameter: Tensor) -> None:
    kind = type(parameter.detach()).__name__
    if isinstance(module, torch.jit.ScriptModule) and parameter.requires_grad:
        kind = "TorchScript parameter"
    elif kind == "Tensor" and parameter.is_leaf:
        return
    elif not parameter.is_leaf:
        kind = "result of another computation"
    raise ValueError(
        f"`{name}` (a {kind}) must be a plain parameter, because `GlobalBatch` temporarily replaces the parameters "
        "of the module with other tensors. Use the loss without `GlobalBatch`, or a module without sharded, "
        "scripted or computed parameters."
    )


# ---- modes and dtypes ------------------------------------------------------------------------------------------------


class Environment:
    """Snapshot of autocast settings, function modes, default dtype and training modes."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._is_training = [(module, module.training) for module in modules]
        self._function_modes = current_function_modes()
        self._default_dtype = torch.get_default_dtype()
        self._autocast: list[dict[str, Any]] = []
        for device_type in _autocast_devices():
            self._autocast.append(
                {
                    "device_type": device_type,
                    "dtype": torch.get_autocast_dtype(device_type),
                    "enabled": torch.is_autocast_enabled(device_type),
                }
            )

    @contextmanager
    def of_forward(self) -> Iterator[None]:
        """Apply the recorded function modes and autocast settings within a context."""
        with ExitStack() as stack:
            for mode in self._function_modes:
                stack.enter_context(mode)
            for settings in self._autocast:
                stack.enter_context(torch.autocast(**settings))
            yield

    @contextmanager
    def of_modules(self) -> Iterator[None]:
        """Apply the recorded default dtype and each module's training mode within a context."""
        current_dtype = torch.get_default_dtype()
        current_modes = [(module, module.training) for module, _ in self._is_training]
        torch.set_default_dtype(self._default_dtype)
        try:
            _set_training(self._is_training)
            yield
        finally:
            _set_training(current_modes)
            torch.set_default_dtype(current_dtype)


def _autocast_devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _set_training(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    for module, is_training in modes:
        if module.training is not is_training:
            module.training = is_training


@contextmanager
def without_logging(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Disable `self.log` of LightningModules, and updates of metrics, within a context.

    Each module must occur only once in `modules`.
    """
    metric_type: Any = getattr(sys.modules.get("torchmetrics"), "Metric", ())
    module_types = lightning_types("pytorch.LightningModule")
    replaced: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in modules:
        names: tuple[str, ...] = ()
        if isinstance(module, module_types):
            names = ("log", "log_dict")
        elif isinstance(module, metric_type):
            names = ("update", "forward")
        attributes = vars(module)
        replaced.append(
            (attributes, {name: attributes[name] for name in names if name in attributes})
        )
        attributes.update(dict.fromkeys(names, _do_nothing))
    try:
        yield
    finally:
        for attributes, before in replaced:
            for name in [name for name, value in attributes.items() if value is _do_nothing]:
                del attributes[name]
            attributes.update(before)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass
