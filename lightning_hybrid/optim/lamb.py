"""LAMB: AdamW in which each layer's step is proportional to the layer's own size."""

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

    m, v, t -> state `"exp_avg"`, `"exp_avg_sq"`, `"step"`, as in `torch.optim.AdamW`; phi: between the two
    `weight_norm_bounds`, or the norm itself without them.

    `bias_correction=True` is that rule, Algorithm 2 of the published paper. False puts M = m and V = v: the early
    arXiv versions, as most PyTorch ports read them. The trust ratio removes the scale of u: only the first steps'
    balance between moments, `eps` and weight decay differs.

    A tensor with phi(|w|) = 0 or |u| = 0 gets q = 1; the paper leaves this open. `trust_clip=c` replaces q by
    min(q, c), unlike in `LARS` not divided by lr.

    `max_grad_norm=c` first scales all gradients, of all groups together, by min(1, c / norm), as NVIDIA's LAMB does
    with c = 1; the paper does not, so the default is off. It is one bound for the optimizer, no option of a group.

    A group with `trust_ratio=False` is excluded: it moves by AdamW at lr * `excluded_lr_mult`, bit for bit
    `torch.optim.AdamW` in float32 and float64 (with `bias_correction` and without `max_grad_norm`). Biases and
    normalisation are commonly excluded, without weight decay: see `param_groups`.

    Dtypes, rounding, a tensor as `lr` and `foreach` are as in `LARS`, with |u| in place of the norm for "joint".

    `fused=True` is two passes over memory for the whole model: moments with |w| and |u|, then the update; three where
    inf, nan or `max_grad_norm` need the gradients first. They are C++ and for the CPU; needs, rounding and protocol are
    those of `LARS`. On CUDA there are none: `None` steps by lists there, with temporaries of some 16 bytes a parameter;
    True is refused, and where the checkpoint of a CPU brings it, it is lists, too.

    `capturable=True` is as in `LARS`, and counts steps on the parameters' device. `differentiable` is refused.

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
    _clip_factor: Tensor | None = None  # of the step in progress

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
        super().__init__(params, options_of(locals()))

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if not isinstance(betas := group["betas"], tuple | list) or len(betas) != 2:
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
        if (bound := group["max_grad_norm"]) is not None:
            require_number(
                "max_grad_norm",
                bound,
                "it bounds all gradients together; None is no bound",
                above=True,
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; raises as the base does, and for a `max_grad_norm` that is not the optimizer's."""
        own = plain_value(param_group.get("max_grad_norm"))
        common = self.defaults["max_grad_norm"]
        if own is not None and own != common:
            raise ValueError(
                f"`max_grad_norm` (={own!r:.80}) must be the optimizer's (={common}): it bounds the norm of the "
                "gradients of all groups together. Give it to LAMB, not to a group."
            )
        super().add_param_group(param_group)

    def _before_updates(self) -> None:
        # Any group has it: `add_param_group` refuses a bound that is not the optimizer's.
        bound = self.param_groups[0]["max_grad_norm"]
        of_parts = self._norms_over_ranks(self._bounded_gradients) if self.parts else {}
        self._clip_factor = None if bound is None else self._factor(bound, of_parts)
        self._part_steps: dict[Tensor, float | Tensor] = {}
        self._part_norms = self._norms_over_ranks(self._taken_gradients) if self.parts else {}

    def _factor(self, bound: float, of_parts: dict[Tensor, list[Tensor]]) -> Tensor | None:
        by_dtype: dict[Any, list[Tensor]] = {}
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param not in of_parts:
                    by_dtype.setdefault((param.device, param.grad.dtype), []).append(param)
        norms = [torch.stack(some) for some in of_parts.values()]
        for params in by_dtype.values():
            of_grads = tensor_norms([param.grad for param in params if param.grad is not None])
            norms += (
                [of_grads] if self.shard_sums is None else self.shard_sums.norms(params, of_grads)
            )
        if not norms:
            return None
        # The bound is on unscaled gradients: it must not move with the loss scale.
        norm = torch.linalg.vector_norm(torch.cat([part.to(norms[0].device) for part in norms]))
        (norm,) = self._scaling.to(norm.device).unscale([norm], keep=[])
        return (bound / norm).clamp(max=1.0)

    def _bounded_gradients(
        self, group: dict[str, Any], _: Tensor, grad: Tensor, part: Part
    ) -> list[ShardedVector]:
        return [] if group["max_grad_norm"] is None else [ShardedVector(part=part, pieces=[grad])]

    def _taken_gradients(
        self, group: dict[str, Any], param: Tensor, grad: Tensor, part: Part
    ) -> list[ShardedVector]:
        # All parts' moments before the first update: the norms of their updates take one sum over ranks.
        (self._part_steps[param],) = self._take(group, [param], [grad])
        moments = [self.state[param][key] for key in ("exp_avg", "exp_avg_sq")]
        return lamb_vectors(param, moments, part, group=group, step=self._part_steps[param])

    def _take(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> list[float | Tensor]:
        """Count the step, and take the gradients into both moments."""
        scaling = self._scaling.to(params[0].device)
        clip_factor = self._clip_factor
        if clip_factor is not None:
            clip_factor = clip_factor.to(params[0].device)
        for some_grads, means, squares in in_blocks(
            grads, *self.state_lists(params, "exp_avg", "exp_avg_sq")
        ):
            moments_(
                some_grads, means, squares, group=group, clip_factor=clip_factor, scaling=scaling
            )
        return self._next_steps(params, group["capturable"])

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        lr = lr_of(group, params[0].device)
        scaling = self._scaling
        # Three passes over the blocks: moments, |u|, update. |u| of a whole tensor is known before any block moves.
        part_norms = self._whole_norms(params)
        if part_norms is None:
            steps = self._take(group, params, grads)
        else:
            steps = [self._part_steps[param] for param in params]
        blocks = list(in_blocks(params, *self.state_lists(params, "exp_avg", "exp_avg_sq")))
        if not group["trust_ratio"]:
            for some_params, means, squares in blocks:
                adamw_(some_params, means, squares, steps, group=group, lr=lr, scaling=scaling)
            return

        updates = None
        if part_norms is None:
            norms_of_blocks = []
            for some_params, means, squares in blocks:
                updates = lamb_updates(some_params, means, squares, steps, group=group)
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
        for some_params, means, squares in blocks:
            if updates is None or len(blocks) > 1:
                # Reading two moments again costs less than keeping a large u between its norm and its use.
                updates = lamb_updates(some_params, means, squares, steps, group=group)
            lamb_(some_params, updates, lr=lr, ratios=ratios, scaling=scaling)

    def _next_steps(self, params: list[Tensor], capturable: bool) -> list[Any]:
        """Count this step, unless it is skipped; return the counts as `_corrections` takes them."""
        device = params[0].device
        found_inf = self._scaling.found_inf
        reads_on_host = found_inf is None
        if capturable:  # not `and not capturable`, which torch.compile does not trace in torch 2.15
            reads_on_host = False
        for state in (states := [self.state[param] for param in params]):
            if "step" not in state:
                # Where it is read: on the CPU, wherever the parameter is, that waits for nothing.
                state["step"] = torch.zeros(
                    (), dtype=torch.float32, device="cpu" if reads_on_host else device
                )
            elif not reads_on_host and state["step"].device != device:
                # The host does not know whether this step is skipped, so the count moves to where `found_inf` is read.
                state["step"] = state["step"].to(device, non_blocking=True)
        steps = [state["step"] for state in states]
        torch._foreach_add_(
            steps, 1 if found_inf is None else [(found_inf <= 0).to(steps[0])] * len(steps)
        )
        if reads_on_host:
            return [_count(step, device) for step in steps]
        # A skipped first step divides by 1 - beta ** 0; nothing comes of it, and nothing is written.
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
    """Take `grads`, unscaled and then scaled by `clip_factor` if there is one, into both moments, in place."""
    beta1, beta2 = group["betas"]
    grads = scaling.unscale(as_dtype(grads, exp_avgs[0].dtype), keep=grads)
    if group["maximize"]:
        grads = list(torch._foreach_neg(grads))
    if clip_factor is not None:
        # In their dtype: a 0-dim gradient would take that of the factor.
        grads = list(torch._foreach_mul(grads, clip_factor.to(grads[0].dtype)))
    means = scaling.scratch(exp_avgs)
    squares = scaling.scratch(exp_avg_sqs)
    # Operations and order of torch.optim.AdamW, for the same bits.
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
    """Compute the u of `LAMB` for tensors of one device and dtype; `steps` counts the present step, 1 at the first."""
    updates = list(torch._foreach_div(exp_avgs, _denominators(exp_avg_sqs, steps, group)))
    if group["bias_correction"]:
        torch._foreach_div_(updates, _corrections(steps, group))
    if group["weight_decay"] != 0:
        torch._foreach_add_(
            updates, as_dtype(params, updates[0].dtype), alpha=group["weight_decay"]
        )
    return updates


def lamb_vectors(
    param: Tensor,
    moments: Sequence[Tensor],
    part: Part,
    *,
    group: dict[str, Any],
    step: float | Tensor,
) -> list[ShardedVector]:
    """Return the vectors w and u of a part, whose norms make its trust ratio; none where that is off."""
    if not group["trust_ratio"]:
        return []
    blocks = in_blocks([param], *([moment] for moment in moments))
    updates = (
        lamb_updates(some, means, squares, [step], group=group)[0]
        for some, means, squares in blocks
    )
    of_updates = ShardedVector(
        part=part, pieces=updates, is_in_blocks=not is_together(group, param)
    )
    return [ShardedVector(part=part, pieces=[param]), of_updates]


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
    """Move `params` by -lr * ratio * u, in place; `updates` hold u and are overwritten."""
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
    """Move `params` as AdamW does, in place; the order of operations is that of `torch.optim.AdamW`."""
    weights = scaling.scratch(params, exp_avgs[0].dtype)
    if group["weight_decay"] != 0:
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
    denominators = _denominators(exp_avg_sqs, steps, group)
    corrections = _corrections(steps, group)
    # addcdiv takes its factors from the host: tensors on a device need separate operations.
    if isinstance(lr, Tensor) or isinstance(corrections[0], Tensor):
        torch._foreach_mul_(denominators, corrections)
        add_scaled_(weights, list(torch._foreach_div(exp_avgs, denominators)), -lr)
    else:
        torch._foreach_addcdiv_(
            weights, exp_avgs, denominators, [-(lr / correction) for correction in corrections]
        )
    scaling.commit_(params, weights)


def _count(step: Tensor, device: torch.device) -> float | Tensor:
    # A number would be frozen into a compiled graph. float64: 1 - 0.999 ** step would lose half its digits in float32.
    return step.to(device, torch.float64) if torch.compiler.is_compiling() else step.item()


def _corrections(steps: list[Any], group: dict[str, Any]) -> list[Any]:
    return (
        _one_minus_powers(group["betas"][0], steps)
        if group["bias_correction"]
        else [1.0] * len(steps)
    )


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
    # sqrt(V) + eps. The correction is divided out after the root, as in torch.optim.AdamW, for the same bits.
    denominators = list(torch._foreach_sqrt(exp_avg_sqs))
    if group["bias_correction"]:
        squares = _one_minus_powers(group["betas"][1], steps)
        roots = (
            torch._foreach_sqrt(squares)
            if isinstance(steps[0], Tensor)
            else [square**0.5 for square in squares]
        )
        torch._foreach_div_(denominators, roots)
    torch._foreach_add_(denominators, group["eps"])
    return denominators
