"""Base class of LARS and LAMB: checked parameter groups, float32 state, mixed precision, the choice of a path."""

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
    "params param_names name initial_lr min_lr max_lr base_momentum max_momentum swa_lr".split()
)

_TYPO_SIMILARITY = 0.7
"""Similarity (`difflib`, our choice) from which a group key is taken for a misspelt option: `trust_ration` has 0.96,
`layer_decay` for `weight_decay` 0.61."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class LayerwiseOptimizer(Optimizer):
    """Base of optimizers that scale each tensor's step by a trust ratio; the subclasses LARS and LAMB define the rule.

    It checks the options of the defaults and of each group. Other keys of a group, such as `lr_scale` for a schedule
    with layer decay, are kept and not read; a key that is similar to an option is an error. State is float32 for
    half-precision parameters, also after `load_state_dict`. The rule gets lists of tensors: one tensor per list or,
    with `foreach`, all tensors of a device and dtype.

    Gradients may have another dtype than their parameters, and may be scaled. `torch.amp.GradScaler`, or a caller that
    has half-precision gradients of fp32 parameters (`param.grad_dtype = None`), sets and reads plain attributes:

        grad_scale              0-dim tensor: the step divides gradients by it
        found_inf               0-dim tensor: if above 0, the step writes nothing, bit for bit
        last_found_inf          result of a step with one of the two: its `found_inf`, or the result of its own check

    All three are on the device, and the host reads none of them. With `grad_scale` and no `found_inf` (absent or None)
    a step first checks the gradients for inf and nan itself. It does not change gradients: a second step would divide
    them again.

    Ranks may share the update, by two more attributes. The trust ratio is then that of the whole tensor, in the fused
    step bit for bit.

        parts                   {parameter: `Part`}: a 1-D parameter that is a part of a tensor, and has its gradient;
                                or a slice in any dimension, whose part is from 0 to its own number of elements
        add_up_                 adds a float64 tensor over the ranks that hold the parts, in place, the same bits on all

    LARS calls `add_up_` once a step, LAMB twice; all those ranks must step. Parameters without a part are whole on all
    of them. If one rank finds inf or nan, or has a `found_inf` above 0, none of them writes.
    """

    parts: Mapping[Tensor, Part] | None = None
    add_up_: Callable[[Tensor], None]
    last_found_inf: Tensor | None = None
    shard_sums: ShardSums | None = (
        None  # of a step on shards of DTensors, see `dtensor.local_shards`
    )
    _fused_step_type: type[FusedStep]
    _scaling = GradScaling()  # of the step in progress
    _part_norms: Mapping[
        Tensor, list[Tensor]
    ] = {}  # in it, of whole tensors, of which a parameter is a part

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._check_group({**defaults})
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
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
        if (clip := group["trust_clip"]) is not None:
            require_number(
                "trust_clip", clip, "it bounds the trust ratio; None is no bound", above=True
            )
        require_choice(
            "differentiable",
            group.get("differentiable", False),  # torch leaves False there by itself
            (False,),
            "the step writes in place and records no gradient. To differentiate through it, use torch.optim.SGD or "
            "AdamW, whose rule is that of groups with trust_ratio=False",
        )
        for name, why in (
            (
                "capturable",
                "True reads nothing on the host in a step, so that a CUDA graph may capture it",
            ),
            ("trust_ratio", "False excludes the group from layer scaling"),
            ("maximize", "True climbs the objective"),
        ):
            require_choice(name, group[name], (True, False), why)
        for name, why in (
            ("foreach", "None is one tensor at a time on the CPU, else lists"),
            (
                "fused",
                "True is few passes over memory for the whole model; None and False work on lists of tensors",
            ),
        ):
            require_choice(name, group[name], (None, True, False), why)
        if group["fused"] and group["foreach"]:
            raise ValueError(
                "`fused` (=True) excludes `foreach` (=True): they are two ways to do the same step. Set one of them."
            )

    def _refuse_misspelt(self, key: str, value: Any) -> None:
        """Raise `ValueError` for a group key that is similar to an option; schedules may read all other keys."""
        for option in difflib.get_close_matches(
            key, list(self.defaults), n=1, cutoff=_TYPO_SIMILARITY
        ):
            # `weight_decay_scale` is a key of a schedule's own, and no misspelt `weight_decay`.
            if not key.startswith(f"{option}_") and not key.endswith(f"_{option}"):
                raise ValueError(
                    f"`{key}` (={value!r:.80}) is no option of {type(self).__name__}, which would not read it. Did you "
                    f"mean `{option}`? A parameter group may set {', '.join(sorted(self.defaults))}."
                )

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        """Move `params`, which share device and dtype, one step; leave `grads` as they are."""
        raise NotImplementedError

    def _before_updates(self) -> None:
        """Prepare the updates of one step; runs after the closure, before the first `_update`."""

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
        if (own := param_group.get("fused", common)) != common:
            raise ValueError(
                f"`fused` (={own!r:.80}) must be the optimizer's (={common}): one check for inf and nan, before "
                f"anything is written, is for all groups together. Give it to {type(self).__name__}, not to a group."
            )
        super().add_param_group(param_group)
        try:
            check_placements(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise
        for index, param in enumerate(self.param_groups[-1]["params"]):
            # torch has added the group by now: a refusal takes it out again.
            if param.dtype not in _DTYPES:
                group = self.param_groups.pop()
                raise ValueError(
                    f"`{param_name(group, index)}.dtype` (={param.dtype}) must be float16, bfloat16, float32 or "
                    "float64: the trust ratio is a quotient of real norms. Give this parameter to another optimizer, "
                    "or store a complex one as its `torch.view_as_real`."
                )
            if common and param.device.type not in (devices := self._fused_step_type.devices):
                self.param_groups.pop()
                raise ValueError(
                    f"`fused` (=True) needs parameters on {' or '.join(devices)}, not on `{param.device}`: there "
                    f"{type(self).__name__} has no kernels. Use fused=None, or torch.compile(optimizer.step)."
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Groups of an older checkpoint lack the newer options.
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but with the state of half-precision parameters in float32."""
        # torch casts each state tensor to the dtype of its parameter, which would round it.
        loaded: list[dict[str, Any]] = []
        # Hooks of the user may replace the dict, so that our hooks run right before and right after torch's own work.
        before = self.register_load_state_dict_pre_hook(lambda _, final: loaded.append(final))
        after = self.register_load_state_dict_post_hook(
            lambda _: self._restore_float32(loaded[-1]), prepend=True
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _restore_float32(self, state_dict: dict[str, Any]) -> None:
        # From the checkpoint once more: what torch has loaded is rounded already. "step" is float32 in any case.
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(indices, params, strict=True):
            dtype = state_dtype(param.dtype)
            for key, value in state_dict["state"].get(index, {}).items():
                if key != "step" and isinstance(value, Tensor) and dtype != param.dtype:
                    self.state[param][key] = value.to(device=param.device, dtype=dtype)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Move every parameter that has a gradient one step; gradients are read, never written.

        `closure`, if given, runs first, with autograd on, and its loss is returned. Nothing waits for the device.

        Raises:
            ValueError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._scaling, is_checked = self._given_scaling()
        try:
            # torch.compile traces the lists: it cannot see through addresses.
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
            # Also after an error: the scale of one step must not meet the gradients of another.
            self._scaling = GradScaling()
        return loss

    def _step(self, is_checked: bool) -> None:
        if not self._fused_step(is_checked):
            self._listed_step(is_checked)

    def _given_scaling(self) -> tuple[GradScaling, bool]:
        # The second result: whether this step looks for inf and nan itself.
        grad_scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        self.last_found_inf = found_inf
        if grad_scale is None:
            return GradScaling(found_inf=found_inf), False
        scale = grad_scale.detach().float()
        is_fused = self._asks_for_fused() and not torch.compiler.is_compiling()
        if is_fused and found_inf is None and scale.device.type == "cuda":
            # One launch gives both 1 / scale and a fresh 0 / scale = 0 that the kernels may set; (1, 0) is made once.
            pair: Tensor | None = self.__dict__.get("_pair")
            if pair is None or pair.device != scale.device:
                self._pair = pair = torch.arange(
                    1.0, -1.0, -1.0, dtype=torch.float32, device=scale.device
                )
            inverse_scale, found_inf_out = (pair / scale).unbind()
            return GradScaling(inverse_scale=inverse_scale, found_inf_out=found_inf_out), True
        return GradScaling(inverse_scale=scale.reciprocal(), found_inf=found_inf), found_inf is None

    def _listed_step(self, is_checked: bool) -> None:
        # All gradients are looked at before the first parameter is written.
        if is_checked:
            self._scaling = self._checked(self._scaling)
        self._before_updates()
        scaling = self._scaling
        for group in self.param_groups:
            for params, grads in _batches(group, self.parts or {}):
                self._scaling = scaling.to(params[0].device)
                self._update(group, params, grads)

    def _checked(self, scaling: GradScaling) -> GradScaling:
        # One look per device and dtype; the results meet on the first device, and the host reads none of them.
        by_device: dict[Any, list[Tensor]] = {}
        for group in self.param_groups:
            for grad in (param.grad for param in group["params"] if param.grad is not None):
                by_device.setdefault((grad.device, grad.dtype), []).append(grad)
        found = [any_not_finite(grads) for grads in by_device.values()]
        if not found:
            return scaling
        self.last_found_inf = torch.stack(
            [one.to(found[0].device, non_blocking=True) for one in found]
        ).amax()
        if self.shard_sums is not None:
            self.last_found_inf = self.shard_sums.largest(self.last_found_inf)
        return GradScaling(inverse_scale=scaling.inverse_scale, found_inf=self.last_found_inf)

    def _norms_over_ranks(
        self, vectors_of: Callable[[dict[str, Any], Tensor, Tensor, Part], list[ShardedVector]]
    ) -> dict[Tensor, list[Tensor]]:
        # Of whole tensors, for each parameter with a part; all ranks then skip this step, or none.
        vectors = {
            param: vectors_of(group, param, grad, self.parts[param])
            for group in self.param_groups
            for _, (param, grad) in dense_gradients(group)
            if self.parts and param in self.parts
        }
        given = self._scaling.found_inf
        flag = (
            torch.zeros((), device=next(iter(self.parts or ())).device) if given is None else given
        )
        norms, found_inf = norms_over_ranks(vectors, flag, self.add_up_)
        if given is not None:
            self._scaling = replace(self._scaling, found_inf=found_inf)
            self.last_found_inf = found_inf
        return norms

    def _whole_norms(self, params: list[Tensor]) -> list[Tensor] | None:
        # `_batches` puts parts and whole tensors apart: all of these are parts, or none is.
        if params[0] not in self._part_norms:
            return None
        return [
            torch.stack(norms)
            for norms in zip(*(self._part_norms[param] for param in params), strict=True)
        ]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # The name that GradScaler and Lightning read; True: the step itself unscales and skips.
        params = [param for group in self.param_groups for param in group["params"]]
        return (
            bool(params)
            and bool(self.param_groups[0]["fused"])
            and self._fused_step_type.has_engines(params)
        )

    def _asks_for_fused(self) -> bool:
        return bool(self.param_groups) and bool(self.param_groups[0]["fused"])

    def _fused_step(self, is_checked: bool) -> bool:
        if not self._asks_for_fused():
            return False
        # Made here and not in __init__: it holds addresses, and a copied or unpickled optimizer needs its own.
        if "_fused" not in self.__dict__:
            self._fused = self._fused_step_type()
        scaling = self._fused.step(self, self._scaling, is_checked=is_checked)
        if scaling is not None:
            self.last_found_inf = scaling.found_inf
        return scaling is not None

    def state_lists(self, params: list[Tensor], *keys: str) -> list[list[Tensor]]:
        """Return one list of state tensors per key, parallel to `params`; zeros where a parameter has none yet."""
        for param in params:
            state = self.state[param]
            for key in keys:
                if key not in state:
                    state[key] = torch.zeros_like(param, dtype=state_dtype(param.dtype))
        return [[self.state[param][key] for param in params] for key in keys]


def options_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options among the arguments of a constructor: the defaults of parameter groups."""
    options: dict[str, Any] = {"trust_ratio": True}
    for name, value in arguments.items():
        if name not in ("self", "params", "__class__"):
            options[name] = plain_value(value)
    return options


def _batches(
    group: dict[str, Any], parts: Mapping[Tensor, Part]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield lists of parameters and of their gradients, as the group's updates take them together.

    A list has one device and one pair of dtypes. Parts are in other lists than whole tensors, whose norms the update
    itself computes.
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
