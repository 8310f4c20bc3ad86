"""CUDA path on a CPU: mock streams, events and communicators that record calls, and real all-reduces over Gloo."""

import sys
import threading
import time
import weakref
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_hybrid.comm import (
    CommEngine,
    CommPlan,
    CommTrace,
    HookState,
    Topology,
    average_bucket,
)
from lightning_hybrid.comm import plan as plans
from lightning_hybrid.comm.engine import cuda_carrier, cuda_streams, node_exchange, process_groups
from lightning_hybrid.comm.engine import engine as engines
from lightning_hybrid.comm.health import abort, device_waits
from lightning_hybrid.comm.health.consensus import OrderError
from lightning_hybrid.comm.health.watchdog import Watchdog
from lightning_hybrid.strategy import rendezvous
from tests.comm.layouts import Bucket, error_of_another_order, integers, sum_of_integers
from tests.stand_in.recording_cuda import CUDA, Cuda

TWO_BY_TWO = ((0, 1), (2, 3))
ALGORITHMS = ["flat", "parallel_flat", "hierarchical", "two_level"]
NUMELS = (300_000, 70_001, 5)  # several chunks, a tail that does not divide, and a tiny bucket


class FakeWatchdog(Watchdog):
    """Watchdog of a world without failures. It records requests, and whether the engine's lock was held."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.arguments = arguments
        self.asked = []
        self.engine = None

    def start(self):
        """Start without a thread."""

    def _note(self, request, answer):
        is_locked = self.engine is not None and self.engine._latch.lock.locked()
        self.asked.append((request, is_locked))
        return answer

    def requests(self):
        return [request for request, _ in self.asked]

    def compare(self, key, value):
        return self._note("compare", value)

    def raise_alarm(self, error):
        return self._note("alarm", error)

    def collect_status(self, noticed):
        return self._note("status", f"comm: rank 3 does not answer. {noticed}.")

    def leave(self):
        self._note("leave", None)


def in_small_pieces(patch):
    patch.setattr(plans, "CUDA_CHUNK_BYTES", 1)
    patch.setattr(plans, "MOST_CUDA_CHUNKS", 7)


@pytest.fixture
def fake_world(monkeypatch):
    """Become rank 0 of four whose collectives do nothing. Torch's bookkeeping of groups is real."""
    if dist.is_initialized():  # left by an earlier test's fit in this process
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    monkeypatch.setattr(engines, "compare_plans", lambda *args: ("token", ["host"] * 4, [[]] * 4))
    monkeypatch.setattr(engines, "private_store", lambda prefix: dist.HashStore())
    monkeypatch.setattr(engines, "Watchdog", FakeWatchdog)
    in_small_pieces(monkeypatch)
    aborted = []
    monkeypatch.setattr(process_groups, "abort_all", lambda limit_s: aborted.append(limit_s) or [])
    yield aborted
    dist.destroy_process_group()


MADE = []  # engines of rank 0 of the fake world


@pytest.fixture
def cuda(fake_world, monkeypatch):
    with Cuda().installed(monkeypatch) as cuda:
        yield cuda
        cuda.go_on()
        while MADE:
            MADE.pop().close()


def engine_of(
    algorithm,
    nodes=TWO_BY_TWO,
    *,
    keep_events=False,
    is_timed=False,
    dtype_across=None,
    timeout_s=20.0,
    **plan,
):
    plan = CommPlan(algorithm=algorithm, chunk_bytes=2**17, **plan)
    rank = dist.get_rank() if dist.is_initialized() else 0
    trace = CommTrace(keep_events=keep_events)
    if is_timed:
        trace.measure_devices()
    engine = CommEngine(
        topology=Topology(rank=rank, nodes=nodes),
        plan=plan,
        timeout=timedelta(seconds=timeout_s),
        device=CUDA,
        trace=trace,
        dtype_across_nodes=dtype_across,
    )
    if isinstance(engine._watchdog, FakeWatchdog):
        engine._watchdog.engine = engine
        MADE.append(engine)
    return engine


def step(engine, buffers, comm_dtype=None):
    state = HookState(engine=engine, comm_dtype=comm_dtype)
    futures = []
    for index, buffer in enumerate(buffers):
        buffer.add_(1)
        Cuda.instance().compute.now_s += 0.5
        futures.append(average_bucket(state, Bucket(index, buffer, is_last=buffer is buffers[-1])))
    for future in futures:
        future.wait().mul_(0.1)


def steps(engine, *, num_steps=2, comm_dtype=None):
    for _ in range(num_steps):
        buffers = [torch.zeros(numel) for numel in NUMELS]  # freed after each step
        step(engine, buffers, comm_dtype)
    del buffers
    torch.zeros(1)  # another operation detects memory that was freed too early


# ---- order between streams -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("comm_dtype", [None, torch.float16, torch.float32])
@pytest.mark.parametrize("asked", ["nothing", "times", "timeline"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_tensor_that_crosses_streams_is_ordered_and_kept(cuda, algorithm, asked, comm_dtype):
    """This holds even if the caller frees a bucket and its wire buffer before it waits for the result."""
    across = None if comm_dtype is None else torch.float16
    is_flat = "flat" in algorithm
    keep_events = asked == "timeline"
    is_timed = asked == "times"
    engine = engine_of(algorithm, keep_events=keep_events, is_timed=is_timed, dtype_across=across)
    steps(engine, comm_dtype=comm_dtype)
    summary = engine.trace.drain()
    for index in range(2):
        wire = torch.ones(40_000)
        buffer = torch.ones(40_000)
        finish = partial(torch.Tensor.copy_, buffer)
        engine.submit(wire, bucket_index=index, is_last=bool(index), finish=finish)
        del wire, buffer, finish
        torch.zeros(1)
    assert cuda.violations == []
    used = {stream for name, stream in cuda.operations if name.startswith("c10d::")}
    is_torchs = algorithm == "flat" and across is None
    if is_torchs:
        num_own_streams = 0
    elif is_flat:
        num_own_streams = 1
    else:
        num_own_streams = 2
    assert len(used - {"nccl"}) == num_own_streams
    assert "compute" not in used
    assert cuda.host_waits == []
    assert summary.num_steps == 2
    if is_torchs and asked == "nothing":
        assert summary.exposed_s == 0.0
        assert summary.busy_s == 0.0
        assert summary.buckets == ()
    else:
        assert 0 < summary.exposed_s < summary.busy_s
    stage_events = [e for e in engine.trace._events if e["row"].startswith(algorithm)]
    assert is_flat or bool(stage_events) is keep_events
    for event in stage_events:
        assert event["dur"] > 0.99e6, "a collective takes a second"


def test_flat_is_one_call_and_a_hierarchy_overlaps_its_chunks(cuda):
    times = {}
    for algorithm in ("flat", "parallel_flat", "hierarchical"):
        engine = engine_of(algorithm, is_timed=True)
        del cuda.operations[:]
        step(engine, [torch.zeros(400_000)])
        calls = [name for name, _ in cuda.operations if name.startswith("c10d::")]
        times[algorithm] = engine.trace.drain().busy_s
        engine.close()
        if algorithm != "hierarchical":
            assert calls == ["c10d::allreduce_"]
    num_chunks = len(calls) // 3
    assert num_chunks == 6
    assert calls[:5] == [
        "c10d::reduce_",
        "c10d::allreduce_",
        "c10d::reduce_",
        "c10d::allreduce_",
        "c10d::broadcast_",
    ]
    assert times["flat"] == 1.0
    # 2 of 3 calls are inside the node, and overlap with the third.
    assert times["hierarchical"] < 0.75 * 3 * num_chunks


def test_a_hierarchy_alone_imports_and_makes_streams_of_our_own_and_they_have_high_priority(
    fake_world, cuda, monkeypatch
):
    monkeypatch.delitem(sys.modules, cuda_streams.__name__)
    for algorithm in ("auto", "flat", "two_level"):
        engine = engine_of(algorithm)
        is_named = algorithm == "two_level"
        if is_named:  # with the mocks that the engine knows
            monkeypatch.setitem(sys.modules, cuda_streams.__name__, cuda_streams)
        step(engine, [torch.zeros(8)])
        assert (cuda_streams.__name__ in sys.modules) is is_named
        priorities = [stream.priority for stream in cuda.streams if stream.priority]
        assert priorities == [-1, -1] * is_named
        engine.close()


def test_only_the_last_chunk_of_a_bucket_is_padded_and_shards_are_aligned(cuda, monkeypatch):
    numels = []
    reduce_scatter = node_exchange.reduce_scatter

    def noting(shard, whole, group):
        numels.append((shard.numel(), whole.numel()))
        reduce_scatter(shard, whole, group=group)

    monkeypatch.setattr(node_exchange, "reduce_scatter", noting)
    engine_of("two_level").submit(torch.zeros(300_001), bucket_index=0, is_last=True)
    engine = engine_of("two_level", check_order=False)
    # copied into the padded buffer and back
    for numel, num_pads in ((300_001, 3), (4 * 256 * 30, 0)):
        del cuda.operations[:]
        engine.submit(torch.zeros(numel), bucket_index=0)
        pads = [name for name, _ in cuda.operations if "pad" in name or name == "aten::copy_"]
        assert len(pads) <= num_pads
    assert len(numels) > 6
    for shard, whole in numels:
        assert shard % 128 == 0
        assert whole == 2 * shard


def test_what_is_on_the_streams_is_held_by_them_alone(cuda):
    """A wire buffer is released as soon as the allocator permits, without anyone having to poll."""
    engine = engine_of("two_level")
    cuda.hang()
    wire = torch.zeros(70_001)
    held = weakref.ref(wire)
    engine.submit(wire, bucket_index=0, is_last=True, finish=lambda flat: torch.zeros(1))
    del wire
    assert held() is None
    assert len(engine._latch.in_flight) == 1


# ---- times -----------------------------------------------------------------------------------------------------------


def test_times_are_the_devices_and_a_step_counts_once_it_is_through(cuda):
    engine = engine_of("flat", is_timed=True)
    cuda.hang()
    step(engine, [torch.zeros(8), torch.zeros(8)])
    assert engine.trace.drain().num_steps == 0
    assert cuda.host_waits == []
    cuda.go_on()
    summary = engine.trace.drain()
    assert (summary.num_steps, summary.num_buckets, summary.num_bytes) == (1, 2, 64)
    # The buckets are ready after 0.5 and 1 s, and done after 1.5 and 2.5 s.
    assert summary.busy_s == 2.0
    assert summary.exposed_s == 1.5
    assert [bucket.exposed_s for bucket in summary.buckets] == [0.5, 1.0]
    assert [bucket.in_flight_s for bucket in summary.buckets] == [1.0, 1.5]


def test_a_bucket_has_no_event_and_counts_at_once_unless_somebody_reads_its_times(
    cuda, monkeypatch
):
    engine = engine_of("flat")
    events = []
    event_of_cuda = torch.cuda.Event

    def noted_event(**kwargs):
        events.append(kwargs)
        return event_of_cuda(**kwargs)

    monkeypatch.setattr(torch.cuda, "Event", noted_event)
    cuda.hang()
    step(engine, [torch.zeros(8), torch.zeros(8)])
    assert events == []
    summary = engine.trace.drain()
    assert (summary.num_steps, summary.num_buckets, summary.num_bytes) == (1, 2, 64)
    assert summary.busy_s == 0.0
    assert summary.buckets == ()
    engine.trace.measure_devices()
    step(engine, [torch.zeros(8), torch.zeros(8)])
    assert events == [{"enable_timing": True}] * 4  # start and end of each bucket
    cuda.go_on()
    assert engine.trace.drain().busy_s > 0


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (OSError("boom"), "alarm"),
        (RuntimeError("socket timeout of my database"), "alarm"),
        (RuntimeError("NCCL error: remote process exited"), "status"),
        (OrderError("this rank submitted x"), "status"),
    ],
)
def test_a_rank_that_only_noticed_asks_for_status_and_one_that_failed_raises_the_alarm(
    fake_world, cuda, error, word
):
    engine = engine_of("flat")

    def finish(flat):
        raise error

    failed = "rank 0 failed on bucket 0"
    with pytest.raises(
        RuntimeError, match=f"{failed} in stage `finish` of the flat all-reduce"
    ) as raised:
        engine.submit(torch.zeros(8), bucket_index=0, finish=finish)
    assert ("rank 3 does not answer" in str(raised.value)) == (word == "status")
    requests = [request for request in engine._watchdog.requests() if request != "compare"]
    assert requests == [word]
    with pytest.raises(RuntimeError, match=failed):
        engine.submit(torch.zeros(8), bucket_index=1)
    assert len(fake_world) == 1


def test_nothing_that_waits_is_done_under_the_engines_lock(cuda, monkeypatch):
    engine = engine_of("two_level")
    locked = []

    def abort_all(limit_s):
        locked.append(engine._latch.lock.locked())
        return []

    monkeypatch.setattr(process_groups, "abort_all", abort_all)
    step(engine, [torch.zeros(8)])
    engine.abort("a test")
    assert set(engine._watchdog.requests()) >= {"compare", "alarm"}
    assert not any(is_locked for _, is_locked in engine._watchdog.asked)
    assert locked == [False]


def test_a_bucket_on_its_way_to_the_streams_as_another_rank_fails_is_an_error_at_once(
    fake_world, cuda
):
    engine = engine_of("flat")

    def finish(flat):
        engine._latch.trip("comm: rank 2 gave up.")

    with pytest.raises(RuntimeError, match="rank 2 gave up"):
        engine.submit(torch.zeros(8), bucket_index=0, finish=finish)
    assert len(fake_world) == 1


def test_a_bucket_that_hangs_is_seen_by_its_events_with_the_stage_in_which_it_is(cuda):
    engine = engine_of("hierarchical")
    # Before the time limit of torch's watchdog.
    assert engine._watchdog.arguments["give_up_after_s"] == 18.0
    buffers = [torch.zeros(8), torch.zeros(8)]
    step(engine, buffers)
    assert engine._latch.stalled_s() == 0.0
    assert engine._latch.status().place.startswith("with no bucket in flight, in ")
    cuda.hang()
    step(engine, buffers)
    issued = engine._carrier._issued._issued[0]
    for through, expected in (
        (cuda.num_through, "waiting for its gradients before the start"),
        (issued.ready.number, "in stage `reduce`"),
        (issued.stages[0].end.number, "in stage `ring`"),
    ):
        cuda.num_through = through
        assert engine._latch.stalled_s() > 0.0
        assert engine._latch.status().place == f"bucket 0 {expected} of the hierarchical all-reduce"
        assert engine._latch.status().is_inside == ("stage" in expected)
    cuda.go_on()
    assert engine._latch.stalled_s() == 0.0
    assert cuda.host_waits == []


def test_an_error_of_all_aborts_and_closing_then_waits_for_nothing(fake_world, cuda, monkeypatch):
    engine = engine_of("hierarchical")
    destroyed = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: destroyed.append(group))
    cuda.hang()
    step(engine, [torch.zeros(8)])
    engine._latch.trip("comm: rank 2 gave up: OSError.")  # as the watchdog's thread would
    assert len(fake_world) == 1
    with pytest.raises(
        RuntimeError, match=r"^comm: rank 2 gave up: OSError\. The gradients of this step are lost"
    ):
        engine.submit(torch.zeros(8), bucket_index=0)
    engine.close()
    engine.close()
    assert destroyed == []
    assert cuda.host_waits == []
    assert engine._groups._owned == []
    monkeypatch.undo()


def test_a_device_that_waits_outside_of_a_bucket_counts_and_is_said(cuda):
    engine = engine_of("flat")
    cuda.hang()
    # The wait has not been long enough yet.
    assert engine._latch.stalled_s() == 0.0 or not engine._latch.status().is_inside
    engine._carrier._waits._since_s -= 5.0
    assert engine._latch.stalled_s() > 4.0
    assert engine._latch.status().place == "waiting for its device, with no bucket in flight"
    assert engine._latch.status().is_inside
    cuda.go_on()
    assert engine._latch.stalled_s() == 0.0
    assert engine._latch.status().place.startswith("with no bucket in flight, in ")


def test_an_engine_that_closes_in_health_waits_by_looking_and_not_for_ever(
    fake_world, cuda, monkeypatch
):
    engine = engine_of("flat")
    cuda.hang()
    step(engine, [torch.zeros(8)])
    threading.Timer(0.2, cuda.go_on).start()
    engine.close()
    assert fake_world == []
    assert engine.trace.total().num_steps == 1
    stuck = engine_of("flat")
    cuda.hang()
    step(stuck, [torch.zeros(8)])
    monkeypatch.setattr(engines, "FAILED_CLOSE_LIMIT_S", -19.8)  # with a timeout of 20 s
    with pytest.warns(
        UserWarning,
        match="closed its communication engine while the all-reduce stages .* were still waiting for other ranks",
    ):
        stuck.close()
    assert len(fake_world) == 1
    assert cuda.host_waits == []


def test_a_look_that_does_not_come_back_does_not_hold_up_the_watchdog(
    fake_world, cuda, monkeypatch
):
    engine = engine_of("flat")
    cuda.hang()
    step(engine, [torch.zeros(8)])
    assert engine._latch.stalled_s() >= 0.0  # from here on there is an event to query
    may_go_on = threading.Event()
    began_s = time.monotonic()
    monkeypatch.setattr(device_waits, "LOOK_LIMIT_S", 0.05)
    monkeypatch.setattr(engine._carrier._waits._event, "query", lambda: may_go_on.wait(30))
    assert engine._latch.stalled_s() > 0.0
    engine._latch.trip("comm: a test")
    assert len(fake_world) == 1
    assert time.monotonic() - began_s < 15  # the query would take 30 s
    may_go_on.set()


class LateFuture:
    """Future like Gloo's: its callbacks run in a separate thread, once the test marks it as done."""

    def __init__(self, value):
        self._value = value
        self._callbacks = []

    def value(self):
        return self._value

    def done(self):
        return False

    def then(self, callback):
        after = LateFuture(None)

        def run():
            after._value = callback(self)
            after.arrive()

        self._callbacks.append(run)
        return after

    def arrive(self):
        for run in self._callbacks:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()


def test_a_bucket_whose_future_comes_late_is_in_flight_until_then_and_its_times_are_reported_once(
    cuda, monkeypatch
):
    """CUDA reports an event that was never recorded as complete, and raises when its time is read."""
    late = []

    def all_reduce(tensor, *args, **kwargs):
        late.append(LateFuture([tensor]))
        return SimpleNamespace(get_future=lambda: late[-1])

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    engine = engine_of("flat", is_timed=True)
    for index in range(3):
        engine.submit(torch.zeros(8), bucket_index=index, is_last=index == 2)
    engine.raise_if_failed()
    assert len(engine._latch.in_flight) == 3
    assert engine.trace.drain().num_steps == 0
    assert engine._latch.stalled_s() > 0  # queries the position
    assert engine._latch.status().place.startswith("bucket 0 in stage `all_reduce`")
    for future in late[:2]:
        future.arrive()
    engine.raise_if_failed()
    assert [bucket.plan.index for bucket in engine._latch.in_flight] == [2]
    late[2].arrive()
    engine.raise_if_failed()
    assert not engine._latch.in_flight
    assert engine.trace.drain().num_steps == 1


# ---- communicators ---------------------------------------------------------------------------------------------------


def test_the_default_group_serves_for_all_ranks_and_stages_share_what_they_can(cuda):
    flat = engine_of("flat")
    assert flat._groups.by_stage["all_reduce"] is dist.group.WORLD
    assert flat._groups._owned == []
    flat.close()
    assert dist.is_initialized()
    both = engine_of("two_level")
    assert both._groups.by_stage["scatter_reduce"] is both._groups.by_stage["gather"]
    assert len(both._groups._owned) == 2
    both.close()


def test_groups_of_a_scope_are_one_split_where_the_backend_can(cuda, monkeypatch):
    splits = []

    def split_group(*, split_ranks, timeout, group_desc):
        splits.append(split_ranks)
        return dist.group.WORLD

    monkeypatch.setattr("lightning_hybrid.comm.engine.process_groups._can_be_split", lambda: True)
    monkeypatch.setattr(dist, "split_group", split_group)
    monkeypatch.setattr(
        dist, "new_group", lambda *args, **kwargs: pytest.fail("a split would have done")
    )
    engine = engine_of("two_level")
    assert splits == [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
    engine._groups._owned.clear()


def test_no_bucket_goes_into_a_captured_graph(cuda, monkeypatch):
    engine = engine_of("flat")
    step(engine, [torch.zeros(8)])
    cuda.hang()
    step(engine, [torch.zeros(8)])
    monkeypatch.setattr(cuda_carrier, "is_any_captured", lambda: True)
    num_queries = cuda.num_queries
    with pytest.raises(RuntimeError, match="inside a CUDA graph capture"):
        engine.submit(torch.zeros(8), bucket_index=0)
    engine.raise_if_failed()
    assert cuda.num_queries == num_queries  # a query would end the capture
    monkeypatch.setattr(cuda_carrier, "is_any_captured", lambda: False)


# ---- results over Gloo -----------------------------------------------------------------------------------------------


def sums_by_streams(algorithm, nodes, numels, dtype):
    with pytest.MonkeyPatch.context() as patch:
        Cuda().installed(patch)
        engine = engine_of(algorithm, nodes)
        for _ in range(2):
            are_right = are_sums_right(engine, numels, dtype)
        summary = engine.trace.drain()
        engine.close()
        return are_right, summary.num_steps


def are_sums_right(engine, numels, dtype):
    """All-reduce a bucket of each size, all in flight at once, and return whether each result is right."""
    rank = dist.get_rank()
    futures = []
    for index, numel in enumerate(numels):
        flat = integers(rank, numel, dtype, seed=index)
        is_last = index == len(numels) - 1
        futures.append(engine.submit(flat, bucket_index=index, is_last=is_last))
    are_right = []
    for index, (future, numel) in enumerate(zip(futures, numels, strict=True)):
        expected = sum_of_integers(4, numel, dtype, seed=index)
        are_right.append(torch.equal(future.wait(), expected))
    return are_right


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "nodes", [TWO_BY_TWO, ((0, 2), (1, 3)), ((0,), (1,), (2,), (3,)), ((0, 1, 2), (3,))], ids=str
)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_stages_of_cuda_sum_up_right(four_ranks, algorithm, nodes):
    numels = [0, 3, 100_000, 70_001, 300_001]
    if algorithm == "two_level" and len(nodes[0]) == 3:
        algorithm = "auto"
    for order in (numels, numels[::-1]):
        results = four_ranks.run(sums_by_streams, algorithm, nodes, order, torch.float32)
        for rank, (are_right, num_steps) in enumerate(results):
            assert num_steps == 2, f"rank {rank}"
            assert are_right == [True] * len(order), f"rank {rank}"


def sums_over_gloo():
    """All-reduce a GPU's buckets over Gloo, and return their correctness, the asynchronous calls and the steps."""
    asynchronous = []
    all_reduce = dist.all_reduce

    def noted_all_reduce(*args, **kwargs):
        asynchronous.append(kwargs.get("async_op", False))
        return all_reduce(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        Cuda().installed(patch)
        patch.setattr(cuda_carrier, "is_on_hosts", abort.is_on_hosts)
        patch.setattr(dist, "all_reduce", noted_all_reduce)
        engine = engine_of("flat")
        are_right = are_sums_right(engine, (3, 70_001), torch.float32)
        num_steps = engine.trace.drain().num_steps
        engine.close()
    return are_right, asynchronous, num_steps


def test_over_gloo_sums_of_a_gpu_go_stage_by_stage_through_synchronous_calls(four_ranks):
    for rank, result in enumerate(four_ranks.run(sums_over_gloo)):
        are_right, asynchronous, num_steps = result
        assert are_right == [True, True], f"rank {rank}"
        assert asynchronous == [False, False], f"rank {rank}"
        assert num_steps == 1, f"rank {rank}"


def groups_beside_a_bound_default_group():
    default = dist.distributed_c10d._get_default_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(process_groups, "dist", AsBound(default))
        return process_groups._can_be_split()


class AsBound:
    """Mock of `torch.distributed` whose default group is bound to a GPU."""

    def __init__(self, default):
        self._bound = SimpleNamespace(bound_device_id=CUDA, _get_backend=default._get_backend)
        self.distributed_c10d = SimpleNamespace(_get_default_group=lambda: self._bound)


def test_a_default_group_of_gloo_is_never_split_although_gloo_says_that_it_can(two_ranks):
    assert two_ranks.run(groups_beside_a_bound_default_group) == [False, False]


@pytest.mark.parametrize(
    ("backend", "device", "is_bound"),
    [
        ("nccl", CUDA, True),
        ("cpu:gloo,cuda:nccl", CUDA, True),
        ("gloo", CUDA, False),
        ("gloo", torch.device("cpu"), False),
    ],
)
def test_only_nccl_is_bound_to_its_device(monkeypatch, backend, device, is_bound):
    """Bound to a device, torch would split Gloo's groups, which is not supported: ranks would hang or raise."""
    arguments = {}

    def connect(*args, **kwargs):
        arguments.update(kwargs)

    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # the launcher owns the store
    monkeypatch.setattr(rendezvous, "lightning_function", lambda name: connect)
    rendezvous.connect_ranks(None, backend, device, timedelta(seconds=5))
    expected = device if is_bound else None
    assert arguments["device_id"] == expected


def another_order(algorithm):
    with pytest.MonkeyPatch.context() as patch:
        cuda = Cuda().installed(patch)
        engine = engine_of(algorithm)  # compares plans on the host
        with cuda:
            text = error_of_another_order(engine)
        return text, cuda.host_waits, cuda.violations


def test_the_order_of_buckets_is_compared_in_the_first_steps_and_then_rarely(cuda):
    engine = engine_of("flat")
    compared = []
    for number in range(1, 41):
        num_before = len(engine._watchdog.asked)
        step(engine, [torch.zeros(8), torch.zeros(8)])
        if "compare" in engine._watchdog.requests()[num_before:]:
            compared.append(number)
    assert compared == [1, 2, 3, 4, 5, 6, 7, 8, 16, 32]
    collectives = [name for name, _ in cuda.operations if name.startswith("c10d::")]
    assert collectives == ["c10d::allreduce_"] * 80, "the comparison has no collective of its own"
    unchecked = engine_of("flat", check_order=False)
    for _ in range(4):
        step(unchecked, [torch.zeros(8)])
    # The comparison of the bucket when it was new.
    assert unchecked._watchdog.requests() == ["compare"]


@pytest.mark.parametrize("algorithm", ["flat", "two_level"])
def test_buckets_in_another_order_are_an_error_on_every_rank_and_no_host_waits_for_a_device(
    four_ranks, algorithm
):
    for rank, result in enumerate(four_ranks.run(another_order, algorithm)):
        text, host_waits, violations = result
        assert host_waits == [], f"rank {rank}"
        assert violations == [], f"rank {rank}"
        assert "comm: rank 2 submitted bucket 1 (40 x float32" in text, f"rank {rank}: {text}"
        assert "where ranks 0, 1, 3 submitted bucket 0 (40 x float32" in text, f"rank {rank}"
