"""Base class of LARS and LAMB: checks of parameter groups, float32 state, mixed precision, fused steps or lists."""

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

# Group keys that are not our options: torch's own, and those that schedulers and loggers add.
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
"""Similarity (`difflib`, our choice) from which a group key counts as a misspelt option. `trust_ration`
has 0.96, and `layer_decay` has 0.61 to `weight_decay`."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_REASONS_OF_FLAGS = {
    "capturable": "True reads nothing on the host in a step, so that a CUDA graph may capture it",
    "trust_ratio": "False excludes the group from layer scaling",
    "maximize": "True climbs the objective",
}
_REASONS_OF_OPTIONAL_FLAGS = {
    "foreach": "None is one tensor at a time on the CPU, else lists",
    "fused": (
        "True is few passes over memory for the whole model; None and False work on lists of tensors"
    ),
}


class LayerwiseOptimizer(Optimizer):
    """Base of optimizers that scale each tensor's step by a trust ratio. The subclasses LARS and LAMB define the rule.

    It checks the options of the defaults and of each group. Other keys of a group, such as `lr_scale` for
    a schedule with layer decay, are kept and not read. A key that is similar to an option is an error.
    State is float32 for half-precision parameters, also after `load_state_dict`. The rule receives lists
    of tensors: one tensor per list or, with `foreach`, all tensors of a device and dtype.

    Gradients may have another dtype than their parameters, and may be scaled. `torch.amp.GradScaler`, or a
    caller that has half-precision gradients of fp32 parameters (`param.grad_dtype = None`), sets and reads
    plain attributes:

        grad_scale              0-dim tensor: the step divides gradients by it
        found_inf               0-dim tensor: if above 0, the step writes nothing, bit for bit
        last_found_inf          result of a step with one of the two: its `found_inf`, or the result of its own check

    All three are on the device, and the host reads none of them. With `grad_scale` and no `found_inf`
    (absent or None) a step first checks the gradients for inf and nan itself. It does not change
    gradients, so a second step would divide them again.

    Ranks may share the update by two more attributes. The trust ratio is then that of the whole tensor, in
    the fused step bit for bit.

        parts                   {parameter: `Part`}: a 1-D parameter that is a part of a tensor, and has its gradient,
                                or a slice in any dimension, whose part is from 0 to its own number of elements
        add_up_                 adds a float64 tensor over the ranks that hold the parts, in place, the same bits on all

    LARS calls `add_up_` once per step, LAMB twice. Collective: all those ranks must step. Parameters
    without a part are whole on all of them. If one rank finds inf or nan, or has a `found_inf` above 0,
    none of them writes.

    Attributes:
        shard_sums: Sums over ranks during a step on shards of DTensors, see `dtensor.local_shards`.
    """

    # Class attributes, because copied and unpickled optimizers and the views of `local_shards` do not
    # run `__init__`.
    parts: Mapping[Tensor, Part] | None = None
    add_up_: Callable[[Tensor], None]
    last_found_inf: Tensor | None = None
    shard_sums: ShardSums | None = None
    _fused_step_type: type[FusedStep]
    _one_and_zero: Tensor | None = None
    # Of the step in progress: its scaling, and the norms of the whole tensors of which parameters are parts.
    _scaling = GradScaling()
    _part_norms: Mapping[Tensor, list[Tensor]] = {}

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._check_group({**defaults})
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise `ValueError` for the first option of the group that breaks its rule."""
        lr = group["lr"]
        if isinstance(lr, Tensor):
            if lr.dim() != 0 or not lr.is_floating_point():
                raise ValueError(
                    f"`lr` (={lr!r:.80}) must be a number or a 0-dim floating-point tensor: a group has one learning "
                    "rate. Use `torch.tensor(0.1)`, and one group per learning rate."
                )
            lr = lr.item()
        require_number("lr", lr, "a negative rate would climb; to climb, use `maximize=True`")
        require_number(
            "weight_decay",
            group["weight_decay"],
            "a negative decay would grow the weights; 0 is off",
        )
        require_number(
            "excluded_lr_mult",
            group["excluded_lr_mult"],
            "it scales the learning rate of groups with trust_ratio=False; 1 leaves it, 0 freezes them",
        )
        if group["trust_clip"] is not None:
            reason = "it bounds the trust ratio; None is no bound"
            require_number("trust_clip", group["trust_clip"], reason, above=True)
        self._check_switches(group)

    def _check_switches(self, group: dict[str, Any]) -> None:
        """Raise `ValueError` unless the options that are on or off have a valid value."""
        require_choice(
            "differentiable",
            group.get("differentiable", False),  # torch leaves False there by itself
            (False,),
            "the step writes in place and records no gradient. To differentiate through it, use torch.optim.SGD or "
            "AdamW, whose rule is that of groups with trust_ratio=False",
        )
        for name, reason in _REASONS_OF_FLAGS.items():
            require_choice(name, group[name], (True, False), reason)
        for name, reason in _REASONS_OF_OPTIONAL_FLAGS.items():
            require_choice(name, group[name], (None, True, False), reason)
        if group["fused"] and group["foreach"]:
            raise ValueError(
                "`fused` (=True) excludes `foreach` (=True): they are two ways to do the same step. Set one of them."
            )

    def _refuse_misspelt(self, key: str, value: Any) -> None:
        """Raise `ValueError` for a group key that is similar to an option. Schedules may read all other keys."""
        options = list(self.defaults)
        for option in difflib.get_close_matches(key, options, n=1, cutoff=_TYPO_SIMILARITY):
            # `weight_decay_scale` is a key for a schedule, and no misspelt `weight_decay`.
            if not key.startswith(f"{option}_") and not key.endswith(f"_{option}"):
                raise ValueError(
                    f"`{key}` (={value!r:.80}) is no option of {type(self).__name__}, which would not read it. Did you "
                    f"mean `{option}`? A parameter group may set {', '.join(sorted(self.defaults))}."
                )

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        """Update `params`, which share device and dtype, by one step. Do not change `grads`."""
        raise NotImplementedError

    def _before_updates(self) -> None:
        """Prepare the updates of one step. Runs after the closure, before the first `_update`."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, after a check of its options.

        Raises:
            ValueError: An option breaks its rule, a key is a misspelt option, or a parameter is complex or integer.
        """
        if not isinstance(param_group, dict):
            raise TypeError(
                f"`param_group` (={param_group!r:.80}) must be a dict: a group is its params and options."
            )
        # A copy: values become plain, torch fills in the defaults, and the caller's dict stays as it was.
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
                f"`fused` (={fused!r:.80}) must be the optimizer's (={common}): one check for inf and nan, before "
                f"anything is written, is for all groups together. Give it to {type(self).__name__}, not to a group."
            )
        super().add_param_group(param_group)
        try:
            self._check_params(self.param_groups[-1])
        except ValueError:
            # torch has added the group by now: an error takes it out again.
            self.param_groups.pop()
            raise

    def _check_params(self, group: dict[str, Any]) -> None:
        """Raise `ValueError` for a parameter of the group that cannot be updated."""
        check_placements(group)
        fused_devices = self._fused_step_type.devices
        for index, param in enumerate(group["params"]):
            if param.dtype not in _DTYPES:
                raise ValueError(
                    f"`{param_name(group, index)}.dtype` (={param.dtype}) must be float16, bfloat16, float32 or "
                    "float64: the trust ratio is a quotient of real norms. Give this parameter to another optimizer, "
                    "or store a complex one as its `torch.view_as_real`."
                )
            if self.defaults["fused"] and param.device.type not in fused_devices:
                raise ValueError(
                    f"`fused` (=True) needs parameters on {' or '.join(fused_devices)}, not on `{param.device}`: there "
                    f"{type(self).__name__} has no kernels. Use fused=None, or torch.compile(optimizer.step)."
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Groups of an older checkpoint lack the newer options.
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict as torch does, but with the state of half-precision parameters in float32."""
        # torch casts each state tensor to the dtype of its parameter, which would round it. Hooks of the user may
        # replace the dict, so these hooks run right before and right after torch's own work.
        loaded: list[dict[str, Any]] = []

        def keep_state_dict(_: Optimizer, final_state_dict: dict[str, Any]) -> None:
            loaded.append(final_state_dict)

        def restore_float32(_: Optimizer) -> None:
            self._restore_float32(loaded[-1])

        pre_hook = self.register_load_state_dict_pre_hook(keep_state_dict)
        post_hook = self.register_load_state_dict_post_hook(restore_float32, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            pre_hook.remove()
            post_hook.remove()

    def _restore_float32(self, state_dict: dict[str, Any]) -> None:
        """Copy the state of half-precision parameters from the checkpoint again, since torch has rounded it."""
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
        """Update every parameter that has a gradient by one step. Gradients are read, never written.

        A `closure` runs first, with autograd on, and its loss is returned. Nothing waits for the device.

        Raises:
            ValueError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._scaling, is_checked = self._read_scaling()
        try:
            # torch.compile traces the step on lists, because it cannot follow addresses.
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
            # Also after an error: the scale of one step must not be applied to the gradients of another.
            self._scaling = GradScaling()
        return loss

    def _step(self, is_checked: bool) -> None:
        if not self._fused_step(is_checked):
            self._listed_step(is_checked)

    def _read_scaling(self) -> tuple[GradScaling, bool]:
        """Return the scaling that the caller has set, and True if this step must look for inf and nan itself."""
        grad_scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        self.last_found_inf = found_inf
        if grad_scale is None:
            return GradScaling(found_inf=found_inf), False

        scale = grad_scale.detach().float()
        is_fused = self._asks_for_fused() and not torch.compiler.is_compiling()
        if is_fused and found_inf is None and scale.device.type == "cuda":
            # One launch gives both 1 / scale and a fresh 0 / scale = 0 that the kernels may set. (1, 0) is made once.
            if self._one_and_zero is None or self._one_and_zero.device != scale.device:
                self._one_and_zero = torch.arange(
                    1.0, -1.0, -1.0, dtype=torch.float32, device=scale.device
                )
            inverse_scale, found_inf_out = (self._one_and_zero / scale).unbind()
            return GradScaling(inverse_scale=inverse_scale, found_inf_out=found_inf_out), True
        return GradScaling(inverse_scale=scale.reciprocal(), found_inf=found_inf), found_inf is None

    def _listed_step(self, is_checked: bool) -> None:
        """Do the step on lists of tensors."""
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
        """Return the scaling with a `found_inf` that says whether any gradient is inf or nan."""
        # One check per device and dtype. The results are combined on the first device, and the host reads none of them.
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
        """Return the norms of whole tensors for each parameter that is a part, and skip the step on all ranks or none.

        Collective: every rank that holds parts must call it, in the same order.

        Args:
            vectors_of: Function of a group, a parameter, its gradient and its part, which returns the
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
        """Return the norms of the whole tensors of which `params` are parts, one tensor per vector, or None."""
        # `_batches` separates parts from whole tensors, so either all of `params` are parts or none is.
        if params[0] not in self._part_norms:
            return None
        norms_of_params = [self._part_norms[param] for param in params]
        return [torch.stack(norms) for norms in zip(*norms_of_params, strict=True)]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Return True if the step itself unscales and skips. GradScaler and Lightning read this name."""
        params = [param for group in self.param_groups for param in group["params"]]
        if not params or not self.param_groups[0]["fused"]:
            return False
        return self._fused_step_type.has_engines(params)

    def _asks_for_fused(self) -> bool:
        """Return True if the user has set `fused=True`."""
        return bool(self.param_groups) and bool(self.param_groups[0]["fused"])

    def _fused_step(self, is_checked: bool) -> bool:
        """Do the fused step. Return False if it was not requested, or if a device has no kernels for it."""
        if not self._asks_for_fused():
            return False
        # Made here and not in __init__: it holds addresses, and a copied or unpickled optimizer needs its own.
        if "_fused" not in self.__dict__:
            self._fused = self._fused_step_type()
        scaling = self._fused.step(self, self._scaling, is_checked=is_checked)
        if scaling is None:
            return False
        self.last_found_inf = scaling.found_inf
        return True

    def state_lists(self, params: list[Tensor], *keys: str) -> list[list[Tensor]]:
        """Return one list of state tensors per key, parallel to `params`. Missing state is created as zeros."""
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
    """Return the defaults of parameter groups from the arguments of a constructor, as plain values."""
    options: dict[str, Any] = {"trust_ratio": True}
    for name, value in arguments.items():
        options[name] = plain_value(value)
    return options


def _batches(
    group: dict[str, Any], parts: Mapping[Tensor, Part]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield lists of parameters and of their gradients, which the group's updates process together.

    A list has one device and one pair of dtypes. Parts and whole tensors are in separate lists, because
    the update itself computes the norms of whole tensors.
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
