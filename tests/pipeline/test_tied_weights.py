"""A weight in several stages: one sum of its gradients a step, one norm, one place in a checkpoint."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_hybrid.optim import LAMB
from tests import toy
from tests.pipeline.cases import InBlocks, accumulated, in_stages
from tests.pipeline.test_bit_equality import WithLars
from tests.scenes import fit, same

WIDTH = toy.NUM_FEATURES
NUM = 4
NUM_TOKENS = 17


class Tied(WithLars):
    """The first and the last layer have one weight."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            middle = [
                layer
                for _ in range(2)
                for layer in (nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
            ]
            self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), *middle, nn.Linear(WIDTH, WIDTH))
        self.tie()

    def tie(self):
        self.net[-1].weight = self.net[0].weight


class Apart(Tied):
    """Both layers have their own, and in each step the sum of both gradients, of all micro-batches."""

    def tie(self):
        self.net[-1].weight = nn.Parameter(self.net[0].weight.detach().clone())

    def on_after_backward(self):
        if (self.trainer.fit_loop.batch_idx + 1) % NUM == 0:
            one = self.net[0].weight
            other = self.net[-1].weight
            one.grad = other.grad = one.grad + other.grad


class WithLamb(Tied):
    optimizer = LAMB
    options = {"lr": 0.01, "weight_decay": 0.01}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["32-true", "16-true"])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_its_gradient_is_that_of_both_uses_summed_once_a_step_bit_for_bit(
    one_rank, rank_pool, num_stages, precision
):
    (expected,) = fit(one_rank, Apart, **accumulated(precision=precision))
    for seen in fit(
        rank_pool.ranks(num_stages), Tied, **in_stages(num_stages=num_stages, precision=precision)
    ):
        assert same(seen.weights, expected.weights)


class Detached(nn.Linear):
    """A layer that uses its weight and does not train it."""

    def forward(self, x):
        return F.linear(x, self.weight.detach(), self.bias)


class TrainedOnce(Tied):
    """The last layer has the weight of the first, and gives it no gradient."""

    def tie(self):
        self.net[-1] = Detached(WIDTH, WIDTH)
        with torch.no_grad():
            self.net[-1].bias.zero_()
        self.net[-1].weight = self.net[0].weight


def test_a_stage_that_gives_a_tied_weight_no_gradient_takes_part_in_its_sum(one_rank, two_ranks):
    (expected,) = fit(one_rank, TrainedOnce, **accumulated())
    for seen in fit(two_ranks, TrainedOnce, **in_stages(timeout=20)):
        assert same(seen.weights, expected.weights)


def assert_near(piped, expected):
    """The bound: 16 steps, each with one addition in another order, of 2^-24 relative to the largest summand."""
    assert all(same(seen.weights, piped[0].weights) for seen in piped)
    for name, weight in piped[0].weights.items():
        assert (weight - expected.weights[name]).norm() <= 1e-6 * expected.weights[name].norm(), (
            name
        )


@pytest.mark.parametrize(("module", "scene"), [(WithLamb, {}), (Tied, {"gradient_clip_val": 0.05})])
def test_it_trains_what_accumulation_trains_but_for_the_order_of_additions(
    two_ranks, four_ranks, module, scene
):
    assert_near(
        fit(four_ranks, module, **in_stages(**scene)),
        fit(two_ranks, module, **accumulated(**scene))[0],
    )


def test_its_checkpoint_is_that_of_a_whole_network(one_rank, two_ranks, four_ranks, tmp_path):
    plain, some, more = (tmp_path / name for name in ("plain.ckpt", "some.ckpt", "more.ckpt"))
    scene = {"module": Tied, "precision": "16-true"}
    fit(one_rank, **accumulated(save_to=plain, **scene))
    fit(four_ranks, **in_stages(num_stages=4, save_to=some, max_epochs=1, **scene))
    (went_on,) = fit(one_rank, **accumulated(ckpt_path=some, max_epochs=1, **scene))
    piped = fit(two_ranks, **in_stages(ckpt_path=some, save_to=more, **scene))
    straight = fit(two_ranks, **in_stages(**scene))
    one, other, between = (torch.load(path, weights_only=True) for path in (plain, more, some))
    assert list(one["state_dict"]) == list(other["state_dict"])
    assert (
        one["optimizer_states"][0]["state"].keys() == other["optimizer_states"][0]["state"].keys()
    )
    names = ("net.0.weight", "net.7.weight")
    assert len({other["state_dict"][name].untyped_storage().data_ptr() for name in names}) == 1
    assert same(dict(between["state_dict"]), went_on.weights)
    assert same(piped[0].weights, straight[0].weights)


class Embeds(nn.Embedding):
    def forward(self, tokens, targets):
        return super().forward(tokens), targets


class Mixes(nn.TransformerEncoderLayer):
    def forward(self, states, targets):
        return super().forward(states), targets


class Losses(nn.Linear):
    def forward(self, states, targets):
        return F.cross_entropy(
            super().forward(states).flatten(0, 1), targets.flatten(), reduction="none"
        )


class TellsTokens(Tied):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = [Mixes(WIDTH, 2, WIDTH, 0.0, batch_first=True) for _ in range(2)]
            self.net = InBlocks(Embeds(NUM_TOKENS, WIDTH), *layers, Losses(WIDTH, NUM_TOKENS))
        self.net.blocks[-1].weight = self.net.blocks[0].weight

    def loss(self, batch):
        tokens = (4 * batch[0]).long().remainder(NUM_TOKENS)
        return self.net(tokens, tokens.roll(1, 1)).mean()


def test_a_language_model_whose_last_stage_returns_losses_trains_as_under_accumulation(
    one_rank, four_ranks
):
    assert_near(
        fit(four_ranks, TellsTokens, **in_stages(num_stages=4)),
        fit(one_rank, TellsTokens, **accumulated())[0],
    )


class TiedInside(Tied):
    def tie(self):
        self.net[5].weight = self.net[0].weight


def test_two_stages_of_one_rank_cannot_share_it(two_ranks):
    scene = in_stages(schedule="interleaved", cuts=[2, 4, 6], raises=True)
    for seen in fit(two_ranks, TiedInside, **scene):
        assert "must not be in two stages of one rank (= stages [0, 2])" in seen.error
