"""Tuning on real ranks, with planted step times: all change plan at once, sums stay right."""

import threading

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.comm import CommPlan, Topology
from lightning_hybrid.comm.tuning.session import NUM_WARMUP_STEPS, TuningSession
from tests.comm.layouts import engine_over, integers

TWO_BY_TWO = ((0, 1), (2, 3))
NUMELS = (300_000, 200_000)  # halves: of 586 and 391 KiB, in several chunks
MOST_STEPS = 400


class Session:
    """An engine, its tuning and a clock that the test moves; a step sums two tensors and checks the sums."""

    def __init__(self, nodes=TWO_BY_TWO):
        self.now_s = 0.0
        self.reported, self.taken = [], []
        self.engine = engine_over(nodes, CommPlan())
        self.tuning = TuningSession(
            self.engine, report=self.reported.append, on_plan=self.taken.append, clock=lambda: self.now_s
        )
        self.addends = [[integers(r, n, torch.float16) for n in NUMELS] for r in range(dist.get_world_size())]
        self.sums = [sum(of_ranks) for of_ranks in zip(*self.addends, strict=True)]
        self.num_steps = 0

    def step(self, step_s):
        self.tuning.before_batch()
        if not self.num_steps:  # as DDP, which rebuilds its buckets after the first step
            self.engine.submit(torch.ones(1000), bucket_index=0, is_last=True).wait()
        mine = [flat.clone() for flat in self.addends[dist.get_rank()]]
        last = len(mine) - 1
        futures = [self.engine.submit(f, bucket_index=i, is_last=i == last) for i, f in enumerate(mine)]
        for future, expected in zip(futures, self.sums, strict=True):
            assert torch.equal(future.wait(), expected), self.engine.plan
        self.now_s += step_s(self.engine.plan)
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
    others = set(threading.enumerate())  # of engines that an earlier test has left in this process
    session = Session()
    num_groups = len(session.engine._groups._owned)
    num_steps = session.until_taken(best_where_all_are_fast)
    names = sorted(thread.name for thread in set(threading.enumerate()) - others)
    threads = [name for name in names if name.startswith("comm-") and name != "comm-watch"]
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


class EngineOnCuda:
    topology, plan, device = Topology(rank=0, nodes=TWO_BY_TWO), CommPlan(), torch.device("cuda")

    def prepare(self, plans):
        self.prepared = [plan.algorithm for plan in plans]


def test_on_cuda_groups_for_all_trials_are_made_before_the_first_step():
    TuningSession(engine := EngineOnCuda())
    assert engine.prepared == ["flat", "parallel_flat", "hierarchical", "two_level"]


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
