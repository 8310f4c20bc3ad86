"""The plan is tuned in a fit where that is asked for and worth it; no bit depends on it where the order does not."""

import itertools
from functools import partial

import pytest
import torch

from lightning_hybrid import Comm, HybridAllReduceStrategy
from lightning_hybrid.comm import CommPlan, Topology
from lightning_hybrid.strategy import plan_tuning
from lightning_hybrid.strategy.plan_tuning import LEAST_STEPS, MOST_SHARE, why_not
from tests import toy
from tests.scenes import at, fit, same

ONE_NODE = Topology.from_ranks_per_node(rank=0, world_size=4, ranks_per_node=4)
TWO_NODES = Topology.from_ranks_per_node(rank=0, world_size=4, ranks_per_node=2)
LONG = LEAST_STEPS / MOST_SHARE


def plan_in_force(trainer, module, *args):
    return trainer.strategy._comm.engine.plan


def state_of_tuning(trainer, module):
    return trainer.strategy._comm._tuning is not None, trainer.strategy.communication_plan


LOOKS = at(on_after_backward=plan_in_force, on_train_end=state_of_tuning)
SCENE = {"max_epochs": 1, "accumulate_grad_batches": 2, "val_check_interval": 39, "limit_train_batches": 120}
DATA = {"module": partial(toy.Toy, lr=0.05), "train": partial(toy.loader, 960, 4), "val": partial(toy.loader, 16)}


def ticking_fit(scene):
    """60 steps of two batches each, with validation in the midst of steps; and what was said.

    By the clock every step takes as long, so that every plan loses in four rounds.
    """
    said = []
    with pytest.MonkeyPatch.context() as patch:
        clock = itertools.count().__next__
        patch.setattr(plan_tuning, "TuningSession", partial(plan_tuning.TuningSession, clock=clock))
        patch.setattr(plan_tuning, "rank_zero_info", said.append)
        try:
            return fit(None, ranks_per_node=1, callbacks=[LOOKS], **SCENE | DATA | scene), said
        finally:
            torch.use_deterministic_algorithms(False)


def test_tuning_changes_no_bit_where_ranks_add_in_one_order_only(two_ranks):
    """Two ranks do. Many plans were in force meanwhile, with accumulation and validation between."""
    tuned = two_ranks.run(ticking_fit, {"comm": Comm(tune="on")})
    for (seen, _), plain in zip(tuned, fit(two_ranks, strategy="ddp", **SCENE | DATA), strict=True):
        assert seen.losses == plain.losses
        assert same(seen.weights, plain.weights)
        plans, ((_, line),) = seen.looks["on_after_backward"], seen.looks["on_train_end"]
        assert len({plan.algorithm for plan in plans}) >= 3
        assert plans == tuned[0][0].looks["on_after_backward"]
        assert f"plan {plans[-1].plan_hash[:4]}" in line
    (_, (line,)), (_, nothing) = tuned
    assert line.startswith("comm: plan tuned in ")
    assert nothing == []


@pytest.mark.parametrize(
    ("comm", "settings", "is_tuned", "words"),
    [
        (Comm(tune="on"), {"deterministic": True}, False, "deterministic algorithms are asked for"),
        (Comm(plan=CommPlan()), {}, False, ""),
        (Comm(plan=CommPlan(), tune="on"), {}, True, ""),
    ],
)
def test_a_fit_is_tuned_only_as_asked(two_ranks, comm, settings, is_tuned, words):
    scene = {"comm": comm, "limit_train_batches": 4, "val_check_interval": 4, **settings}
    (seen, said), _ = two_ranks.run(ticking_fit, scene)
    assert seen.looks["on_train_end"][0][0] == is_tuned
    assert [line.startswith(f"comm: the plan is not tuned: {words}") for line in said] == [True] * bool(words)


@pytest.mark.parametrize(
    ("options", "is_tuned"),
    [
        ({}, True),
        ({"tune": "off"}, False),
        ({"num_steps": LONG - 1}, False),
        ({"num_steps": LONG - 1, "tune": "on"}, True),
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
