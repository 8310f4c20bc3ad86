"""Training without fp32 master weights, in which weights and momentum are fp16 numbers, unlike with them."""

import pytest
import torch

from recipes.training.build import build
from tests.recipes.composed import composed
from tests.recipes.training.test_recipes import NO_FILES, QUIET

SMALL = "model=alexnet_bn model.width=0.0625 trainer.max_steps=3 trainer.devices=1 trainer.limit_val_batches=0"


def is_fp16(values: torch.Tensor) -> bool:
    return torch.equal(values, values.half().float())


@pytest.mark.parametrize(
    ("callbacks", "expected"), [("[default,without_masters]", True), ("[default]", False)]
)
def test_weights_and_momentum_are_fp16_numbers_exactly_without_masters(callbacks, expected):
    words = [
        *QUIET,
        *NO_FILES,
        *SMALL.split(),
        f"callbacks={callbacks}",
        "warmup_epochs=0",
        "batch_size_per_rank=64",
    ]
    trainer, module, data = build(composed("train", *words))
    trainer.fit(module, data)
    assert trainer.accumulate_grad_batches == 2
    weights = [weight.detach() for weight in module.parameters()]
    momenta = [state["momentum_buffer"] for state in trainer.optimizers[0].state.values()]
    assert weights[0].dtype is torch.float32
    assert all(map(is_fp16, weights)) == expected
    assert all(map(is_fp16, momenta)) == expected
    assert any(momentum.any() for momentum in momenta)
