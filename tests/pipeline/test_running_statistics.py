"""BatchNorm's running statistics over data ranks: those of the first, as under DDP."""

from __future__ import annotations

import pytest
import torch

from lightning_hybrid import Comm, HybridAllReduceStrategy, HybridPipelineStrategy
from tests import toy

NUM_MICROBATCHES = 4


class Validated(toy.Toy):
    """Notes each loss in validation, on inputs that are the same on all ranks."""

    def __init__(self):
        super().__init__()
        self.found = []

    def validation_step(self, batch, batch_idx):
        same = torch.linspace(-2, 2, 8 * toy.NUM_FEATURES).view(8, toy.NUM_FEATURES)
        self.found.append(self.loss((same, torch.arange(8) % toy.NUM_CLASSES)).item())


def validated(strategy, size, accumulate):
    module = Validated()
    trainer = toy.trainer(
        strategy=strategy, accumulate_grad_batches=accumulate, val_check_interval=accumulate, num_sanity_val_steps=0
    )
    trainer.fit(module, toy.loader(64, size), toy.loader(16, 8))
    return module.found, toy.weights(module)


def in_stages():
    return validated(HybridPipelineStrategy(num_stages=2, num_microbatches=NUM_MICROBATCHES), 8, 1)


def by_accumulation():
    return validated(HybridAllReduceStrategy(comm=Comm(tune="off")), 8 // NUM_MICROBATCHES, NUM_MICROBATCHES)


def test_data_ranks_validate_with_the_statistics_of_the_first(two_ranks, four_ranks):
    expected = two_ranks.run(by_accumulation)
    assert expected[0][0] == expected[1][0]
    for rank, (found, weights) in enumerate(four_ranks.run(in_stages)):
        losses, _ = expected[rank // 2]
        assert len(found) == 8  # each of four steps in two epochs
        assert found == pytest.approx(losses, rel=1e-5)  # a batch in parts, where a matrix product may round otherwise
        assert toy.same_bits(weights, expected[0][1])
