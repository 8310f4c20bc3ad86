"""Description of a cluster in place of a plan. The strategy chooses a plan for it."""

import pytest

from lightning_hybrid import Comm, Mean
from lightning_hybrid.comm import CommPlan
from lightning_hybrid.planning.model import plan_search
from lightning_hybrid.planning.model.cluster import Cluster
from lightning_hybrid.planning.model.cost import Link
from lightning_hybrid.planning.model.cost_gloo import Gloo
from lightning_hybrid.planning.model.node_wire import NodeWire
from tests import toy
from tests.scenes import at, fit

GLOO = Gloo(stage_s=1e-4, message_s=1e-4, segment_s=1e-4, ring_share=0.9, num_shared_cores=2)


def cluster(ranks_per_node):
    """Return a cluster whose links within nodes are slow, so that no plan would use every node's links."""
    near = Link(latency_s=2e-2, bytes_per_s=5e8)
    far = Link(latency_s=1e-6, bytes_per_s=1e10)
    return Cluster(
        num_nodes=8, ranks_per_node=ranks_per_node, inside=near, across=far, transport=GLOO
    )


def plan_of_the_fit(trainer, module):
    """Return the plan and its description."""
    return trainer.strategy._comm.engine.plan, trainer.strategy.communication_plan


NUMELS = [parameter.numel() for parameter in toy.Toy().parameters()]
SCENE = {"precision": "16-true", "max_epochs": 1, "callbacks": [at(on_train_start=plan_of_the_fit)]}


@pytest.mark.parametrize(
    ("options", "expected", "is_flat"),
    [
        ({"comm": Comm(plan=cluster(2))}, {"itemsize": 2}, True),
        # Without the codec the plan would be flat, which rounds the gradient of each rank.
        (
            {"comm": Comm(plan=cluster(2)), "between_nodes": Mean(dtype="int8")},
            {"itemsize": 2, "wire": NodeWire(name="int8", itemsize=2)},
            False,
        ),
    ],
    ids=["half", "codec"],
)
def test_the_plan_is_the_one_chosen_on_the_cluster_with_the_nodes_of_the_job(
    four_ranks, options, expected, is_flat
):
    """The plan is chosen for the 2 nodes of the job, not for the description's 8, and must support the codec."""
    chosen = plan_search.choose_plan(NUMELS[::-1], cluster(2).of(2), on_cuda=False, **expected)
    for seen in fit(four_ranks, ranks_per_node=2, **options, **SCENE):
        ((plan, description),) = seen.looks["on_train_start"]
        assert plan == chosen, f"rank {seen.rank}"
        assert ("flat" in description) == is_flat, f"rank {seen.rank}"


class MostChunks:
    def plan_for(self, numels, topology, *, itemsize, on_cuda):
        return CommPlan(algorithm="hierarchical", chunk_bytes=sum(numels) * itemsize)


def test_any_object_with_plan_for_may_take_the_place_of_a_plan(two_ranks):
    for seen in fit(two_ranks, comm=Comm(plan=MostChunks()), ranks_per_node=1, **SCENE):
        ((plan, _),) = seen.looks["on_train_start"]
        expected = CommPlan(algorithm="hierarchical", chunk_bytes=2 * sum(NUMELS))
        assert plan == expected, f"rank {seen.rank}"


def test_a_cluster_of_other_nodes_is_refused_on_every_rank(two_ranks):
    message = (
        "`plan` (=a cluster with 4 ranks per node) cannot be used for this job, whose nodes have 1"
    )
    for seen in fit(two_ranks, comm=Comm(plan=cluster(4)), ranks_per_node=1, raises=True, **SCENE):
        assert message in seen.error
        assert not seen.looks["on_train_start"]
