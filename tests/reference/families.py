"""LARS and LAMB of each family of libraries: the rule on one tensor in float64, in the original order of operations."""

import math

import torch


def norm(tensor):
    return tensor.square().sum().sqrt()


def paper(w, gradients, lrs, *, momentum, weight_decay, trust_coefficient):
    """Apply You et al. 2017 (arXiv:1708.03888), Algorithm 1. The local learning rate is inside the momentum."""
    v = torch.zeros_like(w)
    for g, lr in zip(gradients, lrs, strict=True):
        local_lr = trust_coefficient * norm(w) / (norm(g) + weight_decay * norm(w))
        v = momentum * v + lr * local_lr * (g + weight_decay * w)
        w = w - v
    return w


def mlperf_tensorflow(
    w, gradients, lrs, *, momentum, weight_decay, trust_coefficient, eps, nesterov
):
    """Apply ``lars_optimizer.py`` of mlcommons/training: Keras's momentum on the scaled learning rate.

    If a norm is 0, the ratio is 1.
    """
    accumulator = torch.zeros_like(w)
    for g, lr in zip(gradients, lrs, strict=True):
        ratio = torch.ones((), dtype=w.dtype)
        if norm(w) > 0 and norm(g) > 0:
            ratio = trust_coefficient * norm(w) / (norm(g) + weight_decay * norm(w) + eps)
        scaled_lr = lr * ratio
        decayed = g + weight_decay * w
        accumulator = momentum * accumulator - scaled_lr * decayed
        if nesterov:
            w = w + (momentum * accumulator - scaled_lr * decayed)
        else:
            w = w + accumulator
    return w


def optax(w, gradients, lrs, *, momentum, weight_decay, trust_coefficient, eps, nesterov):
    """Apply ``optax.lars``: a chain of decay, trust ratio of the decayed update, learning rate, and trace."""
    trace = torch.zeros_like(w)
    for g, lr in zip(gradients, lrs, strict=True):
        update = g + weight_decay * w
        ratio = trust_coefficient * norm(w) / (norm(update) + eps)
        if norm(w) > 0 and norm(update) > 0:
            update = update * ratio
        update = -lr * update
        trace = update + momentum * trace
        if nesterov:
            w = w + (update + momentum * trace)
        else:
            w = w + trace
    return w


def timm(
    w, gradients, lrs, *, momentum, weight_decay, trust_coefficient, eps, nesterov, clip=False
):
    """Apply LARS of timm, lightly, torch_optimizer, and apex LARC around SGD: it scales gradients before momentum."""
    buffer = None
    for g, lr in zip(gradients, lrs, strict=True):
        ratio = trust_coefficient * norm(w) / (norm(g) + weight_decay * norm(w) + eps)
        if clip:
            ratio = min(ratio / lr, torch.ones_like(ratio))
        d = (g + weight_decay * w) * ratio
        if buffer is None:
            buffer = d.clone()
        else:
            buffer = momentum * buffer + d
        if nesterov:
            w = w - lr * (d + momentum * buffer)
        else:
            w = w - lr * buffer
    return w


def nvidia_mxnet(w, gradients, lrs, *, momentum, weight_decay, trust_coefficient, eps):
    """Apply ``SGDwFASTLARS`` of NVIDIA's MXNet entries: the paper's rule with Goyal et al.'s momentum correction."""
    v = torch.zeros_like(w)
    previous = lrs[0]
    for g, lr in zip(gradients, lrs, strict=True):
        local_lr = trust_coefficient * norm(w) / (norm(g) + weight_decay * norm(w) + eps)
        v = momentum * (lr / previous) * v - lr * local_lr * (g + weight_decay * w)
        w = w + v
        previous = lr
    return w


def barlow_twins(w, gradients, lrs, *, momentum, weight_decay, trust_coefficient):
    """Apply LARS of Barlow Twins, MoCo v3 and VISSL: the ratio uses the decayed gradient, without epsilon."""
    mu = torch.zeros_like(w)
    for g, lr in zip(gradients, lrs, strict=True):
        dp = g + weight_decay * w
        q = 1.0
        if norm(w) > 0 and norm(dp) > 0:
            q = trust_coefficient * norm(w) / norm(dp)
        mu = mu * momentum + dp * q
        w = w - lr * mu
    return w


def colossalai(w, gradients, lrs, *, momentum, weight_decay, trust_coefficient, eps):
    """Apply LARS of NUS-HPC and ColossalAI without their clamps: momentum first, and the ratio on the whole history."""
    buffer = torch.zeros_like(w)
    for g, lr in zip(gradients, lrs, strict=True):
        ratio = trust_coefficient * norm(w) / (norm(g) + weight_decay * norm(w) + eps)
        buffer = momentum * buffer + g + weight_decay * w
        w = w - lr * ratio * buffer
    return w


def joint_outside(w, gradients, lrs, *, momentum, weight_decay, trust_coefficient, eps, nesterov):
    """Apply "ratio_outside" with "joint", which no library uses: ColossalAI's momentum with optax's ratio."""
    buffer = torch.zeros_like(w)
    for g, lr in zip(gradients, lrs, strict=True):
        d = g + weight_decay * w
        buffer = momentum * buffer + d
        ratio = trust_coefficient * norm(w) / (norm(d) + eps)
        if nesterov:
            w = w - lr * ratio * (momentum * buffer + d)
        else:
            w = w - lr * ratio * buffer
    return w


# Family -> its rule, the equivalent options of our LARS, and our additional options.
FAMILIES = {
    "paper": (paper, {"momentum_form": "lr_inside", "denominator": "sum"}),
    "mlperf": (
        mlperf_tensorflow,
        {"momentum_form": "lr_inside", "denominator": "sum", "eps": 1e-7},
    ),
    "mlperf-nesterov": (
        mlperf_tensorflow,
        {"momentum_form": "lr_inside", "denominator": "sum", "nesterov": True},
    ),
    "optax": (optax, {"momentum_form": "lr_inside", "denominator": "joint"}),
    "optax-nesterov": (
        optax,
        {"momentum_form": "lr_inside", "denominator": "joint", "nesterov": True, "eps": 1e-6},
    ),
    "timm": (timm, {"momentum_form": "lr_outside", "denominator": "sum", "eps": 1e-8}),
    "timm-nesterov": (
        timm,
        {"momentum_form": "lr_outside", "denominator": "sum", "nesterov": True},
    ),
    "larc": (
        timm,
        {"momentum_form": "lr_outside", "denominator": "sum", "eps": 1e-8, "trust_clip": 1.0},
    ),
    "nvidia": (nvidia_mxnet, {"momentum_form": "lr_outside", "denominator": "sum"}),
    "barlow": (barlow_twins, {"momentum_form": "lr_outside", "denominator": "joint"}),
    "colossalai": (colossalai, {"momentum_form": "ratio_outside", "denominator": "sum"}),
    "nobody": (joint_outside, {"momentum_form": "ratio_outside", "denominator": "joint"}),
    "nobody-nesterov": (
        joint_outside,
        {"momentum_form": "ratio_outside", "denominator": "joint", "nesterov": True},
    ),
}


def lamb(
    ws,
    gradients,
    lrs,
    *,
    betas,
    eps,
    weight_decay,
    bias_correction=True,
    weight_norm_bounds=(0.0, math.inf),
    trust_clip=None,
    max_grad_norm=None,
):
    """Return the layers after len(lrs) steps. `gradients[t][i]` is the gradient of layer i at step t."""
    ws = list(ws)
    ms = [torch.zeros_like(w) for w in ws]
    vs = [torch.zeros_like(w) for w in ws]
    for t, (grads, lr) in enumerate(zip(gradients, lrs, strict=True), start=1):
        total = sum(norm(g) ** 2 for g in grads) ** 0.5
        clip = 1.0
        if max_grad_norm is not None:
            clip = min(1.0, max_grad_norm / total)
        for i, g in enumerate(grads):
            ms[i] = betas[0] * ms[i] + (1 - betas[0]) * clip * g
            vs[i] = betas[1] * vs[i] + (1 - betas[1]) * (clip * g) ** 2
            m = ms[i]
            v = vs[i]
            if bias_correction:
                m = m / (1 - betas[0] ** t)
                v = v / (1 - betas[1] ** t)
            u = m / (v.sqrt() + eps) + weight_decay * ws[i]
            phi = norm(ws[i]).clamp(*weight_norm_bounds)
            q = 1.0
            if phi > 0:
                q = phi / norm(u)
            if trust_clip is not None:
                q = min(q, trust_clip)
            ws[i] = ws[i] - lr * q * u
    return ws
