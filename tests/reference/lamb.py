"""LAMB in float64, straight from You et al. 2019 (arXiv:1904.00962)."""

import math

import torch


def norm(tensor):
    return tensor.square().sum().sqrt()


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
    """The layers after len(lrs) steps; `gradients[t][i]` is the gradient of layer i at step t."""
    ws, ms, vs = list(ws), [torch.zeros_like(w) for w in ws], [torch.zeros_like(w) for w in ws]
    for t, (grads, lr) in enumerate(zip(gradients, lrs, strict=True), start=1):
        total = sum(norm(g) ** 2 for g in grads) ** 0.5
        clip = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / total)
        for i, g in enumerate(grads):
            ms[i] = betas[0] * ms[i] + (1 - betas[0]) * clip * g
            vs[i] = betas[1] * vs[i] + (1 - betas[1]) * (clip * g) ** 2
            m, v = ms[i], vs[i]
            if bias_correction:
                m, v = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
            u = m / (v.sqrt() + eps) + weight_decay * ws[i]
            phi = norm(ws[i]).clamp(*weight_norm_bounds)
            q = phi / norm(u) if phi > 0 else 1.0
            ws[i] = ws[i] - lr * (q if trust_clip is None else min(q, trust_clip)) * u
    return ws
