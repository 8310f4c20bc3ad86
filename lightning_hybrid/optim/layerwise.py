"""What LARS and LAMB share: checked parameter groups, float32 state, lists of tensors to work on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.optim.fused.availability import FUSED_DEVICES, has_kernels
from lightning_hybrid.optim.grad_scaling import GradScaling, any_not_finite

if TYPE_CHECKING:
    from lightning_hybrid.optim.fused.step import FusedStep

# Keys a group may hold that are no option of ours: torch's own, and those that schedulers and loggers leave there.
_FOREIGN_KEYS = frozenset("params param_names name initial_lr min_lr max_lr base_momentum max_momentum swa_lr".split())
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of optimizer state and arithmetic for a parameter of `dtype`: at least float32.

    >>> state_dtype(torch.bfloat16), state_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


class LayerwiseOptimizer(Optimizer):
    """An optimizer that scales each tensor's step by a trust ratio; LARS and LAMB say how.

    It owns what does not depend on the rule: options are checked for the defaults and for each group; an unknown
    group key is an error; state is float32 for half-precision parameters and stays so through `load_state_dict`;
    `step` hands the rule lists of tensors, one tensor a list or, with `foreach`, all of a device and dtype at once.

    Mixed precision, by plain attributes, for `torch.amp.GradScaler` and for whoever keeps float32 masters:

        grad_scale              0-dim tensor: gradients are divided by it, within the step; they may be half precision
        found_inf               0-dim tensor, 0 or more: if more, nothing is written, to the bit
        last_found_inf          left by a step that had one of the two: its `found_inf`, or what it found by itself
        copies                  {parameter: half-precision copy}: each is written as parameter.to(dtype) by the step

    All are read on the device. A step with `grad_scale` and without `found_inf` (absent or None) looks itself whether
    a gradient is inf or nan, before it writes. Gradients are not changed: divided once more they would be wrong.
    """

    copies: Mapping[Tensor, Tensor] = {}  # never written; torch.compile stops at a MappingProxyType
    last_found_inf: Tensor | None = None
    _scaling = GradScaling()  # of the step in progress

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._check_group({**defaults})
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise if an option of `group`, defaults already filled in, breaks its rule."""
        raise NotImplementedError

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        """Move `params`, which share device and dtype, one step; leave `grads` as they are."""
        raise NotImplementedError

    def _before_updates(self) -> None:
        """Called once a step, after the closure, before the first `_update`."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; its options are checked, and the caller's dict is left as it was.

        Raises `ValueError` for an option that breaks its rule, an unknown key, or a complex or integer parameter.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"`param_group` (={param_group!r:.80}) must be a dict: a group is its params and options.")
        known = self.defaults.keys() | _FOREIGN_KEYS
        for key in param_group:
            if key not in known:
                raise ValueError(
                    f"`{key}` (={param_group[key]!r:.80}) is no option of {type(self).__name__}: it would be ignored. "
                    f"A parameter group may set {', '.join(sorted(self.defaults))}."
                )
        self._check_group({**self.defaults, **param_group})
        common = self.defaults["fused"]
        if (own := param_group.get("fused", common)) != common:
            raise ValueError(
                f"`fused` (={own!r:.80}) must be the optimizer's (={common}): one verdict on inf and nan, before "
                f"anything is written, is for all groups together. Give it to {type(self).__name__}, not to a group."
            )
        super().add_param_group(dict(param_group))
        for index, param in enumerate(self.param_groups[-1]["params"]):
            if param.dtype not in _DTYPES:
                group = self.param_groups.pop()
                raise ValueError(
                    f"`{_name_of(group, index)}.dtype` (={param.dtype}) must be float16, bfloat16, float32 or float64: "
                    "the trust ratio is a quotient of real norms. Give this parameter to another optimizer, or store "
                    "a complex one as its `torch.view_as_real`."
                )
            if common and param.device.type not in FUSED_DEVICES:
                self.param_groups.pop()
                raise ValueError(
                    f"`fused` (=True) needs parameters on {' or '.join(FUSED_DEVICES)}, not on `{param.device}`: there "
                    "are no kernels for it. Use foreach=True, or torch.compile(optimizer.step)."
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle; groups of an older checkpoint get the defaults of the options that they lack."""
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but keep the state of half-precision parameters in float32.

        `torch.optim.Optimizer` casts each state tensor to the dtype of its parameter, which would round it.
        """
        loaded: list[dict[str, Any]] = []
        # Hooks of the user may replace the dict: ours run right before and right after torch's own work.
        before = self.register_load_state_dict_pre_hook(lambda _, final: loaded.append(final))
        after = self.register_load_state_dict_post_hook(lambda _: self._restore_float32(loaded[-1]), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _restore_float32(self, state_dict: dict[str, Any]) -> None:
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

        `closure`, if given, is called first, with autograd on, and its loss is returned. Nothing waits for the device.
        Raises `ValueError` for a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._scaling, is_checked = self._given_scaling()
        try:
            if torch.compiler.is_compiling() or not self._fused_step(is_checked):
                self._listed_step(is_checked)
        finally:
            self._scaling = GradScaling()
        return loss

    def _given_scaling(self) -> tuple[GradScaling, bool]:
        """What is on the attributes, and whether this step has to look for inf and nan by itself."""
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        self.last_found_inf = found_inf
        if grad_scale is None:
            return GradScaling(found_inf=found_inf), False
        scale = grad_scale.detach().float()
        if found_inf is None and scale.device.type == "cuda" and not torch.compiler.is_compiling():
            inverse_scale, verdict = (self._one_and_zero(scale.device) / scale).unbind()  # both in one launch
            return GradScaling(inverse_scale=inverse_scale, verdict=verdict), True
        return GradScaling(inverse_scale=scale.reciprocal(), found_inf=found_inf), found_inf is None

    def _one_and_zero(self, device: torch.device) -> Tensor:
        pair: Tensor | None = self.__dict__.get("_pair")
        if pair is None or pair.device != device:
            self._pair = pair = torch.arange(1.0, -1.0, -1.0, dtype=torch.float32, device=device)
        return pair

    def _listed_step(self, is_checked: bool) -> None:
        if is_checked:
            self._scaling = self._checked(self._scaling)
        self._before_updates()
        given = self._scaling
        for group in self.param_groups:
            for params, grads in _batches(group, self.copies):
                self._scaling = given.to(params[0].device)
                self._update(group, params, grads)

    def _checked(self, scaling: GradScaling) -> GradScaling:
        by_device: dict[Any, list[Tensor]] = {}
        for group in self.param_groups:
            for grad in (param.grad for param in group["params"] if param.grad is not None):
                by_device.setdefault((grad.device, grad.dtype), []).append(grad)
        found = [any_not_finite(grads) for grads in by_device.values()]
        if not found:
            return scaling
        self.last_found_inf = torch.stack([one.to(found[0].device, non_blocking=True) for one in found]).amax()
        return GradScaling(inverse_scale=scaling.inverse_scale, found_inf=self.last_found_inf)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return self._is_fused()

    def _is_fused(self) -> bool:
        """Whether steps are asked to be fused, and can be. Where nobody asked, nobody else need know of it."""
        types = {param.device.type for group in self.param_groups for param in group["params"]}
        is_asked_for = bool(self.param_groups) and bool(self.param_groups[0]["fused"])
        return is_asked_for and all(has_kernels(device_type) for device_type in types)

    def _asks_for_fused(self) -> bool:
        """`fused`; None is kernels on CUDA, unless lists or a loop are asked for, or a step that a graph captures."""
        if not self.param_groups or (fused := self.param_groups[0]["fused"]) is not None:
            return bool(self.param_groups) and fused
        return all(
            group["foreach"] is None and not group["capturable"] and all(param.is_cuda for param in group["params"])
            for group in self.param_groups
        )

    def _new_fused(self) -> FusedStep:
        """The rule's own fused step."""
        raise NotImplementedError

    def _fused_step(self, is_checked: bool) -> bool:
        """Do the step in few passes, if that is asked for and there are kernels; else do nothing and say so."""
        if not self._asks_for_fused():
            return False
        if "_fused" not in self.__dict__:
            self._fused = self._new_fused()
        scaling = self._fused.step(self, self._scaling, is_checked=is_checked)
        if scaling is not None:
            self.last_found_inf = scaling.found_inf
        return scaling is not None

    def _copies_of(self, params: list[Tensor]) -> list[Tensor]:
        """The copies of `params`: all have one or none has."""
        return [self.copies[param] for param in params if param in self.copies]

    def state_lists(self, params: list[Tensor], *keys: str) -> list[list[Tensor]]:
        """State tensors by key, each a list beside `params`; zeros where a parameter has none yet."""
        for param in params:
            state = self.state[param]
            for key in keys:
                if key not in state:
                    state[key] = torch.zeros_like(param, dtype=state_dtype(param.dtype))
        return [[self.state[param][key] for param in params] for key in keys]


def _name_of(group: dict[str, Any], index: int) -> str:
    return group["param_names"][index] if "param_names" in group else f"params[{index}]"


def _batches(group: dict[str, Any], copies: Mapping[Tensor, Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Parameters and gradients to work on together: one at a time, or all of a kind where that is faster.

    On the CPU one at a time is: its temporaries stay in cache. On an accelerator launches count, so it is all at once.
    """
    kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for index, (param, grad) in dense_gradients(group):
        together = param.device.type != "cpu" if group["foreach"] is None else group["foreach"]
        kind = (param.device, param.dtype, grad.dtype, _dtype(copies.get(param))) if together else index
        params, grads = kinds.setdefault(kind, ([], []))
        params.append(param)
        grads.append(grad)
    yield from kinds.values()


def dense_gradients(group: dict[str, Any]) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Of each parameter that has a gradient: its place in the group, itself, the gradient. Raises for a sparse one."""
    for index, param in enumerate(group["params"]):
        grad = param.grad
        if grad is None:
            continue
        if grad.layout != torch.strided:
            raise ValueError(
                f"`{_name_of(group, index)}.grad.layout` (={grad.layout}) must be torch.strided: a sparse gradient "
                "touches some rows, but the trust ratio is of the whole layer. Build the layer with `sparse=False`, "
                "or give it to `torch.optim.SparseAdam`."
            )
        yield index, (param, grad)


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def lr_of(group: dict[str, Any], device: torch.device) -> float | Tensor:
    """The group's learning rate, that of excluded groups multiplied; a tensor only where a number would cost a wait.

    A tensor on the CPU is read, which waits for nothing, except while `torch.compile` traces and with `capturable`:
    a number would be frozen into the graph.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor):
        lr = lr.detach()
        may_be_read = lr.device.type == "cpu" and not torch.compiler.is_compiling() and not group["capturable"]
        lr = lr.item() if may_be_read else lr.to(device)
    return lr if group["trust_ratio"] else lr * group["excluded_lr_mult"]
