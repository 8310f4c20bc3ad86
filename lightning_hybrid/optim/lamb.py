"""LAMB: AdamW in which each layer's step is proportional to the norm of its weights."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.checks import plain_value, require_choice, require_number
from lightning_hybrid.optim.foreach_ops import add_scaled_, as_dtype, in_blocks
from lightning_hybrid.optim.fused.step import FusedLamb
from lightning_hybrid.optim.gradients import UNSCALED, GradScaling, is_together, lr_of
from lightning_hybrid.optim.layerwise import LayerwiseOptimizer, options_of
from lightning_hybrid.optim.trust_ratio import (
    ShardedVector,
    combined_norms,
    require_bounds,
    tensor_norms,
    trust_ratio,
)
from lightning_hybrid.placement import Part


class LAMB(LayerwiseOptimizer):
    """Layer-wise adaptive moments for batch training (You et al. 2019, arXiv:1904.00962).

    For each parameter tensor w with gradient g, at its t-th step:

        m <- beta1 * m + (1 - beta1) * g              M = m / (1 - beta1 ** t)
        v <- beta2 * v + (1 - beta2) * g * g          V = v / (1 - beta2 ** t)
        u  = M / (sqrt(V) + eps) + weight_decay * w
        q  = phi(|w|) / |u|                           w <- w - lr * q * u

    m, v and t are the state `"exp_avg"`, `"exp_avg_sq"` and `"step"`, as in `torch.optim.AdamW`. phi clamps
    the norm to the two `weight_norm_bounds`, and leaves it as it is without them.

    `bias_correction=True` is that rule, Algorithm 2 of the published paper. False puts M = m and V = v, as in
    the early arXiv versions and most PyTorch ports of them. The trust ratio removes the scale of u, so only
    the first steps' balance between moments, `eps` and weight decay differs.

    A tensor with phi(|w|) = 0 or |u| = 0 gets q = 1. The paper leaves this open. `trust_clip=c` replaces q by
    min(q, c). Unlike in `LARS`, q is not divided by lr.

    `max_grad_norm=c` first scales all gradients, of all groups together, by min(1, c / norm), as NVIDIA's
    LAMB does with c = 1. The paper does not, so the default is off. It is one bound for the optimizer, and
    groups cannot set it.

    A group with `trust_ratio=False` is excluded: its update is AdamW at lr * `excluded_lr_mult`, bit for bit
    `torch.optim.AdamW` in float32 and float64 (with `bias_correction` and without `max_grad_norm`). Biases and
    normalisation are commonly excluded, without weight decay: see `param_groups`.

    Dtypes, rounding, a tensor as `lr` and `foreach` are as in `LARS`, with |u| in place of the norm for "joint".

    `fused=True` is two passes over memory for the whole model: moments with |w| and |u|, then the update. It
    is three passes if a check for inf and nan, or `max_grad_norm`, needs the gradients first. The passes are
    C++ and for the CPU. Requirements, rounding and protocol are those of `LARS`. There are no kernels for
    CUDA: None steps on lists there, with temporaries of some 16 bytes per parameter, and True raises an error.
    If a checkpoint from a CPU brings True, the step works on lists, too.

    `capturable=True` is as in `LARS`, and counts steps on the parameters' device. `differentiable=True` raises
    an error.

    Raises:
        ValueError: An option breaks its rule, a group key is a misspelt option, a parameter is complex, or a
            gradient is sparse.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = LAMB([weight], lr=0.1)
    >>> weight.grad = torch.tensor([0.0, 1e-3])
    >>> optimizer.step(); weight            # |step| = lr * |w| = 0.5, however small the gradient
    Parameter containing:
    tensor([3.0000, 3.5000], requires_grad=True)
    """

    _fused_step_type = FusedLamb
    # Of the step in progress: the factor of `max_grad_norm`, and the step counts of parameters that are parts.
    _clip_factor: Tensor | None = None
    _part_steps: dict[Tensor, float | Tensor]

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        weight_norm_bounds: tuple[float, float] | None = None,
        trust_clip: float | None = None,
        max_grad_norm: float | None = None,
        excluded_lr_mult: float = 1.0,
        foreach: bool | None = None,
        maximize: bool = False,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        options = options_of(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            weight_norm_bounds=weight_norm_bounds,
            trust_clip=trust_clip,
            max_grad_norm=max_grad_norm,
            excluded_lr_mult=excluded_lr_mult,
            foreach=foreach,
            maximize=maximize,
            fused=fused,
            capturable=capturable,
            differentiable=differentiable,
        )
        super().__init__(params, options)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        betas = group["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise ValueError(
                f"`betas` (={betas!r:.80}) must be a pair: the decay rates of the first and of the second moment. "
                "(0.9, 0.999) is usual."
            )
        for index, beta in enumerate(betas):
            require_number(
                f"betas[{index}]", beta, "at 1 the moment would never see a gradient", high=1
            )
        require_number(
            "eps", group["eps"], "it is added to the root of the second moment; 1e-6 is usual"
        )
        require_choice(
            "bias_correction", group["bias_correction"], (True, False), "see the LAMB docstring"
        )
        require_bounds(group["weight_norm_bounds"])
        bound = group["max_grad_norm"]
        if bound is not None:
            reason = "it bounds all gradients together; None is no bound"
            require_number("max_grad_norm", bound, reason, above=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, after a check of its options.

        Raises:
            ValueError: The base class refuses the group, or its `max_grad_norm` is not that of the optimizer.
        """
        bound = plain_value(param_group.get("max_grad_norm"))
        common = self.defaults["max_grad_norm"]
        if bound is not None and bound != common:
            raise ValueError(
                f"`max_grad_norm` (={bound!r:.80}) must be the optimizer's (={common}): it bounds the norm of the "
                "gradients of all groups together. Give it to LAMB, not to a group."
            )
        super().add_param_group(param_group)

    def _before_updates(self) -> None:
        norms_of_grads: dict[Tensor, list[Tensor]] = {}
        if self.parts:
            norms_of_grads = self._norms_over_ranks(self._vectors_of_grad)
        # Any group has the bound, because `add_param_group` raises an error for a bound that is not the optimizer's.
        bound = self.param_groups[0]["max_grad_norm"]
        self._clip_factor = None
        if bound is not None:
            self._clip_factor = self._compute_clip_factor(bound, norms_of_grads)

        # Filled by `_vectors_of_update`.
        self._part_steps = {}
        self._part_norms = {}
        if self.parts:
            self._part_norms = self._norms_over_ranks(self._vectors_of_update)

    def _compute_clip_factor(
        self, bound: float, norms_of_parts: dict[Tensor, list[Tensor]]
    ) -> Tensor | None:
        """Return min(1, bound / norm) for the norm of all gradients, or None without gradients.

        `norms_of_parts` holds the norms of whole gradients for the parameters that are parts.
        """
        by_dtype: dict[Any, list[Tensor]] = {}
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param not in norms_of_parts:
                    by_dtype.setdefault((param.device, param.grad.dtype), []).append(param)

        norms = [torch.stack(norms_of_part) for norms_of_part in norms_of_parts.values()]
        for params in by_dtype.values():
            grad_norms = tensor_norms([param.grad for param in params if param.grad is not None])
            if self.shard_sums is None:
                norms.append(grad_norms)
            else:
                norms.extend(self.shard_sums.norms(params, grad_norms))
        if not norms:
            return None

        # The bound is on unscaled gradients, because it must not change with the loss scale.
        device = norms[0].device
        on_one_device = [some_norms.to(device) for some_norms in norms]
        norm = torch.linalg.vector_norm(torch.cat(on_one_device))
        (norm,) = self._scaling.to(device).unscale([norm], keep=[])
        return (bound / norm).clamp(max=1.0)

    def _vectors_of_grad(
        self, group: dict[str, Any], _: Tensor, grad: Tensor, part: Part
    ) -> list[ShardedVector]:
        """Return the gradient of a part as vector, if gradients are bounded."""
        if group["max_grad_norm"] is None:
            return []
        return [ShardedVector(part=part, pieces=[grad])]

    def _vectors_of_update(
        self, group: dict[str, Any], param: Tensor, grad: Tensor, part: Part
    ) -> list[ShardedVector]:
        """Update the moments of a part, and return the vectors w and u of its trust ratio."""
        # The moments of all parts before the first update: the norms of all u then need one sum over ranks.
        (step,) = self._update_moments(group, [param], [grad])
        self._part_steps[param] = step
        moments = [self.state[param]["exp_avg"], self.state[param]["exp_avg_sq"]]
        return lamb_vectors(param, moments, part, group=group, step=step)

    def _update_moments(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> list[float | Tensor]:
        """Update both moments by the gradients, count the step, and return the step counts."""
        scaling = self._scaling.to(params[0].device)
        clip_factor = self._clip_factor
        if clip_factor is not None:
            clip_factor = clip_factor.to(params[0].device)
        exp_avgs, exp_avg_sqs = self.state_lists(params, "exp_avg", "exp_avg_sq")
        for grad_blocks, means, squares in in_blocks(grads, exp_avgs, exp_avg_sqs):
            moments_(
                grad_blocks, means, squares, group=group, clip_factor=clip_factor, scaling=scaling
            )
        return self._next_steps(params, group["capturable"])

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        lr = lr_of(group, params[0].device)
        scaling = self._scaling
        # Three passes over the blocks: moments, |u|, update. The first block is updated when |u| of
        # the whole tensor is known.
        part_norms = self._whole_norms(params)
        if part_norms is None:
            steps = self._update_moments(group, params, grads)
        else:
            steps = [self._part_steps[param] for param in params]
        exp_avgs, exp_avg_sqs = self.state_lists(params, "exp_avg", "exp_avg_sq")
        blocks = list(in_blocks(params, exp_avgs, exp_avg_sqs))
        if not group["trust_ratio"]:
            for param_blocks, means, squares in blocks:
                adamw_(param_blocks, means, squares, steps, group=group, lr=lr, scaling=scaling)
            return

        updates = None
        if part_norms is None:
            norms_of_blocks = []
            for param_blocks, means, squares in blocks:
                updates = lamb_updates(param_blocks, means, squares, steps, group=group)
                norms_of_blocks.append(tensor_norms(updates))
            weight_norms = tensor_norms(params)
            update_norms = combined_norms(norms_of_blocks)
            if self.shard_sums is not None:
                weight_norms, update_norms = self.shard_sums.norms(
                    params, weight_norms, update_norms
                )
        else:
            weight_norms, update_norms = part_norms

        ratios = lamb_ratios(weight_norms, update_norms, group=group)
        for param_blocks, means, squares in blocks:
            if updates is None or len(blocks) > 1:
                # Reading two moments again costs less than keeping a large u between its norm and its use.
                updates = lamb_updates(param_blocks, means, squares, steps, group=group)
            lamb_(param_blocks, updates, lr=lr, ratios=ratios, scaling=scaling)

    def _next_steps(self, params: list[Tensor], capturable: bool) -> list[Any]:
        """Count this step unless it is skipped. Return the counts as `_corrections` needs them."""
        device = params[0].device
        found_inf = self._scaling.found_inf
        reads_on_host = found_inf is None
        if capturable:  # not `and not capturable`, which torch.compile does not trace in torch 2.15
            reads_on_host = False
        # Reading a count on the CPU waits for nothing, wherever the parameter is.
        count_device = device
        if reads_on_host:
            count_device = torch.device("cpu")

        steps: list[Tensor] = []
        for param in params:
            state = self.state[param]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=count_device)
            elif not reads_on_host and state["step"].device != device:
                # The host does not know whether this step is skipped, so the count moves to the device of `found_inf`.
                state["step"] = state["step"].to(device, non_blocking=True)
            steps.append(state["step"])

        if found_inf is None:
            torch._foreach_add_(steps, 1)
        else:
            increment = (found_inf <= 0).to(steps[0])
            torch._foreach_add_(steps, [increment] * len(steps))
        if reads_on_host:
            return [_count(step, device) for step in steps]
        # A skipped first step divides by 1 - beta ** 0, but its result is not written.
        wide = torch.empty(len(steps), dtype=torch.float64, device=device).unbind()
        torch._foreach_copy_(wide, steps)
        return list(wide)


def moments_(
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    group: dict[str, Any],
    clip_factor: Tensor | None,
    scaling: GradScaling = UNSCALED,
) -> None:
    """Update both moments in place by `grads`, unscaled and then scaled by `clip_factor` if there is one."""
    beta1, beta2 = group["betas"]
    grads = scaling.unscale(as_dtype(grads, exp_avgs[0].dtype), keep=grads)
    if group["maximize"]:
        grads = list(torch._foreach_neg(grads))
    if clip_factor is not None:
        # In the dtype of the gradients, because a 0-dim gradient would take on the dtype of the factor.
        grads = list(torch._foreach_mul(grads, clip_factor.to(grads[0].dtype)))
    means = scaling.scratch(exp_avgs)
    squares = scaling.scratch(exp_avg_sqs)
    # The operations and their order are those of torch.optim.AdamW, for the same bits.
    torch._foreach_lerp_(means, grads, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
    scaling.commit_(exp_avgs, means)
    scaling.commit_(exp_avg_sqs, squares)


def lamb_updates(
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Any],
    *,
    group: dict[str, Any],
) -> list[Tensor]:
    """Compute the u of `LAMB` for tensors of one device and dtype. `steps` counts the current step, 1 at the first."""
    updates = list(torch._foreach_div(exp_avgs, _denominators(exp_avg_sqs, steps, group)))
    if group["bias_correction"]:
        torch._foreach_div_(updates, _corrections(steps, group))
    if group["weight_decay"] != 0:
        weights = as_dtype(params, updates[0].dtype)
        torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
    return updates


def lamb_vectors(
    param: Tensor,
    moments: Sequence[Tensor],
    part: Part,
    *,
    group: dict[str, Any],
    step: float | Tensor,
) -> list[ShardedVector]:
    """Return the vectors w and u of a part, whose norms make its trust ratio, or no vector if the ratio is off."""
    if not group["trust_ratio"]:
        return []
    exp_avg, exp_avg_sq = moments
    blocks = in_blocks([param], [exp_avg], [exp_avg_sq])
    updates = (
        lamb_updates(params, means, squares, [step], group=group)[0]
        for params, means, squares in blocks
    )
    weight = ShardedVector(part=part, pieces=[param])
    update = ShardedVector(part=part, pieces=updates, is_in_blocks=not is_together(group, param))
    return [weight, update]


def lamb_ratios(weight_norms: Tensor, update_norms: Tensor, *, group: dict[str, Any]) -> Tensor:
    """Compute q of `LAMB` from |w| and |u|, clipped if the group has a bound."""
    if group["weight_norm_bounds"] is not None:
        weight_norms = weight_norms.clamp(*group["weight_norm_bounds"])
    ratios = trust_ratio(weight_norms, update_norms)
    if group["trust_clip"] is not None:
        ratios = ratios.clamp(max=group["trust_clip"])
    return ratios


def lamb_(
    params: list[Tensor],
    updates: list[Tensor],
    *,
    lr: float | Tensor,
    ratios: Tensor,
    scaling: GradScaling = UNSCALED,
) -> None:
    """Update `params` by -lr * ratio * u, in place. `updates` hold u and are overwritten."""
    weights = scaling.scratch(params, updates[0].dtype)
    torch._foreach_mul_(updates, ratios.to(updates[0].dtype).unbind())
    add_scaled_(weights, updates, -lr)
    scaling.commit_(params, weights)


def adamw_(
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Any],
    *,
    group: dict[str, Any],
    lr: float | Tensor,
    scaling: GradScaling = UNSCALED,
) -> None:
    """Update `params` as AdamW does, in place, with the order of operations of `torch.optim.AdamW`."""
    weights = scaling.scratch(params, exp_avgs[0].dtype)
    if group["weight_decay"] != 0:
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
    denominators = _denominators(exp_avg_sqs, steps, group)
    corrections = _corrections(steps, group)
    # addcdiv reads its factors on the host, so tensors on a device need separate operations.
    if isinstance(lr, Tensor) or isinstance(corrections[0], Tensor):
        torch._foreach_mul_(denominators, corrections)
        add_scaled_(weights, list(torch._foreach_div(exp_avgs, denominators)), -lr)
    else:
        factors = [-(lr / correction) for correction in corrections]
        torch._foreach_addcdiv_(weights, exp_avgs, denominators, factors)
    scaling.commit_(params, weights)


def _count(step: Tensor, device: torch.device) -> float | Tensor:
    """Return a step count on the CPU as a number, or as float64 on `device` while torch.compile traces."""
    # A number would be frozen into a compiled graph. In float32, 1 - 0.999 ** step would lose half its digits.
    if torch.compiler.is_compiling():
        return step.to(device, torch.float64)
    return step.item()


def _corrections(steps: list[Any], group: dict[str, Any]) -> list[Any]:
    """Return 1 - beta1 ** t for each tensor, or 1 without bias correction."""
    if not group["bias_correction"]:
        return [1.0] * len(steps)
    return _one_minus_powers(group["betas"][0], steps)


def _one_minus_powers(beta: float, steps: list[Any]) -> list[Any]:
    if not isinstance(steps[0], Tensor):
        return [1 - beta**step for step in steps]
    powers = torch._foreach_pow(beta, steps)
    torch._foreach_sub_(powers, 1)
    torch._foreach_neg_(powers)
    return list(powers)


def _denominators(
    exp_avg_sqs: list[Tensor], steps: list[Any], group: dict[str, Any]
) -> list[Tensor]:
    """Return sqrt(V) + eps for each tensor."""
    # The correction is divided out after the root, as in torch.optim.AdamW, for the same bits.
    denominators = list(torch._foreach_sqrt(exp_avg_sqs))
    if group["bias_correction"]:
        corrections = _one_minus_powers(group["betas"][1], steps)
        roots: Any
        if isinstance(steps[0], Tensor):
            roots = torch._foreach_sqrt(corrections)
        else:
            roots = [correction**0.5 for correction in corrections]
        torch._foreach_div_(denominators, roots)
    torch._foreach_add_(denominators, group["eps"])
    return denominators
