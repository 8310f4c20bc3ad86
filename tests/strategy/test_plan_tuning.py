"""The plan is tuned in a fit where that is asked for and worth it; no bit depends on it where the order does not."""

from __future__ import annotations

import itertools
from functools import partial
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch

from lightning_hybrid import Comm, HybridAllReduceStrategy
from lightning_hybrid.comm import CommPlan, Topology
from lightning_hybrid.strategy import plan_tuning as trainer_tuning
from lightning_hybrid.strategy.plan_tuning import LEAST_STEPS, MOST_SHARE, why_not
from tests import toy

ONE_NODE = Topology.from_ranks_per_node(rank=0, world_size=4, ranks_per_node=4)
TWO_NODES = Topology.from_ranks_per_node(rank=0, world_size=4, ranks_per_node=2)
LONG = LEAST_STEPS / MOST_SHARE


class Watches(pl.Callback):
    """Notes under which plan each step was made, and what was said."""

    def __init__(self):
        self.plans, self.lines = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx % 2:
            self.plans.append(trainer.strategy._comm.engine.plan)

    def on_train_end(self, trainer, module):
        tuning = trainer.strategy._comm._tuning
        self.is_tuned = tuning is not None and tuning._tuning is not None
        self.line = trainer.strategy.communication_plan


def fit(strategy, **options):
    """Losses, weights, and what was noted; 60 steps of two batches each, with validation in the midst of steps.

    By the clock every step takes as long, so that every plan loses in four rounds.
    """
    module, watches = toy.Toy(lr=0.05), Watches()
    settings = {"precision": "32-true", "max_epochs": 1, "accumulate_grad_batches": 2, "callbacks": [watches]}
    settings |= {"val_check_interval": 39, "limit_train_batches": 120}
    trainer = toy.trainer(strategy=strategy, **(settings | options))
    ticking = partial(trainer_tuning.TuningSession, clock=itertools.count().__next__)
    with (
        mock.patch.object(trainer_tuning, "TuningSession", ticking),
        mock.patch.object(trainer_tuning, "rank_zero_info", watches.lines.append),
    ):
        trainer.fit(module, toy.loader(960, batch_size=4), toy.loader(16))
    return module.losses, toy.weights(module), watches, trainer


def tuned_and_plain():
    tuned = fit(HybridAllReduceStrategy(ranks_per_node=1, comm=Comm(tune="on")))[:3]
    plain = fit("ddp", callbacks=[])[:2]
    return (*tuned, *plain)


def test_tuning_changes_no_bit_where_ranks_add_in_one_order_only(two_ranks):
    """Two ranks do. Many plans were in force meanwhile, with accumulation and validation between."""
    results = two_ranks.run(tuned_and_plain)
    for losses, weights, watches, losses_plain, weights_plain in results:
        assert losses == losses_plain
        assert toy.same_bits(weights, weights_plain)
        assert len({plan.algorithm for plan in watches.plans}) >= 3
        assert watches.plans == results[0][2].plans
        assert f"plan {watches.plans[-1].plan_hash[:4]}" in watches.line
    (line,) = results[0][2].lines
    assert line.startswith("comm: plan tuned in ")
    assert results[1][2].lines == []


def settings_of(tune, algorithm="auto", plan=None, deterministic=False):
    """Whether a fit with these options is tuned, and what was said."""
    strategy = HybridAllReduceStrategy(ranks_per_node=1, comm=Comm(tune=tune, algorithm=algorithm, plan=plan))
    options = {"deterministic": True} if deterministic else {}
    try:
        _, _, watches, _ = fit(strategy, limit_train_batches=4, val_check_interval=4, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    return watches.is_tuned, watches.lines


def several_settings():
    return {
        "auto, but short": settings_of("auto"),
        "on": settings_of("on"),
        "YAML's on": settings_of(True),
        "YAML's off": settings_of(False),
        "deterministic": settings_of("on", deterministic=True),
        "the user's plan": settings_of("auto", plan=CommPlan()),
        "the user's plan, on": settings_of("on", plan=CommPlan()),
    }


def test_a_fit_is_tuned_only_as_asked(two_ranks):
    found = two_ranks.run(several_settings)[0]
    assert {name for name, (is_tuned, _) in found.items() if is_tuned} == {"on", "YAML's on", "the user's plan, on"}
    (line,) = found["deterministic"][1]
    assert line.startswith("comm: the plan is not tuned: deterministic algorithms are asked for")
    assert [lines for name, (_, lines) in found.items() if name != "deterministic"] == [[]] * 6


@pytest.mark.parametrize(
    ("options", "is_tuned"),
    [
        ({}, True),
        ({"tune": "off"}, False),
        ({"num_steps": LONG - 1}, False),
        ({"num_steps": LONG - 1, "tune": "on"}, True),
        ({"num_steps": float("inf")}, True),
        ({"topology": ONE_NODE}, False),
        ({"topology": ONE_NODE, "tune": "on"}, True),
        ({"topology": ONE_NODE, "tune": "on", "on_cuda": True}, False),
        ({"topology": Topology(rank=0, nodes=((0,),)), "tune": "on"}, False),
        ({"on_cuda": True}, False),  # no hierarchy runs on a GPU that was not asked for by name
        ({"on_cuda": True, "tune": "on"}, True),
    ],
)
def test_when_a_plan_is_tuned(options, is_tuned):
    given = {"tune": "auto", "topology": TWO_NODES, "on_cuda": False, "num_steps": LONG} | options
    assert (why_not(given.pop("tune"), given.pop("topology"), **given) is None) == is_tuned


def test_a_named_algorithm_is_the_users_choice_and_is_not_tuned():
    assert HybridAllReduceStrategy()._comm.tune == "auto"
    assert HybridAllReduceStrategy(comm=Comm(algorithm="flat"))._comm.tune == "off"
    assert HybridAllReduceStrategy(comm=Comm(algorithm="flat", tune="on"))._comm.tune == "on"
