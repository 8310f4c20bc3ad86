"""BatchNorm's running statistics over data ranks: those of the first, as under DDP."""

from functools import partial

import pytest
import torch

from tests import toy
from tests.pipeline.cases import accumulated, in_stages
from tests.scenes import fit, same


class Validated(toy.Toy):
    """Notes each loss in validation, on inputs that are the same on all ranks."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        same = torch.linspace(-2, 2, 8 * toy.NUM_FEATURES).view(8, toy.NUM_FEATURES)
        self.losses.append(self.loss((same, torch.arange(8) % toy.NUM_CLASSES)).item())


def test_data_ranks_validate_with_the_statistics_of_the_first(two_ranks, four_ranks):
    scene = {"val": partial(toy.loader, 16, 8), "num_sanity_val_steps": 0}
    expected = fit(two_ranks, Validated, **accumulated(val_check_interval=4, **scene))
    assert expected[0].losses == expected[1].losses
    for rank, seen in enumerate(fit(four_ranks, Validated, **in_stages(val_check_interval=1, **scene))):
        assert len(seen.losses) == 8  # each of four steps in two epochs
        # A batch in parts, where a matrix product may round otherwise.
        assert seen.losses == pytest.approx(expected[rank // 2].losses, rel=1e-5)
        assert same(seen.weights, expected[0].weights)
