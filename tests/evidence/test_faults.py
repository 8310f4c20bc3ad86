"""Judgement of injected faults from the ranks' results: broken promises are found, and kept ones accepted."""

from dataclasses import replace

import pytest

from tests.evidence.faults.case import ALLOWED_S, FaultCase, fault_outcome
from tests.evidence.faults.comm_cases import cases
from tests.evidence.faults.table import chosen_of
from tests.evidence.faults.world import RunOutcome

NAMED = FaultCase(
    fault="f", kind="dies", rank=1, names=("rank RANK does", "on host HOST"), no_answer=True
)
BOTH = replace(NAMED, no_answer=False)
OWN = replace(BOTH, own_names=("OutOfMemoryError", "rank RANK (host HOST)"))
NEVER = replace(NAMED, names=("rank RANK",), never_says=("dead", "host HOST is down"))
SURVIVED = FaultCase(fault="f", kind="lags", rank=1, is_survived=True)
ERROR = "RuntimeError: comm: rank 1 does not answer. Rank 1 is on host b."
LIMIT_S = NAMED.timeout_s + ALLOWED_S


def rank(error=None, weights=7, time_s=103.0, num_steps=12):
    return {"error": error, "weights": weights, "time_s": time_s, "num_steps": num_steps}


OTHER = rank(weights=8)
NO_MEMORY = rank("OutOfMemoryError: no room\nOn rank 1 (host b), in batch 3: ...")
# Promise, result of each rank, further observations, and the problem that must be found (None: the promise is kept).
JUDGED = [
    (NAMED, [rank(ERROR), None], {}, None),
    (NAMED, [rank(ERROR.replace("host b", "host a")), None], {}, "rank 0 does not say 'on host b'"),
    (NAMED, [rank(), None], {}, "rank 0 ended without an error"),
    (NAMED, [None, None], {"still_ran": [0]}, "rank 0 still ran"),
    (NAMED, [rank(ERROR), None], {"injected_s": None}, "the fault was never injected"),
    (
        BOTH,
        [rank(ERROR, time_s=101.0), rank(ERROR, time_s=101.0 + LIMIT_S)],
        {},
        "after 36 s, beyond 35",
    ),
    (OWN, [rank(ERROR), NO_MEMORY], {}, None),  # the affected rank may use its own words
    (OWN, [NO_MEMORY, NO_MEMORY], {}, "rank 0 does not say"),
    (NEVER, [rank("rank 1: host b is down"), None], {}, "which is not so"),
    (SURVIVED, [rank(), rank(ERROR)], {}, "rank 1: RuntimeError: comm:"),
    (SURVIVED, [rank(), OTHER], {}, "ranks end with different weights"),
    (SURVIVED, [OTHER, OTHER], {}, "the weights are not those of an undisturbed run"),
    (SURVIVED, [rank(), rank(num_steps=11)], {}, "rank 1 made 11 of 12 steps"),
    (SURVIVED, [rank(), rank()], {}, None),
]


@pytest.mark.parametrize(("case", "ranks", "seen", "problem"), JUDGED)
def test_a_promise_is_judged_by_what_the_ranks_wrote(case, ranks, seen, problem):
    ended = RunOutcome(**{"injected_s": 100.0, "ranks": ranks, **seen})
    no_answer = (case.rank,) if case.no_answer else ()
    outcome = fault_outcome(case, ended, host="b", no_answer=no_answer, weights=7)
    assert outcome.is_held == (problem is None)
    assert problem is None or problem in outcome.detected_by
    error_times_s = [word["time_s"] for word in ranks if word and word["error"]]
    if error_times_s and "injected_s" not in seen:
        assert outcome.seconds == max(error_times_s) - 100.0
    else:
        assert outcome.seconds is None


def test_a_night_runs_a_part_and_all_nights_run_all():
    faults = cases(2, 2)
    ids = set()
    for number in range(8):
        part = chosen_of(faults, None, f"{number}/8")
        assert part[0].kind == "nothing", f"part {number}"
        ids.update(map(id, part))
    assert ids == {id(case) for case in faults}
    for only, part, words in (
        (None, "8/8", r"`part` \(=8/8\) must be k/n"),
        (["x"], None, r"`only` \(=x\)"),
    ):
        with pytest.raises(ValueError, match=words):
            chosen_of(faults, only, part)
