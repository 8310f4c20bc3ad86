"""A study tunes every arm at the same points and tests on paired seeds that tuning has not seen."""

from __future__ import annotations

from collections import Counter

import pytest
from omegaconf import OmegaConf

from lightning_hybrid.callbacks.run_report.figure import figure_of
from recipes.hyperparams import study_report
from recipes.hyperparams.study import UNTESTED, Cell, Study
from recipes.hyperparams.study_report import Interval, complete, markdown, paired
from recipes.hyperparams.trial_log import TrialLog, TrialOutcome
from recipes.hyperparams.trial_pool import TrialPool
from tests.checkout import ROOT, tracked_in
from tests.recipes.composed import composed
from tests.recipes.hyperparams.planted import PlantedStudy

STUDIES = sorted(path.stem for path in tracked_in(ROOT / "conf" / "study", "*.yaml"))
TUNING = {"objective": "val/loss", "mode": "min", "num_points": 6, "seeds": [8, 9], "num_finalists": 2}
SGD = {"overrides": ["optim=sgd"], "lr": [0.05, 0.8]}
STUDY = {
    "recipe": "r",
    "title": "planted",
    "chance": 0.1,
    "num_train": 20,
    "batch_sizes": {"20": 5, "10": 5},
    "num_folds": 3,
    "margin": 0.01,
    "reference": ["SGD", "fp32"],
    "precisions": {"fp32": ["precision=32-true"]},
    "axes": {
        "lr": {"override": "optim.lr={}", "grows_with_batch": True},
        "momentum": {"override": "optim.momentum={}", "low": 0.01, "high": 0.1, "is_one_minus": True},
        "warmup": {
            "override": "warmup_epochs={}", "low": 1, "high": 3, "scale": "linear", "grows_with_batch": True, "most": 4
        },
    },
    "arms": {
        "SGD, linear": {"overrides": ["optim=sgd"], "point_of": "SGD", "rule": "linear"},
        "SGD": SGD,
        "LARS": SGD | {"overrides": ["optim=lars"], "axes": {"momentum": None}},
        "LARS, less": {"overrides": ["optim=lars", "x=1"], "point_of": "LARS", "like": "LARS", "batch_sizes": [20]},
    },
}  # fmt: skip


def study_of(tuning=(), seeds=(1, 2, 3), **changes):
    return Study.from_config({"study": STUDY | changes, "tuning": TUNING | dict(tuning), "seeds": list(seeds)})


def run(study, folder, trial=None, budget_s=None):
    log = TrialLog(folder / "results.jsonl", fingerprint="f")
    reported = []
    with TrialPool(trial or PlantedStudy(), num_workers=0, budget_s=budget_s) as pool:
        is_complete = study.run(pool, log, lambda name, outcome: reported.append((name, outcome)))
    return log, reported, is_complete


def cell(arm, batch_size):
    return Cell(arm=arm, precision="fp32", batch_size=batch_size)


def test_the_tables_say_what_the_trials_said(tmp_path):
    """Accuracies of 90, 80 and 70 %; with LARS the second run diverged or ended at chance: it is lost, and has 10 %."""
    study = study_of()
    log, _, is_complete = run(study, tmp_path)
    assert is_complete
    text = markdown(study, log)
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    assert rows[0][2:] == ["10 (50 %)", "20 (100 %)"]
    assert rows[2:6] == [
        ["SGD, linear", "fp32", "80.0 ± 16.9 (70.0)", "80.0 ± 16.9 (70.0)"],
        ["SGD", "fp32", "80.0 ± 16.9 (70.0)", "80.0 ± 16.9 (70.0)"],
        ["LARS", "fp32", "56.7 ± 70.2 (50.0), 1 of 3 lost", "56.7 ± 70.2 (50.0), 1 of 3 lost"],
        ["LARS, less", "fp32", "", "56.7 ± 70.2 (50.0), 1 of 3 lost"],
    ]
    assert ["SGD", "fp32", "", "+0.0 ± 0.0 equal"] in rows
    assert ["LARS", "fp32", "-23.3 ± 68.1 open", "-23.3 ± 68.1 open"] in rows
    assert ["LARS, less", "fp32", "", "+0.0 ± 0.0 equal"] in rows
    study_report.write_study(tmp_path, study, log, environment={})
    assert ">LARS, fp32</text>" in (tmp_path / "accuracy.svg").read_text()


def test_differences_are_paired_by_seed_and_an_interval_is_students():
    """Accuracies scatter by 20 points and more, their differences by none. t(0.95, 9) = 1.833 of ten values."""
    one, other = {1: 0.9, 2: 0.5, 3: 0.7}, {3: 0.69, 1: 0.89, 2: 0.49}
    difference = paired(one, other)
    assert difference.mean == pytest.approx(0.01)
    assert difference.half == pytest.approx(0.0, abs=1e-12)
    assert Interval.of(list(one.values())).half > 0.2
    assert Interval.of([1.0, -1.0] * 5).half == pytest.approx(1.8331 * (10 / 9) ** 0.5 / 10**0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("mean", "half", "verdict"),
    [
        (0.0, 0.004, "equal"), (0.003, 0.001, "equal"), (0.004, 0.002, "better"), (-0.02, 0.01, "worse"),
        (0.0, 0.006, "open"), (-0.004, 0.005, "open"),
    ],
)  # fmt: skip
def test_equal_means_that_the_whole_interval_is_within_the_margin(mean, half, verdict):
    assert Interval(mean=mean, half=half, num=10).verdict(0.005) == verdict


def test_every_arm_is_tuned_at_the_same_points_of_the_unit_cube(tmp_path):
    study = study_of(arms={"SGD": SGD, "LARS": SGD | {"overrides": ["optim=lars"], "lr": [0.5, 8.0]}})
    for index in range(6):
        one, other = study.point(cell("SGD", 10), index), study.point(cell("LARS", 20), index)
        assert other["lr"] == pytest.approx(10 * one["lr"], rel=1e-5)
        assert {**one, "lr": 0} == {**other, "lr": 0}
        assert 0.9 <= one["momentum"] <= 0.99
        assert 1 <= one["warmup"] <= 3
    assert len({study.point(cell("SGD", 10), index)["lr"] for index in range(6)}) == 6


def test_tuning_takes_all_points_with_one_seed_and_the_best_with_the_others(tmp_path):
    _, reported, _ = run(study_of(), tmp_path)
    tuning = Counter(
        (name, seed)
        for name, one in reported
        for seed in one.overrides
        if UNTESTED in one.overrides and "seed=" in seed
    )
    tuned = [f"{arm}, fp32, batch {size}" for arm in ("SGD", "LARS") for size in (10, 20)]
    assert tuning == {(name, f"seed={seed}"): num for name in tuned for seed, num in ((8, 6), (9, 2))}


def test_the_point_is_that_of_the_best_mean_over_the_seeds(tmp_path):
    """The planted best rates are 0.1 and 0.2; a seed that diverges loses the point."""
    study, nearest = study_of(), {}

    def diverges_once(overrides, limits):
        if "seed=9" in overrides and f"optim.lr={nearest[10]:.6g}" in overrides:
            return TrialOutcome(overrides=overrides, status="diverged", reason="loss is nan")
        return PlantedStudy()(overrides, limits)

    for batch_size, best in ((10, 0.1), (20, 0.2)):
        rates = [study.point(cell("SGD", batch_size), index)["lr"] for index in range(6)]
        nearest[batch_size] = min(rates, key=lambda rate: max(rate / best, best / rate))
    log, _, _ = run(study, tmp_path)
    assert {size: study.chosen_point(cell("SGD", size), log)["lr"] for size in nearest} == nearest
    log, _, _ = run(study, tmp_path / "diverges", diverges_once)
    assert study.chosen_point(cell("SGD", 10), log)["lr"] != nearest[10]


def test_the_linear_rule_scales_rate_and_warm_up_of_the_smallest_batch_to_their_limit(tmp_path):
    study = study_of(
        batch_sizes={"10": 5, "60": 5}, arms={name: STUDY["arms"][name] for name in ("SGD, linear", "SGD")}
    )
    log, _, _ = run(study, tmp_path)
    base, scaled = (study.chosen_point(cell(*of), log) for of in (("SGD", 10), ("SGD, linear", 60)))
    assert scaled["lr"] == pytest.approx(6 * base["lr"])
    assert scaled["warmup"] == 4
    assert scaled["momentum"] == base["momentum"]


def test_what_tunes_is_never_tested_and_each_seed_has_its_fold(tmp_path):
    _, reported, _ = run(study_of(), tmp_path)
    assert len({outcome.key for _, outcome in reported}) == len(reported)
    for _, outcome in reported:
        seed = next(int(one.removeprefix("seed=")) for one in outcome.overrides if one.startswith("seed="))
        assert (seed in (8, 9)) == (UNTESTED in outcome.overrides)
        assert UNTESTED not in outcome.overrides or "test/acc" not in outcome.metrics
        assert f"data.fold={seed % 3}" in outcome.overrides


def test_cells_that_decide_run_first_after_what_they_take_a_point_of():
    study = study_of(first=[["LARS, less", "fp32", 20], ["SGD, linear", "fp32", 20]])
    assert [str(one) for one in study.cells[:4]] == [
        "LARS, fp32, batch 20", "LARS, less, fp32, batch 20", "SGD, fp32, batch 10", "SGD, linear, fp32, batch 20"
    ]  # fmt: skip
    assert len(study.cells) == len(set(study.cells)) == 7


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
    whole, everything, _ = run(study, tmp_path / "whole")
    assert len(reported) == len(everything) - 17
    assert markdown(study, log) == markdown(study, whole)
    _, reported, is_complete = run(study, tmp_path, budget_s=0.0)
    assert (is_complete, reported) == (True, [])
    assert len(complete(study, log)) == 7
    assert complete(study_of(seeds=(1, 2, 3, 4)), log) == {}  # a mean waits for all of its seeds
    log, reported, is_complete = run(study, tmp_path / "none", budget_s=0.0)
    assert (is_complete, reported) == (False, [])


def test_the_picture_shows_how_far_each_arm_is_from_the_small_batch_and_joins_no_two_arms(tmp_path):
    study = study_of()
    log, _, _ = run(study, tmp_path)
    panels = figure_of(study_report.panels_of(study, log)).axes
    assert [[tick.get_text() for tick in panel.get_yticklabels()] for panel in panels] == [["LARS, fp32"]] * 2
    interval, dot = panels[0].lines
    assert [*interval.get_xdata(), *dot.get_xdata()] == pytest.approx([-91.5, 44.8, -23.3], abs=0.1)
    assert min(panels[0].get_xlim()) < -300 * study.margin  # so that the margin can be seen


MISTAKES = {
    "tuning.seeds": ({"seeds": (9, 1)}, r"`tuning.seeds` \(=\[8, 9\]\) must not have \[9\] of `seeds`"),
    "point_of": ({"arms": {"a": {"point_of": "b"}}}, r"`study.reference` \(=SGD\) must be one of the study's: a"),
    "either": ({"arms": {"SGD": SGD | {"point_of": "SGD"}}}, r"`study.arms.SGD` must have either .* or `point_of`"),
    "both": ({"arms": {"SGD": SGD | {"point": {"lr": 1.0}}}}, r"`study.arms.SGD` must have either .* or `point_of`"),
    "point": ({"arms": {"SGD": {"point": {"rate": 1.0}}}}, r"`study.arms.SGD.point` \(=rate\)"),
    "precisions": ({"arms": {"SGD": SGD | {"precisions": ["fp8"]}}}, r"`study.arms.SGD.precisions` \(=fp8\)"),
    "batch_sizes": ({"arms": {"SGD": SGD | {"batch_sizes": [11]}}}, r"`study.arms.SGD.batch_sizes` \(=11\)"),
    "like": ({"arms": {"SGD": SGD | {"like": "b"}}}, r"`study.arms.SGD.like` \(=b\)"),
    "first": ({"first": [["SGD", "fp32", 11]]}, r"`study.first` \(=\['SGD', 'fp32', 11\]\) must be a cell"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_key(mistake):
    changes, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        study_of(**changes)


def configured(*overrides):
    return OmegaConf.to_container(composed("claims", "run_dir=/nowhere", *overrides), resolve=True)


@pytest.mark.long
@pytest.mark.parametrize("name", STUDIES)
def test_every_trial_of_a_study_can_be_configured(name):
    """All arms and precisions, composed as a trial composes them; and their ranges of rates are equally wide."""
    from recipes.hyperparams.trial import configured as trial_configured

    config = configured(f"study={name}")
    study = Study.from_config(config)
    assert {arm.lr[1] / arm.lr[0] for arm in study.arms.values() if arm.lr} <= {128.0}
    for one in {(c.arm, c.precision, c.batch_size): c for c in study.cells}.values():
        tuned = study.source_of(one) or one
        trial = study.tests(one, study.arms[tuned.arm].point or study.point(tuned, 0))[0]
        cfg = trial_configured((*config["trial"], *trial), run_dir="/nowhere")
        assert cfg.global_batch_size == one.batch_size
        assert cfg.trainer.check_val_every_n_epoch == cfg.trainer.max_epochs
        num_parts = cfg.trainer.devices * cfg.trainer.accumulate_grad_batches
        assert num_parts * cfg.batch_size_per_rank == one.batch_size
        assert cfg.data.seed == study.seeds[0]
