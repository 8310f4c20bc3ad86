"""`Adasum` between nodes: its effect on a fit, its errors and its warnings."""

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid import Adasum, HybridAllReduceStrategy
from lightning_hybrid.optim import LAMB, LARS
from lightning_hybrid.precision.loss_scale import DynamicLossScale
from tests import toy
from tests.reference.adasum import of_buckets
from tests.scenes import at, fit, same

NUMELS = (300, 7)


class Slopes(pl.LightningModule):
    """Module of two parameters whose gradients are drawn from 1 to 2 by rank, on its share or everywhere, or inf."""

    def __init__(self, *, apart=False, inf_at=None, optimizer=None):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(numel)) for numel in NUMELS])
        self.apart = apart
        self.inf_at = inf_at
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        drawn = slopes(dist.get_rank(), apart=self.apart)
        if self.inf_at == (dist.get_rank(), batch_idx):
            drawn[0] = drawn[0] * float("inf")
        return sum(
            (weight.float() * slope).sum()
            for weight, slope in zip(self.weights, drawn, strict=True)
        )

    def configure_optimizers(self):
        if self.optimizer is None:
            return torch.optim.SGD(self.parameters(), lr=1.0)
        return self.optimizer(self.parameters())


def slopes(rank, *, apart):
    generator = torch.Generator().manual_seed(rank)
    results = [1 + torch.randint(0, 64, (numel,), generator=generator) / 64 for numel in NUMELS]
    if apart:
        return [slope * (torch.arange(len(slope)) % 4 == rank) for slope in results]
    return results


def moved_by(seen):
    return [-seen.weights[f"weights.{index}"] for index in range(len(NUMELS))]


def plan_in_words(trainer, module):
    return trainer.strategy.communication_plan


@pytest.mark.sampled(3)
@pytest.mark.parametrize("apart", [False, True], ids=["oblique", "orthogonal"])
@pytest.mark.parametrize("precision", ["32-true", "16-true", "bf16-true"])
def test_a_step_moves_by_the_adasum_of_the_nodes_means(four_ranks, precision, apart):
    scene = {"module": partial(Slopes, apart=apart), "precision": precision, "max_steps": 1}
    scene |= {"between_nodes": Adasum(), "ranks_per_node": 2}
    if precision == "16-true":
        scene["loss_scale"] = 256.0
    per_rank = fit(four_ranks, callbacks=[at(on_train_start=plan_in_words)], **scene)
    alone = [torch.cat(slopes(rank, apart=apart)) for rank in range(4)]
    expected = of_buckets(alone, NUMELS, ((0, 1), (2, 3)))
    bound = {"32-true": 1e-6, "16-true": 2 * 2**-11, "bf16-true": 2 * 2**-8}[precision]
    for seen in per_rank:
        assert same(moved_by(seen), moved_by(per_rank[0])), f"rank {seen.rank}"
        for weight, sum_of_nodes in zip(moved_by(seen), expected, strict=True):
            right = sum_of_nodes / 2
            assert (weight.double() - right).norm() <= bound * right.norm(), f"rank {seen.rank}"
            if apart:  # then it is the sum of both nodes' means, and no mean of all ranks
                assert torch.equal(weight, right.float()), f"rank {seen.rank}"
        assert seen.looks["on_train_start"][0].endswith("; Adasum between nodes")


def test_an_overflow_on_one_node_skips_the_step_on_all_and_halves_the_scale(two_ranks):
    scale = DynamicLossScale(init_scale=256.0, growth_interval=100)
    options = {"between_nodes": Adasum(), "ranks_per_node": 1, "loss_scale": scale}
    per_rank = fit(
        two_ranks,
        partial(Slopes, inf_at=(1, 0)),
        precision="16-true",
        max_steps=2,
        max_epochs=1,
        **options,
    )
    alone = [torch.cat(slopes(rank, apart=False)) for rank in range(2)]
    expected = of_buckets(alone, NUMELS, ((0,), (1,)))
    for seen in per_rank:
        assert (seen.loss_scale, seen.num_skipped) == (128.0, 1), f"rank {seen.rank}"
        assert same(seen.weights, per_rank[0].weights), f"rank {seen.rank}"
        for weight, right in zip(moved_by(seen), expected, strict=True):
            # The first step is skipped.
            error = (weight.double() - right).norm()
            assert error <= 2 * 2**-11 * right.norm(), f"rank {seen.rank}"


def refusal_of_three_nodes():
    strategy = HybridAllReduceStrategy(between_nodes=Adasum(), ranks_per_node=1)
    return toy.error_of(toy.trainer, strategy=strategy)  # before a module exists


def test_a_number_of_nodes_that_is_no_power_of_two_is_refused_by_the_trainer(three_ranks):
    expected = (
        "ValueError: `between_nodes` (=Adasum()) requires that the number of nodes is a power of two, because "
        "Adasum combines nodes in pairs, but the run has 3 nodes."
    )
    for rank, error in enumerate(three_ranks.run(refusal_of_three_nodes)):
        assert error.startswith(expected), f"rank {rank}"


def sgd_on_groups(parameters):
    """Make SGD as recipes do, with groups that contain `trust_ratio`, which SGD does not know."""
    return torch.optim.SGD([{"params": list(parameters), "trust_ratio": True}], lr=1.0)


def warned(ranks, optimizer, ranks_per_node):
    """Fit a step and return, by rank, the warnings about Adasum and the observations."""
    scene = {
        "module": partial(Slopes, optimizer=optimizer),
        "max_steps": 1,
        "between_nodes": Adasum(),
        "warns": True,
    }
    results = []
    for seen in fit(ranks, ranks_per_node=ranks_per_node, **scene):
        about_adasum = [text for text in seen.warnings if "Adasum()" in text]
        results.append((about_adasum, seen))
    return results


@pytest.mark.parametrize(
    ("optimizer", "word"),
    [
        (partial(LARS, lr=1.0), "LARS"),
        (partial(LAMB, lr=1.0), "LAMB"),
        (None, ""),
        (sgd_on_groups, ""),
    ],
    ids=["LARS", "LAMB", "SGD", "SGD on groups"],
)
def test_an_optimizer_that_discards_the_size_of_the_sum_is_a_warning_on_rank_zero(
    two_ranks, optimizer, word
):
    (warnings_0, _), (warnings_1, _) = warned(two_ranks, optimizer, 1)
    beginnings = [text.partition(", because its trust ratio")[0] for text in warnings_0]
    if word:
        assert beginnings == [f"`between_nodes` (=Adasum()) is not recommended with {word}"]
    else:
        assert beginnings == []
    assert not warnings_1


def test_on_one_node_adasum_is_the_mean_with_a_warning_on_rank_zero(two_ranks):
    pairs = zip(slopes(0, apart=False), slopes(1, apart=False), strict=True)
    expected = [(slope_0 + slope_1) / 2 for slope_0, slope_1 in pairs]
    (warnings_0, rank_0), (warnings_1, rank_1) = warned(two_ranks, None, 2)
    assert same(moved_by(rank_0), expected)
    assert same(moved_by(rank_1), expected)
    (text,) = warnings_0
    assert text.startswith("`between_nodes` (=Adasum()) combines")
    assert warnings_1 == []


def test_on_one_node_there_is_no_warning_about_a_trust_ratio(two_ranks):
    (warnings_0, _), (warnings_1, _) = warned(two_ranks, partial(LARS, lr=1.0), 2)
    (text,) = warnings_0
    assert text.startswith("`between_nodes` (=Adasum()) combines")
    assert warnings_1 == []
