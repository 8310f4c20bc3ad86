"""LAMB in float64, one number at a time, straight from You et al. 2019 (arXiv:1904.00962)."""

from math import inf, sqrt


def norm(vector):
    return sqrt(sum(x * x for x in vector))


def lamb(
    layers,
    gradients,
    lrs,
    *,
    beta1,
    beta2,
    eps,
    weight_decay,
    bias_correction=True,
    weight_norm_bounds=(0.0, inf),
    trust_clip=None,
    max_grad_norm=None,
):
    """The layers after len(lrs) steps; `gradients[t][i]` is the gradient of layer i at step t."""
    layers = [list(w) for w in layers]
    ms = [[0.0] * len(w) for w in layers]
    vs = [[0.0] * len(w) for w in layers]
    for t, (grads, lr) in enumerate(zip(gradients, lrs, strict=True), start=1):
        clip = 1.0
        if max_grad_norm is not None:
            total = sqrt(sum(norm(g) ** 2 for g in grads))
            clip = min(1.0, max_grad_norm / total) if total > 0 else 1.0
        for w, m, v, g in zip(layers, ms, vs, grads, strict=True):
            u = []
            for i in range(len(w)):
                gi = clip * g[i]
                m[i] = beta1 * m[i] + (1 - beta1) * gi
                v[i] = beta2 * v[i] + (1 - beta2) * gi * gi
                m_hat = m[i] / (1 - beta1**t) if bias_correction else m[i]
                v_hat = v[i] / (1 - beta2**t) if bias_correction else v[i]
                u.append(m_hat / (sqrt(v_hat) + eps) + weight_decay * w[i])
            low, high = weight_norm_bounds
            phi = min(max(norm(w), low), high)
            q = phi / norm(u) if phi > 0 and norm(u) > 0 else 1.0
            if trust_clip is not None:
                q = min(q, trust_clip)
            for i in range(len(w)):
                w[i] -= lr * q * u[i]
    return layers
