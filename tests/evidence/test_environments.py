"""Programs in bad environments are judged by exit codes and words; every case says what it expects."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.evidence.environments import trials
from tests.evidence.environments.cases import CASES, Environment
from tests.evidence.environments.trials import ProgramExit, environment_outcome
from tests.evidence.faults.table import chosen_of
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


def test_every_case_says_what_it_expects():
    for case in CASES:
        assert case.goes_on or case.names, case.fault
        assert (ROOT / "recipes" / f"{case.program}.py").is_file()
        assert not case.wrapper or case.wrapper[-1] in ("bash", "--net")  # the program follows as arguments


def test_a_fault_that_is_not_known_is_refused_by_name():
    assert [case.fault for case in chosen_of(CASES, ["TMPDIR missing"])] == ["TMPDIR missing"]
    assert chosen_of(CASES, None) == CASES
    parts = [chosen_of(CASES, None, f"{k}/8") for k in range(8)]
    assert sorted(CASES.index(case) for part in parts for case in part) == list(range(len(CASES)))
    assert max(map(len, parts)) == -(-len(CASES) // 8)
    for part in ("8/8", "1", "a/8", "/8"):
        with pytest.raises(ValueError, match=rf"`part` \(={part}\) must be k/n with k below n"):
            chosen_of(CASES, None, part)
    with pytest.raises(ValueError, match=r"`only` \(=TMPDIR\) must be faults of WORLD_SIZE=abc, "):
        chosen_of(CASES, ["TMPDIR"])


def test_ports_directories_and_unset_variables_reach_the_program(tmp_path, monkeypatch):
    """A program of one line in place of a recipe."""
    monkeypatch.setattr(trials, "ROOT", tmp_path)
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setenv("WANDB_API_KEY", "not to be passed on")
    program = "import os, sys, json; print(json.dumps([dict(os.environ), sys.argv[1:]]))"
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "echo.py").write_text(program)
    case = replace(
        GOES_ON,
        program="echo",
        variables={"HOME": None, "PORT": "<FREE>"},
        ranks=({"RANK": "0"},),
        overrides=("a=<RUN>",),
    )
    ended = trials.run_programs(case, tmp_path / "case")
    environment, arguments = json.loads(ended.output)
    assert ended.codes == [0]
    assert 0 < int(environment["PORT"]) < 65536
    assert environment["RANK"] == "0"
    assert not {"HOME", "WANDB_API_KEY"} & environment.keys()
    assert arguments == ["a=<run directory>", "hydra.run.dir='<run directory>'"]  # as in a record


def test_a_program_that_does_not_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "ROOT", tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "sleep.py").write_text("import time; time.sleep(60)")
    ended = trials.run_programs(replace(GOES_ON, program="sleep", limit_s=0.5), tmp_path / "case")
    assert ended.codes == [None]
    assert ended.seconds < 10


@pytest.mark.long
def test_two_cases_as_whole_programs(tmp_path):
    assert outcomes_of("environments", tmp_path, "only=['WORLD_SIZE=abc','| head -1']") == [True, True]
