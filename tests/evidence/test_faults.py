"""Injected faults are judged by what ranks wrote: a broken promise is seen, one that holds is not doubted."""

from __future__ import annotations

import csv
import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.evidence.faults import mode_cases, numerics_cases, replica_cases
from tests.evidence.faults.case import ALLOWED_S, FaultCase, fault_outcome, run_case, run_cases
from tests.evidence.faults.comm_cases import cases, cases_of_links
from tests.evidence.faults.inject import AT_CONSTRUCTION, PHASES, Inject
from tests.evidence.faults.modes import MODES
from tests.evidence.faults.table import FaultOutcome, read_outcomes, write_table
from tests.evidence.faults.world import OneHost, RunOutcome
from tests.evidence.outcomes import outcomes_of

NAMED = FaultCase(fault="f", kind="dies", rank=1, names=("rank RANK does", "on host HOST"), no_answer=True)
BOTH = replace(NAMED, no_answer=False)
OWN = replace(BOTH, own_names=("OutOfMemoryError", "rank RANK (host HOST)"))
EITHER = replace(BOTH, rank=3, names=("rank RANK does not | rank PLACE does not",))
NEVER = replace(NAMED, names=("rank RANK",), never_says=("dead", "host HOST is down"))
SURVIVED = FaultCase(fault="f", kind="lags", rank=1, is_survived=True)
OVER = replace(SURVIVED, no_answer=True)
ALIKE = replace(SURVIVED, has_same_weights=False)
WARNED = replace(ALIKE, warns=("rank RANK (host HOST) was inf", "floor"))
ERROR = "RuntimeError: comm: rank 1 does not answer. Rank 1 is on host b."
LIMIT_S = NAMED.timeout_s + ALLOWED_S


def rank(error=None, weights=7, time_s=103.0, num_steps=12, warnings=()):
    return {"error": error, "weights": weights, "time_s": time_s, "num_steps": num_steps, "warnings": list(warnings)}


def warned(*texts):
    return [rank(warnings=[text] if text else []) for text in texts]


OTHER, INF = rank(weights=8), "rank 1 (host b) was inf"
NO_MEMORY = rank("OutOfMemoryError: no room\nOn rank 1 (host b), in batch 3: ...")
# A promise, what each rank wrote, what else was seen, and the problem that must be found; None: it is held.
JUDGED = [
    (NAMED, [rank(ERROR), None], {}, None),
    (NAMED, [rank(ERROR.replace("host b", "host a")), None], {}, "rank 0 does not say 'on host b'"),
    (NAMED, [rank(), None], {}, "rank 0 ended without an error"),
    (NAMED, [None, None], {}, "rank 0 left no word"),
    (NAMED, [None, None], {"still_ran": [0]}, "rank 0 still ran"),
    (NAMED, [rank(ERROR, time_s=100.0 + LIMIT_S), None], {}, None),
    (NAMED, [rank(ERROR, time_s=101.0 + LIMIT_S), None], {}, "after 36 s, beyond 35"),
    (NAMED, [rank(ERROR), None], {"injected_s": None}, "the fault was never injected"),
    (BOTH, [rank(ERROR, time_s=101.0), rank(ERROR, time_s=100.1 + LIMIT_S)], {}, "beyond 35"),  # the slowest counts
    (OWN, [rank(ERROR), NO_MEMORY], {}, None),  # the rank concerned may say it in its own words
    (OWN, [rank(ERROR), rank("OutOfMemoryError: no room")], {}, "rank 1 does not say 'rank 1 (host b)'"),
    (OWN, [NO_MEMORY, NO_MEMORY], {}, "rank 0 does not say"),
    (NEVER, [rank("rank 1 is far"), None], {}, None),
    (NEVER, [rank("rank 1 is dead"), None], {}, "which is not so"),
    (NEVER, [rank("rank 1: host b is down"), None], {}, "which is not so"),
    (EITHER, [rank("rank 3 does not answer")] * 4, {}, None),
    (EITHER, [rank("rank 1 does not answer")] * 4, {}, None),
    (EITHER, [rank("rank 2 does not answer")] * 4, {}, "does not say"),
    (SURVIVED, [rank(), rank()], {}, None),
    (SURVIVED, [rank(), rank()], {"injected_s": None}, "the fault was never injected"),  # nor may nothing hold
    (SURVIVED, [rank(), rank(ERROR)], {}, "rank 1: RuntimeError: comm:"),
    (SURVIVED, [rank(), OTHER], {}, "ranks end with different weights"),
    (SURVIVED, [OTHER, OTHER], {}, "the weights are not those of an undisturbed run"),
    (SURVIVED, [rank(), None], {}, "rank 1 left no word"),
    (SURVIVED, [rank(), rank(num_steps=11)], {}, "rank 1 made 11 of 12 steps"),
    (OVER, [rank(), None], {}, None),  # a dead rank is not asked, but the others end as if nothing had happened
    (OVER, [OTHER, None], {}, "the weights are not those"),
    (OVER, [rank(ERROR), None], {}, "rank 0: RuntimeError"),
    (ALIKE, [OTHER, OTHER], {}, None),
    (ALIKE, [OTHER, rank()], {}, "different weights"),
    (WARNED, warned(INF, "at its floor"), {}, None),
    (WARNED, warned("", f"{INF}: at its floor"), {}, None),
    (WARNED, warned(INF, ""), {}, "no rank warns 'floor'"),
    (WARNED, warned("rank 0 (host a) was inf", "floor"), {}, f"no rank warns '{INF}'"),
]


@pytest.mark.parametrize(("case", "ranks", "seen", "problem"), JUDGED)
def test_a_promise_is_judged_by_what_the_ranks_wrote(case, ranks, seen, problem):
    ended = RunOutcome(**{"injected_s": 100.0, "ranks": ranks, **seen})
    no_answer = (case.rank,) if case.no_answer else ()
    outcome = fault_outcome(case, ended, host="b", no_answer=no_answer, weights=7)
    assert outcome.is_held == (problem is None)
    assert problem is None or problem in outcome.detected_by
    errors = [one["time_s"] for one in ranks if one and one["error"]]
    assert outcome.seconds == (max(errors) - 100.0 if errors and "injected_s" not in seen else None)


class Played:
    """A world in which every rank does what is asked, and the weights are given; first it fails to meet so often."""

    num_ranks, has_links = 2, True

    def __init__(self, weights=7, num_failures=0):
        self.weights, self.specs, self.num_failures = weights, [], num_failures

    def host_of(self, rank):
        return rank

    def host_name(self, host):
        return "ab"[host]

    def run(self, train, spec, *, limit_s, no_answer=(), when_injected=None):
        self.specs.append(spec)
        weights = 7 if spec["kind"] == "nothing" else self.weights
        injected_s = None if len(self.specs) <= self.num_failures else 100.0
        return RunOutcome(injected_s=injected_s, ranks=[rank(weights=weights)] * 2)


UNDISTURBED = FaultCase(fault="none", kind="nothing", rank=1, is_survived=True)


@pytest.mark.parametrize("weights", [7, 8])
def test_all_cases_run_once_in_their_order_against_the_weights_of_the_undisturbed_run(weights):
    chosen = [UNDISTURBED, *(replace(SURVIVED, fault=f"fault {index}") for index in range(7))]
    worlds = [Played(weights), Played(weights), Played(weights)]
    outcomes = list(run_cases(chosen, worlds))
    assert [outcome.fault for outcome in outcomes] == [case.fault for case in chosen]
    assert [outcome.is_held for outcome in outcomes] == [True] + [weights == 7] * 7
    assert sum(len(world.specs) for world in worlds) == 8


def test_what_is_everywhere_is_asked_of_every_rank_and_else_of_one():
    world = Played()
    assert len(list(run_cases([UNDISTURBED, SURVIVED, replace(SURVIVED, everywhere=True)], [world]))) == 3
    assert [spec["rank"] for spec in world.specs] == [1, 1, None]


@pytest.mark.parametrize("num_failures", [0, 1, 2, 3])
def test_a_run_that_never_came_to_its_fault_is_tried_again_once_and_then_not_held(num_failures):
    world = Played(num_failures=num_failures)
    outcome, _ = run_case(SURVIVED, world, 7)
    assert outcome.is_held == (num_failures < 2)
    assert len(world.specs) == min(num_failures + 1, 2)


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
    for kind in ("dies", "stops"):
        where = {(case.rank, case.phase) for case in cases(4, 2) if case.kind == kind}
        assert where == {(rank, phase) for rank in range(4) for phase in PHASES}


def test_a_table_holds_what_happened_and_words_cannot_break_it(tmp_path):
    row = {"promise": "p", "fault": "f", "phase": "b", "where": "rank 1", "detected_by": "a | b\nc", "lost": "1 step"}
    held = FaultOutcome(**row, seconds=1.25, is_held=True)
    broken = replace(held, seconds=None, is_held=False)
    write_table(tmp_path, [held, broken], config={"seed": 0}, title="a title")
    assert read_outcomes(tmp_path / "faults.json") == [held, broken]
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert (lines[4].count("a \\| b c"), lines[4].endswith("| yes  |"), lines[5].endswith("| NO   |")) == (
        1,
        True,
        True,
    )
    assert (lines[0], lines[-1]) == ("a title", "1 of 2 held.")
    with open(tmp_path / "table.csv") as file:
        assert list(next(csv.DictReader(file))) == list(asdict(held))
    for wrong in ({"where": " "}, {"seconds": -1.0}, {"seconds": float("nan")}):
        with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` \\(="):
            replace(held, **wrong)


def sleep_on_rank_one(spec):
    if os.environ["RANK"] == "1":
        time.sleep(60)
    Path(spec["folder"], f"rank{os.environ['RANK']}.json").write_text(json.dumps(spec | {"pid": os.getpid()}))


@pytest.mark.long
def test_a_rank_that_never_ends_is_ended_and_reported():
    ended = OneHost(num_ranks=2).run(sleep_on_rank_one, {"a": 1}, limit_s=20.0)
    assert (ended.still_ran, ended.ranks[0]["a"], ended.ranks[1], ended.injected_s) == ([1], 1, None, None)


OF_MODES = json.dumps(["pipeline: raises", "local_steps: nan", "shard_update: hang", "fabric: memory"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "num_outcomes"),
    [
        (['only=[out of memory,one bit of a weight flips,"nan in one batch\'s loss"]'], 10),  # memory in seven phases
        (["modes=[pipeline,local_steps,shard_update,fabric]", f"only={OF_MODES}", "world.num_ranks=4", "at_once=2"], 5),
    ],
    ids=["plain", "modes"],
)
def test_the_matrix_in_short(tmp_path, arguments, num_outcomes):
    """The whole program, with some of its cases."""
    assert outcomes_of("faults", tmp_path, *arguments) == [True] * num_outcomes
