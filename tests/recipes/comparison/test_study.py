"""Comparison study: it tunes every variant equally, pairs seeds, and neither loses nor repeats finished fits."""

import json
import statistics
import subprocess
import sys
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from scipy import stats

from recipes.cli import config_check
from recipes.comparison import fits, journal, paired
from recipes.comparison.arms import Arm, Cell, FinalTests, StudyPlan, Tuning
from recipes.comparison.table import table_of
from recipes.training.keys import TRAIN_KEYS
from tests.checkout import ROOT
from tests.recipes.comparison.planted import planted
from tests.recipes.composed import composed
from tests.scenes import same

NUM_FITS = 3 * (4 + 3)  # cells, each with four trials and three seeds


def plan_of(folder, **changes):
    """Return a plan with two variants, of which the second has two shares and is 2 points worse."""
    axes = {"lr": (0.01, 1.0)}
    settings = {
        "arms": {
            "base": Arm(overrides=("offset=0",), shares=(0.01,), axes=axes),
            "method": Arm(overrides=("offset=0.02",), shares=(0.1, 0.5), axes=axes, like="base"),
        },
        "base": "base",
        "only": None,
        "every_fit": (f"folder={folder}",),
        "micro_batch": 10,
        "tuning": Tuning(num_trials=4, seed=0, num_images=500),
        "testing": FinalTests(seeds=(1, 2, 3), num_images=1000),
    }
    return StudyPlan(**settings | changes)


class PoolOfThreads(fits.FitPool):
    """Pool that runs its tasks in this process, which is faster."""

    def call(self, function, argument):
        return function(argument)


def studied(folder, *, pool_class=PoolOfThreads, num_workers=2, **changes):
    """Run a study in `folder`, and return its plan and the results of its cells."""
    plan = plan_of(folder, **changes)
    results = {}
    with journal.only_user_of(folder), pool_class(num_workers) as pool:
        study_journal = journal.StudyJournal(
            folder, plan, pool, tell=lambda line: None, run=planted
        )
        study_journal.check()
        for cell in plan.cells:
            results[cell] = study_journal.test(cell, study_journal.tune(cell))
    return plan, results


def calls(folder):
    return Counter((folder / "calls").read_text().splitlines())


def test_the_point_with_the_best_held_out_accuracy_is_tested_with_every_seed(tmp_path):
    plan, results = studied(tmp_path)
    assert list(results) == [Cell("base", 0.01), Cell("method", 0.1), Cell("method", 0.5)]
    assert calls(tmp_path).total() == NUM_FITS
    for cell, result in results.items():
        assert result.point == min(plan.points(cell), key=lambda point: abs(point["lr"] - 0.5))
        assert list(result.accuracies) == [1, 2, 3]
        assert result.core_s == 7.0
    base, method, _ = results.values()
    difference = paired.paired_difference(method.accuracies, base.accuracies)
    assert difference.mean == pytest.approx(-2.0)
    # seeds are paired, so their spread cancels
    assert difference.half == pytest.approx(0.0, abs=1e-9)
    assert statistics.stdev(base.accuracies.values()) > 0.5
    assert [result.num_steps for result in results.values()] == [10, 100, 500]


def test_the_table_shows_each_cell_with_its_difference_and_verdict(tmp_path):
    plan, results = studied(tmp_path)
    lines = table_of(plan, results).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[4:]]
    assert [row[:3] for row in rows] == [
        ["`base`", "10 (1 %)", "10"],
        ["`method`", "100 (10 %)", "100"],
        ["`method`", "500 (50 %)", "500"],
    ]
    assert [row[5] for row in rows] == ["", "-2.00 ± 0.00 worse", "-2.00 ± 0.00 worse"]


def killed_study(folder):
    """Run the study of the following test in processes, one of which kills it."""
    studied(folder, pool_class=fits.FitPool, num_workers=1, **FEW_FITS)


FEW_FITS = {
    "tuning": Tuning(num_trials=2, seed=0, num_images=500),
    "testing": FinalTests(seeds=(1, 2), num_images=1000),
}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("kill_at", [2, 4])
def test_a_killed_study_continues_to_the_same_table_and_repeats_only_what_was_under_way(
    tmp_path, kill_at
):
    whole_folder = tmp_path / "whole"
    folder = tmp_path / "killed"
    whole_folder.mkdir()
    folder.mkdir()
    plan, whole = studied(whole_folder, **FEW_FITS)
    (folder / "kill_at").write_text(str(kill_at))
    script = (
        "if __name__ == '__main__':\n"
        "    from pathlib import Path\n"
        "    from tests.recipes.comparison.test_study import killed_study\n"
        f"    killed_study(Path({str(folder)!r}))\n"
    )
    (tmp_path / "program.py").write_text(script)
    command = [sys.executable, str(tmp_path / "program.py")]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert killed.returncode == -9, killed.stderr
    with open(folder / "journal.jsonl", "a") as file:
        file.write('{"op_code": 4, "wor')  # a line that was cut off by a kill
    continued_plan, continued = studied(folder, **FEW_FITS)
    assert table_of(continued_plan, continued) == table_of(plan, whole)
    repeated = [name for name, count in calls(folder).items() if count > 1]
    assert len(repeated) == 1
    assert calls(folder).total() == 3 * (2 + 2) + 1
    assert calls(folder).keys() == calls(whole_folder).keys()


def test_a_study_that_is_complete_runs_nothing_and_one_with_more_seeds_runs_those(tmp_path):
    _, first = studied(tmp_path)
    _, again = studied(tmp_path)
    assert again == first
    assert calls(tmp_path).total() == NUM_FITS
    four_seeds = FinalTests(seeds=(1, 2, 3, 4), num_images=1000)
    _, results = studied(tmp_path, testing=four_seeds)
    assert calls(tmp_path).total() == NUM_FITS + 3
    for cell, result in results.items():
        assert result.accuracies == {**first[cell].accuracies, 4: result.accuracies[4]}


def test_other_settings_in_the_same_folder_are_refused(tmp_path):
    studied(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"`hydra.run.dir` \(=.*\) contains training runs of `base_1/tuning` with other settings",
    ):
        studied(tmp_path, trial=("trainer.max_epochs=2",))


OTHER_TUNING = {
    "more trials": ({"num_trials": 5}, r"`study.tuning.num_trials` \(=5\) differs from .* \(=4\)"),
    "fewer trials": ({"num_trials": 3}, r"`study.tuning.num_trials` \(=3\) differs from .* \(=4\)"),
    "another seed": ({"seed": 9}, r"`study.tuning.seed` \(=9\) differs from .* \(=0\)"),
}


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize(("changes", "message"), OTHER_TUNING.values(), ids=OTHER_TUNING)
def test_another_tuning_is_refused_before_the_first_fit(tmp_path, changes, message, is_old):
    studied(tmp_path, only=("base",))
    num_fits = calls(tmp_path).total()
    if is_old:
        make_old(tmp_path / "journal.jsonl")
        if "seed" in changes:
            message = r"with other settings .*'seed=0'.* now .*'seed=9'"
    tuning = {"num_trials": 4, "seed": 0, "num_images": 500, **changes}
    for only in (("method",), None):
        if is_old and "seed" in changes and only:
            continue  # the old journal has the seed only among the overrides of each cell
        with pytest.raises(ValueError, match=message):
            studied(tmp_path, only=only, tuning=Tuning(**tuning))
    assert calls(tmp_path).total() == num_fits


def test_a_journal_of_an_earlier_version_continues(tmp_path):
    studied(tmp_path, only=("base",))
    make_old(tmp_path / "journal.jsonl")
    studied(tmp_path)
    assert calls(tmp_path).total() == NUM_FITS


def make_old(path):
    """Remove the settings that journals of earlier versions do not contain."""
    lines = []
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        settings = entry.get("user_attr", {}).get("settings", {})
        for name in ("num_trials", "seed"):
            settings.pop(name, None)
        lines.append(json.dumps(entry))
    path.write_text("\n".join(lines) + "\n")


def test_a_folder_in_use_is_refused(tmp_path):
    message = r"`hydra.run.dir` \(=.*\) is in use by another study"
    with journal.only_user_of(tmp_path), pytest.raises(ValueError, match=message):
        studied(tmp_path)
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("error", r"`optim.lr` \(=-1\) must be positive"),
        ("exit", "The process of a training run ended with exit code 3"),
    ],
)
def test_an_error_of_a_fit_ends_the_study_with_its_words(tmp_path, fault, message):
    with pytest.raises(fits.FitError, match=message):
        studied(tmp_path, pool_class=fits.FitPool, trial=(f"fault={fault}",), num_workers=1)
    assert calls(tmp_path).total() == 1


def test_every_cell_is_tuned_at_the_same_points_of_the_unit_cube(tmp_path):
    axes = {"lr": (0.1, 10.0), "weight_decay": (1e-4, 1e-2)}
    method_axes = {"lr": (1.0, 100.0), "weight_decay": (1e-3, 1e-1)}
    plan = plan_of(
        tmp_path,
        arms={
            "base": Arm(overrides=(), shares=(0.1,), axes=axes),
            "method": Arm(overrides=(), shares=(0.5,), axes=method_axes),
        },
    )
    base_points, method_points = (plan.points(cell) for cell in plan.cells)
    for base_point, method_point in zip(base_points, method_points, strict=True):
        for axis, (low, high) in axes.items():
            assert method_point[axis] == pytest.approx(10 * base_point[axis], rel=1e-3)
            assert low <= base_point[axis] <= high
    assert len({point["lr"] for point in base_points}) == 4


# ---- configuration ---------------------------------------------------------------------------------------------------


def configured_plan(*overrides) -> StudyPlan:
    config = OmegaConf.to_container(composed("study", "run_dir=x", *overrides), resolve=True)
    return config_check.made(StudyPlan, config["study"], "study")


def test_the_paper_share_and_the_number_of_updates_are_the_same_in_tuning_and_test():
    plan = configured_plan()
    sizes = {}
    for cell in plan.cells:
        tuned = plan.global_batch_size(cell, plan.tuning.num_images)
        tested = plan.global_batch_size(cell, plan.testing.num_images)
        sizes[cell.share] = (tuned, tested)
        if cell.arm != "base":
            assert plan.tuning.num_images // tuned == plan.testing.num_images // tested
    assert sizes == {
        0.00214: (128, 128),
        0.0512: (2560, 3072),
        0.25: (12416, 14976),
        1.0: (49920, 59904),
    }


def test_every_arm_is_a_configuration_that_train_accepts():
    plan = configured_plan()
    batches = set()
    for name, arm in plan.arms.items():
        cell = Cell(name, arm.shares[-1])
        for overrides in (
            plan.tuning_overrides(cell),
            plan.testing_overrides(cell, plan.points(cell)[0]),
        ):
            cfg = composed("train", *overrides, "run_dir=x")
            config_check.check(cfg, TRAIN_KEYS)
            batches.add((cfg.batch_size_per_rank, cfg.trainer.max_epochs))
            assert "last" in cfg.callbacks  # a fit resumes from it
            assert "recalibrate_bn" in cfg.callbacks
    assert batches == {(128, 90)}


def test_each_part_differs_from_the_method_in_its_own_keys():
    plan = configured_plan()
    differing = {}
    method = configured_train(plan, "method")
    for name, arm in plan.arms.items():
        if arm.like == "method":
            part = configured_train(plan, name)
            differing[name] = sorted(key for key in method if part.get(key) != method[key])
            differing[name] += sorted(key for key in part if key not in method)
    assert differing == {
        "decay_everywhere": ["decay_excluded"],
        "no_pool5_bn": ["model.pool5_bn"],
        "no_trust_ratio": ["optim.excluded_lr_mult", "trust_ratio"],
        "no_masters": ["callbacks.without_masters._target_"],
        "no_loss_scale": ["strategy.loss_scale"],
        "no_warmup": ["warmup_epochs"],
    }


def configured_train(plan, name):
    """Return the values of a variant's configuration by dotted key, with unresolved references."""
    cfg = composed("train", *plan.tuning_overrides(Cell(name, 0.25)), "run_dir=x")
    return flat(OmegaConf.to_container(cfg, resolve=False))


def flat(mapping, prefix=""):
    """Return the values of nested mappings by dotted key."""
    values = {}
    for name, value in mapping.items():
        if isinstance(value, dict):
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "study.base=bass",
            r"`study.base` \(=bass\) must be one of the variants in `study.arms`: base, method",
        ),
        ("study.only=[methods]", r"`study.only` \(=methods\) must be one of the variants"),
        ("study.testing.seeds=[0,1]", r"`study.tuning.seed` \(=0\) must not be one of"),
        (
            "study.testing.seeds=[]",
            r"`study.testing.seeds` \(=\[\]\) must contain at least one seed",
        ),
        (
            "study.arms.method.axes.lr=[3,2]",
            r"`study.arms.method.axes.lr` \(=\[3.0, 2.0\]\) must be two numbers",
        ),
        (
            "study.arms.method.shares=[1.5]",
            r"`study.arms.method.shares` \(=1.5\) must be above 0 and at most 1",
        ),
        (
            "study.arms.base.shares=[0.1,0.2]",
            r"`study.arms.base.shares` \(=\[0.1, 0.2\]\) must contain only one fraction",
        ),
        ("study.micro_batch=0", r"`study.micro_batch` \(=0\) must be an integer, 1 or more"),
        (
            "study.tuning.num_trials=0",
            r"`study.tuning.num_trials` \(=0\) must be an integer, 1 or more",
        ),
        ("study.margin=0", r"`study.margin` \(=.*\) must be positive"),
        (
            "+study.arms.method.share=0.1",
            r"`study.arms.method.share` \(=0.1\) is not a known key\. Remove it",
        ),
        (
            "~study.tuning.num_trials",
            r"`study.tuning` .* needs the key `num_trials`\. Set study.tuning.num_trials=<value>",
        ),
    ],
)
def test_a_mistake_is_named_with_its_key(override, message):
    with pytest.raises(ValueError, match=message):
        configured_plan(override)


# ---- statistics ------------------------------------------------------------------------------------------------------


@given(
    values=st.lists(st.floats(-2, 2).map(lambda value: round(value, 3)), min_size=3, max_size=8),
    margin=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_a_verdict_is_that_of_the_two_one_sided_tests(values, margin):
    if len(set(values)) < 2:
        return
    interval = paired.interval_of(values)
    above = stats.ttest_1samp(values, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(values, margin, alternative="less").pvalue
    is_equal = max(above, below) < 0.05
    if abs(max(above, below) - 0.05) < 1e-6:
        return
    assert (paired.verdict(interval, margin) == "equal") == is_equal
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.90)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-9)


def test_seeds_that_one_arm_lacks_are_left_out_of_the_differences():
    difference = paired.paired_difference({1: 90.0, 2: 80.0, 3: 70.0}, {1: 89.0, 2: 79.0})
    assert (difference.mean, difference.half) == (1.0, 0.0)
    assert paired.paired_difference({1: 90.0}, {2: 90.0}) is None


# ---- real fits -------------------------------------------------------------------------------------------------------

DIGITS = (
    "callbacks=[default]",
    *("~callbacks.report", "~callbacks.best", "~callbacks.progress"),
    *("logger=none", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false"),
    *(
        "trainer.devices=1",
        "trainer.log_every_n_steps=1",
        "model.width=0.0625",
        "global_batch_size=600",
    ),
    "trainer.check_val_every_n_epoch=1000000",
    "strategy.checkpoint_io.in_background=false",
)


def fit_here(folder, *overrides, stage="test"):
    """Run a fit in this process."""
    request = fits.FitRequest(overrides=(*DIGITS, *overrides), run_dir=str(folder), stage=stage)
    return fits.fit(request)


def test_a_fit_that_was_interrupted_continues_from_its_last_checkpoint(tmp_path):
    overrides = ("trainer.max_epochs=2", "warmup_epochs=0")
    whole = fit_here(tmp_path / "whole", *overrides)
    cut = fit_here(tmp_path / "cut", *overrides, "+trainer.max_time=00:00:00:00")
    assert cut.num_steps < 4
    continued = fit_here(tmp_path / "cut", *overrides)
    assert continued.num_steps == whole.num_steps == 4
    assert same(last_weights(tmp_path / "whole"), last_weights(tmp_path / "cut"))
    assert continued.accuracy == whole.accuracy


def last_weights(run_dir):
    checkpoint = torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=False)
    return checkpoint["state_dict"]


def test_a_fit_that_diverges_counts_as_guessing(tmp_path):
    overrides = (
        "optim=sgd",
        "optim.lr=1e30",
        "warmup_epochs=0",
        "precision=32-true",
        "trainer.max_epochs=2",
    )
    lost = fit_here(tmp_path, *overrides)
    assert lost.accuracy == 0.1
    assert lost.divergence.startswith("NonFiniteLossError: ")


def test_validation_and_test_images_are_told_apart(tmp_path):
    accuracies = {}
    for stage, num_images in (("validate", 180), ("test", 360)):
        result = fit_here(tmp_path / stage, "trainer.max_epochs=1", "warmup_epochs=0", stage=stage)
        accuracies[stage] = result.accuracy * num_images
        assert accuracies[stage] == pytest.approx(round(accuracies[stage]), abs=1e-3)
        assert result.core_s > 0
