"""Fifty steps of our optimizer and a family's own rule, on any path and device."""

import inspect

import torch
from torch import nn

from lightning_hybrid.optim import LARS, WarmupPolynomialDecay
from tests.optim.test_lars import normals
from tests.reference.families import FAMILIES

NUM_STEPS = 50
COMMON = {"momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.01}
# An excluded group: SGD's rule (Barlow Twins': no ratio, no decay, plain momentum) at a multiplied rate.
EXCLUDED = {"trust_ratio": False, "weight_decay": 0.0, "excluded_lr_mult": 0.01}


def distance_from(family, shapes, *, dtype=torch.float64, device="cpu", maximize=False, num_steps=NUM_STEPS, **path):
    """The largest ``|w - w_family| / |w_family|`` over layers, after a warm-up and a poly-2 decay."""
    rule, named = FAMILIES[family]
    peak = 0.02 if "trust_clip" in named else 6.0  # a ceiling, near enough to the ratio that both sides of it occur
    layers = [nn.Parameter(normals(*shape, seed=i, dtype=dtype).to(device)) for i, shape in enumerate(shapes)]
    starts = [layer.detach().cpu().double().clone() for layer in layers]
    groups = [{"params": layers[:-1]}, {"params": layers[-1:], **EXCLUDED}]
    optimizer = LARS(groups, lr=peak, maximize=maximize, **COMMON, **named, **path)
    schedule = WarmupPolynomialDecay(optimizer, total_steps=num_steps, warmup_steps=10, warmup_start_lr=0.1 * peak)
    gradients, lrs = [[] for _ in layers], []
    for step in range(num_steps):
        for index, (history, layer) in enumerate(zip(gradients, layers, strict=True)):
            layer.grad = normals(*layer.shape, seed=1000 * (step + 1) + index, dtype=dtype).to(device)
            history.append((-1 if maximize else 1) * layer.grad.cpu().double())
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    takes = inspect.signature(rule).parameters
    options = COMMON | {"eps": 0.0, "nesterov": False} | named
    options = {name: value for name, value in options.items() if name in takes}
    if "trust_clip" in named:
        options["clip"] = True
    ends = [rule(start, history, lrs, **options) for start, history in zip(starts[:-1], gradients, strict=False)]
    momentum, (excluded, rates) = torch.zeros_like(starts[-1]), (starts[-1], [0.01 * lr for lr in lrs])
    inside = named["momentum_form"] == "lr_inside"
    for g, lr in zip(gradients[-1], rates, strict=True):
        d = lr * g if inside else g
        momentum = COMMON["momentum"] * momentum + d
        step = COMMON["momentum"] * momentum + d if named.get("nesterov") else momentum
        excluded = excluded - (step if inside else lr * step)
    pairs = zip(layers, [*ends, excluded], strict=True)
    return max(((one.detach().cpu().double() - end).norm() / end.norm()).item() for one, end in pairs)
