"""The numbers of the fused LARS in torch's own operations, beside which those of the kernels are held."""

import torch

from lightning_hybrid.optim.trust_ratio import trust_ratio


def coefficients(sums, options, scaling, *, is_joint):
    """The numbers of the update, (tensors, 6), float64:

        d = SCALE * g + DECAY * w
        v <- MOMENTUM * v + INSIDE * d
        w <- w - OUTSIDE * v            LOOK (Nesterov): w - OUTSIDE * (MOMENTUM * v + INSIDE * d)

        INSIDE, OUTSIDE      "lr_inside"  lr * q, 1      "lr_outside"  q, lr      "ratio_outside"  1, lr * q

    `sums`: (2, tensors), of squares of weights, and of still scaled gradients or directions.
    """
    scale = 1.0 if scaling.inverse_scale is None else scaling.inverse_scale
    weight_norms, norms = sums.sqrt().unbind()
    ratios = trust_ratio(
        weight_norms,
        norms * scale,
        trust_coefficient=options["trust_coefficient"],
        weight_decay=0.0 if is_joint else options["weight_decay"],
        eps=options["eps"],
    )
    is_adapted = options["trust_ratio"] > 0
    lr = torch.where(is_adapted, options["lr"], options["lr"] * options["excluded_lr_mult"])
    clipped = torch.minimum(ratios / lr, options["trust_clip"])
    ratios = torch.where(options["trust_clip"] < torch.inf, clipped, ratios)
    ratios = torch.where(is_adapted, ratios, 1.0)
    form = options["momentum_form"]
    inside = torch.where(form == 0, lr * ratios, torch.where(form == 1, ratios, 1.0))
    outside = torch.where(form == 0, 1.0, torch.where(form == 1, lr, lr * ratios))
    scales = options["sign"] * scale
    return torch.stack([scales, options["weight_decay"], options["momentum"], inside, outside, options["nesterov"]], 1)
