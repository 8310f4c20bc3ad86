"""Simulated steps: overlap, waits between ranks, and a timeline in the format of the real one."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.comm import CommTrace
from lightning_hybrid.comm.plan import MIB, CommPlan
from lightning_hybrid.planning.estimates.step_trace import to_trace
from lightning_hybrid.planning.model.cost import Link, NodeGroup
from lightning_hybrid.planning.model.simulate import Jitter, simulate
from lightning_hybrid.planning.model.workload import StepWorkload, buckets_of, ready_times_s
from tests.planning.model.clusters import NCCL, NODES, RANKS, cluster

PLAN = CommPlan()
SIXTEEN = StepWorkload(forward_s=0.1, gradients=((MIB, 0.025),) * 16, update_s=0.01)
RDMA = Link(latency_s=0.0, bytes_per_s=1e10)


def on_gpus(num_nodes=4, ranks_per_node=8, across=RDMA):
    inside = Link(latency_s=0.0, bytes_per_s=1e11)
    return cluster(num_nodes, ranks_per_node, transport=NCCL, inside=inside, across=across)


def simulated(work, cluster, plan=PLAN, **options):
    return simulate(work, cluster, plan, itemsize=2, **options)


@settings(max_examples=25)
@given(num_nodes=NODES, ranks=RANKS, rate=st.floats(1e8, 1e11), backward_s=st.floats(1e-3, 1))
def test_a_step_is_never_shorter_than_its_arithmetic_nor_than_its_bytes(
    num_nodes, ranks, rate, backward_s
):
    work = StepWorkload(forward_s=0.0, gradients=((4 * MIB, backward_s),) * 4)
    result = on_gpus(num_nodes, ranks, across=Link(latency_s=0.0, bytes_per_s=rate))
    outcome = simulated(work, result)
    assert outcome.step_s >= work.alone_s
    assert outcome.step_s >= result.least_s(16 * MIB * 2)
    assert 0 < outcome.efficiency <= 1


def test_one_rank_alone_has_nothing_to_wait_for():
    outcome = simulated(SIXTEEN, on_gpus(1, 1))
    slow = StepWorkload(forward_s=0.1, gradients=((MIB, 0.1),), input_s=2.0)
    assert simulated(slow, on_gpus(1, 1)).step_s == 2.0, "but for its input"
    assert outcome.step_s == pytest.approx(0.1 + 16 * 0.025 + 0.01)
    assert outcome.exposed_s.tolist() == [0.0]


def test_everything_waits_for_the_slowest_nodes():
    """If one node's link has a quarter of the bandwidth, all-reduces take as long as if all links were slow.

    Similarly, if one node's ranks are slow, steps take as long as if all ranks were.
    """
    few = SIXTEEN.scaled(1e-6)
    many = SIXTEEN
    slow = Link(latency_s=1e-5, bytes_per_s=RDMA.bytes_per_s / 4)
    for work, group, all_slow in (
        (few, NodeGroup(across=slow), replace(on_gpus(), across=slow)),
        (many, NodeGroup(slowdown=1.5), on_gpus()),
    ):
        step_s = simulated(work, replace(on_gpus(), groups=[group])).step_s
        expected_s = simulated(work.scaled(group.slowdown), all_slow).step_s
        assert step_s == pytest.approx(expected_s)
        assert step_s > 1.4 * simulated(work, on_gpus()).step_s
        one_node = replace(on_gpus(1), groups=[group])
        assert simulated(work, one_node).alone_s == work.alone_s


@pytest.mark.parametrize(
    ("options", "num_buckets"), [({}, range(9, 99)), ({"cuts": []}, [1])], ids=["many", "one"]
)
def test_all_but_the_last_bucket_is_hidden_by_a_long_backward(options, num_buckets):
    result = on_gpus()
    outcome = simulate(SIXTEEN, result, CommPlan(num_buckets=16), itemsize=2, **options)
    last = outcome.buckets[-1]
    assert len(outcome.buckets) in num_buckets
    assert outcome.exposed_s[0] == pytest.approx(result.alone_s(last.algorithm, last.num_bytes))


def test_segments_end_where_they_are_cut():
    numels = [5, 7, 11, 13]
    results = buckets_of(numels, on_gpus(), PLAN, itemsize=2, on_cuda=True, cuts=[3])
    assert [bucket.numel for bucket in results] == [23, 13]
    singles = buckets_of(numels, on_gpus(), PLAN, itemsize=4, on_cuda=True, cuts=range(1, 4))
    assert [bucket.numel for bucket in singles] == numels
    assert {bucket.dtype for bucket in singles} == {"float32"}
    with pytest.raises(
        ValueError,
        match=r"`cuts` \(=\[5\]\) must be positions from 0 to the number of tensors \(=4\)",
    ):
        buckets_of(numels, on_gpus(), PLAN, itemsize=2, on_cuda=True, cuts=[5])


def test_a_bucket_is_ready_with_its_last_gradient():
    work = StepWorkload(forward_s=1.0, gradients=((10, 1.0), (10, 2.0), (10, 4.0)))
    result = buckets_of([10] * 3, on_gpus(), PLAN, itemsize=2, on_cuda=True, cuts=[2])
    assert ready_times_s(work, result) == (4.0, 8.0)


@pytest.mark.parametrize("relative_std", [-0.1, float("inf"), float("nan")])
def test_a_spread_that_is_none_and_work_without_gradients_are_refused(relative_std):
    with pytest.raises(ValueError, match=r"^`relative_std`"):
        Jitter(relative_std=relative_std)
    with pytest.raises(ValueError, match=r"`gradients` \(=\(\)\) must contain at least one"):
        StepWorkload(forward_s=0.0, gradients=())


@pytest.mark.parametrize("slow_share", [-0.1, 1.5, float("nan")])
def test_a_share_of_slow_ranks_that_is_no_probability_is_refused(slow_share):
    with pytest.raises(ValueError, match=rf"^`slow_share` \(={slow_share}\) must be .* 0 to 1"):
        Jitter(slow_share=slow_share)


def test_the_step_is_the_slowest_ranks():
    jitter = Jitter(slow_share=1.0, slow_factor=3.0)
    plain = simulated(SIXTEEN, on_gpus(), jitter=Jitter())
    slow = simulated(SIXTEEN, on_gpus(), jitter=jitter)
    plain_arithmetic_s = plain.step_s - plain.exposed_s[0]
    assert slow.step_s - slow.exposed_s[0] == pytest.approx(3 * plain_arithmetic_s)


def test_more_ranks_wait_longer_for_the_slowest():
    """The maximum of n normal samples approaches sqrt(2 ln n) standard deviations above the mean from below."""
    jitter = Jitter(relative_std=0.01)
    of_16 = jitter.slowest(16, 200).mean()
    of_4096 = jitter.slowest(4096, 200).mean()
    assert 1 < of_16 < of_4096 < 1 + 0.01 * np.sqrt(2 * np.log(4096))
    assert of_16 < 1 + 0.01 * np.sqrt(2 * np.log(16))


def test_quantiles_are_of_the_steps_and_the_seed_repeats_them():
    jitter = Jitter(relative_std=0.05, seed=3)
    outcome = simulated(SIXTEEN, on_gpus(), jitter=jitter, num_steps=50)
    again = simulated(SIXTEEN, on_gpus(), jitter=jitter, num_steps=50)
    assert outcome.steps_s.tolist() == again.steps_s.tolist()
    fastest_s = outcome.steps_s.min()
    slowest_s = outcome.steps_s.max()
    assert fastest_s < outcome.quantile_s(0.5) < outcome.quantile_s(0.99) <= slowest_s
    of_seed_4 = simulated(SIXTEEN, on_gpus(), jitter=replace(jitter, seed=4), num_steps=50)
    assert of_seed_4.steps_s.tolist() != outcome.steps_s.tolist()


@pytest.mark.clock
def test_2048_ranks_and_100_steps_take_seconds():
    """The limit is 10 s on one core. It took 0.2 s, and less than 1.5 s on a busy machine."""
    began_s = time.process_time()
    ask = {"itemsize": 2, "jitter": Jitter(relative_std=0.01), "num_steps": 100}
    assert len(set(simulate(SIXTEEN, on_gpus(256, 8), PLAN, **ask).steps_s)) == 100
    assert time.process_time() - began_s < 10


def test_the_timeline_is_in_the_format_of_the_real_one_and_its_counters_see_what_the_simulator_says(
    tmp_path,
):
    outcome = simulated(SIXTEEN, cluster(2, 2), on_cuda=False)
    counted = to_trace(outcome).total()
    assert (counted.num_buckets, counted.num_bytes) == (len(outcome.buckets), 16 * MIB * 2)
    assert counted.exposed_s == pytest.approx(outcome.first.exposed_s)
    assert counted.busy_s == pytest.approx(outcome.first.busy_s)
    to_trace(outcome).write(tmp_path / "ours.json", rank=0)
    ticks = iter(range(9))
    real = CommTrace(clock=lambda: float(next(ticks)), keep_events=True)
    began_s = real.begin(num_bytes=outcome.buckets[0].num_bytes, is_last=True)
    real.stage(outcome.buckets[0], "ring", 0, began_s, 8)
    real.end(outcome.buckets[0], began_s)
    real.write(tmp_path / "real.json", rank=0)
    ours = json.loads((tmp_path / "ours.json").read_text())
    theirs = json.loads((tmp_path / "real.json").read_text())
    assert ours.keys() == theirs.keys()
    assert keys_of_events(ours) == keys_of_events(theirs)
    rows = set()
    for event in ours["traceEvents"]:
        if event["name"] == "thread_name":
            rows.add(event["args"]["name"])
    assert {"backward", "buckets", "two_level.0 scatter_reduce", "two_level.1 gather"} <= rows


def keys_of_events(timeline):
    return {tuple(sorted(event)) for event in timeline["traceEvents"]}
