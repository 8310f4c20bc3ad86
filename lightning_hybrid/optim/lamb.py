"""LAMB optimizer, a variant of AdamW that scales each layer's step to the norm of its weights."""

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
    """Optimizer with layer-wise adaptive moments for batch training (You et al. 2019, arXiv:1904.00962).

    For each parameter tensor w with gradient g, at its t-th step:

        m <- beta1 * m + (1 - beta1) * g              M = m / (1 - beta1 ** t)
        v <- beta2 * v + (1 - beta2) * g * g          V = v / (1 - beta2 ** t)
        u  = M / (sqrt(V) + eps) + weight_decay * w
        q  = phi(|w|) / |u|                           w <- w - lr * q * u

    m, v and t are the state `"exp_avg"`, `"exp_avg_sq"` and `"step"`, as in `torch.optim.AdamW`. phi clamps
    the norm to `weight_norm_bounds`. Without bounds it is the identity.

    `bias_correction=True` is Algorithm 2 of the published paper. False sets M = m and V = v, as in the early
    arXiv versions and most PyTorch ports. The trust ratio removes the scale of u, so only the balance between
    moments, `eps` and weight decay differs in the first steps.

    A tensor with phi(|w|) = 0 or |u| = 0 gets q = 1. The paper does not define this case. `trust_clip=c`
    replaces q by min(q, c). Unlike in `LARS`, q is not divided by lr.

    `max_grad_norm=c` first scales the gradients of all groups by min(1, c / norm), where norm is that of all
    gradients together. NVIDIA's LAMB does this with c = 1. The paper does not, so the default is off. The bound
    belongs to the optimizer, and groups cannot set it.

    A group with `trust_ratio=False` is excluded from layer scaling. Its update is AdamW with
    lr * `excluded_lr_mult`. In float32 and float64 it is bitwise equal to `torch.optim.AdamW` (with
    `bias_correction` and without `max_grad_norm`). Biases and normalization layers are commonly excluded,
    without weight decay (see `param_groups`).

    Dtypes, rounding, `foreach` and an `lr` that is a tensor are as in `LARS`, where |u| takes the place of the
    norm of "joint".

    `fused=True` makes two passes over the memory of the whole model: moments with |w| and |u|, then the update.
    It makes three passes if a check for inf and nan, or `max_grad_norm`, needs the gradients first. The passes
    are written in C++ for the CPU. Requirements, rounding and protocol are those of `LARS`. There are no kernels
    for CUDA. On CUDA, None processes lists, with temporaries of about 16 bytes per parameter, and True raises
    an error. If a checkpoint from a CPU has True, the step processes lists as well.

    `capturable=True` is as in `LARS`, and steps are then counted on the parameters' device.
    `differentiable=True` raises an error.

    Raises:
        ValueError: An option has an invalid value, a group key is a misspelt option, a parameter is complex, or a
            gradient is sparse.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = LAMB([weight], lr=0.1)
    >>> weight.grad = torch.tensor([0.0, 1e-3])
    >>> optimizer.step(); weight            # |step| = lr * |w| = 0.5, however small the gradient
    Parameter containing:
    tensor([3.0000, 3.5000], requires_grad=True)
    """

    _fused_step_type = FusedLamb
    # State of the current step: the factor of `max_grad_norm`, and the step counts of parameters that are shards.
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
                f"`betas` (={betas!r:.80}) must be two numbers, the decay rates of the first and the second moment. "
                "Set betas=(0.9, 0.999), for example."
            )
        for index, beta in enumerate(betas):
            require_number(
                f"betas[{index}]",
                beta,
                "with 1, the moment would ignore gradients. Set betas=(0.9, 0.999), for example",
                high=1,
            )
        require_number(
            "eps",
            group["eps"],
            "a negative value could make the denominator of the update zero. Use 1e-6, for example",
        )
        require_choice(
            "bias_correction",
            group["bias_correction"],
            (True, False),
            "True corrects the bias of the moments, and False does not",
        )
        require_bounds(group["weight_norm_bounds"])
        bound = group["max_grad_norm"]
        if bound is not None:
            reason = "larger gradients are scaled down to this norm. Set None to disable clipping"
            require_number("max_grad_norm", bound, reason, above=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Check the options of a parameter group, and add it to the optimizer.

        Raises:
            ValueError: The base class rejects the group, or its `max_grad_norm` differs from that of the optimizer.
        """
        common = self.defaults["max_grad_norm"]
        bound = common
        if isinstance(param_group, dict):  # The base class refuses everything else.
            bound = plain_value(param_group.get("max_grad_norm", common))
        if bound != common:
            raise ValueError(
                f"`max_grad_norm` (={bound!r:.80}) must equal the optimizer's value (={common}), because it bounds the "
                "norm of the gradients of all groups together. Pass `max_grad_norm` to LAMB instead of a group."
            )
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # As in torch.optim.AdamW. Files of torch before 1.12 and of other implementations of LAMB hold numbers.
        for entry in self.state.values():
            step = entry.get("step")
            if step is not None and not isinstance(step, Tensor):
                entry["step"] = torch.tensor(float(step), dtype=torch.float32)

    def _before_updates(self) -> None:
        norms_of_grads: dict[Tensor, list[Tensor]] = {}
        if self.parts:
            norms_of_grads = self._norms_over_ranks(self._vectors_of_grad)
        # All groups have the same bound, because `add_param_group` raises an error for another one.
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
        """Return the gradient-clipping factor min(1, bound / norm), or None if there are no gradients.

        Args:
            bound: Maximum norm of all gradients together.
            norms_of_parts: Norms of the full gradients, for the parameters that are shards.
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

        # The bound applies to unscaled gradients, because it must not depend on the loss scale.
        device = norms[0].device
        on_one_device = [some_norms.to(device) for some_norms in norms]
        norm = torch.linalg.vector_norm(torch.cat(on_one_device))
        (norm,) = self._scaling.to(device).unscale([norm], keep=[])
        return (bound / norm).clamp(max=1.0)

    def _vectors_of_grad(
        self, group: dict[str, Any], _: Tensor, grad: Tensor, part: Part
    ) -> list[ShardedVector]:
        """Return a list with the gradient shard if `max_grad_norm` is set, otherwise an empty list."""
        if group["max_grad_norm"] is None:
            return []
        return [ShardedVector(part=part, pieces=[grad])]

    def _vectors_of_update(
        self, group: dict[str, Any], param: Tensor, grad: Tensor, part: Part
    ) -> list[ShardedVector]:
        """Update the moments of a parameter shard, and return the vectors w and u for its trust ratio."""
        # The moments of all shards are updated before the first weight, so that the norms of all u need one all-reduce.
        (step,) = self._update_moments(group, [param], [grad])
        self._part_steps[param] = step
        moments = [self.state[param]["exp_avg"], self.state[param]["exp_avg_sq"]]
        return lamb_vectors(param, moments, part, group=group, step=step)

    def _update_moments(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> list[float | Tensor]:
        """Update both moments with the gradients, increment the step counts, and return them."""
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
        # There are three passes over the blocks: moments, |u|, update. No block is updated before |u| of the full
        # tensor is known.
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
                # Reading two moments again takes less time than keeping a large u between its norm and its use.
                updates = lamb_updates(param_blocks, means, squares, steps, group=group)
            lamb_(param_blocks, updates, lr=lr, ratios=ratios, scaling=scaling)

    def _next_steps(self, params: list[Tensor], capturable: bool) -> list[Any]:
        """Increment the step counts unless the step is skipped, and return them for `_corrections`."""
        device = params[0].device
        found_inf = self._scaling.found_inf
        reads_on_host = found_inf is None
        if capturable:  # In one expression with `and not capturable`, torch.compile of torch 2.15 could not trace it.
            reads_on_host = False
        # A count on the CPU can be read without a wait, on whichever device the parameter is.
        count_device = device
        if reads_on_host:
            count_device = torch.device("cpu")

        steps: list[Tensor] = []
        for param in params:
            state = self.state[param]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=count_device)
            elif not reads_on_host and state["step"].device != device:
                # The host does not know whether this step is skipped, so the count is moved to the device.
                state["step"] = state["step"].to(device, non_blocking=True)
            steps.append(state["step"])

        if found_inf is None:
            torch._foreach_add_(steps, 1)
        else:
            increment = (found_inf <= 0).to(steps[0])
            torch._foreach_add_(steps, [increment] * len(steps))
        if reads_on_host:
            return [_count(step, device) for step in steps]
        # If the first step is skipped, it divides by 1 - beta ** 0, but its result is not written.
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
    """Update the first and second moments of LAMB in place.

    Args:
        grads: Gradients, which are still multiplied by the loss scale.
        exp_avgs: First moments.
        exp_avg_sqs: Second moments.
        group: Parameter group, with the options of `LAMB`.
        clip_factor: Factor of `max_grad_norm` on the unscaled gradients. None: no bound.
        scaling: Loss scale of the gradients, and whether to skip the step.
    """
    beta1, beta2 = group["betas"]
    grads = scaling.unscale(as_dtype(grads, exp_avgs[0].dtype), keep=grads)
    if group["maximize"]:
        grads = list(torch._foreach_neg(grads))
    if clip_factor is not None:
        # The factor is cast, because a 0-dim gradient would otherwise be promoted to the dtype of the factor.
        grads = list(torch._foreach_mul(grads, clip_factor.to(grads[0].dtype)))
    means = scaling.scratch(exp_avgs)
    squares = scaling.scratch(exp_avg_sqs)
    # The operations and their order are those of torch.optim.AdamW, so that results are bitwise equal.
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
    """Compute the updates u of `LAMB` for tensors that have the same device and dtype.

    Args:
        params: Weights.
        exp_avgs: First moments.
        exp_avg_sqs: Second moments.
        steps: Step count of each tensor, which is 1 in the first step.
        group: Parameter group, with the options of `LAMB`.
    """
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
    """Return the weight and update vectors of a parameter shard, whose norms give the trust ratio.

    There are no vectors if the trust ratio is off.
    """
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
    """Compute the trust ratios of LAMB from the norms |w| and |u|, with the bounds of the group."""
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
    """Update the weights `params` in place by -lr * ratio * u.

    `updates` contain u and are overwritten.
    """
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
    """Apply one AdamW step to `params` in place, with the same operations as `torch.optim.AdamW`."""
    weights = scaling.scratch(params, exp_avgs[0].dtype)
    if group["weight_decay"] != 0:
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
    denominators = _denominators(exp_avg_sqs, steps, group)
    corrections = _corrections(steps, group)
    # addcdiv reads its factors on the host, so factors on a device need separate operations.
    if isinstance(lr, Tensor) or isinstance(corrections[0], Tensor):
        torch._foreach_mul_(denominators, corrections)
        add_scaled_(weights, list(torch._foreach_div(exp_avgs, denominators)), -lr)
    else:
        factors = [-(lr / correction) for correction in corrections]
        torch._foreach_addcdiv_(weights, exp_avgs, denominators, factors)
    scaling.commit_(params, weights)


def _count(step: Tensor, device: torch.device) -> float | Tensor:
    """Return a step count on the CPU as a Python number.

    While torch.compile traces, the result is a float64 tensor on `device`.
    """
    # A number would be a constant in a compiled graph. In float32, 1 - 0.999 ** step would lose half its digits.
    if torch.compiler.is_compiling():
        return step.to(device, torch.float64)
    return step.item()


def _corrections(steps: list[Any], group: dict[str, Any]) -> list[Any]:
    """Return the bias correction 1 - beta1 ** t of each tensor, or 1 without bias correction."""
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
    """Return the denominator sqrt(V) + eps of each tensor's update."""
    # The correction is applied after the root, as in torch.optim.AdamW, so that results are bitwise equal.
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
