"""Half-precision training with fp32 master weights in a loop of the user's own: the precision plugin for Fabric.

It does what `plugin.py` does in the Trainer's manual optimization, for any number of modules and optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.precision.dtype_errors import add_cure
from lightning_hybrid.precision.loss_scale import LossScale
from lightning_hybrid.precision.master_weights import MasterWeights
from lightning_hybrid.precision.plugin import MasterWeightMixin
from lightning_hybrid.precision.skipped_steps import OptimizerStepState, raise_if_stuck

# Every so many steps of an optimizer the host asks the device whether all were skipped, as the Trainer does at its
# logged steps: 50 is its default.
_ASK_EVERY = 50


class FabricMasterWeightMixin(MasterWeightMixin):
    """A Fabric plugin for fp16 (or bf16) models and gradients with fp32 masters, optimizer state and normalisation.

        forward         under autocast, on the half copies of the masters; outputs come back in fp32
        backward        of the loss times its scale; then `p.grad` is fp32 and unscaled, to be read, clipped or changed
        optimizer.step  on the fp32 masters, or not at all where a gradient was inf or nan

    Each optimizer has a loss scale of its own; a backward takes the smallest of those that it can reach. Checkpoints
    hold the masters, the fp32 state of the optimizers and the loss scales. Arguments and errors are those of the
    Trainer's `MasterWeightPrecision`; 40 skipped steps in a row are looked for every 50 steps.
    """

    def __init__(
        self,
        precision: Literal["16-true", "bf16-true"] = "16-true",
        loss_scale: str | float | LossScale | None = None,
        keep_fp32: tuple[type[nn.Module], ...] = (),
    ) -> None:
        super().__init__(precision, loss_scale=loss_scale, keep_fp32=keep_fp32)
        self._modules = nn.ModuleList()
        # Whether the backward in progress averages a parameter's gradient. A strategy says; until then it is true of
        # all, by what can be pickled for `hybrid_allreduce_spawn`.
        self.averages: Callable[[Tensor], bool] = torch.is_tensor
        self._num_steps = 0

    # ---- setup -----------------------------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert in place; fp32 values are cloned before the cast."""
        if self.masters is None:
            self.masters = MasterWeights(module, self.dtype, self.keep_fp32)
            self.masters.hooks.step_context = self.forward_context
        else:
            self.masters.convert(module)
        self._modules.append(module)
        return module

    def connect_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that cannot work; load its state as fp32 wherever `load_state_dict` is called."""
        self.connect(self._modules, [optimizer], [])
        # torch casts what it loads to the dtype of the parameters.
        optimizer.load_state_dict = partial(self._load_on_masters, optimizer)  # type: ignore[method-assign]
        if optimizer.state:  # made by its constructor, maybe of half-precision parameters
            optimizer.load_state_dict(optimizer.state_dict())

    def _load_on_masters(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        assert self.masters is not None
        with self.masters.swapped_in(optimizer):
            type(optimizer).load_state_dict(optimizer, state_dict)

    # ---- forward and backward --------------------------------------------------------------------------------------

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Run under autocast; an error about half-precision dtypes gets a note with the cure."""
        with self._add_cure_to_errors(), super().forward_context():
            yield

    @contextmanager
    def _add_cure_to_errors(self) -> Iterator[None]:
        # The Trainer reports an error to its strategy. Fabric does not: it is caught on its way to the user.
        try:
            yield
        except Exception as error:
            add_cure(error, self.precision)
            raise

    def convert_output(self, data: Any) -> Any:
        """Return what a module returned with its half-precision tensors in fp32, so that the loss is fp32."""
        return apply_to_collection(data, Tensor, lambda one: one.float() if one.dtype is self.dtype else one)

    def pre_backward(self, tensor: Tensor, module: nn.Module | None) -> None:  # type: ignore[override]
        """Choose the scale of this backward; gradients that stayed are made ready for more to be added."""
        self._scale = None if self.loss_scale is None else self.optimizer_steps.scale_for_backward()
        self._unscaled.prepare_for_backward(self._scale, sums=True, averages=self.averages)
        self._last_loss = tensor.detach()

    def backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward of the loss times its scale, in fp32: a half-precision one would overflow."""
        with self._add_cure_to_errors():
            super().backward(tensor if self._scale is None else tensor.float() * self._scale, *args, **kwargs)

    def post_backward(self, tensor: Tensor, module: nn.Module | None) -> None:  # type: ignore[override]
        """Put fp32 gradients, unscaled, into `p.grad`."""
        assert self.masters is not None
        options: Any = {"to_fp32": self.masters.gradient_fp32, "is_local": lambda one: not self.averages(one)}
        for parameters in self.optimizer_steps.parameters_by_optimizer(self._modules.parameters()):
            self._unscaled.unscale(parameters, self._scale, **options)
        self._unscaled.put_back()

    # ---- optimizer step --------------------------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Run the closure, if there is one, then step on the masters or skip the step whole."""
        closure = kwargs.pop("closure", None)
        result = None if closure is None else closure()
        assert self._step is not None
        state = self.optimizer_steps.of(optimizer)
        state.skip_flag = None
        found_inf = self._unscale_(optimizer, state)
        with self._add_cure_to_errors():
            self._step.from_unscaled(optimizer, state, found_inf, **kwargs)
        if found_inf is not None:
            state.count(found_inf)
            self._stop_if_stuck(state, self._modules)
        return result

    @property
    def _is_automatic(self) -> bool:
        return False

    def _stop_if_stuck(self, state: OptimizerStepState, model: nn.Module, *, is_end: bool = False) -> None:
        self._num_steps += 1
        flag = state.skip_flag
        if self._num_steps % _ASK_EVERY == 0 or (flag is not None and flag.is_known and flag.was_skipped()):
            raise_if_stuck(state, model, self._last_loss, step=f"optimizer step {self._num_steps} of this process")

    def teardown(self) -> None:
        """Make the modules fp32 again, with the masters' values."""
        for state in self.optimizer_steps:
            vars(state.optimizer or self).pop("load_state_dict", None)
        self._modules = nn.ModuleList()
        super().teardown()
