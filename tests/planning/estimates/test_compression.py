"""All-reduces between nodes in fewer bits: bytes of the engine's formula, codec time, and when they pay off."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.comm import traffic_of
from lightning_hybrid.comm.plan import MIB, CommPlan
from lightning_hybrid.planning.estimates.compression import (
    average_s,
    compressed_steps,
    proposed,
    wire_step,
    with_averages,
)
from lightning_hybrid.planning.model.cost import Link
from lightning_hybrid.planning.model.cost_gloo import Gloo
from lightning_hybrid.planning.model.node_wire import CodecRates, NodeWire
from lightning_hybrid.planning.model.plan_search import candidates, choose_plan
from lightning_hybrid.planning.model.simulate import simulate
from lightning_hybrid.planning.model.workload import StepWorkload
from tests.planning.model.clusters import FREE_GLOO, NCCL, cluster
from tests.planning.model.test_cluster import topology_of

INT8 = NodeWire(name="int8", itemsize=2)
INT4 = NodeWire(name="int4", itemsize=2)
SIZE = 64.0 * MIB
SIXTEEN = StepWorkload(forward_s=0.1, gradients=((MIB, 0.025),) * 16, update_s=0.01)
BARE = StepWorkload(forward_s=0.0, gradients=((MIB, 0.0),) * 16)


def across_bytes(coded_cluster, algorithm, wire):
    stages = coded_cluster.stages(algorithm, SIZE, wire)
    work_s = sum(stage.work_s for stage in stages if stage.level == "across")
    return work_s * coded_cluster.node_bytes_per_s


@pytest.mark.parametrize("wire", [INT8, INT4], ids=str)
@pytest.mark.parametrize("algorithm", ["hierarchical", "two_level"])
@settings(max_examples=15)
@given(num_nodes=st.integers(2, 6), ranks=st.integers(1, 6))
def test_links_carry_the_bytes_that_the_engine_counts(wire, algorithm, num_nodes, ranks):
    """tests/netlab compares that formula with kernel counters. Gradients are whole blocks in this test."""
    result = cluster(num_nodes, ranks)
    coded = wire.num_bytes(SIZE)
    assert coded == SIZE / 2 * {8: 258, 4: 130}[wire.bits] / 256
    counted = traffic_of(
        algorithm, topology_of(result), SIZE, num_bytes_across=coded, is_ring=False
    )
    assert across_bytes(result, algorithm, wire) == pytest.approx(counted.across, rel=1e-12)


@pytest.mark.parametrize("num_nodes", [2, 5])
@pytest.mark.parametrize("algorithm", ["flat", "parallel_flat", "hierarchical", "two_level"])
@pytest.mark.parametrize("transport", [FREE_GLOO, NCCL], ids=["gloo", "nccl"])
def test_with_one_rank_per_node_every_algorithm_sends_the_same_coded_bytes(
    transport, algorithm, num_nodes
):
    across = Link(latency_s=0.0, bytes_per_s=1e9)
    result = cluster(num_nodes, 1, transport=transport, across=across)
    (stage,) = result.stages(algorithm, SIZE, INT4)
    expected_bytes = 2 * (num_nodes - 1) / num_nodes * INT4.num_bytes(SIZE)
    assert stage.work_s * 1e9 == pytest.approx(expected_bytes, rel=1e-9)


def test_small_gradients_are_sent_as_whole_blocks():
    """Sixteen gradients of one element become sixteen blocks of 256."""
    work = StepWorkload(forward_s=0.0, gradients=((1, 0.0),) * 16)
    for wire, num_elements in ((None, 16), (INT8, 16 * 256)):
        options = {"itemsize": 2, "on_cuda": False, "wire": wire}
        outcome = simulate(work, cluster(2, 2), CommPlan(), **options)
        assert sum(bucket.numel for bucket in outcome.buckets) == num_elements


def test_ranks_that_share_cores_encode_one_after_another():
    emulated = Gloo(stage_s=0.0, message_s=0.0, segment_s=0.0, num_shared_cores=2)
    alone_s = cluster(4, 2, transport=FREE_GLOO).codec_s("two_level", SIZE, INT8)
    shared_s = cluster(4, 2, transport=emulated).codec_s("two_level", SIZE, INT8)
    assert shared_s == pytest.approx(4 * alone_s)  # eight ranks on two cores


def test_on_accelerators_every_part_of_every_node_is_a_kernel():
    rates = CodecRates.of_accelerator(4.8e12)
    assert rates.seconds(INT8, 0, 2) == pytest.approx(5 * rates.kernel_s)
    assert rates.seconds(INT8, 0, 64) == pytest.approx(133 * rates.kernel_s)
    # Fewer codes are read and written.
    assert rates.int4_bytes_per_s > rates.int8_bytes_per_s > 4.8e12 / 6


def test_a_measured_curve_of_sums_through_a_codec_is_theirs_alone():
    plain = cluster(2, 2, curves={})
    scaled = cluster(2, 2, curves={"two_level_int8": {SIZE: 1.5}})
    plain_int8_s = plain.alone_s("two_level", SIZE, INT8)
    assert scaled.alone_s("two_level", SIZE, INT8) == pytest.approx(1.5 * plain_int8_s)
    assert scaled.alone_s("two_level", SIZE, INT4) == plain.alone_s("two_level", SIZE, INT4)
    assert scaled.alone_s("two_level", SIZE) == plain.alone_s("two_level", SIZE)
    both = cluster(2, 2, curves={"two_level": {SIZE: 1.2}, "two_level_int8": {SIZE: 1.5}})
    assert both.alone_s("two_level", SIZE, INT8) == scaled.alone_s("two_level", SIZE, INT8)
    plain_int4_s = plain.alone_s("two_level", SIZE, INT4)
    assert both.alone_s("two_level", SIZE, INT4) == pytest.approx(1.2 * plain_int4_s)


@pytest.mark.parametrize(
    ("transport", "on_cuda"), [(FREE_GLOO, False), (NCCL, True)], ids=["gloo", "nccl"]
)
def test_plans_for_a_codec_add_up_in_nodes_first(transport, on_cuda):
    """With links this slow inside nodes, the best plan without a codec is flat."""
    far = Link(latency_s=1e-6, bytes_per_s=1e10)
    near = Link(latency_s=2e-2, bytes_per_s=5e8)
    result = cluster(2, 4, transport=transport, inside=near, across=far)
    ask = {"itemsize": 2, "on_cuda": on_cuda}
    assert on_cuda or choose_plan([MIB] * 16, result, **ask).algorithm == "flat"
    kinds = {candidate.plan.algorithm for candidate in candidates(BARE, result, wire=INT8, **ask)}
    allowed = {"hierarchical", "two_level"}
    if not on_cuda:
        allowed.add("auto")
    assert kinds <= allowed
    with pytest.raises(
        ValueError, match=r"`algorithm` \(='flat'\) has no stage between nodes, .* \(='int8'\)"
    ):
        simulate(BARE, result, CommPlan(algorithm="flat"), wire=INT8, **ask)


def steps_on(mbit_per_s, work, **options):
    across = Link(latency_s=1e-4, bytes_per_s=mbit_per_s * 1e6 / 8)
    result = cluster(2, 2, across=across, **options)
    plain = simulate(work, result, CommPlan(), itemsize=2, on_cuda=False)
    coded = compressed_steps(work, result, [CommPlan()], itemsize=2, on_cuda=False)
    return wire_step(plain, result, itemsize=2, name=None), coded


def test_a_slow_link_pays_by_the_ratio_of_bytes_and_a_fast_one_or_a_slow_codec_does_not():
    plain, (int8, int4) = steps_on(100, BARE)
    assert plain.step_s / int8.step_s == pytest.approx(256 * 2 / 258, rel=0.05)
    assert plain.step_s / int4.step_s == pytest.approx(256 * 2 / 130, rel=0.1)
    assert plain.node_bytes / int4.node_bytes == pytest.approx(256 * 2 / 130)
    assert proposed(plain, (int8, int4)).name == "int4"
    hidden = steps_on(100_000, SIXTEEN)
    assert proposed(*hidden) is None
    slow = CodecRates(int8_bytes_per_s=4e6, int4_bytes_per_s=4e6)
    plain, coded = steps_on(100, BARE, codec=slow)
    assert proposed(plain, coded) is None
    assert min(step.codec_s for step in coded) > plain.exposed_s / 2


def test_where_gradients_are_fp32_float16_comes_first():
    result = cluster(2, 2, across=Link(latency_s=0.0, bytes_per_s=1e7))
    outcome = simulate(BARE, result, CommPlan(), itemsize=4, on_cuda=False)
    plain = wire_step(outcome, result, itemsize=4, name=None)
    plans = [CommPlan(), CommPlan(algorithm="flat")]
    steps = compressed_steps(BARE, result, plans, itemsize=4, on_cuda=False)
    assert [step.name for step in steps] == ["float16", "int8", "int4"]
    assert plain.step_s / steps[0].step_s == pytest.approx(2, rel=0.05)


def test_averages_are_all_reduces_of_the_masters_and_of_the_momentum():
    """An average sends 8 bytes per parameter at the link's bandwidth, spread over the steps in between."""
    result = cluster(2, 1, across=Link(latency_s=0.0, bytes_per_s=1e8))
    taken_s = average_s(8e7, result, CommPlan(), on_cuda=False)
    assert taken_s == pytest.approx(0.8, rel=0.01)
    inside = simulate(SIXTEEN, result.of(1), CommPlan(), itemsize=2, on_cuda=False)
    steps = with_averages(inside, every=8, average_s=taken_s)
    assert steps.step_s == pytest.approx(SIXTEEN.alone_s + taken_s / 8)
    assert steps.exposed_s.mean() == pytest.approx(taken_s / 8)
