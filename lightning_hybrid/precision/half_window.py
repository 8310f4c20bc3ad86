"""Temporary replacement of a module's fp32 parameters by half-precision copies for forward and backward.

    closed    parameters, gradients and optimizer state are the user's own fp32 objects
    open      parameters show the half-precision copies on which DDP was built

When the window opens, all fp32 values are rounded into the copies. When it closes, elements that user code wrote in
the meantime are copied to the fp32 values. They are found by comparing the bits of both tensors, so writes need not be
tracked while the window is closed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lightning_hybrid.placement import broadcast_first_
from lightning_hybrid.precision.device_writes import WriteSearch
from lightning_hybrid.precision.living_modules import LivingModules
from lightning_hybrid.precision.module_hooks import ModuleHooks
from lightning_hybrid.precision.parameter_pair import (
    ParameterPair,
    cast_,
    check_exchange,
    take_writes_,
)

NORMALIZATION_TYPES: tuple[type[nn.Module], ...] = (
    _NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)

HALF_DTYPES = (torch.float16, torch.bfloat16)


class HalfPrecisionWindow:
    """Switch that changes all parameters of a module between fp32 values and half-precision copies.

    While the window is open, the parameters are in half precision. While it is closed, they are in fp32.

    The following keep their own dtype: parameters of normalization layers, weights that are computed from other
    parameters (`parametrizations`, `weight_norm`, `spectral_norm`, pruning), embeddings with `max_norm`, scripted
    modules, buffers, and during training frozen parameters. A parameter that several modules share keeps its dtype if
    one of these modules requires it.

    A trained parameter that the user has created in half precision is in fp32 until `end` is called.

    Args:
        module: Module with its final values. `add` adds further modules.
        dtype: `torch.float16` or `torch.bfloat16`.
        keep_fp32: Module types whose own parameters stay in fp32. Their submodules are converted.
        frozen: Whether parameters that do not require gradients have a half-precision copy as well. It must be False
            during training, because teacher networks and averaged weights change by amounts that half precision would
            round away.
        on_meta: Whether parameters on the meta device have a half-precision copy as well. During training these belong
            to other pipeline stages.
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        keep_fp32: tuple[type[nn.Module], ...] = (),
        *,
        frozen: bool = False,
        on_meta: bool = False,
    ) -> None:
        self.dtype = dtype
        self.pairs: dict[int, ParameterPair] = {}
        self.is_open = False
        self.hooks = ModuleHooks(self, dtype)
        self.before_open: list[Callable[[], None]] = []
        self._keep_fp32 = keep_fp32
        self._frozen = frozen
        self._on_meta = on_meta
        self._modules = LivingModules()
        # `id`s of the parameters of each module that was added.
        self._parameters_of: list[tuple[weakref.ref[nn.Module], set[int]]] = []
        self._has_warned = False
        self._search = WriteSearch()
        self._dtypes_before: list[tuple[nn.Parameter, torch.dtype]] = []
        self.add(module)

    def add(self, module: nn.Module) -> None:
        """Create half-precision copies of a module's parameters, and prepare hooks for its submodules."""
        modules = list(_modules_outside_metrics(module))
        kept: set[int] = set()
        for child in modules:
            if self._keeps_dtype(child):
                kept.update(id(parameter) for parameter in child.parameters(recurse=False))

        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for child in modules:
            for parameter in child.parameters(recurse=False):
                is_new = id(parameter) not in self.pairs and id(parameter) not in kept
                if is_new and self._is_converted(parameter):
                    check_exchange()
                    self._make_fp32(parameter)
                    name = names.get(id(parameter), "parameter")
                    self.pairs[id(parameter)] = ParameterPair(name, parameter, self.dtype)

        for child in modules:
            # BatchNorm supports half-precision activations with fp32 parameters itself.
            if isinstance(child, NORMALIZATION_TYPES) and not isinstance(child, _BatchNorm):
                self.hooks.compute_in_fp32(child)
            if any(id(parameter) in self.pairs for parameter in child.parameters(recurse=False)):
                self.hooks.show_fp32_in_state_dicts(child)
        self.hooks.refuse_other_threads(module)
        for child in modules:
            self._modules.append(child)
        self._parameters_of.append((weakref.ref(module), {id(p) for p in module.parameters()}))

    def remove_dead(self) -> set[int]:
        """Remove the half-precision copies of modules that no longer exist.

        Returns:
            The `id`s of the parameters of these modules, except those that other modules share.
        """
        dead: set[int] = set()
        living: set[int] = set()
        if all(module() is not None for module, _ in self._parameters_of):
            return dead
        for module, parameters in self._parameters_of:
            if module() is None:
                dead |= parameters
            else:
                living |= parameters
        dead -= living
        self._modules.forget_dead()
        self.hooks.forget_dead()
        self._parameters_of = [entry for entry in self._parameters_of if entry[0]() is not None]
        for key in dead & self.pairs.keys():
            self.pairs.pop(key).close()
        self._dtypes_before = [entry for entry in self._dtypes_before if id(entry[0]) not in dead]
        return dead

    def _keeps_dtype(self, module: nn.Module) -> bool:
        is_kept_type = isinstance(
            module, (*NORMALIZATION_TYPES, torch.jit.ScriptModule, *self._keep_fp32)
        )
        # With `max_norm`, the forward pass changes the weight.
        is_written_in_forward = getattr(module, "max_norm", None) is not None
        return is_kept_type or is_written_in_forward or is_reparametrized(module)

    def _is_converted(self, parameter: nn.Parameter) -> bool:
        if parameter.dtype is not torch.float32 and parameter.dtype not in HALF_DTYPES:
            return False
        if parameter.is_meta and not self._on_meta:
            return False
        return parameter.requires_grad or self._frozen

    def _make_fp32(self, parameter: nn.Parameter) -> None:
        if parameter.dtype is torch.float32:
            return
        self._dtypes_before.append((parameter, parameter.dtype))
        parameter.grad = None
        parameter.data = parameter.data.float()
        parameter.grad_dtype = torch.float32

    def pair_of(self, parameter: Tensor) -> ParameterPair | None:
        """Return the fp32 and half-precision pair of a parameter, or None if the parameter has no copy."""
        return self.pairs.get(id(parameter))

    def add_stand_in(self, stand_in: nn.Parameter, parameter: Tensor) -> None:
        """Create a half-precision copy for a tensor that temporarily replaces a parameter.

        The copy is kept until `remove_stand_in` is called. Nothing happens if the parameter keeps its own dtype, or
        while the window is open, because the tensor was then made from the half-precision copy.

        Args:
            stand_in: Tensor that replaces the parameter.
            parameter: Parameter that is replaced.
        """
        pair = self.pair_of(parameter)
        if pair is not None and not self.is_open:
            self.pairs[id(stand_in)] = ParameterPair(pair.name, stand_in, self.dtype)

    def remove_stand_in(self, stand_in: Tensor) -> None:
        """Remove the half-precision copy of a tensor that temporarily replaced a parameter."""
        pair = self.pairs.pop(id(stand_in), None)
        if pair is not None:
            pair.close()

    # ---- open and close ----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Switch the module's parameters to half precision, with newly rounded values."""
        if self.is_open:
            return
        for prepare in self.before_open:
            prepare()
        # The flag is set first, because an interrupt may occur when only some parameters are switched.
        self.is_open = True
        cast_(self.pairs.values())
        self._exchange()
        self.hooks.attach()

    def close(self) -> None:
        """Switch the module's parameters back to fp32, keeping values that user code wrote in the meantime.

        Elements that user code wrote into the half-precision copies are first copied to the fp32 values.
        """
        if not self.is_open:
            return
        self.hooks.detach()
        try:
            open_pairs = [pair for pair in self.pairs.values() if pair.is_open]
            take_writes_(open_pairs, self._search)
        finally:
            self._exchange(to_fp32=True)
            self.is_open = False
        self._warn_of_writes_inside()
        self._refresh_pruned_weights()

    def _warn_of_writes_inside(self) -> None:
        name = self._search.take_written()
        for pair in self.pairs.values():
            if name is None and pair.was_written:
                name = pair.name
        if name is None or self._has_warned:
            return
        self._has_warned = True
        rank_zero_warn(
            f"`{name}` was written inside a training step, where parameters are in half precision, so the values were "
            f"rounded to {str(self.dtype).removeprefix('torch.')} and small changes are lost. Writes through a "
            "`.data` tensor or a NumPy array that was created outside the step are undone. Write parameters between "
            "steps, for example in `on_train_batch_end`, or with an optimizer, whose steps run in fp32."
        )

    def _exchange(self, *, to_fp32: bool = False) -> None:
        # Autocast caches casts of parameters. Its references would prevent a swap, and the cached values are now wrong.
        torch.clear_autocast_cache()
        for pair in self.pairs.values():
            if to_fp32:
                pair.close()
            else:
                pair.open()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Temporarily switch the parameters to half precision."""
        was_open = self.is_open
        self.open()
        try:
            yield
        finally:
            if not was_open:
                self.close()

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Temporarily switch the parameters to fp32."""
        was_open = self.is_open
        self.close()
        try:
            yield
        finally:
            if was_open:
                self.open()

    def check_dtypes(self) -> None:
        """Raise if user code has changed the dtype or shape of a parameter's data during a step."""
        for pair in self.pairs.values():
            pair.check_dtype()

    def is_written(self) -> bool:
        """Return whether an fp32 value has changed since the half-precision copies were last updated.

        This waits for the device.
        """
        return not all(pair.is_exact_cast() for pair in self.pairs.values())

    def cast(self) -> None:
        """Update the half-precision copies from the fp32 values, without switching the parameters."""
        cast_(self.pairs.values())

    def _refresh_pruned_weights(self) -> None:
        # A pruned weight is a product that the last forward has computed in half precision.
        for module in self._modules:
            for hook in module._forward_pre_hooks.values():
                if isinstance(hook, BasePruningMethod):
                    hook(module, ())

    # ---- begin and end of a run --------------------------------------------------------------------------------------

    def broadcast_(self, module: nn.Module, ignored: Container[str] = ()) -> None:
        """Broadcast rank zero's fp32 parameter values to all ranks.

        DDP broadcasts only the half-precision copies. Without this method, ranks with different initial weights, for
        example without a common seed, would keep different low digits.

        Collective: every rank must call it, in the same order.

        Args:
            module: Module with the parameters.
            ignored: Names of parameters that DDP ignores. They are not broadcast.
        """
        values = []
        for name, parameter in module.named_parameters():
            pair = self.pair_of(parameter)
            if pair is not None and name not in ignored:
                values.append(pair.fp32.detach())
        broadcast_first_(values)

    def end(self) -> None:
        """Switch the parameters to fp32 permanently, restore the user's dtypes, and remove all hooks."""
        self.close()
        self.hooks.remove()
        self.pairs.clear()
        self.before_open.clear()
        self._modules.clear()
        self._parameters_of.clear()
        for parameter, dtype in self._dtypes_before:
            parameter.grad = None
            parameter.data = parameter.data.to(dtype)
            parameter.grad_dtype = dtype
        self._dtypes_before.clear()


def is_reparametrized(module: nn.Module) -> bool:
    """Return whether a module computes a weight from other parameters before each forward.

    Examples are `parametrizations`, `weight_norm` and pruning.
    """
    if isinstance(module, parametrize.ParametrizationList):
        return True
    computing = (WeightNorm, SpectralNorm, BasePruningMethod)
    return any(isinstance(hook, computing) for hook in module._forward_pre_hooks.values())


def _modules_outside_metrics(module: nn.Module) -> Iterator[nn.Module]:
    metric_type = getattr(sys.modules.get("torchmetrics"), "Metric", ())
    seen: set[int] = set()
    stack = [module]
    while stack:
        current = stack.pop()
        if id(current) in seen or isinstance(current, metric_type):
            continue
        seen.add(id(current))
        yield current
        stack.extend(reversed(list(current.children())))
