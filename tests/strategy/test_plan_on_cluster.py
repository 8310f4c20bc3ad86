"""A described cluster instead of a plan: the plan is chosen on it, and tuning starts from there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_hybrid import Comm, HybridAllReduceStrategy, Mean
from lightning_hybrid.comm import CommPlan, Topology
from lightning_hybrid.planning import plan_search
from lightning_hybrid.planning.cluster import Cluster
from lightning_hybrid.planning.cost import Link
from lightning_hybrid.planning.cost_gloo import Gloo
from lightning_hybrid.planning.node_wire import NodeWire
from lightning_hybrid.strategy import arguments
from tests import toy

GLOO = Gloo(stage_s=1e-4, message_s=1e-4, segment_s=1e-4, ring_share=0.9, num_shared_cores=2)


def cluster(ranks_per_node):
    """Ranks of a node are far from each other, so that the way through every node is long: no plan would take it."""
    near, far = Link(latency_s=2e-2, bytes_per_s=5e8), Link(latency_s=1e-6, bytes_per_s=1e10)
    return Cluster(num_nodes=8, ranks_per_node=ranks_per_node, inside=near, across=far, transport=GLOO)


def plan_in_force(ranks_per_node, described, dtype=None, **settings):
    comm = Comm(plan=cluster(described), dtype=dtype)
    strategy = HybridAllReduceStrategy(comm=comm, ranks_per_node=ranks_per_node, **settings)
    seen = []

    class Module(toy.Toy):
        def on_train_start(self):
            seen.append((strategy._engine.plan.to_json(), strategy.communication_plan))

    module = Module()
    error = toy.error_of(toy.trainer(strategy=strategy, precision="16-true", max_epochs=1).fit, module, toy.loader())
    return seen, error, [parameter.numel() for parameter in module.parameters()]


@pytest.mark.parametrize(("comm_dtype", "itemsize"), [(None, 2), (torch.float32, 4)])
def test_the_plan_is_the_one_chosen_on_the_cluster_with_the_nodes_of_the_job(four_ranks, comm_dtype, itemsize):
    """Described with 8 nodes; the job has 2."""
    for seen, error, numels in four_ranks.run(_plan_in_force, comm_dtype):
        assert error == ""
        expected = plan_search.choose_plan(numels[::-1], cluster(2).of(2), itemsize=itemsize, on_cuda=False)
        assert expected.algorithm == "flat"
        assert seen[0][0] == expected.to_json()
        assert "flat" in seen[0][1]


def _plan_in_force(comm_dtype):
    return plan_in_force(2, 2, dtype=comm_dtype)


def test_a_run_with_a_codec_gets_a_plan_that_a_codec_can_carry(four_ranks):
    """Without one it is flat, which rounds the gradient of each rank."""
    for seen, error, numels in four_ranks.run(plan_in_force_with_int8):
        assert error == ""
        wire = NodeWire(name="int8", itemsize=2)
        expected = plan_search.choose_plan(numels[::-1], cluster(2).of(2), itemsize=2, on_cuda=False, wire=wire)
        assert seen[0][0] == expected.to_json()
        assert "flat" not in seen[0][1]


def plan_in_force_with_int8():
    return plan_in_force(2, 2, between_nodes=Mean(dtype="int8"))


@pytest.mark.parametrize(("comm_dtype", "itemsize"), [(None, 2), (torch.float32, 4)])
def test_the_planner_is_asked_about_the_gradients_and_nodes_of_the_job(monkeypatch, comm_dtype, itemsize):
    """As they get ready, without what is frozen; by the dtype of the largest, or that on the wire."""
    asked = []
    monkeypatch.setattr(
        "lightning_hybrid.planning.cluster.choose_plan",
        lambda *args, **settings: asked.append((args, settings)) or CommPlan(),
    )
    module = nn.Sequential(nn.Linear(3, 5).half(), nn.LayerNorm(5), nn.Linear(5, 2).half())
    module[2].bias.requires_grad_(False)
    topology = Topology.from_ranks_per_node(rank=0, world_size=6, ranks_per_node=2)
    arguments.ask_planner(cluster(2), module, topology, comm_dtype=comm_dtype, on_cuda=False)
    (((numels, described), settings),) = asked
    assert list(numels) == [10, 5, 5, 5, 15]
    assert described == cluster(2).of(3)
    assert settings == {"itemsize": itemsize, "on_cuda": False, "wire": None}


class MostChunks:
    """A planner of a user's own."""

    def plan_for(self, numels, topology, *, itemsize, on_cuda):
        return CommPlan(algorithm="hierarchical", chunk_bytes=sum(numels) * itemsize)


def fit_with_an_own_planner():
    strategy = HybridAllReduceStrategy(comm=Comm(plan=MostChunks()), ranks_per_node=1)
    seen = []

    class Module(toy.Toy):
        def on_train_start(self):
            seen.append(strategy._engine.plan)

    module = Module()
    toy.trainer(strategy=strategy, precision="16-true", max_epochs=1).fit(module, toy.loader())
    return seen, sum(parameter.numel() for parameter in module.parameters())


def test_any_object_that_chooses_a_plan_may_stand_for_it(two_ranks):
    for seen, numel in two_ranks.run(fit_with_an_own_planner):
        assert seen == [CommPlan(algorithm="hierarchical", chunk_bytes=2 * numel)]


def test_a_cluster_of_other_nodes_is_refused_on_every_rank(two_ranks):
    for seen, error, _ in two_ranks.run(plan_in_force, 1, 4):
        assert not seen
        assert "`plan` (=a cluster with 4 ranks per node) must be of nodes as this job's, which have 1" in error


@pytest.mark.parametrize(("plan", "tune"), [(cluster(2), "auto"), (CommPlan(), "off")], ids=["cluster", "plan"])
def test_what_was_chosen_on_a_cluster_is_tuned_as_the_librarys_own(plan, tune):
    assert HybridAllReduceStrategy(comm=Comm(plan=plan))._tune == tune
