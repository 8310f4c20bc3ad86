"""Weights shared by several stages: one reduction of gradients per step, one norm, one entry in a checkpoint."""

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
    """Module whose first and last layer share a weight."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = [nn.Linear(WIDTH, WIDTH)]
            # In the order of the network, in which their initial weights are drawn.
            for _ in range(2):
                layers += [nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)]
            layers.append(nn.Linear(WIDTH, WIDTH))
            self.net = nn.Sequential(*layers)
        self.tie()

    def tie(self):
        self.net[-1].weight = self.net[0].weight


class Apart(Tied):
    """Module with two separate weights, each of which gets the sum of both gradients over all micro-batches."""

    def tie(self):
        self.net[-1].weight = nn.Parameter(self.net[0].weight.detach().clone())

    def on_after_backward(self):
        if (self.trainer.fit_loop.batch_idx + 1) % NUM == 0:
            first = self.net[0].weight
            last = self.net[-1].weight
            gradient = first.grad + last.grad
            first.grad = gradient
            last.grad = gradient


class WithLamb(Tied):
    optimizer = LAMB
    options = {"lr": 0.01, "weight_decay": 0.01}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["32-true", "16-true"])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_the_gradients_of_a_tied_weight_are_summed_once_a_step_bit_for_bit(
    one_rank, rank_pool, num_stages, precision
):
    (expected,) = fit(one_rank, Apart, **accumulated(precision=precision))
    scene = in_stages(num_stages=num_stages, precision=precision)
    for seen in fit(rank_pool.ranks(num_stages), Tied, **scene):
        assert same(seen.weights, expected.weights), f"rank {seen.rank}"


class Detached(nn.Linear):
    """Layer that uses its weight without training it."""

    def forward(self, x):
        return F.linear(x, self.weight.detach(), self.bias)


class TrainedOnce(Tied):
    """Module whose last layer has the weight of the first one, without a gradient."""

    def tie(self):
        self.net[-1] = Detached(WIDTH, WIDTH)
        with torch.no_grad():
            self.net[-1].bias.zero_()
        self.net[-1].weight = self.net[0].weight


def test_a_stage_without_a_gradient_of_a_tied_weight_joins_the_sum(one_rank, two_ranks):
    (expected,) = fit(one_rank, TrainedOnce, **accumulated())
    for seen in fit(two_ranks, TrainedOnce, **in_stages(timeout=20)):
        assert same(seen.weights, expected.weights), f"rank {seen.rank}"


def assert_near(piped, expected):
    """Assert that weights differ only by rounding.

    Each of 16 steps has one addition in another order, with an error of 2^-24 relative to the largest summand.
    """
    for seen in piped:
        assert same(seen.weights, piped[0].weights), f"rank {seen.rank}"
    for name, weight in piped[0].weights.items():
        error = (weight - expected.weights[name]).norm()
        assert error <= 1e-6 * expected.weights[name].norm(), name


@pytest.mark.parametrize(("module", "scene"), [(WithLamb, {}), (Tied, {"gradient_clip_val": 0.05})])
def test_tied_weights_train_as_under_accumulation_except_for_the_order_of_additions(
    two_ranks, four_ranks, module, scene
):
    piped = fit(four_ranks, module, **in_stages(**scene))
    expected = fit(two_ranks, module, **accumulated(**scene))
    assert_near(piped, expected[0])


def test_a_checkpoint_with_a_tied_weight_is_that_of_a_whole_network(
    one_rank, two_ranks, four_ranks, tmp_path
):
    path_of_whole = tmp_path / "whole.ckpt"
    path_of_four = tmp_path / "four_stages.ckpt"
    path_of_two = tmp_path / "two_stages.ckpt"
    scene = {"module": Tied, "precision": "16-true"}
    fit(one_rank, **accumulated(save_to=path_of_whole, **scene))
    fit(four_ranks, **in_stages(num_stages=4, save_to=path_of_four, max_epochs=1, **scene))
    (loaded,) = fit(one_rank, **accumulated(ckpt_path=path_of_four, max_epochs=1, **scene))
    resumed = fit(two_ranks, **in_stages(ckpt_path=path_of_four, save_to=path_of_two, **scene))
    uninterrupted = fit(two_ranks, **in_stages(**scene))

    whole = torch.load(path_of_whole, weights_only=True)
    two_stages = torch.load(path_of_two, weights_only=True)
    assert list(whole["state_dict"]) == list(two_stages["state_dict"])
    state = two_stages["optimizer_states"][0]["state"]
    assert state.keys() == whole["optimizer_states"][0]["state"].keys()
    first = two_stages["state_dict"]["net.0.weight"]
    last = two_stages["state_dict"]["net.7.weight"]
    assert first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()

    four_stages = torch.load(path_of_four, weights_only=True)
    assert same(dict(four_stages["state_dict"]), loaded.weights)
    assert same(resumed[0].weights, uninterrupted[0].weights)


class Embeds(nn.Embedding):
    def forward(self, tokens, targets):
        return super().forward(tokens), targets


class Mixes(nn.TransformerEncoderLayer):
    def forward(self, states, targets):
        return super().forward(states), targets


class Losses(nn.Linear):
    def forward(self, states, targets):
        logits = super().forward(states).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="none")


class LanguageModel(Tied):
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
    piped = fit(four_ranks, LanguageModel, **in_stages(num_stages=4))
    (expected,) = fit(one_rank, LanguageModel, **accumulated())
    assert_near(piped, expected)


class TiedInside(Tied):
    def tie(self):
        self.net[5].weight = self.net[0].weight


def test_two_stages_of_one_rank_cannot_share_a_weight(two_ranks):
    scene = in_stages(schedule="interleaved", cuts=[2, 4, 6], raises=True)
    for seen in fit(two_ranks, TiedInside, **scene):
        assert "is in the stages [0, 2] of one rank" in seen.error
