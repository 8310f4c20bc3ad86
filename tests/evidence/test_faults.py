"""Injected faults are judged by what ranks wrote: a broken promise is seen, one that holds is not doubted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.evidence.faults import mode_cases, numerics_cases, replica_cases
from tests.evidence.faults.case import ALLOWED_S, FaultCase, fault_outcome, run_case, run_cases, shorten
from tests.evidence.faults.comm_cases import cases, cases_of_links
from tests.evidence.faults.inject import AT_CONSTRUCTION, PHASES, Inject
from tests.evidence.faults.modes import MODES
from tests.evidence.faults.world import OneHost, RunOutcome

ROOT = Path(__file__).resolve().parents[2]
NAMED = FaultCase(fault="f", kind="dies", rank=1, names=("rank RANK does", "on host HOST"), no_answer=True)
SURVIVED = FaultCase(fault="f", kind="lags", rank=1, is_survived=True)
ERROR = "RuntimeError: comm: rank 1 does not answer. Rank 1 is on host b."


def rank(error=None, weights=7, time_s=103.0, num_steps=12, warnings=()):
    return {"error": error, "weights": weights, "time_s": time_s, "num_steps": num_steps, "warnings": list(warnings)}


def judged(case, ranks, *, injected_s=100.0, still_ran=(), weights=7):
    ended = RunOutcome(injected_s=injected_s, ranks=ranks, still_ran=list(still_ran))
    return fault_outcome(case, ended, host="b", no_answer=(case.rank,) if case.no_answer else (), weights=weights)


def test_an_error_that_says_all_it_should_in_time_holds():
    outcome = judged(NAMED, [rank(ERROR), None])
    assert (outcome.is_held, outcome.seconds) == (True, 3.0)
    assert outcome.detected_by.startswith("comm: rank 1 does not answer.")


@pytest.mark.parametrize(
    ("ranks", "settings", "problem"),
    [
        ([rank(ERROR.replace("host b", "host a")), None], {}, "rank 0 does not say 'on host b'"),
        ([rank(), None], {}, "rank 0 ended without an error"),
        ([None, None], {}, "rank 0 left no word"),
        ([None, None], {"still_ran": [0]}, "rank 0 still ran"),
        ([rank(ERROR, time_s=101.0 + NAMED.timeout_s + ALLOWED_S), None], {}, "after 36 s, beyond 35"),
        ([rank(ERROR), None], {"injected_s": None}, "the fault was never injected"),
    ],
)
def test_what_breaks_a_promise_of_an_error_is_reported(ranks, settings, problem):
    outcome = judged(NAMED, ranks, **settings)
    assert not outcome.is_held
    assert problem in outcome.detected_by


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        ([rank(), rank()], None),
        ([rank(), rank(ERROR)], "rank 1: RuntimeError: comm:"),
        ([rank(), rank(weights=8)], "ranks end with different weights"),
        ([rank(weights=8), rank(weights=8)], "the weights are not those of an undisturbed run"),
        ([rank(), None], "rank 1 left no word"),
        ([rank(), rank(num_steps=11)], "rank 1 made 11 of 12 steps"),
    ],
)
def test_survival_needs_every_rank_and_the_very_weights_of_an_undisturbed_run(ranks, problem):
    outcome = judged(SURVIVED, ranks)
    assert outcome.is_held == (problem is None)
    assert problem is None or problem in outcome.detected_by


def test_the_rank_concerned_may_say_it_in_its_own_words():
    case = replace(NAMED, no_answer=False, own_names=("OutOfMemoryError", "rank RANK (host HOST)"))
    own = rank("OutOfMemoryError: no room\nOn rank 1 (host b), in batch 3: ...")
    assert judged(case, [rank(ERROR), own]).is_held
    assert not judged(case, [rank(ERROR), rank("OutOfMemoryError: no room")]).is_held
    assert not judged(case, [own, own]).is_held


def test_survival_without_the_fault_is_none():
    """A case that injects nothing must not be able to hold."""
    outcome = judged(SURVIVED, [rank(), rank()], injected_s=None)
    assert not outcome.is_held
    assert outcome.detected_by == "the fault was never injected"


def test_the_dead_rank_is_not_asked_but_the_others_must_end_as_if_nothing_had_happened():
    over = replace(SURVIVED, no_answer=True)
    assert judged(over, [rank(), None]).is_held
    assert judged(over, [rank(), None]).promise == "the others end, same bits"
    assert not judged(over, [rank(weights=8), None]).is_held
    assert not judged(over, [rank(ERROR), None]).is_held
    assert not judged(SURVIVED, [rank(), None]).is_held


def test_equal_ranks_need_no_weights_of_an_undisturbed_run_but_their_own():
    alike = replace(SURVIVED, has_same_weights=False)
    assert judged(alike, [rank(weights=8), rank(weights=8)]).is_held
    assert not judged(alike, [rank(weights=8), rank()]).is_held


WARNED = replace(SURVIVED, has_same_weights=False, warns=("rank RANK (host HOST) was inf", "floor"))


@pytest.mark.parametrize(
    ("warnings", "problem"),
    [
        ([["rank 1 (host b) was inf"], ["at its floor"]], None),
        ([[], ["rank 1 (host b) was inf: at its floor"]], None),
        ([["rank 1 (host b) was inf"], []], "no rank warns 'floor'"),
        ([["rank 0 (host a) was inf"], ["floor"]], "no rank warns 'rank 1 (host b) was inf'"),
        ([[], []], "no rank warns 'rank 1 (host b) was inf'; no rank warns 'floor'"),
    ],
)
def test_a_promised_warning_must_have_been_given(warnings, problem):
    outcome = judged(WARNED, [rank(warnings=each) for each in warnings])
    assert outcome.promise == "survived, told"
    assert outcome.is_held == (problem is None)
    assert outcome.detected_by == (problem or "rank 1 (host b) was inf" + ("" if warnings[0] else ": at its floor"))


def test_words_that_are_not_so_break_the_promise_on_any_rank():
    case = replace(NAMED, names=("rank RANK",), never_says=("dead", "host HOST is down"))
    assert judged(case, [rank("rank 1 is far"), None]).is_held
    for lie in ("rank 1 is dead", "rank 1: host b is down"):
        outcome = judged(case, [rank(lie), None])
        assert not outcome.is_held
        assert "which is not so" in outcome.detected_by


def test_either_of_two_words_may_name_the_rank():
    case = replace(NAMED, rank=3, names=("rank RANK does not | rank PLACE does not",), no_answer=False)
    for named, is_held in ((3, True), (1, True), (2, False)):
        assert judged(case, [rank(f"rank {named} does not answer")] * 4).is_held == is_held


def test_an_error_just_in_time_holds_and_later_does_not():
    limit_s = NAMED.timeout_s + ALLOWED_S
    assert judged(NAMED, [rank(ERROR, time_s=100.0 + limit_s), None]).is_held
    assert not judged(NAMED, [rank(ERROR, time_s=100.1 + limit_s), None]).is_held


def test_the_slowest_rank_counts():
    case = replace(NAMED, no_answer=False)
    assert judged(case, [rank(ERROR, time_s=101.0), rank(ERROR, time_s=104.0)]).seconds == 4.0


def test_long_words_are_cut_and_begin_where_they_are_ours():
    assert shorten(f"Error: torch says comm: {'a' * 300}") == "comm: " + "a" * 141 + "..."


class Played:
    """A world in which every rank does what is asked, and the weights are given."""

    num_ranks, has_links = 2, True

    def __init__(self, weights):
        self.weights, self.specs = weights, []

    def host_of(self, rank):
        return rank

    def host_name(self, host):
        return "ab"[host]

    def run(self, train, spec, *, limit_s, no_answer=(), when_injected=None):
        self.specs.append(spec)
        weights = 7 if spec["kind"] == "nothing" else self.weights
        return RunOutcome(injected_s=100.0, ranks=[rank(weights=weights)] * 2)


def test_all_cases_run_once_in_their_order_against_the_weights_of_the_undisturbed_run():
    chosen = [FaultCase(fault="none", kind="nothing", rank=1, is_survived=True)]
    chosen += [replace(SURVIVED, fault=f"fault {index}") for index in range(7)]
    for weights in (7, 8):
        worlds = [Played(weights), Played(weights), Played(weights)]
        outcomes = list(run_cases(chosen, worlds))
        assert [outcome.fault for outcome in outcomes] == [case.fault for case in chosen]
        assert [outcome.is_held for outcome in outcomes] == [True] + [weights == 7] * 7
        assert sum(len(world.specs) for world in worlds) == 8


def test_what_is_everywhere_is_asked_of_every_rank_and_else_of_one():
    world = Played(7)
    undisturbed = FaultCase(fault="none", kind="nothing", rank=1, is_survived=True)
    assert len(list(run_cases([undisturbed, SURVIVED, replace(SURVIVED, everywhere=True)], [world]))) == 3
    assert [spec["rank"] for spec in world.specs] == [1, 1, None]


class NeverMeets(Played):
    """So many times the ranks do not even meet."""

    def __init__(self, num_times):
        super().__init__(7)
        self.num_times = num_times

    def run(self, train, spec, **settings):
        ended = super().run(train, spec, **settings)
        return replace(ended, injected_s=None) if len(self.specs) <= self.num_times else ended


@pytest.mark.parametrize("num_times", [0, 1, 2, 3])
def test_a_run_that_never_came_to_its_fault_is_tried_again_once_and_then_not_held(num_times):
    world = NeverMeets(num_times)
    outcome, _ = run_case(SURVIVED, world, 7)
    assert outcome.is_held == (num_times < 2)
    assert len(world.specs) == min(num_times + 1, 2)


@pytest.mark.parametrize(("num_ranks", "ranks_per_host"), [(2, 2), (4, 2), (16, 8)])
def test_every_case_has_its_fault_and_an_error_or_survival_to_judge(num_ranks, ranks_per_host):
    found = [*cases(num_ranks, ranks_per_host), *cases_of_links(num_ranks)]
    found += [*numerics_cases.cases(num_ranks), *replica_cases.cases(num_ranks)]
    found += mode_cases.cases(num_ranks, list(MODES)) if num_ranks == 4 else []
    assert found[0].kind == "nothing"
    for case in found:
        assert hasattr(Inject, case.kind) != (case.kind in AT_CONSTRUCTION)
        assert case.is_survived != bool(case.names)
        assert not case.warns or case.is_survived
        assert 0 <= case.rank < num_ranks
        assert case.phase in PHASES


def test_a_rank_of_each_kind_dies_and_stops_in_every_phase():
    found = cases(4, 2)
    for kind in ("dies", "stops"):
        where = {(case.rank, case.phase) for case in found if case.kind == kind}
        assert where == {(rank, phase) for rank in range(4) for phase in PHASES}


def sleep_on_rank_one(spec):
    if os.environ["RANK"] == "1":
        time.sleep(60)
    Path(spec["folder"], f"rank{os.environ['RANK']}.json").write_text(json.dumps(spec | {"pid": os.getpid()}))


@pytest.mark.slow  # two processes that import torch
@pytest.mark.long
def test_a_rank_that_never_ends_is_ended_and_reported():
    ended = OneHost(num_ranks=2).run(sleep_on_rank_one, {"a": 1}, limit_s=20.0)
    assert ended.still_ran == [1]
    assert ended.ranks[0]["a"] == 1
    assert ended.ranks[1] is None
    assert ended.injected_s is None


OF_MODES = ("pipeline: raises", "local_steps: nan", "shard_update: hang", "fabric: memory")


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "num_outcomes"),
    [
        (['only=[out of memory,one bit of a weight flips,"nan in one batch\'s loss"]'], 10),  # memory in seven phases
        (
            [
                "modes=[pipeline,local_steps,shard_update,fabric]",
                f"only={json.dumps(OF_MODES)}",
                "world.num_ranks=4",
                "at_once=2",
            ],
            5,
        ),
    ],
    ids=["plain", "modes"],
)
def test_the_matrix_in_short(tmp_path, arguments, num_outcomes):
    """The whole program, with some of its cases."""
    command = [sys.executable, "-m", "tests.evidence.faults", *arguments, f"hydra.run.dir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads((tmp_path / "faults.json").read_text())["outcomes"]
    assert len(outcomes) == num_outcomes
    assert all(outcome["is_held"] for outcome in outcomes)
