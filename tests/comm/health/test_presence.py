"""Detection of missing ranks while a bucket is in flight on a device.

Some tests run the watchdogs of several ranks in one process. Others run whole ranks whose device hangs while the host
waits for it.
"""

import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.comm.engine import process_groups
from lightning_hybrid.comm.health import presence, watchdog
from lightning_hybrid.comm.health.diagnosis import RankStatus
from lightning_hybrid.comm.health.watchdog import Watchdog
from tests.comm.engine.test_cuda_streams import engine_of
from tests.stand_in.recording_cuda import Cuda

WAITING = RankStatus(
    num_submitted=2,
    order="b",
    place="bucket 1 in stage `all_reduce`",
    recent=("x", "y"),
    is_inside=True,
)
BEHIND = RankStatus(num_submitted=1, order="a", place="with no bucket in flight", recent=("x",))
STRAYED = RankStatus(
    num_submitted=2, order="c", place="bucket 1 in stage `all_reduce`", recent=("x", "z")
)


class Watched:
    def __init__(self, status, stalled_s, errors, rank):
        self.status = lambda: status
        self.stalled_s = lambda: stalled_s
        self._errors = errors
        self._rank = rank

    def trip(self, error, cause=None):
        self._errors.setdefault(self._rank, error)


class World:
    """Watchdogs of some of three ranks on one store. All have been waiting for ``stalled_s`` and still wait."""

    def __init__(self, statuses, *, stalled_s=10.0, give_up_after_s=1000.0):
        self.store = dist.HashStore()
        self.errors = {}
        self.watchdogs = []
        for rank, status in statuses.items():
            rank_watchdog = Watchdog(
                store=dist.PrefixStore("a", self.store),
                rank=rank,
                world_size=3,
                watched=Watched(status, stalled_s, self.errors, rank),
                give_up_after_s=give_up_after_s,
                hosts=["x", "y", "z"],
            )
            rank_watchdog.start()
            self.watchdogs.append(rank_watchdog)

    def outcome(self, *, num_errors, limit_s=30.0):
        end_s = time.monotonic() + limit_s
        while len(self.errors) < num_errors and time.monotonic() < end_s:
            time.sleep(0.05)
        for rank_watchdog in self.watchdogs:
            rank_watchdog.leave()
        return self.errors

    def has(self, key):
        return self.store.check([f"a/{key}"])


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(presence, "ASK_AFTER_S", 0.2)
    monkeypatch.setattr(presence, "PATIENCE_S", 2.0)
    # Rank 0 leaves without waiting for absent ranks.
    monkeypatch.setattr(watchdog, "STORE_LIMIT_S", 0.5)


def test_a_rank_that_does_not_answer_is_named_on_all_others(soon):
    errors = World({0: WAITING, 1: WAITING}).outcome(num_errors=2)
    assert len(set(errors.values())) == 1
    assert errors[0].startswith(
        "comm: rank 2 does not answer: its process is dead, stopped or unreachable. rank "
    )
    assert (
        "has waited 10 s (state: bucket 1 in stage `all_reduce`). Rank 2 is on host z." in errors[1]
    )


def test_a_rank_that_is_slow_answers_and_is_waited_for(monkeypatch):
    monkeypatch.setattr(presence, "ASK_AFTER_S", 0.2)
    world = World({0: WAITING, 1: WAITING, 2: BEHIND})
    end_s = time.monotonic() + 30
    # Ranks 0 and 1 ask in turn, so one may ask again before the last question is answered.
    while not (world.has("question/2") and world.has("answer/1/2")):
        assert time.monotonic() < end_s, "rank 2 did not answer"
        time.sleep(0.05)
    assert world.outcome(num_errors=1, limit_s=0) == {}


@pytest.mark.parametrize(
    ("third", "words"),
    [
        (STRAYED, "comm: rank 2 submitted z where ranks 0, 1 submitted y"),
        (None, "comm: rank 2 has closed its engine"),
    ],
)
def test_what_can_come_to_no_end_is_an_error_at_once(soon, third, words):
    statuses = {0: WAITING, 1: WAITING}
    if third is not None:
        statuses[2] = third
    world = World(statuses)
    if third is None:
        left = RankStatus(num_submitted=1, order="a", place="gone", has_left=True)
        dist.PrefixStore("a", world.store).set("status/2", left.to_json())
    errors = world.outcome(num_errors=2)
    assert len(errors) >= 2
    for rank, error in errors.items():
        assert error.startswith(words), f"rank {rank}"


def test_after_the_time_limit_the_rank_behind_is_named_on_all(monkeypatch):
    monkeypatch.setattr(presence, "ASK_AFTER_S", 1000.0)  # no rank would ask again before that
    errors = World({0: WAITING, 1: WAITING, 2: BEHIND}, give_up_after_s=5.0).outcome(num_errors=3)
    assert len(set(errors.values())) == 1
    assert errors[2].startswith(
        "comm: rank 2 is behind: it has submitted 1 of 2 buckets. State of rank 2: with no"
    )


def test_where_collectives_raise_by_themselves_no_rank_asks(soon):
    world = World({0: WAITING, 1: WAITING}, give_up_after_s=None)
    time.sleep(0.7)
    assert not world.has("question/0")
    assert world.outcome(num_errors=1, limit_s=0) == {}


class Unanswering:
    """Store that does not answer a request if `is_busy` returns true for its number."""

    def __init__(self, is_busy):
        self.is_busy = is_busy
        self.num_requests = 0

    def check(self, keys):
        self.num_requests += 1
        if self.is_busy(self.num_requests):
            raise TimeoutError("no answer")
        return False

    def set(self, key, value):
        self.num_requests += 1
        raise TimeoutError("no answer")

    def compare_set(self, key, expected, value):
        time.sleep(0.3)
        return value.encode()


def watchdog_of(store, errors):
    watched = Watched(WAITING, 10.0, errors, 1)
    rank_watchdog = Watchdog(store=store, rank=1, world_size=2, watched=watched)
    rank_watchdog._poll_s = 0.01
    return rank_watchdog


@pytest.mark.parametrize(
    ("is_busy", "is_error"), [(lambda num: num % 2, False), (lambda num: num > 4, True)]
)
def test_only_requests_left_unanswered_in_a_row_mean_that_the_store_is_gone(
    monkeypatch, is_busy, is_error
):
    monkeypatch.setattr(watchdog, "store_port", lambda: None)  # there is no process group
    store = Unanswering(is_busy)
    errors = {}
    rank_watchdog = watchdog_of(store, errors)
    rank_watchdog.start()
    end_s = time.monotonic() + 20
    while not errors and store.num_requests < 6 * watchdog.PATIENCE and time.monotonic() < end_s:
        time.sleep(0.01)
    rank_watchdog.leave()
    assert bool(errors) == is_error
    assert store.num_requests >= 2 * watchdog.PATIENCE


def test_a_comparison_has_a_limit_of_its_own_and_waits_for_a_busy_store_longer_than_a_question(
    monkeypatch,
):
    rank_watchdog = watchdog_of(Unanswering(bool), {})
    assert rank_watchdog.compare("bucket", "contents") == "contents"
    monkeypatch.setattr(watchdog, "COMPARE_LIMIT_S", 0.1)
    with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
        rank_watchdog.compare("bucket", "contents")
    monkeypatch.undo()
    assert watchdog.COMPARE_LIMIT_S >= watchdog.PATIENCE * watchdog.STORE_LIMIT_S


def test_with_many_ranks_those_of_low_rank_ask_and_less_and_less_often():
    def after_s(rank, num_asked):
        asks = presence.Presence(
            store=dist.HashStore(),
            rank=rank,
            world_size=1,
            ask=lambda do: do(),
            status=lambda: WAITING,
            wait=bool,
        )
        for _ in range(num_asked):
            asks.ask_all()
        return next(tenth / 10 for tenth in range(30, 1000) if asks.is_time_to_ask(tenth / 10))

    assert [after_s(rank, 0) for rank in (0, 1, 8, 2000)] == [3.0, 3.5, 7.0, 7.0]
    assert [after_s(0, num_asked) for num_asked in (1, 2, 3)] == [6.0, 12.0, 24.0]


def host_in_a_sync():
    """Submit a bucket and synchronize ranks 0 and 1, whose device waits for rank 2 until an abort."""
    freed = threading.Event()

    def abort_all(limit_s):
        freed.set()
        return []

    def finish(flat):
        return flat.view(3)

    with pytest.MonkeyPatch.context() as patch:
        cuda = Cuda().installed(patch)
        patch.setattr(process_groups, "abort_all", abort_all)
        patch.setattr(presence, "ASK_AFTER_S", 0.2)
        patch.setattr(presence, "PATIENCE_S", 3.0)
        engine = engine_of("flat", ((0,), (1,), (2,)), timeout_s=60.0)
        engine.submit(torch.ones(8), bucket_index=0, is_last=True)
        dist.barrier()
        text = ""
        began_s = time.monotonic()
        try:
            # Returns at once, as NCCL's calls do.
            all_reduce = partial(cuda.all_reduce, lambda *args, **kwargs: None)
            patch.setattr(dist, "all_reduce", all_reduce)
            if dist.get_rank() < 2:
                cuda.hang()
                engine.submit(torch.ones(8), bucket_index=0, is_last=True)
                assert freed.wait(40), "the host still waits for its device"
            else:
                engine.submit(torch.ones(8), bucket_index=0, is_last=True, finish=finish)
            engine.submit(torch.ones(8), bucket_index=0)
        except RuntimeError as error:
            text = str(error)
        waited_s = time.monotonic() - began_s
        engine.close()
        return text, waited_s


def test_hosts_that_wait_for_their_device_are_freed_with_the_error_of_the_cause(three_ranks):
    cause = "comm: rank 2 failed on bucket 0 in stage `finish` of the flat all-reduce: RuntimeError"
    for rank, (text, waited_s) in enumerate(three_ranks.run(host_in_a_sync)):
        assert waited_s < 20, f"rank {rank}; the time limit is 60 s"
        assert cause in text, f"rank {rank}"
