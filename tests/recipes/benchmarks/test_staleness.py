"""Stale gradients against the recurrences of the papers, in float64 by hand."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from recipes.benchmarks.staleness import train_stale

RATE, NUM_STEPS = 0.05, 6


def scalar(value):
    layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(layer.weight, value)
    return layer


@pytest.mark.parametrize(
    ("delays", "is_stashed"), [((0, 0), True), ((2, 2), True), ((1, 0), True), ((1, 0), False), ((3, 0), False)]
)
def test_each_gradient_is_that_of_the_weights_that_its_stage_saw(delays, is_stashed):
    """Loss x a b of two scalars; without stashing backward multiplies by the newest b."""
    first, second = scalar(1.5), scalar(-0.7)
    inputs = [torch.tensor([[float(step + 1)]], dtype=torch.float64) for step in range(NUM_STEPS)]
    a, b = [1.5], [-0.7]
    for x in (value.item() for value in inputs):
        old_a, old_b = (kept[max(0, len(kept) - 1 - delay)] for kept, delay in zip((a, b), delays, strict=True))
        of_a, of_b = x * (old_b if is_stashed else b[-1]), x * old_a
        a.append(a[-1] - RATE * of_a)
        b.append(b[-1] - RATE * of_b)
    losses = (lambda x=x: second(first(x)).sum() for x in inputs)
    optimizer = SGD([*first.parameters(), *second.parameters()], lr=RATE)
    blocks = list(zip((first, second), delays, strict=True))
    assert len(list(train_stale(blocks, losses, optimizer, is_stashed=is_stashed))) == NUM_STEPS
    assert (first.weight.item(), second.weight.item()) == pytest.approx((a[-1], b[-1]), rel=1e-12)
