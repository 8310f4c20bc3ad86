import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_hybrid.comm import Topology, traffic_of
from lightning_hybrid.comm.plan import Algorithm, BucketPlan
from lightning_hybrid.comm.stats.link_bytes import Traffic
from lightning_hybrid.comm.stats.summary import BucketSummary, CommSummary
from lightning_hybrid.comm.stats.trace import CommTrace, DeviceTimes


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def traced(**options):
    clock = Clock()
    return CommTrace(clock=clock, **options), clock


def play(clock, *calls):
    for clock.now_s, call, *args in calls:
        call(*args)


def begins(trace, num_bytes=1, *, is_last=False, **options):
    return partial(trace.begin, num_bytes=num_bytes, is_last=is_last, **options)


def test_busy_is_the_union_and_exposed_the_tail_of_each_step():
    """Busy time is the union of all buckets, and exposed time is the tail of each step after backward.

    In the first step, buckets are in flight at 1-4 and 3-6, and backward ends at 3. After a pause, the second step has
    buckets at 10-11 and 12-13.
    """
    trace, clock = traced()
    play(
        clock,
        (1, begins(trace, 100)),
        (3, begins(trace, 10, is_last=True)),
        (4, trace.end),
        (6, trace.end),
    )
    play(
        clock,
        (10, begins(trace)),
        (11, trace.end),
        (12, begins(trace, is_last=True)),
        (13, trace.end),
    )
    clock.now_s = 20
    assert trace.drain() == CommSummary(
        num_steps=2, num_buckets=4, num_bytes=112, busy_s=7.0, exposed_s=4.0
    )
    assert trace.drain() == CommSummary(
        num_steps=0, num_buckets=0, num_bytes=0, busy_s=0.0, exposed_s=0.0
    )
    assert trace.drain().achieved_bytes_per_s is None


def test_a_last_bucket_that_is_done_before_the_others_is_exposed_until_they_are():
    trace, clock = traced()
    play(
        clock, (0, begins(trace)), (0, begins(trace, is_last=True)), (1, trace.end), (5, trace.end)
    )
    assert trace.drain().exposed_s == 5.0


def test_draining_in_mid_flight_splits_the_times():
    trace, clock = traced()
    play(clock, (0, begins(trace, is_last=True)), (2, int))
    first = trace.drain()
    play(clock, (5, trace.end))
    second = trace.drain()
    assert (first.busy_s, first.exposed_s, first.num_buckets) == (2.0, 2.0, 1)
    assert (second.busy_s, second.exposed_s, second.num_buckets) == (3.0, 3.0, 0)


def test_buckets_replayed_from_device_times_count_as_if_seen():
    (seen, clock) = traced(keep_events=True)
    replayed = CommTrace(keep_events=True)
    one_step(seen, clock)
    events = [event for event in seen._events if event["row"] == "buckets"]
    device_times = []
    for index, event in enumerate(events):
        begin_s = event["ts"] / 1e6
        times = DeviceTimes(
            bucket=bucket(index),
            traffic=TRAFFIC,
            is_last=index == 1,
            ready_s=begin_s,
            done_s=begin_s + event["dur"] / 1e6,
        )
        device_times.append(times)
    replayed.replay(device_times)
    assert replayed._events == seen._events
    assert replayed.drain() == seen.drain()


def test_counts_survive_many_threads():
    trace = CommTrace()

    def work():
        for _ in range(2000):
            trace.begin(num_bytes=3, is_last=False)
            trace.end()

    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(work)
        drained = [trace.drain() for _ in range(50)]
    drained.append(trace.drain())
    assert sum(summary.num_buckets for summary in drained) == 8000
    assert sum(summary.num_bytes for summary in drained) == 24000


def bucket(index, num_bytes=8, kind=BucketPlan, **fields):
    plan = {
        "numel": num_bytes // 4,
        "num_bytes": num_bytes,
        "dtype": "float32",
        "algorithm": "flat",
        "num_chunks": 1,
    }
    return kind(index=index, **plan, **fields)


def test_each_bucket_is_exposed_from_the_one_done_before_it():
    """The buckets are submitted at 0, 1 and 2, and are done at 1.5 (hidden by backward), 4 and 7."""
    trace, clock = traced()
    play(clock, (0, begins(trace, 8)), (1, begins(trace, 8)), (1.5, trace.end, bucket(0)))
    play(
        clock,
        (2, begins(trace, 8, is_last=True)),
        (4, trace.end, bucket(1)),
        (7, trace.end, bucket(2)),
    )
    summary = trace.drain()
    assert summary.exposed_by_bucket_s == {0: 0.0, 1: 2.0, 2: 3.0}
    assert sum(summary.exposed_by_bucket_s.values()) == summary.exposed_s


TRAFFIC = Traffic(least_across=10.0, across=15.0, inside=20.0)


def one_step(trace, clock, *, num_bytes=8):
    """Record a step with buckets in flight at 0-2 and 1-5 seconds. Backward ends at 1 second."""
    start_s = clock.now_s
    for index in range(2):
        clock.now_s = start_s + index
        trace.begin(num_bytes=num_bytes, is_last=index == 1, traffic=TRAFFIC)
    for index, end_s in ((0, 2), (1, 5)):
        clock.now_s = start_s + end_s
        trace.end(bucket(index, num_bytes), start_s + index, TRAFFIC)


def bucket_summary(index, num_times, in_flight_s, exposed_s):
    times = {"num_times": num_times, "in_flight_s": in_flight_s, "exposed_s": exposed_s}
    return bucket(index, kind=BucketSummary, traffic=TRAFFIC, **times)


def test_each_bucket_has_its_time_in_flight_and_links_their_bytes():
    trace, clock = traced()
    one_step(trace, clock)
    one_step(trace, clock)
    counts = {"num_steps": 2, "num_buckets": 4, "num_bytes": 32, "busy_s": 10.0, "exposed_s": 8.0}
    links = {"least_bytes_across": 40.0, "bytes_across": 60.0, "bytes_inside": 80.0}
    buckets = (bucket_summary(0, 2, 4.0, 2.0), bucket_summary(1, 2, 8.0, 6.0))
    summary = trace.drain()
    assert summary == CommSummary(**counts, **links, buckets=buckets)
    # As in a checkpoint.
    assert CommSummary.from_state_dict(json.loads(json.dumps(summary.state_dict()))) == summary


def test_the_total_is_that_of_all_windows():
    (drained, clock) = traced()
    (never, other_clock) = traced()
    summaries = []
    for num_bytes in (8, 8, 16):  # DDP rebuilds its buckets after the first step
        for trace, its_clock in ((drained, clock), (never, other_clock)):
            its_clock.now_s = 0
            one_step(trace, its_clock, num_bytes=num_bytes)
        summaries.append(drained.drain())
    assert drained.total() == never.total() == summaries[0] + summaries[1] + summaries[2]
    assert [b.num_times for b in never.total().buckets] == [2, 1, 2, 1]
    assert never.total().exposed_by_bucket_s == {0: 3.0, 1: 9.0}
    assert drained.drain() == CommSummary()


def test_an_untimed_part_makes_the_sums_times_unknown_and_keeps_its_counts():
    timed, clock = traced()
    one_step(timed, clock)
    untimed = CommSummary(
        num_buckets=1,
        busy_s=None,
        exposed_s=None,
        bytes_across=15.0,
        buckets=(bucket_summary(0, 1, None, None),),
    )
    total = timed.drain() + untimed
    assert total.num_buckets == 3
    assert total.bytes_across == 45.0
    assert total.busy_s is None
    assert total.exposed_s is None
    assert total.buckets == (bucket_summary(0, 2, None, None), bucket_summary(1, 1, 4.0, 3.0))
    assert total.achieved_bytes_per_s is None


def test_a_timeline_holds_backward_buckets_and_stages(tmp_path):
    (trace, clock) = traced(keep_events=True)
    (off, _) = traced()
    for played in (trace, off):
        clock.now_s = 0
        began_s = played.begin(num_bytes=8, is_last=False)
        clock.now_s = 1
        played.begin(num_bytes=16, is_last=True)
        clock.now_s = 3
        played.stage(bucket(0), "all_reduce", 0, 0.5, 4)
        played.end(bucket(0), began_s)
    assert off._events == []
    path = tmp_path / "deeper" / "rank2.json"
    trace.write(path, rank=2)
    events = json.loads(path.read_text())["traceEvents"]
    rows = {}
    for event in events:
        if event["name"] == "thread_name":
            rows[event["tid"]] = event["args"]["name"]
    shown = []
    for event in events:
        if event["ph"] == "X":
            row = rows[event["tid"]]
            num_bytes = event["args"].get("bytes")
            shown.append((row, event["name"], event["ts"], event["dur"], num_bytes))
    assert shown == [
        ("backward", "backward, from its first bucket on", 0.0, 1e6, None),
        ("flat.0 all_reduce", "bucket 0", 0.5e6, 2.5e6, 4),
        ("buckets", "bucket 0", 0.0, 3e6, 8),
    ]
    assert {event["pid"] for event in events} == {2}


ALGORITHMS = get_args(Algorithm)


@st.composite
def topologies(draw):
    hosts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=12))
    return Topology.from_identities(rank=0, identities=hosts)


@given(
    st.sampled_from(ALGORITHMS), topologies(), st.integers(0, 10**9), st.sampled_from([None, 0.5])
)
def test_no_algorithm_claims_less_than_the_least_and_two_send_no_more(
    algorithm, topology, num_bytes, narrow
):
    assume(algorithm != "two_level" or topology.ranks_per_node is not None)
    across = None if narrow is None else num_bytes * narrow
    result = traffic_of(algorithm, topology, num_bytes, num_bytes_across=across)
    least = (
        2
        * (topology.num_nodes - 1)
        / topology.num_nodes
        * (num_bytes if across is None else across)
    )
    assert result.least_across == pytest.approx(least)
    assert result.across >= result.least_across * (1 - 1e-12)
    if algorithm in ("hierarchical", "two_level"):
        assert result.across == result.least_across
    # The upper bound inside a node: every rank but one sends its bytes to another rank and back. A ring sends less.
    most = 2 * (max(map(len, topology.nodes)) - 1) * num_bytes
    assert (
        result.inside == most
        if algorithm in ("hierarchical", "two_level")
        else result.inside <= most
    )


def test_shards_need_nodes_of_equal_size():
    with pytest.raises(
        ValueError,
        match=r"`algorithm` \(='two_level'\) requires the same number of ranks on every node, but these nodes have \[2",
    ):
        traffic_of("two_level", Topology(rank=0, nodes=((0, 1), (2,))), 100)
