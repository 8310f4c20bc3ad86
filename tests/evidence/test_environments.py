"""Programs in bad environments are judged by exit codes and words; every case says what it expects."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evidence.environments.cases import Environment
from tests.evidence.environments.trials import ProgramExit, environment_outcome
from tests.evidence.outcomes import outcomes_of

ROOT = Path(__file__).resolve().parents[2]
ENDS = Environment(fault="f", names=("`PORT` (=1)", "set it"), limit_s=9.0)
GOES_ON = Environment(fault="f", names=("accuracy",), goes_on=True)
SAID = "some line\nerror: `PORT` (=1) is taken: set it\n"


@pytest.mark.parametrize(
    ("case", "ended", "problem"),
    [
        (ENDS, ProgramExit([0, 1], SAID, 2.5), None),
        (ENDS, ProgramExit([0, 0], SAID, 1.0), "no process ended in an error"),
        (ENDS, ProgramExit([1], SAID.replace("set it", ""), 1.0), "does not say 'set it'"),
        (ENDS, ProgramExit([1], SAID + "Traceback (most recent call last):", 1.0), "a traceback"),
        (ENDS, ProgramExit([1, None], SAID, 9.0), "process 1 still ran after 9 s"),
        (GOES_ON, ProgramExit([0, 0], "test accuracy 97 %\n", 3.0), None),
        (GOES_ON, ProgramExit([0, 1], "accuracy", 1.0), "exit code 1"),
        (GOES_ON, ProgramExit([0], "", 1.0), "does not say 'accuracy'"),
        (GOES_ON, ProgramExit([None], "accuracy", 1.0), "process 0 still ran"),
    ],
)
def test_a_program_is_judged_by_exit_codes_and_words(case, ended, problem):
    outcome = environment_outcome(case, ended)
    assert outcome.is_held == (problem is None)
    said = "`PORT` (=1) is taken: set it" if case is ENDS else "test accuracy 97 %"
    assert outcome.detected_by == said if problem is None else problem in outcome.detected_by
    assert outcome.seconds == (None if case.goes_on else ended.seconds)


@pytest.mark.long
def test_two_cases_as_whole_programs(tmp_path):
    assert outcomes_of("environments", tmp_path, "only=['WORLD_SIZE=abc','| head -1']") == [True, True]
