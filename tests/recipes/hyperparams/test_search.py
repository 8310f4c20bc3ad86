"""What a search reports, and Optuna as its other back end."""

import math

import pytest

from recipes.hyperparams import report as search_report
from recipes.hyperparams.coarse_to_fine import CoarseToFine
from recipes.hyperparams.optuna_backend import OptunaSearch
from recipes.hyperparams.trial_log import best_of
from tests.recipes.hyperparams.planted import Planted
from tests.recipes.hyperparams.test_coarse_to_fine import LR, rates, searched

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
