"""Pipeline stages whose layers are sliced across the ranks of a node that hold them."""

from functools import partial

import pytest
import torch
from torch import nn

from lightning_hybrid import Comm
from tests import toy
from tests.pipeline.cases import accumulated, in_stages
from tests.scenes import fit
from tests.strategy.node_slices.sliced import difference

BOUNDS = {"32-true": 1e-6, "16-true": 4e-3}  # as for sliced layers without stages
CLIPS = {"gradient_clip_val": 0.1}
SCALE = {"loss_scale": 1024}
NARROW = {"comm": Comm(dtype="float16")}


class Staged(toy.Toy):
    """Module with a pair in its first stage and only a head in its last stage, which leaves DDP nothing to reduce."""

    def __init__(self, is_cut):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            pair = [nn.Linear(toy.NUM_FEATURES, 16), nn.Tanh(), nn.Linear(16, 14), nn.LayerNorm(14)]
            self.net = nn.Sequential(*pair, nn.Linear(14, toy.NUM_CLASSES))
        self.net.node_slices = (("0", "2"), ("4",)) if is_cut else ()


@pytest.mark.parametrize(
    ("num_data_ranks", "precision", "scene"),
    [
        (2, "32-true", {}),
        pytest.param(4, "32-true", CLIPS, marks=pytest.mark.long),
        pytest.param(4, "16-true", SCALE, marks=pytest.mark.long),
        pytest.param(4, "16-true", SCALE | NARROW, marks=pytest.mark.long),
    ],
)
def test_cut_layers_in_stages_train_as_whole_layers_on_one_node_and_on_two(
    rank_pool, num_data_ranks, precision, scene
):
    scene = {"precision": precision, **scene}
    data_ranks = rank_pool.ranks(num_data_ranks)
    whole = fit(data_ranks, partial(Staged, False), **accumulated(**scene))
    stages = in_stages(cuts=[4], ranks_per_node=4, **scene)
    for seen in fit(rank_pool.ranks(2 * num_data_ranks), partial(Staged, True), **stages):
        error = difference(seen.weights, whole[0].weights, least=1.0)
        assert error < BOUNDS[precision], f"rank {seen.rank}"
