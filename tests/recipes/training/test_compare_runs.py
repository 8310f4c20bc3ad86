"""Comparison of runs: their differences and results, and messages for folders that are not runs."""

import json

import pytest

from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.callbacks.run_report.figure import figure_of
from recipes.training import compare_runs


def a_run(folder, *, lr=1.0, acc=0.5, seconds=(1.0, 2.0), config=True):
    folder.mkdir(parents=True)
    summary = {
        "metrics": {m.VAL_ACC: acc, m.TRAIN_LOSS: 0.25},
        "best": {m.VAL_ACC: 0.75},
        "images_per_s": 100.0,
        "num_steps": 20,
        "environment": {"commit": "abc"},
        "config": {"optim": {"lr": lr}, "run_dir": str(folder), "seed": 0} if config else None,
    }
    curves = {
        m.TRAIN_LOSS: [[10, 1.0], [15, 0.5], [20, 0.25]],
        m.VAL_ACC: [[20, acc]],
        m.ELAPSED_S: [[10, seconds[0]], [20, seconds[1]]],
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "curves.json").write_text(json.dumps(curves))
    return folder


@pytest.fixture
def two_runs(tmp_path):
    return [a_run(tmp_path / "a"), a_run(tmp_path / "b", lr=2.0, acc=0.6, seconds=(3.0, 5.0))]


def test_runs_are_laid_side_by_side(two_runs, tmp_path):
    runs = compare_runs.read_runs(two_runs)
    compare_runs.write_comparison(tmp_path / "out", runs, title="Two <rates>")
    content = json.loads((tmp_path / "out/report.json").read_text())
    assert [run["name"] for run in content["runs"]] == ["a", "b"]
    assert content["differing_keys"] == {"optim.lr": [1.0, 2.0]}  # and not the output folders
    assert content["final_metrics"] == {
        m.VAL_ACC: [0.5, 0.6],
        f"{m.VAL_ACC}, best": [0.75, 0.75],
        m.TRAIN_LOSS: [0.25, 0.25],
    }
    html = (tmp_path / "out/report.html").read_text()
    assert "Two &lt;rates&gt;" in html
    assert "src=" not in html
    assert (
        html.index("Final metrics")
        < html.index(">Validation accuracy</text>")
        < html.index("Differing keys")
    )
    # On a phone, the column name is shown.
    assert '<td class="good" data-label="b">0.6 (best)</td>' in html
    assert '<td>optim.lr</td><td data-label="a">1</td><td data-label="b">2</td>' in html


def test_differing_keys_name_classes_and_leave_out_copies(two_runs):
    runs = compare_runs.read_runs(two_runs)
    for run, optimizer in zip(
        runs, ("lightning_hybrid.optim.LARS", "torch.optim.SGD"), strict=True
    ):
        part = {"_target_": optimizer, "_partial_": optimizer.endswith("SGD"), "lr": 1.0}
        run.summary["config"] = {
            "optim": part,
            "callbacks": {"configuration": {"kept": {"optim": part}}},
        }
    assert compare_runs.differing_keys(runs) == {"optim": ["LARS", "SGD"]}


def test_curves_are_drawn_over_steps_and_over_time(two_runs):
    """The time of a step without one is interpolated between its neighbors."""
    runs = compare_runs.read_runs(two_runs)
    assert runs[1].over_time(m.TRAIN_LOSS) == [(3.0, 1.0), (4.0, 0.5), (5.0, 0.25)]
    steps, seconds, *_ = figure_of(compare_runs.panels_of(runs)).axes
    assert [list(line.get_xdata()) for line in steps.lines] == [[10, 15, 20]] * 2
    assert [list(line.get_xdata()) for line in seconds.lines] == [[1.0, 1.5, 2.0], [3.0, 4.0, 5.0]]
    assert [text.get_text() for text in steps.texts] == ["a", "b"]  # next to the lines


def test_what_is_no_run_is_named(two_runs, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    refused = {
        rf"`runs` \(={empty}\) is not the directory of a finished run, because it contains no summary.json": [
            *two_runs,
            empty,
        ],
        r"`runs` .* the folder does not exist": [tmp_path / "none"],
        "must name at least one run directory": [],
    }
    for words, folders in refused.items():
        with pytest.raises(ValueError, match=words):
            compare_runs.read_runs(folders)
    for file in ("curves.json", "summary.json"):
        path = two_runs[1] / file
        whole = path.read_text()
        path.write_text(whole[:-10])
        with pytest.raises(
            ValueError, match=rf"`runs` \(={path}\) is damaged and cannot be read: .*resume=auto"
        ):
            compare_runs.read_runs(two_runs)
        path.write_text(whole)
    path.write_text("{}")
    with pytest.raises(
        ValueError, match=r"is not a run directory, because summary.json has no `metrics`"
    ):
        compare_runs.read_runs(two_runs)
