"""Injected faults are judged by what ranks wrote: a broken promise is seen, a kept one is not doubted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.faults_comm import ALLOWED_S, Case, cases, cases_of_links, judge
from recipes.faults_numbers import cases as cases_of_numbers
from recipes.faults_rank import Inject
from recipes.faults_world import OneHost, Told

ROOT = Path(__file__).resolve().parents[2]
NAMED = Case(fault="f", kind="dies", rank=1, names=("rank RANK does", "on host HOST"), no_answer=True)
SURVIVED = Case(fault="f", kind="lags", rank=1, is_survived=True)
ERROR = "RuntimeError: comm: rank 1 does not answer. Rank 1 is on host b."


def rank(error=None, weights=7, time_s=103.0):
    return {"error": error, "weights": weights, "time_s": time_s, "num_steps": 12}


def judged(case, ranks, *, injected_s=100.0, still_ran=(), weights=7):
    told = Told(injected_s=injected_s, ranks=ranks, still_ran=list(still_ran))
    return judge(case, told, host="b", no_answer=(case.rank,) if case.no_answer else (), weights=weights)


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
def test_what_breaks_a_promise_of_an_error_is_told(ranks, settings, problem):
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


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_case_has_its_fault_and_an_error_or_survival_to_judge(num_ranks):
    for case in [*cases(num_ranks), *cases_of_links(num_ranks), *cases_of_numbers(num_ranks)]:
        assert hasattr(Inject, case.kind) or case.kind == "starts_with_another_plan"
        assert case.is_survived != bool(case.names)
        assert 0 <= case.rank < num_ranks
        assert case.phase in ("forward", "backward", "update", "setup")


def sleep_on_rank_one(spec):
    if os.environ["RANK"] == "1":
        time.sleep(60)
    Path(spec["folder"], f"rank{os.environ['RANK']}.json").write_text(json.dumps(spec | {"pid": os.getpid()}))


@pytest.mark.slow  # two processes that import torch
@pytest.mark.long
def test_a_rank_that_never_ends_is_ended_and_told():
    told = OneHost(num_ranks=2).run(sleep_on_rank_one, {"a": 1}, limit_s=20.0)
    assert told.still_ran == [1]
    assert told.ranks[0]["a"] == 1
    assert told.ranks[1] is None
    assert told.injected_s is None


@pytest.mark.long
def test_the_matrix_in_short(tmp_path):
    """One rank out of memory, one whose weights drift, nan in a batch: whole program, two ranks."""
    only = 'only=[out of memory,one bit of a weight flips,"nan in one batch\'s loss"]'
    command = [sys.executable, "recipes/faults.py", only, f"hydra.run.dir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads((tmp_path / "faults.json").read_text())["outcomes"]
    assert len(outcomes) == 6
    assert all(outcome["is_held"] for outcome in outcomes)
