"""Precision plugin for half-precision training with fp32 master weights in Fabric training loops.

The plugin works like `precision/plugin.py` in the Trainer's manual optimization, for any number of modules and
optimizers. Parameters are in half precision only during forward and backward, so all other code of the loop sees fp32
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_hybrid.precision.closure_steps import ClosureStep
from lightning_hybrid.precision.half_window import HalfPrecisionWindow
from lightning_hybrid.precision.living_modules import LivingModules
from lightning_hybrid.precision.loss_scale import LossScale
from lightning_hybrid.precision.module_hooks import ModuleHook
from lightning_hybrid.precision.optimizer_protocol import evaluates_closure, parameters_of
from lightning_hybrid.precision.plugin import MasterWeightMixin
from lightning_hybrid.precision.skipped_steps import OptimizerStepState, SkipFlag

# Number of optimizer steps after which the host checks whether all steps were skipped. The Trainer does so at its
# logged steps, by default every 50 steps.
_ASK_EVERY = 50


class FabricMasterWeightMixin(MasterWeightMixin):
    """Fabric precision plugin for fp16 or bf16 training with fp32 master weights.

        forward         runs under autocast on half-precision copies of the weights. Outputs are converted to fp32
        backward        uses the scaled loss. Afterwards, `p.grad` is fp32 and unscaled, and may be clipped or changed
        optimizer.step  updates the fp32 weights, or is skipped if a gradient was inf or nan

    Each optimizer has its own loss scale. A backward pass uses the smallest scale of all optimizers whose parameters it
    can reach. Checkpoints contain the fp32 weights, the fp32 state of the optimizers and the loss scales. Arguments and
    errors are the same as for the Trainer's `MasterWeightPrecision`. Every 50 steps, the plugin checks for 40
    consecutive skipped steps.
    """

    def __init__(
        self,
        precision: Literal["16-true", "bf16-true"] = "16-true",
        loss_scale: str | float | LossScale | None = None,
        keep_fp32: tuple[type[nn.Module], ...] = (),
    ) -> None:
        super().__init__(precision, loss_scale=loss_scale, keep_fp32=keep_fp32)
        self._modules = LivingModules()
        # Function that returns whether the current backward averages a parameter's gradient, set by the strategy. The
        # default returns True for every parameter, and can be pickled for `hybrid_allreduce_spawn`.
        self.averages: Callable[[Tensor], bool] = torch.is_tensor
        self._num_steps = 0
        # True if a forward has built a graph and no backward has run since.
        self._waits_for_backward = False
        self._num_backwards = 0

    # ---- setup -----------------------------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Register a module for half-precision training and return it unchanged.

        `add_module` creates the half-precision copies later, when the module is on its device.
        """
        self._modules.append(module)
        return module

    def add_module(self, module: nn.Module, device: torch.device) -> None:
        """Create half-precision copies of the parameters of a module that is already on its device."""
        self._device = device
        self._compute_device = device
        if self.window is None:
            self._full_accumulation.begin()
            self._module = self._modules
            self._begin_window(HalfPrecisionWindow(module, self.dtype, self.keep_fp32))
        else:
            self.forget_dead_modules()
            self.window.add(module)
        self.optimizer_steps.to(device)

    def forget_dead_modules(self) -> None:
        """Drop the half-precision copies of modules that no longer exist on this rank.

        A loop may train several models one after another with the same Fabric. Their loss scales stay until all ranks
        have agreed to drop them, because ranks free modules at different times.
        """
        assert self.window is not None
        assert self.gradients is not None
        if self.window.is_open:
            return
        dead = self.window.remove_dead()
        if dead:
            self.gradients.forget(dead)

    def keep_gradients_in_rebuild(self, wrapped: DistributedDataParallel) -> None:
        """Register a hook that keeps fp32 gradients unrounded while a DDP wrapper rebuilds its buckets.

        DDP rebuilds its buckets once, at the beginning of a forward pass, and would round accumulated gradients as it
        moves them into the new buckets. The hook lets DDP rebuild them at the same time, but without gradients.
        """
        handles: list[RemovableHandle] = []
        hook = ModuleHook(self._rebuild_buckets, handles)
        handles.append(wrapped.register_forward_pre_hook(hook))

    def _rebuild_buckets(
        self, handles: list[RemovableHandle], wrapped: DistributedDataParallel, args: Any
    ) -> None:
        if not torch.is_grad_enabled():
            return
        assert self.gradients is not None
        with self.gradients.hidden(list(wrapped.parameters())):
            is_rebuilt = wrapped.reducer._rebuild_buckets()
        if is_rebuilt:
            handles.pop().remove()

    def connect_optimizer(self, optimizer: Optimizer) -> None:
        """Register an optimizer and create its loss scale."""
        modules: Any = self._modules
        self.connect(modules, [optimizer], [])

    # ---- forward and backward --------------------------------------------------------------------------------------

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Return a context for a forward pass with half-precision parameters under autocast.

        It is also the context of `fabric.autocast()`, in which user code may run backward passes and optimizer steps.
        """
        self.forget_dead_modules()
        num_backwards = self._num_backwards
        with super().forward_context():
            yield
        if torch.is_grad_enabled() and self._num_backwards == num_backwards:
            self._waits_for_backward = True

    def convert_output(self, data: Any) -> Any:
        """Convert half-precision tensors in a module's output to fp32, so that the loss is fp32."""
        return apply_to_collection(data, Tensor, self._to_fp32)

    def _to_fp32(self, tensor: Tensor) -> Tensor:
        if tensor.dtype is self.dtype:
            return tensor.float()
        return tensor

    def pre_backward(self, tensor: Tensor, module: nn.Module | None) -> None:  # type: ignore[override]
        """Do nothing, because `backward` also scales the loss."""

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Scale the loss, run the backward pass, and store unscaled fp32 gradients in `p.grad`."""
        assert self.window is not None
        assert self.gradients is not None
        parameters = list(self._modules.parameters())
        self._num_backwards += 1
        self._waits_for_backward = False
        with self.window.opened():
            loss = self._begin_backward(tensor, parameters)
            with self._in_backward(parameters):
                super(MasterWeightMixin, self).backward(loss, model, *args, **kwargs)
            groups: Any = self.optimizer_steps.parameters_by_optimizer(parameters)
            self.gradients.finish(groups, self._scale, self._averages)

    def _averages(self, parameter: Tensor) -> bool:
        return self.averages(parameter)

    def post_backward(self, tensor: Tensor, module: nn.Module | None) -> None:  # type: ignore[override]
        """Do nothing, because `backward` also unscales the gradients."""

    # ---- optimizer step --------------------------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Run an optimizer step, or skip it if a gradient overflowed.

        A closure runs before the step, or within it if the optimizer evaluates closures itself, as LBFGS does.
        """
        assert self.window is not None
        closure = kwargs.pop("closure", None)
        state = self.optimizer_steps.of(optimizer)
        state.skip_flag = None
        if closure is not None and evaluates_closure(optimizer):
            return self._step_on_closure(optimizer, state, closure, **kwargs)

        result = None
        if closure is not None:
            result = closure()
        self._refuse_step_without_backward(optimizer)
        found_inf = self._verdict(optimizer, state)
        with self.window.shut():
            self._step_or_skip(optimizer, state, found_inf, **kwargs)
        if found_inf is not None:
            state.count(found_inf)
            self._stop_if_stuck(state, self._modules)
        return result

    def _refuse_step_without_backward(self, optimizer: Optimizer) -> None:
        lacks_backward = self._waits_for_backward
        self._waits_for_backward = False
        if not lacks_backward:
            return
        if any(parameter.grad is not None for parameter in parameters_of(optimizer)):
            return
        raise RuntimeError(
            f"{type(optimizer).__name__}.step found no gradient, because `fabric.backward(loss)` was not called after "
            "the forward pass. This pass uses half-precision copies of the parameters, so `torch.autograd.grad` with "
            "respect to the parameters themselves returns None. Call `fabric.backward(loss)` and read `p.grad`."
        )

    def _step_on_closure(
        self,
        optimizer: Optimizer,
        state: OptimizerStepState,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        assert self.window is not None

        def has_overflowed() -> bool:
            found_inf = self._verdict(optimizer, state)
            if found_inf is None:
                return False
            state.count(found_inf)
            self._stop_if_stuck(state, self._modules)
            return bool(found_inf)

        step = ClosureStep(self.window, evaluate=closure, has_overflowed=has_overflowed)
        with self.window.shut(), self._running_step(optimizer):
            result = step.run(optimizer, **kwargs)
        if step.was_skipped:
            state.skip_flag = SkipFlag(True)
        return result

    @property
    def _is_automatic(self) -> bool:
        return False

    def _stop_if_stuck(
        self, state: OptimizerStepState, model: Any, *, is_end: bool = False
    ) -> None:
        self._num_steps += 1
        flag = state.skip_flag
        was_skipped = flag is not None and flag.is_known and flag.was_skipped()
        if self._num_steps % _ASK_EVERY == 0 or was_skipped:
            step = f"optimizer step {self._num_steps} of this process"
            self._raise_if_stuck(state, model, step=step)

    def teardown(self) -> None:
        """Restore the fp32 parameters of all registered modules."""
        self._modules = LivingModules()
        super().teardown()
