"""The chosen plan is the best by the model, never worse than the library's own, and right where fixed rules are not."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.comm.plan import MIB, CommPlan
from lightning_hybrid.planning.plan_search import candidates, choose_plan, rank_plans, with_buckets
from lightning_hybrid.planning.simulate import simulate
from lightning_hybrid.planning.workload import StepWorkload
from recipes.planning.calibration.calibrate import calibrate
from tests.planning.clusters import NCCL, cluster
from tests.recipes.planning.calibration.planted_links import gloo_cluster, planted, world_of

SIXTEEN = [MIB] * 16


def work(numels, backward_s=0.0):
    return StepWorkload(forward_s=0.0, gradients=tuple((numel, backward_s * numel / sum(numels)) for numel in numels))


def step_s(plan, cluster, numels, backward_s=0.0):
    return simulate(work(numels, backward_s), cluster, plan, itemsize=2, on_cuda=False).step_s


def test_at_1_gbit_and_2_ms_four_mebibytes_go_hierarchical_where_the_rule_says_two_level():
    """Measured so, on emulated hosts: 97 ms hierarchical, 153 two-level. Two rings at the same time were no faster
    than one, 99 and 101 ms for 2 MiB, 147 for 4; the model would have them at four fifths. The rest is the model's."""
    truth = gloo_cluster(4, 2, mbit_per_s=1000.0, latency_s=2e-3)
    world = world_of(truth)
    told_s = {(name, 4 * MIB): time_s for name, time_s in (("hierarchical", 0.097), ("two_level", 0.153))}
    told_s |= {(name, 2 * MIB): 0.1 for name in ("flat", "gloo_ring", "parallel_flat")}
    told_s |= {(name, 4 * MIB): 0.147 for name in ("flat", "gloo_ring", "parallel_flat")}
    found = calibrate(planted(truth, world, sums_s=told_s), world)
    four_mib = [2 * MIB]
    plan = choose_plan(four_mib, found.cluster, on_cuda=False)
    assert CommPlan().algorithm_for(4 * MIB, truth) == "two_level"
    assert plan.algorithm_for(4 * MIB, truth) == "hierarchical"
    seconds = {
        name: step_s(CommPlan(algorithm=name), found.cluster, four_mib)
        for name in ("hierarchical", "two_level", "flat", "parallel_flat")
    }
    assert min(seconds, key=seconds.get) == "hierarchical"
    assert seconds["two_level"] / seconds["hierarchical"] == pytest.approx(153 / 97, rel=0.25)


@settings(max_examples=4, deadline=None)
@given(
    num_nodes=st.integers(1, 5),
    ranks=st.integers(1, 4),
    mbit_per_s=st.floats(50, 5000),
    latency_s=st.floats(0, 5e-3),
    backward_s=st.floats(0, 1),
)
def test_no_plan_is_chosen_that_the_model_sees_slower_than_the_librarys(
    num_nodes, ranks, mbit_per_s, latency_s, backward_s
):
    cluster = gloo_cluster(num_nodes, ranks, mbit_per_s=mbit_per_s, latency_s=latency_s)
    chosen = choose_plan(SIXTEEN, cluster, backward_s=backward_s, on_cuda=False)
    limit_s = 1.005 * step_s(CommPlan(), cluster, SIXTEEN, backward_s)  # three digits are compared
    assert step_s(chosen, cluster, SIXTEEN, backward_s) <= limit_s


def test_where_the_model_sees_no_difference_the_librarys_plan_stays_and_what_is_no_matter_of_speed_is_kept():
    """A backward of 100 s hides all but the end of anything."""
    base = CommPlan(algorithm="hierarchical", check_order=False)
    assert choose_plan(SIXTEEN, gloo_cluster(2, 2), backward_s=100.0, on_cuda=False, base=base) == base
    slow = gloo_cluster(4, 4, mbit_per_s=1000.0, latency_s=2e-3)
    chosen = choose_plan(SIXTEEN, slow, on_cuda=False, base=base)
    assert chosen != base
    assert not chosen.check_order


def test_runners_up_come_in_the_order_of_their_steps_and_each_does_something_else():
    cluster = gloo_cluster(2, 4, mbit_per_s=100.0)
    found = candidates(work(SIXTEEN, 0.5), cluster, itemsize=2, on_cuda=False)
    assert all(one.step_s <= 1.01 * other.step_s for one, other in itertools.pairwise(found))
    assert CommPlan() in [candidate.plan for candidate in found]
    done = [(c.plan.algorithm, c.num_buckets, c.step_s) for c in found]
    assert len(found) > 20
    assert found[-1].step_s > 1.5 * found[0].step_s, done


def test_plans_that_do_the_same_are_one_candidate():
    """All gradients are one bucket of 2 MiB for any of these."""
    plans = [with_buckets(CommPlan(algorithm="flat"), size) for size in (16 * MIB, 64 * MIB)]
    found = rank_plans(work([MIB]), gloo_cluster(2, 2), plans, itemsize=2, on_cuda=False)
    assert [candidate.plan for candidate in found] == plans[:1]


def test_gpus_have_no_chunks_to_choose():
    """Buckets are not cut there, so plans that differ in chunks alone are not tried."""
    found = candidates(work(SIXTEEN), cluster(4, 8, transport=NCCL), itemsize=2, on_cuda=True)
    assert {candidate.plan.chunk_bytes for candidate in found} == {CommPlan().chunk_bytes}
