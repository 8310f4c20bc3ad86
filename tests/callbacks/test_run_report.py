"""Report of a run, including a resumed one."""

import html
import json
import re

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hybrid import HybridAllReduceStrategy, Report
from lightning_hybrid.callbacks import RunReport
from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.callbacks.run_report import run_page
from recipes.training import compare_runs
from tests import toy
from tests.callbacks.support import Module, counting, fit

COMMUNICATION = {
    "num_steps": 8,
    "num_buckets": 16,
    "num_bytes": 16000,
    "node_bytes": 32000.0,
    "quantization_nmse": None,
    "link_bytes": 24000.0,
    "least_link_bytes": 16000.0,
    "link_bytes_per_s": 32000.0,
    "busy_s": 1.0,
    "exposed_s": 0.4,
    "exposed_s_per_step": 0.05,
    "achieved_bytes_per_s": 16000.0,
    "achieved_share": 0.5,
}
BUCKET = {
    "numel": 500,
    "dtype": "float16",
    "num_bytes": 1000,
    "algorithm": "flat",
    "num_chunks": 2,
    "num_times": 8,
    "link_bytes": 1500.0,
    "least_link_bytes": 1000.0,
    "node_bytes": 2000.0,
}


@pytest.fixture(scope="module")
def written(two_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    table, _ = two_ranks.run(report_after_a_test, str(folder))
    return folder, table


def test_a_report_has_a_picture_a_summary_and_a_table(written):
    run_dir, table = written
    assert (run_dir / "run.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["metrics"][m.TEST_ACC] == 0.75
    assert summary["metrics"][m.VAL_ACC] == 0.5
    assert summary["images_per_s"] == 32.0
    assert summary["num_steps"] == 8
    assert summary["world_size"] == 2
    assert summary["precision"] == "16-true"
    buckets = summary["communication"].pop("per_bucket")
    assert summary["communication"] == pytest.approx(COMMUNICATION)
    first, second = buckets
    times_of_first = {"mean_exposed_s": 0.0, "mean_in_flight_s": 0.1}
    rates_of_first = {"achieved_bytes_per_s": 1000 / 0.1, "achieved_share": 1000 / 0.1 / 32000}
    assert first == pytest.approx({"index": 0, **BUCKET, **times_of_first, **rates_of_first})
    times_of_second = {"mean_exposed_s": 0.05, "mean_in_flight_s": 0.2}
    rates_of_second = {"achieved_bytes_per_s": 1000 / 0.2, "achieved_share": 1000 / 0.2 / 32000}
    assert second == pytest.approx({"index": 1, **BUCKET, **times_of_second, **rates_of_second})
    assert table.splitlines() == [
        "test accuracy  75.00% of the last weights",
        "validation     50.00% of the last weights, best 50.00% after step 4",
        "throughput     32 images/s on 2 ranks, mean of logged steps",
        "skipped steps  0 of 8",
        "communication  50 ms exposed per logged step (10.0 %), 0.003 MB per node and step, "
        "0.016 MB/s = 50 % of the link",
        f"run directory  {run_dir}",
        f"report         {run_dir}/run.html",
    ]


def report_after_a_test(run_dir):
    report = RunReport(run_dir)
    report.config = {"optim": {"lr": 0.1, "note": "<b>"}}
    report.overrides = ["optim.lr=0.1"]
    strategy = counting(loss_scale=1024.0, report=Report(link_bytes_per_s=32000.0))
    _, module, trainer = fit(callbacks=[report], strategy=strategy)
    trainer.test(module, toy.loader(), verbose=False)
    return report.table(trainer)


class ElasticHosts(HybridAllReduceStrategy):
    """Strategy of a host that trains with another one for its first four steps."""

    def _run_status_fields(self):
        num_ranks = 4
        if self.lightning_module.trainer.global_step > 4:
            num_ranks = 2
        return super()._run_status_fields() | {"num_ranks": num_ranks}


def test_the_report_of_an_elastic_run_counts_the_ranks_of_all_hosts(two_ranks, tmp_path):
    settings = {"strategy": ElasticHosts()}
    table = two_ranks.run(report_of, str(tmp_path), settings)[0]
    assert "images/s on 2 to 4 ranks, mean of logged steps" in table
    assert json.loads((tmp_path / "summary.json").read_text())["world_size"] == 4
    page = (tmp_path / "run.html").read_text()
    assert "images/s on 2 to 4 ranks" in page


def test_the_table_says_which_weights_were_tested_and_where_the_best_are(two_ranks, tmp_path):
    """A checkpoint that monitors another metric than the accuracy does not count as the best in validation."""
    lines = two_ranks.run(table_of_the_best, str(tmp_path))[0].splitlines()
    assert lines[:2] == [
        "test accuracy  75.00% of checkpoints/best.ckpt",
        "validation     50.00% of the last weights, best 50.00% after step 4: checkpoints/best.ckpt",
    ]


def table_of_the_best(run_dir):
    options = {"dirpath": f"{run_dir}/checkpoints", "enable_version_counter": False}
    report = RunReport(run_dir)
    best = ModelCheckpoint(filename="best", monitor=m.VAL_ACC, mode="max", **options)
    by_loss = ModelCheckpoint(filename="other", monitor=m.VAL_LOSS, **options)
    _, module, trainer = fit(callbacks=[report, by_loss, best], enable_checkpointing=True)
    trainer.test(module, toy.loader(), ckpt_path=best.best_model_path, verbose=False)
    return report.table(trainer)


def rows_of(content):
    """Return the cells of all table rows of a page, by the first cell."""
    rows = {}
    for row in re.split("<tr[^>]*>", content):
        cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)
        if cells:
            rows[cells[0]] = [html.unescape(cell) for cell in cells[1:]]
    return rows


def test_the_page_of_a_run_needs_no_other_file(written):
    run_dir, _ = written
    content = (run_dir / "run.html").read_text()
    assert re.findall(r' (?:src|href)="([^"]*)"', content) == []
    rows = rows_of(content)
    verdict = '<td>✓</td><td>test accuracy</td><td class="good">75.00% of the last weights</td>'
    assert verdict in content
    assert "Accuracy: 50.00% at best" in content
    assert rows[m.VAL_ACC][:2] == ["0.5", "0.5"]
    assert rows[m.COMM_LINK_BYTES][0] == "3 kB"
    assert rows["torch"] == [torch.__version__]
    assert rows["optim.note"] == ["<b>"]
    assert "optim.lr=0.1" in content
    assert "comm: 2 ranks on 1 node; all-reduce: " in content
    assert "Bucket 1 has the longest mean wait: 50 ms" in content
    # The page shows no second figure for a metric that the first table has for the whole run.
    logged = json.loads((run_dir / "summary.json").read_text())["metrics"]
    for name in (m.IMAGES_PER_S, m.COMM_EXPOSED_S, m.COMM_EXPOSED_SHARE, m.TRAIN_SKIPPED_STEPS):
        assert name in logged
        assert not [row for row in rows if row.startswith(name)]
    assert not list(run_dir.glob(".*.part"))


def test_the_summary_keeps_best_values_configuration_and_environment(written):
    run_dir, _ = written
    summary = json.loads((run_dir / "summary.json").read_text())
    curves = json.loads((run_dir / "curves.json").read_text())
    assert summary["best"][m.TRAIN_LOSS] == min(value for _, value in curves[m.TRAIN_LOSS])
    assert summary["best"][m.VAL_ACC] == 0.5
    assert m.TRAIN_LR not in summary["best"]
    assert summary["config"] == {"optim": {"lr": 0.1, "note": "<b>"}}
    assert summary["overrides"] == ["optim.lr=0.1"]
    assert summary["environment"]["torch"] == torch.__version__
    # Steps take 0.5 s. Four validation batches of 1000 s each follow steps 4 and 8, and precede the last point.
    assert curves[m.ELAPSED_S] == [[2, 1.0], [4, 2.0], [6, 4003.0], [8, 4004.0]]


@pytest.mark.parametrize(
    "settings", [{"validate": False, "precision": "32-true"}, {"max_epochs": 0}], ids=str
)
def test_a_report_is_written_whatever_was_not_measured_and_not_of_a_dry_run(
    two_ranks, tmp_path, settings
):
    table = two_ranks.run(report_of, str(tmp_path), {"fast_dev_run": True})[0]
    assert list(tmp_path.iterdir()) == []
    assert "skipped steps  0 of 1\n" in table
    assert table.endswith("not written (fast_dev_run)")
    two_ranks.run(report_of, str(tmp_path), settings)
    is_measured = settings.get("max_epochs") != 0  # an empty picture is not written
    assert (tmp_path / "run.png").is_file() is is_measured
    assert (tmp_path / "run.html").read_text().count("<svg") >= is_measured


def report_of(run_dir, settings):
    report = RunReport(run_dir)
    _, _, trainer = fit(callbacks=[report], **settings)
    return report.table(trainer)


def test_the_report_of_a_resumed_run_shows_all_of_it_and_the_communication_of_all_steps(
    two_ranks, tmp_path
):
    (whole, resumed), _ = two_ranks.run(whole_and_resumed, f"{tmp_path}/some.ckpt")
    curves, communication = whole
    resumed_curves, resumed_communication = resumed
    assert [step for step, _ in curves[m.TRAIN_LOSS]] == [3, 6]
    assert [step for step, _ in curves[m.VAL_LOSS]] == [4, 8]
    assert without_clocks(curves) == without_clocks(resumed_curves)
    assert communication.num_steps == 8
    assert communication.num_bytes > 0
    # Two nodes of one rank.
    assert communication.bytes_across == communication.num_bytes
    assert communication.least_bytes_across == communication.num_bytes
    assert resumed_communication.num_steps == 8
    assert resumed_communication.num_bytes == communication.num_bytes
    num_times = sum(bucket.num_times for bucket in resumed_communication.buckets)
    assert num_times == resumed_communication.num_buckets
    exposed_s = resumed_communication.exposed_s
    assert 0 < exposed_s <= resumed_communication.busy_s
    by_bucket_s = resumed_communication.exposed_by_bucket_s
    assert sum(by_bucket_s.values()) == pytest.approx(exposed_s)


def without_clocks(curves):
    return {name: curve for name, curve in curves.items() if not m.metric_of(name).from_clock}


def whole_and_resumed(path):
    """Return curves and communication of an uninterrupted and of a resumed run.

    No window is drained for the logger at steps 4, 7 and 8.
    """

    def run(**settings):
        report = RunReport()
        report._write = lambda trainer: None
        strategy = HybridAllReduceStrategy(ranks_per_node=1)
        settings |= {"strategy": strategy, "log_every_n_steps": 3}
        _, _, trainer = fit(callbacks=[report], **settings)
        return trainer, (report.curves, report.communication())

    _, whole = run()
    trainer, _ = run(max_epochs=1)
    trainer.save_checkpoint(path)
    _, resumed = run(ckpt_path=path)
    return whole, resumed


class Diverges(Module):
    """`Module` whose losses and accuracies are inf or nan in the second epoch, or always."""

    is_always = False

    def validation_step(self, batch, batch_idx):
        has_diverged = self.is_always or self.current_epoch > 0
        self.log(m.VAL_LOSS, torch.inf if has_diverged else 1.0, sync_dist=True)
        self.log(m.VAL_ACC, torch.nan if has_diverged else 0.5, sync_dist=True)


class AlwaysNan(Diverges):
    is_always = True


@pytest.mark.parametrize("module", [Diverges, AlwaysNan])
def test_a_run_that_diverges_has_a_report(one_rank, tmp_path, module):
    one_rank.run(report_of, str(tmp_path), {"module": module, "precision": "32-true"})
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    curves = json.loads((tmp_path / "curves.json").read_text(), parse_constant=pytest.fail)
    assert summary["metrics"][m.VAL_ACC] is None
    assert curves[m.VAL_LOSS][-1][1] is None
    rows = rows_of((tmp_path / "run.html").read_text())
    assert rows[m.VAL_LOSS][:2] == ["inf", "" if module is AlwaysNan else "1"]
    assert rows[m.VAL_ACC][:2] == ["nan", "" if module is AlwaysNan else "0.5"]
    assert (tmp_path / "run.png").stat().st_size > 10_000
    [run] = compare_runs.read_runs([tmp_path])
    compare_runs.panels_of([run, run])
    compare_runs.marked_metrics([run, run])


def test_a_report_that_cannot_be_drawn_does_not_fail_the_run(one_rank, tmp_path):
    one_rank.run(fit_with_a_broken_page, str(tmp_path))
    assert json.loads((tmp_path / "summary.json").read_text())["num_steps"] > 0
    assert not (tmp_path / "run.html").exists()


def fit_with_a_broken_page(run_dir):
    def fail(*args):
        raise ZeroDivisionError("of the page")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_page, "html_of", fail)
        with pytest.warns(UserWarning, match="failed .ZeroDivisionError: of the page."):
            fit(callbacks=[RunReport(run_dir)])
