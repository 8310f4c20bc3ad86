"""Hyperparameter search: finds a planted optimum, resumes without repeating trials, and survives failing trials."""

import math
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.cli import usage
from recipes.hyperparams.axes import Axis, axes_from
from recipes.hyperparams.coarse_to_fine import CoarseToFine
from recipes.hyperparams.outcome import Outcome, best_of, status_of
from recipes.hyperparams.processes import Report, run_safely
from recipes.hyperparams.report import SearchReport
from recipes.hyperparams.runner import TrialRunner
from recipes.hyperparams.search import Search
from tests.recipes.hyperparams.planted import Planted

ROOT = Path(__file__).resolve().parents[3]
LR = Axis(key="lr", low=0.01, high=100.0, num=5)


def open_search(folder, *, sampler=None, fingerprint="f", **options):
    sampler = sampler or CoarseToFine([LR], num_rounds=3, zoom=2)
    return Search(folder, [LR], sampler=sampler, settings=fingerprint, **options)


def run_here(search, trial, *, most=100):
    """Run the trials of a search in this process."""
    for _ in range(most):
        started = search.start_trial()
        if started is None:
            return

        def ask_pruner(report, started=started):
            started.report(report.value, step=report.percent)
            return started.should_prune()

        search.end_trial(started, run_safely(trial, (f"lr={started.params['lr']}",), ask_pruner))


def ended(search):
    return [trial for trials in search.rounds() for trial in trials]


def rates(trials):
    return [trial.params["lr"] for trial in trials]


def best_rate(search):
    return best_of(ended(search), search.study.direction).params["lr"]


@settings(max_examples=20, deadline=None)
@given(decade=st.floats(-2, 2))
def test_the_best_is_as_close_to_a_planted_optimum_as_the_finest_grid_allows(
    tmp_path_factory, decade
):
    """Grid points are 1 decade apart, and a quarter after two zooms by 2. The best is at most an eighth away."""
    search = open_search(tmp_path_factory.mktemp("search"))
    run_here(search, Planted(optimum=10**decade))
    # six digits of a learning rate
    assert abs(math.log10(best_rate(search)) - decade) <= 1 / 8 + 1e-5
    assert [len(trials) for trials in search.rounds()] == [5, 2, 2]
    assert search.num_trials == 9
    assert search.is_complete()


def test_a_round_around_an_end_of_the_grid_goes_beyond_it(tmp_path):
    search = open_search(tmp_path)
    run_here(search, Planted(optimum=1000.0))
    assert best_rate(search) > LR.high
    report = SearchReport(axes=[LR], objective="loss", direction=search.study.direction)
    assert report.edges(report.best(search.rounds())) == ["lr"]


def test_two_axes_are_refined_around_their_common_best(tmp_path):
    axes = [LR, Axis(key="wd", low=1.0, high=3.0, num=3, scale="linear")]
    search = Search(tmp_path, axes, sampler=CoarseToFine(axes, num_rounds=2), settings="f")
    while (started := search.start_trial()) is not None:
        loss = abs(math.log10(started.params["lr"])) + abs(started.params["wd"] - 2.5)
        search.end_trial(started, Outcome(status="done", value=loss))
    assert [len(trials) for trials in search.rounds()] == [15, 8]
    assert best_of(ended(search), search.study.direction).params == {"lr": 1.0, "wd": 2.5}


def test_a_search_ends_if_all_trials_of_the_grid_fail(tmp_path):
    search = open_search(tmp_path)
    run_here(search, Planted(fail_above=0.0))
    assert [len(trials) for trials in search.rounds()] == [5]
    assert search.is_complete()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_trials_that_fail_diverge_or_kill_their_process_are_worst_and_the_search_goes_on(
    tmp_path, num_workers
):
    search = open_search(tmp_path, sampler=CoarseToFine([LR], num_rounds=1))
    trial = Planted(optimum=100.0, diverge_above=0.5, fail_above=5.0, exit_above=50.0)
    TrialRunner(search, trial, num_workers=num_workers, log_dir=tmp_path / "logs").run()
    assert search.is_complete()
    reasons = {
        trial.params["lr"]: (status_of(trial), trial.user_attrs["reason"])
        for trial in ended(search)
    }
    assert reasons == {
        0.01: ("done", ""),
        0.1: ("done", ""),
        1.0: ("diverged", "loss is nan"),
        10.0: ("failed", "RuntimeError: no memory left"),
        100.0: ("failed", "The process of rank 0 ended with exit code 3."),
    }
    assert best_rate(search) == 0.1


RUN_AND_KILL = """
import sys
from pathlib import Path
from tests.recipes.hyperparams.planted import Planted
from tests.recipes.hyperparams.test_search import open_search, run_here
folder = Path(sys.argv[1])
run_here(open_search(folder), Planted(optimum=3.0, calls=str(folder / "calls"), kill_at=7))
"""


def test_a_killed_search_continues_and_runs_no_trial_twice(tmp_path):
    """The kernel kills it in the seventh of nine trials, and only the seventh is run again."""
    command = [sys.executable, "-c", RUN_AND_KILL, str(tmp_path)]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert killed.returncode == -9, killed.stderr
    with open(tmp_path / "journal.jsonl", "a") as file:
        file.write('{"op_code": ')  # a line that was cut off

    search = open_search(tmp_path)
    assert (search.num_ended(), search.is_complete()) == (6, False)
    run_here(search, Planted(optimum=3.0, calls=str(tmp_path / "calls")))
    assert search.is_complete()
    count = Counter((tmp_path / "calls").read_text().splitlines())
    assert sorted(count.values()) == [1] * 8 + [2]
    assert list(count.values())[6] == 2

    whole = open_search(tmp_path / "whole")
    run_here(whole, Planted(optimum=3.0))
    assert [rates(trials) for trials in search.rounds()] == [
        rates(trials) for trials in whole.rounds()
    ]


def test_trials_of_other_settings_are_refused(tmp_path):
    open_search(tmp_path)
    with pytest.raises(ValueError, match=r"contains trials with other settings \(f, now g\)"):
        open_search(tmp_path, fingerprint="g")


HOLD_A_TRIAL = """
import sys, time
from pathlib import Path
from tests.recipes.hyperparams.test_search import open_search
trial = open_search(Path(sys.argv[1])).start_trial()
print(trial.params["lr"], flush=True)
time.sleep(600)
"""


def test_two_searches_share_a_directory_and_a_trial_is_interrupted_only_once_its_process_has_ended(
    tmp_path,
):
    command = [sys.executable, "-c", HOLD_A_TRIAL, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert float(process.stdout.readline()) == 0.01
            search = open_search(tmp_path)
            run_here(search, Planted())
            # The round waits for the trial of the other process.
            assert rates(ended(search)) == [0.1, 1.0, 10.0, 100.0]
            assert search.others_run()
        finally:
            process.kill()
    assert not search.others_run()
    run_here(search, Planted())
    assert [len(trials) for trials in search.rounds()] == [5, 2, 2]


def test_no_trial_starts_after_the_budget(tmp_path):
    search = open_search(tmp_path)
    TrialRunner(search, Planted(), budget_s=0.0).run()
    assert ended(search) == []
    assert not search.is_complete()


def test_a_trial_behind_the_median_is_stopped_and_never_the_best(tmp_path):
    """In grid order the losses are 4, 1, 0, 1, 4. The fifth is worse than the median of the four earlier ones."""
    pruner = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=50)
    search = open_search(tmp_path, sampler=CoarseToFine([LR], num_rounds=1), pruner=pruner)
    TrialRunner(search, Planted()).run()
    assert [status_of(trial) for trial in ended(search)] == ["done"] * 4 + ["stopped"]
    stopped = ended(search)[-1]
    assert stopped.value == 4.0
    assert best_of([stopped], search.study.direction) is None


def test_tpe_finds_a_planted_optimum_although_a_quarter_of_the_range_diverges(tmp_path):
    search = open_search(tmp_path, sampler=optuna.samplers.TPESampler(seed=1), num_trials=25)
    run_here(search, Planted(optimum=3.0, diverge_above=10.0))
    assert search.is_complete()
    assert abs(math.log10(best_rate(search) / 3.0)) < 1 / 3
    assert any(status_of(trial) == "diverged" for trial in ended(search))


def test_tpe_resumes_with_new_points(tmp_path):
    for most in (3, 100):
        search = open_search(tmp_path, sampler=optuna.samplers.TPESampler(seed=0), num_trials=6)
        run_here(search, Planted(), most=most)
    assert len(set(rates(ended(search)))) == 6


MISTAKES = {
    "empty range": (
        lambda: Axis(key="lr", low=1.0, high=1.0, num=3),
        r"`axes.lr.low` \(=1.0\) must be below",
    ),
    "log of 0": (
        lambda: Axis(key="lr", low=0.0, high=2.0, num=3),
        r"`axes.lr.low` \(=0.0\) must be above zero",
    ),
    "scale": (
        lambda: Axis(key="lr", low=1.0, high=2.0, num=3, scale="ln"),
        r"`axes.lr.scale` \(='ln'\)",
    ),
    "no values": (
        lambda: axes_from({"optim": {"lr": 0.1}}),
        r"`axes.optim.lr` \(=0.1\) is not an axis",
    ),
    "no high": (
        lambda: axes_from({"optim": {"lr": {"low": 0.1}}}),
        r"`axes.optim.lr` .* Add or correct the key high",
    ),
    "no axis": (lambda: axes_from({}), r"`axes` \(=\{\}\) must contain at least one axis"),
    "no zoom": (lambda: CoarseToFine([LR], zoom=1), r"`sampler.zoom` \(=1\)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_key(mistake):
    make, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        make()


def test_the_table_has_every_trial_once_best_first_with_round_and_reason(tmp_path):
    search = open_search(tmp_path, sampler=CoarseToFine([LR], num_rounds=2))
    run_here(search, Planted(optimum=1.0, fail_above=20.0))
    report = SearchReport(axes=[LR], objective="val/loss", direction=search.study.direction)
    lines = report.table(search.rounds()).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0] == ["rank", "round", "lr", "val/loss", "status", "seconds", "reason"]
    assert [row[1:3] for row in rows[2:5]] == [["1", "1"], ["2", "0.316228"], ["2", "3.16228"]]
    assert len(rows) == 2 + 7
    assert rows[-1][1:5] == ["1", "100", "", "failed"]
    assert rows[-1][-1] == "RuntimeError: no memory left"
    report.write(tmp_path, search.study, search.rounds())
    assert (tmp_path / "search.svg").stat().st_size > 5000


@dataclass(frozen=True)
class Places:
    """Trial whose outcome contains this process's ranks. With `bad`, rank 1 ends that way while the others wait."""

    bad: str = ""

    def __call__(self, overrides, ask_pruner):
        rank = int(os.environ["LOCAL_RANK"])
        if self.bad and rank == 1:
            if self.bad == "dies":
                os._exit(3)
            Path("/nowhere/x").read_text()
        if self.bad:
            time.sleep(600)
        if rank == 0:
            ask_pruner(Report(percent=50, value=7.0))
        return Outcome(
            status="done", value=rank, metrics={"world_size": int(os.environ["WORLD_SIZE"])}
        )


@pytest.mark.parametrize(
    ("bad", "reason"),
    [("", ""), ("fails", "FileNotFoundError"), ("dies", "The process of rank 1 ended with exit")],
)
def test_a_trial_on_ranks_is_that_of_rank_zero_or_of_the_first_rank_that_failed(
    tmp_path, bad, reason
):
    search = open_search(tmp_path, sampler=optuna.samplers.RandomSampler(seed=0), num_trials=1)
    TrialRunner(search, Places(bad), num_ranks=3).run()
    (trial,) = ended(search)
    assert trial.user_attrs["reason"].startswith(reason)
    assert status_of(trial) == ("failed" if bad else "done")
    if not bad:
        assert (trial.value, trial.user_attrs["metrics"]) == (0.0, {"world_size": 3})
        assert trial.intermediate_values == {50: 7.0}


def test_a_search_without_optuna_ends_with_the_line_that_installs_it(monkeypatch, capsys):
    monkeypatch.setattr(
        usage, "find_spec", lambda name: None if name == "optuna" else find_spec(name)
    )
    usage.refuse_missing_extras("train")  # needs no optuna
    with pytest.raises(usage.UsageError):
        usage.refuse_missing_extras("search")
    assert capsys.readouterr().err.splitlines() == [
        "error: `python recipes/search.py` needs packages that are not installed (optuna). Install them with: "
        "pip install 'lightning-hybrid[recipes,report,search]'"
    ]
