"""Base class of LARS and LAMB, which checks parameter groups, keeps float32 state and runs the steps."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.checks import plain_value, require_choice, require_number
from lightning_hybrid.optim.dtensor import ShardSums, check_placements, has_dtensors, local_shards
from lightning_hybrid.optim.fused.step import FusedStep
from lightning_hybrid.optim.gradients import (
    GradScaling,
    any_not_finite,
    dense_gradients,
    is_together,
    param_name,
    state_dtype,
)
from lightning_hybrid.optim.trust_ratio import ShardedVector, norms_over_ranks
from lightning_hybrid.placement import Part

# Group keys that are not options of these optimizers. torch, schedulers and loggers add them.
_FOREIGN_KEYS = frozenset(
    {
        "params",
        "param_names",
        "name",
        "initial_lr",
        "min_lr",
        "max_lr",
        "base_momentum",
        "max_momentum",
        "swa_lr",
    }
)

_TYPO_SIMILARITY = 0.7
"""Similarity (by `difflib`) above which a group key counts as a misspelt option. For example, `trust_ration` has a
similarity of 0.96 to `trust_ratio`, and `layer_decay` has 0.61 to `weight_decay`."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_REASONS_OF_FLAGS = {
    "capturable": "with True, a step reads no values on the host, so that a CUDA graph can capture the step",
    "trust_ratio": "False updates the parameters of the group without a trust ratio",
    "maximize": "True maximizes the objective",
}
_REASONS_OF_OPTIONAL_FLAGS = {
    "foreach": "None processes one tensor at a time on the CPU, and lists of tensors elsewhere",
    "fused": (
        "True makes few passes over memory for the whole model, and None or False process lists of tensors"
    ),
}


class LayerwiseOptimizer(Optimizer):
    """Base class of optimizers that scale each tensor's step by a trust ratio.

    LARS and LAMB define the update rule. The class checks the options in the defaults and in each group.
    Other keys of a group, such as `lr_scale` for a schedule with layer decay, are kept and ignored. A key
    that is similar to an option raises an error. State is float32 for half-precision parameters, also after
    `load_state_dict`. The rule receives lists of tensors: one tensor per list or, with `foreach`, all
    tensors of a device and dtype.

    Gradients may have another dtype than their parameters, and may be scaled. `torch.amp.GradScaler`, or a
    caller with half-precision gradients of fp32 parameters (`param.grad_dtype = None`), uses these
    attributes:

        grad_scale              0-dim tensor by which the step divides gradients
        found_inf               0-dim tensor. If it is above 0, the step writes nothing.
        last_found_inf          `found_inf` of the last step, or the result of its own check

    All three are on the device, and the host reads none of them. With `grad_scale` but without `found_inf`
    (missing or None), a step first checks the gradients for inf and nan itself. It does not change
    gradients, so a second step would divide them again.

    Ranks can share the update with two more attributes. The trust ratio is then computed from the full
    tensors. In the fused step it is bitwise equal to the trust ratio without sharing.

        parts                   {parameter: `Part`}. A parameter is either a 1-D shard of a tensor, with the gradient of
                                the shard, or a slice in any dimension, whose `Part` is from 0 to its number of
                                elements.
        add_up_                 Function that adds a float64 tensor over the ranks that hold the shards, in place. The
                                result must be bitwise equal on all of them.

    LARS calls `add_up_` once per step, and LAMB twice. Collective: all these ranks must step. Each of them
    holds all elements of the parameters that are not in `parts`. If one rank finds inf or nan, or has a
    `found_inf` above 0, no rank writes.

    Attributes:
        shard_sums: All-reduce over ranks during a step on shards of DTensors (see `dtensor.local_shards`).
    """

    # Class attributes, because copied and unpickled optimizers and the views of `local_shards` do not
    # run `__init__`.
    parts: Mapping[Tensor, Part] | None = None
    add_up_: Callable[[Tensor], None]
    last_found_inf: Tensor | None = None
    shard_sums: ShardSums | None = None
    _fused_step_type: type[FusedStep]
    _one_and_zero: Tensor | None = None
    # State of the current step: its scaling, and the norms of the full tensors for parameters that are shards.
    _scaling = GradScaling()
    _part_norms: Mapping[Tensor, list[Tensor]] = {}

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._check_group({**defaults})
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise `ValueError` if an option of the group has an invalid value."""
        lr = group["lr"]
        if isinstance(lr, Tensor):
            if lr.dim() != 0 or not lr.is_floating_point():
                raise ValueError(
                    f"`lr` (={lr!r:.80}) must be a number or a 0-dim floating-point tensor, because a group has one "
                    "learning rate. Use `torch.tensor(0.1)`, or one group for each learning rate."
                )
            lr = lr.item()
        require_number(
            "lr",
            lr,
            "a negative learning rate would maximize the objective. Use `maximize=True` to do that",
        )
        require_number(
            "weight_decay",
            group["weight_decay"],
            "a negative decay would make the weights grow. Set 0 to disable it",
        )
        require_number(
            "excluded_lr_mult",
            group["excluded_lr_mult"],
            "the learning rate of groups with trust_ratio=False is multiplied by it. Set 1 for no change, or 0 to "
            "freeze these groups",
        )
        if group["trust_clip"] is not None:
            reason = "trust ratios are limited to this value. Set None for no limit"
            require_number("trust_clip", group["trust_clip"], reason, above=True)
        self._check_switches(group)

    def _check_switches(self, group: dict[str, Any]) -> None:
        """Raise `ValueError` if a boolean option of the group has an invalid value."""
        require_choice(
            "differentiable",
            group.get("differentiable", False),
            (False,),
            "the step writes in place and records no gradient. To differentiate through a step, use torch.optim.SGD "
            "or AdamW, which use the same update rule as groups with trust_ratio=False",
        )
        for name, reason in _REASONS_OF_FLAGS.items():
            require_choice(name, group[name], (True, False), reason)
        for name, reason in _REASONS_OF_OPTIONAL_FLAGS.items():
            require_choice(name, group[name], (None, True, False), reason)
        if group["fused"] and group["foreach"]:
            raise ValueError(
                "`fused` (=True) and `foreach` (=True) cannot be combined, because they are two implementations of the "
                "same step. Set only one of them."
            )

    def _refuse_misspelt(self, key: str, value: Any) -> None:
        """Raise `ValueError` for a group key that looks like a misspelt option.

        Other keys are allowed for schedules.
        """
        options = list(self.defaults)
        for option in difflib.get_close_matches(key, options, n=1, cutoff=_TYPO_SIMILARITY):
            # `weight_decay_scale` is a key for a schedule, not a misspelt `weight_decay`.
            if not key.startswith(f"{option}_") and not key.endswith(f"_{option}"):
                raise ValueError(
                    f"`{key}` (={value!r:.80}) is not an option of {type(self).__name__} and would be ignored. Did "
                    f"you mean `{option}`? The options of a parameter group are {', '.join(sorted(self.defaults))}."
                )

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        """Apply one step to parameters that have the same device and dtype.

        `grads` must not be changed.
        """
        raise NotImplementedError

    def _before_updates(self) -> None:
        """Prepare the updates of one step.

        Called after the closure and before the first `_update`.
        """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Check the options of a parameter group, and add it to the optimizer.

        Raises:
            ValueError: An option has an invalid value, a key is a misspelt option, or a parameter is complex or
                integer.
        """
        if not isinstance(param_group, dict):
            raise TypeError(
                f"`param_group` (={param_group!r:.80}) must be a dictionary. Pass dict(params=...) with the options "
                "of the group."
            )
        # The caller's dict is copied, because values are converted and torch adds the defaults.
        param_group = dict(param_group)
        for key, value in param_group.items():
            if key in self.defaults:
                param_group[key] = plain_value(value)
            elif key not in _FOREIGN_KEYS:
                self._refuse_misspelt(key, value)
        self._check_group({**self.defaults, **param_group})

        common = self.defaults["fused"]
        fused = param_group.get("fused", common)
        if fused != common:
            raise ValueError(
                f"`fused` (={fused!r:.80}) must equal the optimizer's value (={common}), because all groups are "
                f"checked for inf and nan together. Pass `fused` to {type(self).__name__} instead of a group."
            )
        super().add_param_group(param_group)
        try:
            self._check_params(self.param_groups[-1])
        except ValueError:
            # torch has already added the group, so it is removed again.
            self.param_groups.pop()
            raise

    def _check_params(self, group: dict[str, Any]) -> None:
        """Raise `ValueError` if a parameter of the group cannot be updated."""
        check_placements(group)
        fused_devices = self._fused_step_type.devices
        for index, param in enumerate(group["params"]):
            if param.dtype not in _DTYPES:
                raise ValueError(
                    f"`{param_name(group, index)}.dtype` (={param.dtype}) must be float16, bfloat16, float32 or "
                    "float64, because the trust ratio needs real floating-point norms. Use another optimizer for "
                    "this parameter, or convert a complex parameter with `torch.view_as_real`."
                )
            if self.defaults["fused"] and param.device.type not in fused_devices:
                raise ValueError(
                    f"`fused` (=True) requires parameters on {' or '.join(fused_devices)}, but one parameter is "
                    f"on `{param.device}`, where {type(self).__name__} has no fused kernels. Set fused=None, or "
                    "use torch.compile(optimizer.step)."
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Groups of an older checkpoint do not have newer options.
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, and keep the state of half-precision parameters in float32.

        torch's own optimizers would round this state to the dtype of the parameters.

        Options that the saved groups do not have keep their values in this optimizer's groups. Such a state dict may
        be from another optimizer, for example from SGD, or from an earlier version of this package.
        """
        # torch casts each state tensor to the dtype of its parameter, which would round it. User hooks may replace the
        # dict, so these hooks run directly before and directly after torch's own code.
        loaded: list[dict[str, Any]] = []

        def keep_state_dict(_: Optimizer, final_state_dict: dict[str, Any]) -> dict[str, Any]:
            completed = self._with_missing_options(final_state_dict)
            loaded.append(completed)
            return completed

        def restore_float32(_: Optimizer) -> None:
            self._restore_float32(loaded[-1])

        pre_hook = self.register_load_state_dict_pre_hook(keep_state_dict)
        post_hook = self.register_load_state_dict_post_hook(restore_float32, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            pre_hook.remove()
            post_hook.remove()

    def _with_missing_options(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state dict whose groups have all options.

        torch replaces each group by the saved one. Without this, a group that is excluded from layer scaling would be
        adapted after a state dict of SGD is loaded.
        """
        saved_groups = state_dict["param_groups"]
        completed_groups = list(saved_groups)
        # torch raises an error if the numbers of groups differ.
        for index, (group, saved) in enumerate(zip(self.param_groups, saved_groups, strict=False)):
            options = {key: group[key] for key in self.defaults}
            completed_groups[index] = {**options, **saved}
        return {**state_dict, "param_groups": completed_groups}

    def _restore_float32(self, state_dict: dict[str, Any]) -> None:
        """Restore the float32 state of half-precision parameters, which torch has rounded."""
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(indices, params, strict=True):
            dtype = state_dtype(param.dtype)
            if dtype == param.dtype:
                continue
            for key, value in state_dict["state"].get(index, {}).items():
                # "step" is float32 in any case.
                if key != "step" and isinstance(value, Tensor):
                    self.state[param][key] = value.to(device=param.device, dtype=dtype)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Perform a single optimization step, without waiting for the device.

        Gradients are not changed.

        Args:
            closure: Function that computes gradients and returns the loss. It is called first, with autograd enabled.

        Returns:
            The loss that the closure returned, or None.

        Raises:
            ValueError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._scaling, is_checked = self._read_scaling()
        try:
            # torch.compile traces the step on lists, because it cannot trace a fused step.
            if torch.compiler.is_compiling():
                self._listed_step(is_checked)
            elif has_dtensors(self.param_groups):
                with local_shards(self) as local:
                    local._scaling = self._scaling
                    local.last_found_inf = self.last_found_inf
                    local._step(is_checked)
                    self.last_found_inf = local.last_found_inf
            else:
                self._step(is_checked)
        finally:
            # Reset even after an error, because the scale of one step must not be used in another one.
            self._scaling = GradScaling()
        return loss

    def _step(self, is_checked: bool) -> None:
        if not self._fused_step(is_checked):
            self._listed_step(is_checked)

    def _read_scaling(self) -> tuple[GradScaling, bool]:
        """Return the gradient scaling set by the caller, and whether this step must check for inf and nan."""
        grad_scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        self.last_found_inf = found_inf
        if grad_scale is None:
            return GradScaling(found_inf=found_inf), False

        scale = grad_scale.detach().float()
        is_fused = self._asks_for_fused() and not torch.compiler.is_compiling()
        if is_fused and found_inf is None and scale.device.type == "cuda":
            # One launch computes both 1 / scale and a new 0 / scale = 0, which the kernels may set. (1, 0) is cached.
            if self._one_and_zero is None or self._one_and_zero.device != scale.device:
                self._one_and_zero = torch.arange(
                    1.0, -1.0, -1.0, dtype=torch.float32, device=scale.device
                )
            inverse_scale, found_inf_out = (self._one_and_zero / scale).unbind()
            return GradScaling(inverse_scale=inverse_scale, found_inf_out=found_inf_out), True
        return GradScaling(inverse_scale=scale.reciprocal(), found_inf=found_inf), found_inf is None

    def _listed_step(self, is_checked: bool) -> None:
        """Run the step on lists of tensors, without fused kernels."""
        # All gradients are checked before the first parameter is written.
        if is_checked:
            self._scaling = self._check_gradients(self._scaling)
        self._before_updates()
        scaling = self._scaling
        for group in self.param_groups:
            for params, grads in _batches(group, self.parts or {}):
                self._scaling = scaling.to(params[0].device)
                self._update(group, params, grads)

    def _check_gradients(self, scaling: GradScaling) -> GradScaling:
        """Return the gradient scaling, with a `found_inf` flag that is set if a gradient contains inf or nan."""
        # There is one check per device and dtype. The results are combined on the first device, and the host does not
        # read them.
        batches: dict[Any, list[Tensor]] = {}
        for group in self.param_groups:
            for param in group["params"]:
                grad = param.grad
                if grad is not None:
                    batches.setdefault((grad.device, grad.dtype), []).append(grad)
        flags = [any_not_finite(grads) for grads in batches.values()]
        if not flags:
            return scaling

        device = flags[0].device
        found_inf = torch.stack([flag.to(device, non_blocking=True) for flag in flags]).amax()
        if self.shard_sums is not None:
            found_inf = self.shard_sums.largest(found_inf)
        self.last_found_inf = found_inf
        return GradScaling(inverse_scale=scaling.inverse_scale, found_inf=found_inf)

    def _norms_over_ranks(
        self, vectors_of: Callable[[dict[str, Any], Tensor, Tensor, Part], list[ShardedVector]]
    ) -> dict[Tensor, list[Tensor]]:
        """Return the norms of the full tensors for all parameters of which this rank holds a shard.

        It also combines `found_inf` over ranks, so that the step is skipped on all ranks or on none.

        Collective: every rank that holds shards must call it, in the same order.

        Args:
            vectors_of: Function of a group, a parameter, its gradient and its shard, which returns the
                vectors whose norms are needed.
        """
        parts = self.parts or {}
        vectors: dict[Tensor, list[ShardedVector]] = {}
        for group in self.param_groups:
            for _, (param, grad) in dense_gradients(group):
                if param in parts:
                    vectors[param] = vectors_of(group, param, grad, parts[param])

        local_found_inf = self._scaling.found_inf
        if local_found_inf is None:
            no_flag = torch.zeros((), device=next(iter(parts)).device)
            norms, _ = norms_over_ranks(vectors, no_flag, self.add_up_)
            return norms
        norms, found_inf = norms_over_ranks(vectors, local_found_inf, self.add_up_)
        self._scaling = replace(self._scaling, found_inf=found_inf)
        self.last_found_inf = found_inf
        return norms

    def _whole_norms(self, params: list[Tensor]) -> list[Tensor] | None:
        """Return the norms of the full tensors if `params` are shards, or None if they are full tensors.

        There is one tensor of norms per vector.
        """
        # `_batches` separates shards from full tensors, so either all of `params` are shards or none is.
        if params[0] not in self._part_norms:
            return None
        norms_of_params = [self._part_norms[param] for param in params]
        return [torch.stack(norms) for norms in zip(*norms_of_params, strict=True)]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if `step` unscales gradients and skips updates with inf or nan by itself.

        GradScaler and Lightning read this attribute.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        if not params or not self.param_groups[0]["fused"]:
            return False
        return self._fused_step_type.has_engines(params)

    def _asks_for_fused(self) -> bool:
        """Return whether the user has requested a fused step."""
        return bool(self.param_groups) and bool(self.param_groups[0]["fused"])

    def _fused_step(self, is_checked: bool) -> bool:
        """Run the fused step if it was requested and is available, and return whether it has run."""
        if not self._asks_for_fused():
            return False
        # Created here, because it holds addresses, and a copied or unpickled optimizer does not run `__init__`.
        if "_fused" not in self.__dict__:
            self._fused = self._fused_step_type()
        scaling = self._fused.step(self, self._scaling, is_checked=is_checked)
        if scaling is None:
            return False
        self.last_found_inf = scaling.found_inf
        return True

    def state_lists(self, params: list[Tensor], *keys: str) -> list[list[Tensor]]:
        """Return the optimizer state of some parameters, as one list of tensors per state key.

        Missing state is set to zero.
        """
        for param in params:
            state = self.state[param]
            for key in keys:
                if key not in state:
                    state[key] = torch.zeros_like(param, dtype=state_dtype(param.dtype))
        lists = []
        for key in keys:
            lists.append([self.state[param][key] for param in params])
        return lists


def options_of(**arguments: Any) -> dict[str, Any]:
    """Convert constructor arguments to plain values, for the defaults of parameter groups."""
    options: dict[str, Any] = {"trust_ratio": True}
    for name, value in arguments.items():
        options[name] = plain_value(value)
    return options


def _batches(
    group: dict[str, Any], parts: Mapping[Tensor, Part]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield lists of parameters and gradients that are updated together.

    The tensors of a list have one device and one pair of dtypes. Shards and full tensors are in separate
    lists, because the update itself computes the norms of full tensors.
    """
    batches: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for index, (param, grad) in dense_gradients(group):
        key: Any = index
        if is_together(group, param):
            key = (param.device, param.dtype, grad.dtype, param in parts)
        params, grads = batches.setdefault(key, ([], []))
        params.append(param)
        grads.append(grad)
    yield from batches.values()
