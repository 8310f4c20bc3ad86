"""Tuning on real ranks, with planted step times: all change plan at once, sums stay right, what was found is cached."""

from __future__ import annotations

import json
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.comm import CommPlan, CommTrace, Topology
from lightning_hybrid.comm.tuning.session import CHECK_STEPS, MOST_RETUNES, NUM_WARMUP_STEPS, Decision, TuningSession
from tests.comm.engine.recording_cuda import Cuda
from tests.comm.layouts import engine_over, integers

TWO_BY_TWO = ((0, 1), (2, 3))
NUMELS = (300_000, 200_000)  # halves: of 586 and 391 KiB, in several chunks
MOST_STEPS = 400


class PlantedTrace(CommTrace):
    """Communication takes what the test says."""

    planted_busy_s = 0.0

    @property
    def total_busy(self):
        return self.planted_busy_s, 0


class Session:
    """An engine, its tuning and a clock that the test moves; a step sums two tensors and checks the sums."""

    def __init__(self, nodes=TWO_BY_TWO, folder=None, plan=None):
        self.now_s = 0.0
        self.reported, self.taken = [], []
        self.engine = engine_over(nodes, CommPlan() if plan is None else plan, trace=PlantedTrace())
        self.tuning = TuningSession(
            self.engine,
            cache_folder=folder,
            report=self.reported.append,
            on_plan=self.taken.append,
            clock=lambda: self.now_s,
        )
        self.addends = [[integers(r, n, torch.float16) for n in NUMELS] for r in range(dist.get_world_size())]
        self.sums = [sum(of_ranks) for of_ranks in zip(*self.addends, strict=True)]
        self.num_steps = 0

    def step(self, step_s, busy_s=0.1):
        """`step_s`: by plan, on this rank."""
        self.tuning.before_batch()
        if not self.num_steps:  # as DDP, which rebuilds its buckets after the first step
            self.engine.submit(torch.ones(1000), bucket_index=0, is_last=True).wait()
        mine = [flat.clone() for flat in self.addends[dist.get_rank()]]
        last = len(mine) - 1
        futures = [self.engine.submit(f, bucket_index=i, is_last=i == last) for i, f in enumerate(mine)]
        for future, expected in zip(futures, self.sums, strict=True):
            assert torch.equal(future.wait(), expected), self.engine.plan
        self.now_s += step_s(self.engine.plan)
        self.engine.trace.planted_busy_s += busy_s
        self.tuning.after_optimizer_step()
        self.now_s += 1000.0  # validation, checkpoints: not the step's
        self.num_steps += 1

    def until_taken(self, step_s):
        num_taken = len(self.taken)
        while len(self.taken) == num_taken and self.num_steps < MOST_STEPS:
            self.step(step_s)
        return self.num_steps

    def close(self):
        dist.barrier()
        self.engine.close()


def best_where_all_are_fast(plan):
    """Fastest are 512 KiB of `two_level`; `parallel_flat` is faster still, but on one rank, which all wait for."""
    if plan.algorithm == "parallel_flat":
        return 3.0 if dist.get_rank() == 3 else 0.1
    if plan.algorithm == "two_level":
        return 0.7 if plan.chunk_bytes == 2**19 else 0.9
    return 1.0


def tune_planted():
    session = Session()
    num_groups = len(session.engine._groups._owned)
    num_steps = session.until_taken(best_where_all_are_fast)
    threads = sorted(t.name for t in threading.enumerate() if t.name.startswith("comm-") and t.name != "comm-watch")
    found = session.engine.plan, num_steps, session.reported, threads, len(session.engine._groups._owned) - num_groups
    session.step(best_where_all_are_fast)
    session.close()
    return found, session.taken


def test_all_ranks_find_the_planted_plan_at_once_and_the_slowest_rank_counts(four_ranks):
    results = four_ranks.run(tune_planted)
    for (plan, num_steps, reported, threads, num_groups_more), taken in results:
        assert (plan.algorithm, plan.chunk_bytes) == ("two_level", 2**19)
        assert taken == [plan]
        assert num_steps == results[0][0][1] < 200
        assert {name.split(".")[0] for name in threads} == {
            "comm-scatter_reduce",
            "comm-shard_all_reduce",
            "comm-gather",
        }
        assert num_groups_more <= 0  # what was tried and not taken is freed
        assert len(reported) == (reported is results[0][0][2])
    (line,) = results[0][0][2]
    assert "`algorithm` two_level instead of auto" in line
    assert "`chunk_bytes` 524288 instead of 262144" in line
    assert "0.700 of the time of a step before" in line


def of_another_plan():
    session = Session()
    error = ""
    try:
        for number in range(NUM_WARMUP_STEPS + 1):
            if number == NUM_WARMUP_STEPS and dist.get_rank() == 2:
                session.engine.plan = CommPlan(chunk_bytes=2**19)  # as a fault would
            session.step(lambda plan: 1.0)
    except ValueError as caught:
        error = str(caught)
    session.close()
    return error


def test_a_rank_under_another_plan_is_named_on_every_rank(four_ranks):
    for error in four_ranks.run(of_another_plan):
        assert "all ranks must change the plan of communication after the same step" in error
        assert f"is 'step 5 under plan {CommPlan().plan_hash[:8]}' on ranks 0, 1, 3" in error
        assert f"'step 5 under plan {CommPlan(chunk_bytes=2**19).plan_hash[:8]}' on rank 2" in error


def with_another_reading():
    session = Session(((0,), (1,)))
    digest = Decision.digest
    try:
        if dist.get_rank() == 1:
            Decision.digest = property(lambda self: "another")
        session.tuning._from_first_rank(lambda: Decision(plan=CommPlan()))
        error = ""
    except RuntimeError as caught:
        error = str(caught)
    finally:
        Decision.digest = digest
    session.close()
    return error


def test_a_rank_that_reads_another_plan_than_was_sent_says_so(two_ranks):
    good, bad = two_ranks.run(with_another_reading)
    assert good == ""
    assert bad.startswith("rank 1 reads another plan than rank 0 sent")


# ---- cached on disk --------------------------------------------------------------------------------------------------


def tune_with_folder(folder):
    """A session that tunes, one that takes what the first has written, and one that finds that file broken."""
    folder = Path(folder, str(dist.get_rank()))  # only rank 0 reads or writes
    sessions, files = [], None
    for number in range(3):
        if number == 2:
            files = [path.read_text() for path in folder.glob("*")] if folder.exists() else None
            for path in folder.glob("*.json"):
                path.write_text('{"plan": {"algorithm": "fl')
        session = Session(folder=folder)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            num_steps = session.until_taken(best_where_all_are_fast)
        for _ in range(60 if number < 2 else 0):  # the level of communication's time is learned and written
            session.step(best_where_all_are_fast)
        session.close()
        sessions.append((session.engine.plan, num_steps, session.reported, [str(each.message) for each in caught]))
    return sessions, files


@pytest.fixture(scope="module")
def three_sessions(four_ranks, tmp_path_factory):
    """The folder, and of each rank its sessions and the files after the second."""
    folder = tmp_path_factory.mktemp("plans")
    return folder, four_ranks.run(tune_with_folder, str(folder))


def test_a_plan_that_was_tuned_is_taken_at_once_by_the_next_run(three_sessions):
    _, results = three_sessions
    for (first, second, _), _ in results:
        assert second[0] == first[0]
        assert second[1] == NUM_WARMUP_STEPS + 1
    (text,) = results[0][1]
    assert [files for _, files in results[1:]] == [None] * 3
    cached = json.loads(text)
    assert CommPlan(**cached["plan"]) == results[0][0][0][0]
    assert cached["level"] == {"seconds": pytest.approx(0.1), "sigma": pytest.approx(0.0, abs=1e-9)}
    assert cached["facts"]["nodes"] == [[0, 1], [2, 3]]
    assert cached["facts"]["buckets"] == [[300_000, "float16"], [200_000, "float16"]]
    assert "comm: plan as tuned in an earlier run in " in results[0][0][1][2][0]


def test_a_file_that_cannot_be_read_is_named_and_the_plan_is_tuned_again(three_sessions):
    folder, results = three_sessions
    for (first, _, third), _ in results:
        assert third[:2] == first[:2]
    (message,) = results[0][0][2][3]
    assert f"`{folder}/0/" in message
    assert "holds no plan that can be used (JSONDecodeError" in message


# ---- afterwards ------------------------------------------------------------------------------------------------------


def train_through_changes():
    """Communication takes twice as long, again and again; with each change another plan is best."""
    session = Session()
    session.until_taken(lambda plan: 0.5 if plan.algorithm == "two_level" else 1.0)
    plans, busy_s, messages = [session.engine.plan.algorithm], 0.1, []
    for best in ("flat", "hierarchical", "two_level"):
        for _ in range(80):
            session.step(lambda plan: 1.0, busy_s)
        busy_s *= 2
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2 * CHECK_STEPS + 150):
                session.step(lambda plan, best=best: 0.5 if plan.algorithm == best else 1.0, busy_s)
        plans.append(session.engine.plan.algorithm)
        messages.append([str(each.message) for each in caught])
    session.close()
    return plans, session.reported, messages


@pytest.mark.long
def test_a_change_of_communication_is_tuned_for_twice_and_then_warned_of(four_ranks):
    results = four_ranks.run(train_through_changes, timeout_s=120.0)
    assert MOST_RETUNES == 2
    assert [plans for plans, _, _ in results] == [["two_level", "flat", "hierarchical", "hierarchical"]] * 4
    _, reported, messages = results[0]
    assert sum("communication takes 2.00 of what it took" in line for line in reported) == 2
    assert messages[:2] == [[], []]
    (message,) = messages[2]
    assert "communication takes 2.00 of what it took when plan" in message
    assert "it is stale, and it has been tuned again 2 times" in message
    assert [reported for _, reported, _ in results[1:]] == [[]] * 3


class EngineOnCuda:
    """What tuning asks of an engine, of a device whose steps are counted when it is through with them."""

    def __init__(self):
        self.topology = Topology(rank=0, nodes=TWO_BY_TWO)
        self.plan, self.device, self.buckets = CommPlan(), torch.device("cuda"), ()
        self.dtype_across_nodes, self.trace = None, self
        self.total_busy, self.prepared = (0.0, 0), []

    def prepare(self, plans):
        self.prepared.append([plan.algorithm for plan in plans])

    def free_unused(self):
        pass


@pytest.fixture
def on_cuda():
    """Tuning that watches, as on CUDA; the tensors are the CPU's."""
    with pytest.MonkeyPatch.context() as patch:
        cuda, full = Cuda().installed(patch), torch.full
        patch.setattr(torch, "full", lambda size, value, device: full(size, value))
        patch.setattr(dist, "broadcast", lambda word, src: None)
        tuned = TuningSession(EngineOnCuda(), cache_folder=None, clock=lambda: 0.0)
        tuned._follow(Decision(plan=tuned._engine.plan))
        yield tuned, cuda


def test_on_cuda_groups_for_all_trials_are_made_before_the_first_step(on_cuda):
    assert on_cuda[0]._engine.prepared == [["flat", "parallel_flat", "hierarchical", "two_level"]]


def test_on_cuda_communication_is_watched_by_steps_that_the_device_has_finished(on_cuda):
    """It is through with none, with one, with two at once: what a step takes is the same, and no change is seen."""
    tuned, _ = on_cuda
    total_s, num_steps = 0.0, 0
    for number in range(200):
        num_new = (0, 1, 2)[number % 3]
        total_s, num_steps = total_s + 0.1 * num_new, num_steps + num_new
        tuned._engine.total_busy = total_s, num_steps
        tuned._monitor(1.0)
    assert tuned._detector.baseline.seconds == pytest.approx(0.1)
    assert not tuned._detector.has_changed
    for _ in range(10):
        total_s, num_steps = total_s + 0.2, num_steps + 1
        tuned._engine.total_busy = total_s, num_steps
        tuned._monitor(1.0)
    assert tuned._detector.has_changed


def test_on_cuda_what_rank_0_found_is_read_one_check_late_and_no_host_waits(on_cuda):
    tuned, cuda = on_cuda
    assert tuned._is_stale() is False
    tuned._detector.has_changed = True
    assert tuned._is_stale() is False
    cuda.hang()  # what came after the last check may still be under way
    assert tuned._is_stale() is True
    assert cuda.host_waits == ["event"] * 2  # which the stand-in refuses where it would take time
    tuned._follow(Decision(plan=tuned._engine.plan))
    assert tuned._is_stale() is False  # no word is left over


# ---- the engine's part -----------------------------------------------------------------------------------------------


def adopt_in_flight():
    session = Session(((0,), (1,)))
    flat = torch.ones(10)
    if dist.get_rank() == 0:
        future = session.engine.submit(flat, bucket_index=0, is_last=True)
        with pytest.raises(RuntimeError, match="a plan can only be changed between two steps, and a bucket is in flig"):
            session.engine.adopt(CommPlan(algorithm="flat"))
        dist.barrier()
    else:
        dist.barrier()
        future = session.engine.submit(flat, bucket_index=0, is_last=True)
    total = future.wait().tolist()
    session.close()
    return total


def test_a_plan_does_not_change_while_a_bucket_is_in_flight(two_ranks):
    assert two_ranks.run(adopt_in_flight) == [[2.0] * 10] * 2


def tune_with_few_steps(folder):
    session = Session(folder=Path(folder))
    session.tuning._most_steps = 30
    session.until_taken(best_where_all_are_fast)
    session.close()
    return session.reported


def test_what_ran_out_of_steps_is_said_and_not_cached(four_ranks, tmp_path):
    (line,) = four_ranks.run(tune_with_few_steps, str(tmp_path))[0]
    assert "(not all was tried: the steps for it ran out)" in line
    assert list(tmp_path.iterdir()) == []
