"""LARS in float64, one number at a time, straight from You et al. 2017 (arXiv:1708.03888), and its variants."""

from math import sqrt


def norm(vector):
    return sqrt(sum(x * x for x in vector))


def trust(w, g, *, weight_decay, trust_coefficient, eps, denominator):
    if denominator == "sum":
        if norm(w) == 0 or norm(g) == 0:
            return 1.0
        return trust_coefficient * norm(w) / (norm(g) + weight_decay * norm(w) + eps)
    d = [gi + weight_decay * wi for gi, wi in zip(g, w, strict=True)]
    if norm(w) == 0 or norm(d) == 0:
        return 1.0
    return trust_coefficient * norm(w) / (norm(d) + eps)


def lars(
    w,
    gradients,
    lrs,
    *,
    momentum,
    weight_decay,
    trust_coefficient,
    eps,
    nesterov,
    momentum_form,
    denominator,
    trust_clip=None,
):
    """The weights of one layer after len(lrs) steps; `gradients[t]` and `lrs[t]` are those of step t."""
    w = list(w)
    v = [0.0] * len(w)
    for g, lr in zip(gradients, lrs, strict=True):
        q = trust(
            w, g, weight_decay=weight_decay, trust_coefficient=trust_coefficient, eps=eps, denominator=denominator
        )
        if trust_clip is not None:
            q = min(q / lr, trust_clip) if lr > 0 else trust_clip
        for i in range(len(w)):
            d = g[i] + weight_decay * w[i]
            if momentum_form == "lr_inside":
                v[i] = momentum * v[i] + lr * q * d
                w[i] -= momentum * v[i] + lr * q * d if nesterov else v[i]
            elif momentum_form == "lr_outside":
                v[i] = momentum * v[i] + q * d
                w[i] -= lr * (momentum * v[i] + q * d if nesterov else v[i])
            elif momentum_form == "ratio_outside":
                v[i] = momentum * v[i] + d
                w[i] -= lr * q * (momentum * v[i] + d if nesterov else v[i])
            else:
                raise KeyError(momentum_form)
    return w
