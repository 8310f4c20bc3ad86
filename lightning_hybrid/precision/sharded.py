"""Half-precision training with FSDP2 (`fully_shard`), whose shards are the fp32 master weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from lightning_hybrid.lightning_names import lightning_types, misconfiguration
from lightning_hybrid.precision.half_window import NORMALIZATION_TYPES, HalfPrecisionWindow
from lightning_hybrid.precision.plugin import MasterWeightMixin

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ModelParallelStrategy as _Strategy
else:
    _Strategy = object


class HostShards(_Strategy):
    """Mixin that adds support for FSDP2's `CPUOffloadPolicy` to Lightning's `ModelParallelStrategy`.

    Shards (the master weights), gradients and optimizer state stay on the host. The process group can all-reduce host
    tensors, which is necessary for the check for inf and nan and for the norm in gradient clipping.

    Attributes:
        offload: Whether the mixin is active. False: nothing changes.
    """

    offload = True

    def setup(self, trainer: Any) -> None:
        """Set up the strategy for a run, but leave offloaded shards on the host."""
        if not self.offload:
            super().setup(trainer)
            return
        with _ShardsStay():
            super().setup(trainer)

    def _get_process_group_backend(self) -> str:
        backend = super()._get_process_group_backend()
        kind = self.root_device.type
        if not self.offload or kind == "cpu" or "cpu:" in backend:
            return backend
        return f"cpu:gloo,{kind}:{backend}"


class _ShardsStay(TorchFunctionMode):
    """Torch function mode that prevents `Tensor.to` from moving DTensors to another device.

    Otherwise Lightning would move the module, and the state that optimizers create in their constructors.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Imported here, because the import takes a second.
        from torch.distributed.tensor import DTensor

        if func is Tensor.to and isinstance(args[0], DTensor):
            return args[0]
        return func(*args, **(kwargs or {}))


class CallsOutsideOfSteps:
    """Forward hooks that enable half precision when user code calls a sharded module outside of a step.

    They are registered on the module and on its children, and enter the context of a step. FSDP gathers half-precision
    parameters for such calls as well, so outside of a step the calls need the same context.

    Args:
        module: LightningModule.
        window: Half-precision window, which is open inside of a step.
        step_context: Function that returns the context of a step.
    """

    def __init__(
        self,
        module: nn.Module,
        window: HalfPrecisionWindow,
        step_context: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._window = window
        self._step_context = step_context
        self._entered: list[tuple[nn.Module, ExitStack]] = []
        self._handles: list[Any] = []
        children = [child for child in module.children() if child.forward != nn.Module.forward]
        for called in (module, *children):
            self._handles.append(called.register_forward_pre_hook(self._enter, prepend=True))
            # With `always_call` the context is left after an error as well.
            self._handles.append(called.register_forward_hook(self._leave, always_call=True))

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._window.is_open:
            return
        stack = ExitStack()
        stack.enter_context(self._step_context())
        self._entered.append((module, stack))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._entered or self._entered[-1][0] is not module:
            return None
        _, stack = self._entered.pop()
        stack.close()
        return self._window.hooks.to_fp32(output)

    def remove(self) -> None:
        """Remove the forward hooks from the module and its children."""
        for handle in self._handles:
            handle.remove()


class ShardedHalfMixin(MasterWeightMixin):
    """Half-precision plugin for FSDP2 in `ModelParallelStrategy`, with fp32 shards as master weights.

        gather, forward, backward    w16 = half(w), g16 = grad of s * L at w16          normalization layers: fp32
        reduce                       g   = mean over ranks of g16, in `reduce_dtype`    fp32, a shard on each rank
        skip or step                 any(g / s is inf or nan) on any rank: skip;  else  w <- optimizer(w, g / s)

    Call `shard_` to shard the network. Arguments and behavior are those of `MasterWeightPrecision`, with two
    exceptions: an initial loss scale that is too high falls only step by step, and each step has an additional
    all-reduce of the overflow flag.

    Source: Zhao et al. 2023 (arXiv:2304.11277), for the predecessor of `fully_shard`.
    """

    _calls_outside: CallsOutsideOfSteps | None = None
    reduce_dtype = torch.float32
    """Dtype in which gradients are summed over ranks and over the batches of a step. `torch.float16` sends half the
    bytes."""

    def shard_(self, network: nn.Module, blocks: Iterable[nn.Module], **options: Any) -> None:
        """Shard a network in place with `fully_shard`, making each block a separate FSDP unit.

        All fp32 modules form another unit, and so do all remaining modules.

        Collective: every rank of the mesh must call it, in the same order, as for `fully_shard`.

        Args:
            network: Network to shard.
            blocks: Modules of the network that are gathered one at a time.
            **options: Arguments of `fully_shard`, such as `mesh`. An `offload_policy` requires a strategy with
                `HostShards`. Master weights, gradients, optimizer state and loss scale are then on the host.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        kept = (*NORMALIZATION_TYPES, *self.keep_fp32)
        fp32_modules = []
        for module in network.modules():
            if isinstance(module, kept) and list(module.parameters(recurse=False)):
                fp32_modules.append(module)
        if fp32_modules:
            # They are in a single group, because they are small and stay gathered from forward to backward.
            fp32_options = options | {"reshard_after_forward": False}
            fully_shard(fp32_modules, **fp32_options)
        # Autocast casts the operands of half-precision operations, so inputs keep their dtype.
        options["mp_policy"] = MixedPrecisionPolicy(
            self.dtype, self.reduce_dtype, cast_forward_inputs=False
        )
        for block in blocks:
            if block not in fp32_modules and list(block.parameters()):
                fully_shard(block, **options)
        fully_shard(network, **options)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Check that the module is sharded, and prepare it for half-precision training.

        Its shards are the master weights.

        Raises:
            MisconfigurationException: The strategy is not `ModelParallelStrategy`, `shard_` has not sharded the module,
                or shards are offloaded without `HostShards`.
        """
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        trainer: Any = getattr(module, "trainer", None)
        strategy = None
        if trainer:
            strategy = trainer.strategy
        strategy_types = lightning_types("pytorch.strategies.ModelParallelStrategy")
        is_sharded = any(isinstance(submodule, FSDPModule) for submodule in module.modules())
        if not isinstance(strategy, strategy_types) or not is_sharded:
            raise misconfiguration(
                f"`strategy` (={type(strategy).__name__}) must be ModelParallelStrategy with a module that "
                f"{type(self).__name__} has sharded, because the shards are the fp32 master weights. Call "
                "`self.trainer.precision_plugin.shard_(self.net, self.net.children(), mesh=...)` in "
                "`configure_model`, or use strategy='hybrid_allreduce'."
            )
        self.connect_strategy(is_last_backward_of_step=partial(bool, True))
        super().convert_module(module)
        device_types = set()
        for parameter in module.parameters():
            if isinstance(parameter, DTensor):
                device_types.add(parameter.device.type)
        is_offloaded = device_types != {strategy.root_device.type}
        if is_offloaded and not (isinstance(strategy, HostShards) and strategy.offload):
            raise misconfiguration(
                f"`strategy` (={type(strategy).__name__}) cannot train with `offload_policy`, because it would move "
                "the offloaded shards to the device. Define `class Offloading(HostShards, ModelParallelStrategy): "
                "pass` with `HostShards` from lightning_hybrid.precision.sharded, and use it as the strategy."
            )
        host = None
        if is_offloaded:
            host = torch.device("cpu")
        self.follow_device(strategy.root_device, host=host)
        return module

    def _new_window(self) -> HalfPrecisionWindow:
        # The window has no parameters, because FSDP provides half-precision parameters itself.
        window = HalfPrecisionWindow(nn.Module(), self.dtype)
        for child in self._module.modules():
            if isinstance(child, NORMALIZATION_TYPES) and not isinstance(child, _BatchNorm):
                window.hooks.compute_in_fp32(child)
        self._calls_outside = CallsOutsideOfSteps(self._module, window, self.forward_context)
        return window

    def _end_window(self) -> None:
        if self._calls_outside is not None:
            self._calls_outside.remove()
            self._calls_outside = None
        super()._end_window()

    def _largest_gradient(self, *_: Any) -> Tensor | None:
        return None  # A rank has only shards of the gradients.
