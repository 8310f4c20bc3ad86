"""The search finds what was planted, forgets nothing, repeats nothing, and is ended by nothing that a trial does."""

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.hyperparams import report as search_report
from recipes.hyperparams.coarse_to_fine import Axis, CoarseToFine, Stopping, TrialRunner, axes_from
from recipes.hyperparams.optuna_backend import OptunaSearch
from recipes.hyperparams.trial_log import TrialLog, TrialOutcome, best_of, rank_of
from recipes.hyperparams.trial_pool import TrialPool
from tests.recipes.hyperparams.planted import Planted

ROOT = Path(__file__).resolve().parents[3]
LR = Axis(key="lr", low=0.01, high=100.0, num=5)


def searched(folder, trial, *, num_workers=0, axes=(LR,), backend=None, stopping=None, fingerprint="f", budget_s=None):
    """A search in `folder`: its runner, and whether it was complete."""
    log = TrialLog(folder / "trials.jsonl", fingerprint=fingerprint)
    with TrialPool(trial, num_workers=num_workers, budget_s=budget_s) as pool:
        run = TrialRunner(pool, log, stopping=stopping)
        is_complete = (backend or CoarseToFine(num_rounds=3, zoom=2)).search(axes, run, "min")
    return run, is_complete


def rates(outcomes):
    return [float(outcome.overrides[-1].partition("=")[2]) for outcome in outcomes]


@settings(max_examples=30, deadline=None)
@given(decade=st.floats(-2, 2))
def test_the_best_is_as_close_to_a_planted_optimum_as_the_finest_grid_allows(tmp_path_factory, decade):
    """Grid points are 1 decade apart, after two zooms by 2 a quarter; so the best is an eighth away at most."""
    run, _ = searched(tmp_path_factory.mktemp("search"), Planted(optimum=10**decade))
    (best,) = rates([best_of(run.seen())])
    assert abs(math.log10(best) - decade) <= 1 / 8 + 1e-5  # six digits of a rate
    assert len(run.seen()) == 5 + 2 + 2


@pytest.mark.parametrize(("how", "num_workers"), [("fail_above", 2), ("diverge_above", 0)])
def test_a_trial_that_fails_or_diverges_is_worst_and_ends_nothing(tmp_path, how, num_workers):
    """The optimum is where trials fail: the best is the best of those that do not."""
    run, is_complete = searched(tmp_path, Planted(optimum=100.0, **{how: 20.0}), num_workers=num_workers)
    assert is_complete
    assert best_of(run.seen()).overrides == (f"lr={10**1.25:.6g}",)
    *_, worst = sorted(run.seen(), key=rank_of)
    assert rates([worst])[0] > 20
    assert worst.reason == ("RuntimeError: no memory left" if how == "fail_above" else "loss is nan")


def test_a_process_that_dies_is_a_failed_trial_and_another_takes_its_place(tmp_path):
    run, is_complete = searched(tmp_path, Planted(optimum=0.1, exit_above=0.5), num_workers=1)
    assert is_complete
    died = [outcome for outcome in run.seen() if outcome.status == "failed"]
    assert sorted(rates(died)) == [1.0, 10.0, 100.0]
    assert {outcome.reason for outcome in died} == {"its process ended with exit code 3"}
    assert rates([best_of(run.seen())]) == [0.1]


def test_a_killed_search_goes_on_and_runs_no_trial_twice(tmp_path):
    """Killed in the seventh of nine trials, by the kernel: the seventh alone is run again."""
    calls = tmp_path / "calls"
    script = (
        "from pathlib import Path\n"
        "from tests.recipes.hyperparams.planted import Planted\n"
        "from tests.recipes.hyperparams.test_coarse_to_fine import searched\n"
        f"searched(Path({str(tmp_path)!r}), Planted(optimum=3.0, calls={str(calls)!r}, kill_at=7))\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert killed.returncode == -9, killed.stderr
    with open(tmp_path / "trials.jsonl", "a") as file:
        file.write('{"overrides": ["lr=')  # a line that was killed in the middle
    run, is_complete = searched(tmp_path, Planted(optimum=3.0, calls=str(calls)))
    assert is_complete
    count = Counter(calls.read_text().splitlines())
    assert sorted(count.values()) == [1] * 8 + [2]
    assert list(count.values())[6] == 2
    lines = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert sorted(line["overrides"][0] for line in lines) == sorted(count)
    whole, _ = searched(tmp_path / "whole", Planted(optimum=3.0))
    assert [rates(found) for found in run.rounds] == [rates(found) for found in whole.rounds]
    with pytest.raises(ValueError, match=r"line 1 \(fingerprint=f\) must come from the same settings as now \(=g\)"):
        searched(tmp_path, Planted(), fingerprint="g")
    with open(tmp_path / "trials.jsonl", "a") as file:
        file.write('{"overrides": 1}\n')
    with pytest.raises(ValueError, match=r"trials.jsonl` line 10 .* must be a trial"):
        searched(tmp_path, Planted())


def test_no_trial_starts_after_the_budget(tmp_path):
    for num_workers in (0, 1):
        run, is_complete = searched(tmp_path, Planted(), budget_s=0.0, num_workers=num_workers)
        assert not is_complete
        assert run.seen() == []


def test_a_limit_is_the_median_of_what_ended_before(tmp_path):
    """Each trial receives the median of those before it, once there are three."""
    received = []

    def trial(overrides, limits):
        received.append(limits)
        value = float(len(received))
        return TrialOutcome(overrides=overrides, status="done", value=value, curve=((0.5, value), (1.0, 0.0)))

    searched(tmp_path, trial, backend=CoarseToFine(num_rounds=1), stopping=Stopping(fractions=(0.5,), min_trials=3))
    assert received == [(), (), (), ((0.5, 2.0),), ((0.5, 2.5),)]


def test_a_loser_that_was_stopped_is_never_the_best():
    stopped = TrialOutcome(overrides=("a",), status="stopped", value=0.0)
    assert best_of([stopped, TrialOutcome(overrides=("b",), status="done", value=9.0)]).overrides == ("b",)
    assert best_of([stopped]) is None


MISTAKES = {
    "empty range": (lambda: Axis(key="lr", low=1.0, high=1.0, num=3), r"`axes.lr.low` \(=1.0\) must be below"),
    "log of 0": (lambda: Axis(key="lr", low=0.0, high=2.0, num=3), r"`axes.lr.low` \(=0.0\) must be above zero"),
    "scale": (lambda: Axis(key="lr", low=1.0, high=2.0, num=3, scale="ln"), r"`axes.lr.scale` \(='ln'\)"),
    "no values": (lambda: axes_from({"optim": {"lr": 0.1}}), r"`axes.optim.lr` \(=0.1\) must be an axis"),
    "no high": (lambda: axes_from({"optim": {"lr": {"low": 0.1}}}), r"`axes.optim.lr` .* see high"),
    "no zoom": (lambda: CoarseToFine(zoom=1), r"`backend.zoom` \(=1\)"),
    "workers": (lambda: TrialPool(Planted(), num_workers=-1), r"`num_workers` \(=-1\)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_key(mistake):
    make, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        make()


SAYS = {"objective": "val/loss", "mode": "min"}


def test_the_table_has_every_trial_once_best_first_with_round_and_reason(tmp_path):
    run, _ = searched(tmp_path, Planted(optimum=1.0, fail_above=20.0), backend=CoarseToFine(num_rounds=2))
    lines = search_report.markdown(run.rounds, [LR], **SAYS).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[1] for row in rows[:3]] == ["1", "0.316228", "3.16228"]
    assert [row[4] for row in rows[:3]] == ["1", "2", "2"]
    assert len(rows) == 7
    assert rows[-1][1:4] == ["100", "", "failed"]
    assert rows[-1][-1] == "RuntimeError: no memory left"


def needs_optuna():
    pytest.importorskip("optuna", reason="the extra `search` is not installed")


def test_optuna_finds_a_planted_optimum_and_forgives_what_diverges(tmp_path):
    """A quarter of the range diverges; the best of 25 is within a third of a decade."""
    needs_optuna()
    backend = OptunaSearch(num_trials=25, seed=1)
    run, is_complete = searched(tmp_path, Planted(optimum=3.0, diverge_above=10.0), backend=backend)
    assert is_complete
    (best,) = rates([best_of(run.seen())])
    assert abs(math.log10(best / 3.0)) < 1 / 3
    assert any(outcome.status == "diverged" for outcome in run.seen())


def test_optuna_goes_on_and_runs_no_trial_twice(tmp_path):
    needs_optuna()
    calls = tmp_path / "calls"
    trial = Planted(optimum=3.0, calls=str(calls))
    whole, _ = searched(tmp_path, trial, backend=OptunaSearch(num_trials=12))
    (tmp_path / "trials.jsonl").write_text(
        "".join((tmp_path / "trials.jsonl").read_text().splitlines(keepends=True)[:7])
    )
    again, _ = searched(tmp_path, trial, backend=OptunaSearch(num_trials=12))
    assert rates(again.seen()) == rates(whole.seen())
    assert len(calls.read_text().splitlines()) == 12 + 5


def test_a_missing_optuna_is_reported_with_its_cure(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(ValueError, match=r"needs the package optuna.*pip install 'lightning-hybrid\[search\]'"):
        OptunaSearch()
