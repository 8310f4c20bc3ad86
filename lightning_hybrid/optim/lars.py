"""LARS optimizer, a variant of SGD that scales each layer's step to the norm of its weights."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_hybrid.checks import require_choice, require_number
from lightning_hybrid.optim.dtensor import ShardSums
from lightning_hybrid.optim.foreach_ops import add_scaled_, as_dtype, in_blocks, scaled
from lightning_hybrid.optim.fused.step import FusedLars
from lightning_hybrid.optim.gradients import (
    UNSCALED,
    GradScaling,
    decayed_gradients,
    is_together,
    lr_of,
    state_dtype,
)
from lightning_hybrid.optim.layerwise import options_of
from lightning_hybrid.optim.orthogonal import OrthogonalStep, refuse_part
from lightning_hybrid.optim.trust_ratio import (
    ShardedVector,
    combined_norms,
    tensor_norms,
    trust_ratio,
)
from lightning_hybrid.placement import Part

MomentumForm = Literal["lr_inside", "lr_outside", "ratio_outside"]
Denominator = Literal["sum", "joint"]
Direction = Literal["momentum", "orthogonal"]
_CHOICES = {
    "momentum_form": get_args(MomentumForm),
    "denominator": get_args(Denominator),
    "direction": get_args(Direction),
}


class LARS(OrthogonalStep):
    """Optimizer with layer-wise adaptive rate scaling (You et al. 2017, arXiv:1708.03888).

    For each parameter tensor w with gradient g, and d = g + weight_decay * w:

        denominator     "sum"             q = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)
                        "joint"           q = trust_coefficient * |w| / (|d| + eps)

        momentum_form   "lr_inside"       v <- momentum * v + lr * q * d      w <- w - v
                        "lr_outside"      v <- momentum * v + q * d           w <- w - lr * v
                        "ratio_outside"   v <- momentum * v + d               w <- w - lr * q * v

    The paper's eta is `trust_coefficient`, its m is `momentum`, its beta (decay) is `weight_decay`, and v is
    the state `"momentum_buffer"`.

    The first two forms differ only if `lr` changes. With "lr_inside" each gradient keeps the learning rate of
    its own step. With "lr_outside" the current learning rate scales all of them. Used by:

        "lr_inside", "sum"        the paper, MLPerf's TensorFlow reference
        "lr_inside", "joint"      optax
        "lr_outside", "sum"       timm, apex LARC, lightly, and with momentum correction NVIDIA's MXNet
        "lr_outside", "joint"     Barlow Twins, MoCo v3, VISSL
        "ratio_outside", "sum"    NUS, ColossalAI (which also clamp)

    With `nesterov` the step uses momentum * v plus the last addend of v, instead of the updated v.

    A tensor with |w| = 0 or |g| = 0 ("joint": |d| = 0) gets q = 1, as in the MLPerf reference. The paper does
    not define this case. So with "sum", a tensor whose gradient is exactly zero decays at the full
    `lr * weight_decay`.

    `trust_clip=c` is LARC: q is replaced by min(q / lr, c), after the rule for zeros. With c = 1, as in apex
    and timm, the step is min(q, lr) * d, so `lr` is an upper bound instead of a factor. At lr = 0 the step is
    c * lr * d = 0.

    A group with `trust_ratio=False` is excluded from layer scaling. It has q = 1, its learning rate is
    lr * `excluded_lr_mult`, and it keeps its own weight decay. Biases and normalization layers are commonly
    excluded (see `param_groups`). However, the `lr` of LARS is hundreds of times that of SGD. In a network with
    biases and without normalization, do not exclude the biases, or set `excluded_lr_mult` near 0.01.

    Momentum starts at zero, so the first v is the first update. With the trust ratio off, "lr_outside" and
    "ratio_outside" are bitwise equal to `torch.optim.SGD` (dampening 0) in float32 and float64. So is
    "lr_inside" if momentum = 0 or lr is a constant power of two. Another constant lr changes the rounding, and
    a changing lr changes the rule.

    Parameters may be float16, bfloat16, float32 or float64. Arithmetic, norms and buffer are at least
    float32, and a half-precision parameter is rounded once, at the end. `lr` may be a 0-dim tensor on any
    device, and `step` does not read it on the host. With `foreach=None` a step processes one tensor at a time
    on the CPU, and lists of tensors elsewhere. On the CPU both are bitwise equal, except for "joint" and more
    than half a million elements, where the norm is summed in another order (in float64).

    `fused=True` makes two passes over the memory of the whole model: norms of gradients, then the update. On
    the CPU they are written in C++ (`fused.cpu`) and built by the system's compiler at the first use, which
    takes a few seconds once per machine. On CUDA they are three Triton kernels (`fused.cuda`), which have not
    been run on a GPU. None and False process lists of tensors. Without a compiler or triton, lists are used and
    a warning is raised. Only the rounding differs: weights agree with the step on lists to 2e-6 of their norm
    over ten steps, and to 1e-14 in float64. `fused` is an option of the optimizer, and groups cannot set it.
    With True, `torch.amp.GradScaler` leaves unscaling and skipping to the step, and Lightning then raises an
    error for gradient clipping with "16-mixed". `torch.compile(optimizer.step)` compiles the step on lists.

    With `capturable=True` a step reads nothing on the host, so that a CUDA graph can capture it. Capturing has
    not been tested. A learning rate that changes between replays must be a tensor. `differentiable` is an
    argument of torch's optimizers, and True raises an error.

    `direction="orthogonal"` keeps the size of the step and changes its direction. Every singular value of the
    momentum, viewed as the matrix [out, in * height * width], becomes about 1 (`orthogonal.orthogonalized`),
    as in Muon:

        v <- momentum * v + d;   O = orthogonalized(v);   w <- w - lr * trust_coefficient * |w| * O / |O|

    With `nesterov`, O is computed from momentum * v + d. Large batches have few updates, and with this rule
    each update moves a layer equally far along its weak and its strong directions. `momentum_form`,
    `denominator` and `eps` are not used. Tensors that are not matrices have O = v, and with |w| = 0 or |v| = 0
    the step is lr * v. Excluded groups use momentum SGD unless they set the direction themselves. Then the step
    is `w <- w - lr * excluded_lr_mult * sqrt(max(1, rows / columns)) * O`, which has the size of
    `torch.optim.Muon`. The step processes lists, and `fused=True` raises an error. With `work_group`, a process
    group such as the ranks of a node, each rank orthogonalizes some of the tensors and sends them to the other
    ranks in float16. The result is bitwise equal to the one without `work_group`. Sources: Jordan et al. 2024
    (Muon), Bernstein & Newhouse 2024 (arXiv:2409.20325).

    See `LayerwiseOptimizer` for half-precision gradients, loss scale and skipping.

    Raises:
        ValueError: An option has an invalid value, a group key is a misspelt option, a parameter is complex, or a
            gradient is sparse.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = LARS([weight], lr=10.0, momentum=0.9, trust_coefficient=0.01)
    >>> weight.grad = torch.tensor([0.0, 1e-6])
    >>> optimizer.step(); weight            # |step| = lr * trust_coefficient * |w| = 0.5, however small the gradient
    Parameter containing:
    tensor([3.0000, 3.5000], requires_grad=True)
    """

    _fused_step_type = FusedLars

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        nesterov: bool = False,
        momentum_form: MomentumForm = "lr_inside",
        denominator: Denominator = "sum",
        trust_clip: float | None = None,
        excluded_lr_mult: float = 1.0,
        direction: Direction = "momentum",
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        options = options_of(
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            trust_coefficient=trust_coefficient,
            eps=eps,
            nesterov=nesterov,
            momentum_form=momentum_form,
            denominator=denominator,
            trust_clip=trust_clip,
            excluded_lr_mult=excluded_lr_mult,
            direction=direction,
            foreach=foreach,
            maximize=maximize,
            fused=fused,
            capturable=capturable,
            differentiable=differentiable,
        )
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Check the options of a parameter group, and add it to the optimizer.

        An excluded group uses momentum SGD unless it sets a direction.
        """
        if isinstance(param_group, dict) and not param_group.get("trust_ratio", True):
            param_group = {"direction": "momentum", **param_group}
        super().add_param_group(param_group)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        require_number(
            "momentum",
            group["momentum"],
            "with 1, past gradients would never fade. Set 0 to disable momentum",
            high=1,
        )
        require_number(
            "trust_coefficient",
            group["trust_coefficient"],
            "at lr = 1, a step moves each layer by this fraction of its norm. Use 0.001, or exclude a group with "
            "trust_ratio=False",
            above=True,
        )
        require_number(
            "eps",
            group["eps"],
            "a negative value could make the denominator of the trust ratio zero. Set 0, as in the paper",
        )
        require_choice(
            "nesterov", group["nesterov"], (True, False), "True enables Nesterov momentum"
        )
        for name, choices in _CHOICES.items():
            require_choice(
                name, group[name], choices, "the docstring of LARS describes these choices"
            )
        self._check_combinations(group)

    def _check_combinations(self, group: dict[str, Any]) -> None:
        """Raise `ValueError` for options that cannot be combined."""
        if group["direction"] == "orthogonal":
            conflict = ""
            reason = ""
            if group["fused"]:
                conflict = "fused"
                reason = "orthogonalization has no fused kernels"
            elif group["trust_clip"] is not None:
                conflict = "trust_clip"
                reason = "a step of size lr * trust_coefficient * |w| has no ratio to clip"
            if conflict:
                raise ValueError(
                    f'`{conflict}` (={group[conflict]!r}) and `direction` (="orthogonal") cannot be combined, because '
                    f"{reason}. Leave `{conflict}` out."
                )
        if group["nesterov"] and group["momentum"] == 0:
            raise ValueError(
                "`momentum` (=0) must be above 0 if `nesterov` is True. Set momentum=0.9, or nesterov=False."
            )

    def _asks_for_fused(self) -> bool:
        if not super()._asks_for_fused():
            return False
        return all(group["direction"] == "momentum" for group in self.param_groups)

    def _before_updates(self) -> None:
        self._part_norms = {}
        if self.parts:
            self._part_norms = self._norms_over_ranks(self._vectors)
        self._orthogonalize()

    def _vectors(
        self, group: dict[str, Any], param: Tensor, grad: Tensor, part: Part
    ) -> list[ShardedVector]:
        """Return the vectors of a parameter shard whose norms determine its trust ratio."""
        if group["direction"] == "orthogonal":
            refuse_part(part)
        return lars_vectors(param, grad, part, group=group, scaling=self._scaling.to(param.device))

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        if group["direction"] == "orthogonal":
            self._orthogonal_update(group, params, grads)
            return
        lr = lr_of(group, params[0].device)
        scaling = self._scaling
        # The ratio depends on the full tensor, so it is computed before any block of the tensor is updated.
        ratios = None
        if group["trust_ratio"]:
            ratios = lars_ratios(
                params,
                grads,
                group=group,
                lr=lr,
                scaling=scaling,
                norms=self._whole_norms(params),
                shard_sums=self.shard_sums,
            )

        lists = [params, grads]
        if group["momentum"] != 0:
            lists.extend(self.state_lists(params, "momentum_buffer"))
        for blocks in in_blocks(*lists):
            lars_(*blocks, group=group, lr=lr, ratios=ratios, scaling=scaling)


def lars_vectors(
    param: Tensor,
    grad: Tensor,
    part: Part,
    *,
    group: dict[str, Any],
    scaling: GradScaling = UNSCALED,
) -> list[ShardedVector]:
    """Return the vectors of a parameter shard whose norms are inputs of `lars_ratios`.

    There are no vectors if the trust ratio is off.
    """
    if not group["trust_ratio"]:
        return []
    weight = ShardedVector(part=part, pieces=[param])
    if group["denominator"] == "sum":
        return [weight, ShardedVector(part=part, pieces=[grad])]
    blocks = in_blocks([param], [grad])
    directions = (decayed_gradients(*block, group=group, scaling=scaling)[0] for block in blocks)
    direction = ShardedVector(
        part=part, pieces=directions, is_in_blocks=not is_together(group, param)
    )
    return [weight, direction]


def lars_ratios(
    params: list[Tensor],
    grads: list[Tensor],
    *,
    group: dict[str, Any],
    lr: float | Tensor,
    scaling: GradScaling = UNSCALED,
    norms: Sequence[Tensor] | None = None,
    shard_sums: ShardSums | None = None,
) -> Tensor:
    """Compute the LARS trust ratios of tensors that have the same device and dtype.

    The result is a 1-D tensor on that device.

    Args:
        params: Weights.
        grads: Gradients, which are still multiplied by the loss scale.
        group: Parameter group. If it has a `trust_clip`, the ratios are clipped.
        lr: Learning rate, by which a clip divides.
        scaling: Loss scale of the gradients.
        norms: If `params` are shards, the norms of the full weights, and of the full gradients (still
            scaled) or directions.
        shard_sums: All-reduce over ranks, if `params` are shards of DTensors.
    """
    options = {"trust_coefficient": group["trust_coefficient"], "eps": group["eps"]}
    is_joint = group["denominator"] == "joint"
    if norms is not None:
        weight_norms, update_norms = norms
    elif is_joint:
        norms_of_blocks = []
        for block in in_blocks(params, grads):
            # The directions are not stored in a variable, so that their memory is free before the next block.
            norms_of_blocks.append(
                tensor_norms(decayed_gradients(*block, group=group, scaling=scaling))
            )
        weight_norms = tensor_norms(params)
        update_norms = combined_norms(norms_of_blocks)
    else:
        weight_norms = tensor_norms(params)
        update_norms = tensor_norms(grads)

    if not is_joint:
        # The norms are unscaled instead of the gradients, which saves a pass: |g / scale| = |g| / scale.
        (update_norms,) = scaling.unscale([update_norms], keep=[])
        options["weight_decay"] = group["weight_decay"]
    if shard_sums is not None:
        weight_norms, update_norms = shard_sums.norms(params, weight_norms, update_norms)

    ratios = trust_ratio(weight_norms, update_norms, **options)
    if group["trust_clip"] is None:
        return ratios
    # As in LARC, the step is limited: lr * result = min(ratio, lr * trust_clip). At lr = 0 the quotient is inf, and the
    # clip is the result.
    return (ratios / lr).clamp(max=group["trust_clip"])


def lars_(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor] | None = None,
    *,
    group: dict[str, Any],
    lr: float | Tensor,
    ratios: Tensor | None,
    scaling: GradScaling = UNSCALED,
) -> None:
    """Apply one LARS step in place to tensors that have the same device and dtype.

    Args:
        params: Weights.
        grads: Gradients, which are still multiplied by the loss scale.
        buffers: Momentum buffers. None if momentum is 0.
        group: Parameter group, with the options of `LARS`.
        lr: Learning rate.
        ratios: Trust ratio of each tensor. None if the trust ratio is off.
        scaling: Loss scale of the gradients, and whether to skip the step.
    """
    # The order of operations is that of torch.optim.SGD, so that excluded groups are bitwise equal to SGD.
    dtype = state_dtype(params[0].dtype)
    weights = as_dtype(params, dtype)
    directions = decayed_gradients(weights, grads, group=group, scaling=scaling)
    # If the step may be skipped, everything is computed in scratch memory, and `commit_` writes it unless `found_inf`.
    if weights is params:
        weights = scaling.scratch(params)
    if ratios is not None:
        ratios = ratios.to(dtype)

    # Without momentum all forms agree. "lr_outside" is then SGD bit for bit.
    momentum_form = "lr_outside"
    if buffers is not None:
        momentum_form = group["momentum_form"]

    if momentum_form == "lr_inside":
        factors = lr
        if ratios is not None:
            factors = lr * ratios
        directions = scaled(directions, factors, keep=grads)
        # The buffer now contains the learning rate, so the step must not apply it again.
        lr = 1.0
    elif momentum_form == "lr_outside" and ratios is not None:
        directions = scaled(directions, ratios, keep=grads)

    steps = directions
    if buffers is not None:
        new_buffers = _update_buffers(buffers, directions, group=group, scaling=scaling)
        steps = new_buffers
        if group["nesterov"]:
            steps = list(torch._foreach_add(directions, new_buffers, alpha=group["momentum"]))
        if momentum_form == "ratio_outside" and ratios is not None:
            # The new buffers must keep the unscaled momentum.
            steps = scaled(steps, ratios, keep=new_buffers)

    add_scaled_(weights, steps, -lr)
    scaling.commit_(params, weights)


def _update_buffers(
    buffers: list[Tensor],
    directions: list[Tensor],
    *,
    group: dict[str, Any],
    scaling: GradScaling,
) -> list[Tensor]:
    """Return the new momentum, and write it to `buffers` unless the step is skipped."""
    new_buffers = scaling.scratch(buffers)
    torch._foreach_mul_(new_buffers, group["momentum"])
    torch._foreach_add_(new_buffers, directions)
    scaling.commit_(buffers, new_buffers)
    return new_buffers
