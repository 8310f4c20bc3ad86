"""A study tunes every arm equally, tests on seeds that tuning has not seen, and its tables say what the trials said."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from recipes.cli import launch
from recipes.hyperparams import study_report
from recipes.hyperparams.coarse_to_fine import axis_values_of
from recipes.hyperparams.study import Cell, Study
from recipes.hyperparams.study_report import Accuracy, Difference, accuracies, markdown
from recipes.hyperparams.trial_log import TrialLog, TrialOutcome
from recipes.hyperparams.trial_pool import TrialPool
from tests.recipes.hyperparams.planted import PlantedStudy

ROOT = Path(__file__).resolve().parents[3]
RECORDS = sorted((ROOT / "recipes" / "records" / "claims").glob("*/rows.jsonl"))
TUNING = {"objective": "val/loss", "mode": "min", "num": 5, "num_rounds": 2, "zoom": 2, "seed": 0}
SGD = {"overrides": ["optim=sgd"], "low": 0.05, "high": 0.8}
STUDY = {
    "recipe": "r",
    "title": "planted",
    "chance": 0.1,
    "num_train": 20,
    "batch_sizes": [20, 10],
    "precisions": {"fp32": {"overrides": ["precision=32-true"]}},
    "arms": {"SGD, linear": {"lr_of": "SGD"}, "SGD": SGD, "LARS": SGD | {"overrides": ["optim=lars"]}},
}


def study_of(tuning=(), seeds=(1, 2, 3), **changes):
    return Study.from_config({"study": STUDY | changes, "tuning": TUNING | dict(tuning), "seeds": list(seeds)})


def run(study, folder, trial=None, budget_s=None):
    log = TrialLog(folder / "results.jsonl", fingerprint="f")
    reported = []
    with TrialPool(trial or PlantedStudy(), num_workers=0, budget_s=budget_s) as pool:
        is_complete = study.run(pool, log, lambda name, outcome: reported.append((name, outcome)))
    return log, reported, is_complete


def test_the_tables_say_what_the_trials_said(tmp_path):
    """Accuracies of 90, 80 and 70 %; with LARS the second run diverged and counts as 10 %."""
    study = study_of()
    log, _, is_complete = run(study, tmp_path)
    assert is_complete
    text = markdown(study, log)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    assert cells[0][2:] == ["10 (50 %)", "20 (100 %)"]
    assert cells[2:5] == [
        ["SGD, linear", "fp32", "80.0 ± 10.0", "80.0 ± 10.0"],
        ["SGD", "fp32", "80.0 ± 10.0", "80.0 ± 10.0"],
        ["LARS", "fp32", "56.7 ± 41.6, 1 of 3 lost", "56.7 ± 41.6, 1 of 3 lost"],
    ]
    assert ["LARS - SGD", "fp32", "-23.3 ± 24.7", "-23.3 ± 24.7"] in cells
    assert cells[-3:] == [
        ["SGD, linear", "fp32", "0.1", "0.2"],
        ["SGD", "fp32", "0.1", "0.2"],
        ["LARS", "fp32", "0.1", "0.2"],
    ]


def test_a_rate_beyond_which_none_was_tried_is_marked(tmp_path):
    """The best rates are 0.1 and 0.2; the first grid begins at 0.2, the second looks half a step below, at 0.141."""
    study = study_of(arms={"SGD": SGD | {"low": 0.2, "high": 3.2}})
    log, _, _ = run(study, tmp_path)
    assert "| 0.141 (end of what was tried) | 0.2  " in markdown(study, log)


def test_the_linear_rule_scales_the_tuned_rate_of_the_smallest_batch(tmp_path):
    """The planted best rate does not grow with the batch as the rule wants: 0.1 at 10, 0.3 at 30 by rule, 0.2 tuned."""
    study = study_of(batch_sizes=[10, 30])
    log, _, _ = run(study, tmp_path)
    linear, tuned = (Cell(arm=arm, precision="fp32", batch_size=30) for arm in ("SGD, linear", "SGD"))
    assert study.lr(linear, log) == pytest.approx(0.3)
    assert study.lr(tuned, log) == 0.2


def test_every_arm_is_tuned_with_as_many_trials_and_no_trial_is_run_twice(tmp_path):
    """Five and two for each arm that is tuned; where the linear rule gives the tuned rate it shares its runs."""
    _, reported, _ = run(study_of(), tmp_path)
    tuning = Counter(name for name, outcome in reported if "seed=0" in outcome.overrides)
    assert set(tuning.values()) == {7}
    assert set(tuning) == {f"{arm}, fp32, batch {size}" for arm in ("SGD", "LARS") for size in (10, 20)}
    assert len({outcome.key for _, outcome in reported}) == len(reported) == 4 * (7 + 3)


def test_what_tunes_is_never_tested_and_what_is_tested_never_tunes(tmp_path):
    _, reported, _ = run(study_of(), tmp_path)
    for _, outcome in reported:
        is_tuning = "seed=0" in outcome.overrides
        assert is_tuning == ("trainer.limit_test_batches=0" in outcome.overrides)
        assert ("test/acc" in outcome.metrics) <= (not is_tuning)


def test_a_study_goes_on_where_it_was(tmp_path):
    class RunsOut(PlantedStudy):
        num_left = 17

        def __call__(self, overrides, limits):
            RunsOut.num_left -= 1
            if RunsOut.num_left < 0:
                raise KeyboardInterrupt
            return super().__call__(overrides, limits)

    study = study_of()
    with pytest.raises(KeyboardInterrupt):
        run(study, tmp_path, RunsOut())
    log, reported, is_complete = run(study, tmp_path)
    assert is_complete
    assert len(reported) == 40 - 17
    whole, _, _ = run(study, tmp_path / "whole")
    assert markdown(study, log) == markdown(study, whole)
    _, reported, is_complete = run(study, tmp_path, budget_s=0.0)
    assert is_complete
    assert reported == []


def test_a_mean_waits_for_all_of_its_seeds(tmp_path):
    log, _, _ = run(study_of(seeds=(1, 2)), tmp_path)
    assert len(accuracies(study_of(seeds=(1, 2)), log)) == 6
    assert accuracies(study_of(seeds=(1, 2, 3)), log) == {}


def test_a_study_without_time_is_not_complete(tmp_path):
    study = study_of()
    log, reported, is_complete = run(study, tmp_path, budget_s=0.0)
    assert not is_complete
    assert reported == []
    study_report.write_study(tmp_path, study, log, environment={})
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


def test_an_arm_whose_tuning_failed_has_an_empty_place(tmp_path):
    def fails(overrides, limits):
        return TrialOutcome(overrides=overrides, status="failed", reason="none")

    study = study_of()
    log, _, is_complete = run(study, tmp_path, fails)
    assert is_complete
    assert accuracies(study, log) == {}


def test_one_run_has_no_deviation():
    one = Accuracy.of([TrialOutcome(overrides=(), status="done", metrics={"test/acc": 0.5})], chance=0.1)
    assert (one.mean, one.deviation, one.num_lost) == (0.5, 0.0, 0)
    assert Difference.of(one, one).mean == 0.0


def test_the_picture_has_a_line_for_each_arm_and_a_panel_for_what_was_taken_out(tmp_path):
    arms = STUDY["arms"] | {"LARS, less": SGD | {"precisions": ["fp32"], "batch_sizes": [20]}}
    study = study_of(arms=arms)
    log, _, _ = run(study, tmp_path)
    panels = study_report.picture(study, log).axes
    assert [len(panel.containers) for panel in panels] == [3, 2]
    drawn = panels[0].containers[2].lines[0].get_ydata()  # LARS
    assert list(drawn) == pytest.approx([100 * 1.7 / 3] * 2)


MISTAKES = {
    "tuning.seed": ({"seeds": (0, 1)}, r"`tuning.seed` \(=0\) must not be among `seeds`"),
    "lr_of": ({"arms": {"a": {"lr_of": "b"}}}, r"`study.arms.a.lr_of` \(=b\)"),
    "precisions": ({"arms": {"a": SGD | {"precisions": ["fp8"]}}}, r"`study.arms.a.precisions` \(=fp8\)"),
    "batch_sizes": ({"arms": {"a": SGD | {"batch_sizes": [11]}}}, r"`study.arms.a.batch_sizes` \(=11\)"),
    "smallest": (
        {"precisions": {"fp32": {"overrides": [], "batch_sizes": [20]}}},
        r"`study.arms.SGD, linear.lr_of` \(=SGD\) must have a rate at the smallest batch \(=10\)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_key(mistake):
    changes, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        study_of(**changes)


def configured(*overrides):
    launch.register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("claims", overrides=["run_dir=/nowhere", *overrides])
    return OmegaConf.to_container(cfg, resolve=True)


@pytest.mark.long
@pytest.mark.parametrize("name", ["digits", "glyphs"])
def test_every_trial_of_a_study_can_be_configured(name):
    """All arms and precisions, composed as a trial composes them; and their grids are as wide as each other."""
    from recipes.hyperparams.trial import configured as trial_configured

    config = configured(f"study={name}")
    study = Study.from_config(config)
    sizes = {(arm.high / arm.low) for arm in study.arms.values() if arm.lr_of is None}
    assert sizes == {256.0}
    for cell in {(c.arm, c.precision): c for c in study.cells()}.values():
        cfg = trial_configured((*config["trial"], *study.overrides(cell), "optim.lr=1", "seed=1"), run_dir="/nowhere")
        assert cfg.global_batch_size == cell.batch_size
        assert cfg.trainer.check_val_every_n_epoch == cfg.trainer.max_epochs
        assert cfg.data.seed == 1


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_a_record_says_what_its_trials_said(path):
    """Table, number of trials and rates of a record, made again from its own results and configuration."""
    readme = (path.parent / "README.md").read_text().partition("## Accuracy\n\n")[2]
    table, _, config = readme.partition("\n## Configuration\n\n```json\n")
    study = Study.from_config(json.loads(config.partition("```")[0]))
    log = TrialLog(path, fingerprint=None)
    assert table == f"{study.title}\n\n{markdown(study, log)}\n"
    for cell, accuracy in accuracies(study, log).items():
        assert accuracy.num_runs == len(study.seeds) >= 5
        assert study.lr(cell, log) == pytest.approx(
            axis_values_of(study.results(cell, log)[0].overrides, ["optim.lr"])["optim.lr"], rel=1e-5
        )
