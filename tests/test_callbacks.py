"""Callbacks: what is logged, when, and that a resumed run reports and draws as the uninterrupted one."""

from __future__ import annotations

import dataclasses
import json

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import Logger

from lightning_hybrid import HybridAllReduceStrategy, callbacks
from lightning_hybrid import metrics as m
from lightning_hybrid.callbacks import RunReport, SeedEachStep, TrainingMetrics
from lightning_hybrid.comm import BucketSummary, CommSummary, Traffic
from lightning_hybrid.metrics import METRICS
from tests import toy


class Keeps(Logger):
    """A logger that keeps what it is given."""

    name = version = "keeps"

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.append((step + 1, metrics))

    def column(self, name):
        return {step: row[name] for step, row in self.rows if name in row}


class Module(toy.Toy):
    """With validation that is logged, a schedule, and steps that take half a second of a clock of its own."""

    now_s = 0.0

    def training_step(self, batch, batch_idx):
        Module.now_s += 0.5
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        Module.now_s += 1000.0
        self.log(m.VAL_LOSS, self.loss(batch), sync_dist=True)
        self.log(m.VAL_ACC, 0.5, sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log(m.TEST_ACC, 0.75, sync_dist=True)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Clock:
    @staticmethod
    def perf_counter():
        return Module.now_s


def fit(validate=True, skip_steps=4, more=(), ckpt_path=None, **settings):
    """Two epochs; with two ranks each has four steps of 2 * 8 images."""
    callbacks.time = Clock
    logger, module = Keeps(), Module(lr=0.1)
    settings = {"log_every_n_steps": 2, "precision": "16-true", "logger": logger} | settings
    trainer = toy.trainer(callbacks=[TrainingMetrics(skip_steps), *more], **settings)
    trainer.fit(module, toy.loader(), toy.loader() if validate else None, ckpt_path=ckpt_path)
    return logger, module, trainer


# ---- TrainingMetrics -------------------------------------------------------------------------------------------------


def test_metrics_are_logged_at_their_steps_with_their_values(two_ranks):
    rows, losses = zip(*two_ranks.run(logged_and_losses), strict=True)
    logger = rows[0]
    assert list(logger[m.TRAIN_LOSS]) == [2, 4, 6, 8]
    assert losses[0] != losses[1]
    for step, loss in logger[m.TRAIN_LOSS].items():
        assert loss == pytest.approx((losses[0][step - 1] + losses[1][step - 1]) / 2, rel=1e-6)  # fp32 mean
    # the schedule is 0.1 / (1 + steps before this one); float32 on the way to the logger
    assert logger[m.TRAIN_LR] == pytest.approx({2: 0.1 / 2, 4: 0.1 / 4, 6: 0.1 / 6, 8: 0.1 / 8}, rel=1e-6)
    assert logger[m.TRAIN_LOSS_SCALE] == dict.fromkeys((2, 4, 6, 8), 1024.0)
    assert logger[m.TRAIN_SKIPPED_STEPS] == dict.fromkeys((2, 4, 6, 8), 0.0)


def logged_and_losses():
    logger, module, _ = fit(strategy=HybridAllReduceStrategy(loss_scale=1024.0))
    return {name: logger.column(name) for name in METRICS}, module.losses


def test_throughput_is_that_of_all_ranks_without_first_steps_and_validation(two_ranks):
    """16 images in half a second are 32 per second; the windows that end at steps 6 and 8 begin after 4 steps."""
    assert two_ranks.run(throughput)[0] == {6: 32.0, 8: 32.0}


def throughput():
    return fit()[0].column(m.IMAGES_PER_S)


def test_accumulated_batches_make_one_step(two_ranks):
    """Two batches a step: 32 images in a second, and a logged loss of one batch, not of half a batch."""
    images_per_s, loss, last_loss = two_ranks.run(with_accumulation)[0]
    assert images_per_s == {3: 32.0, 4: 32.0}
    assert loss[4] == pytest.approx(last_loss, rel=0.3)  # rank zero's, against the mean over ranks


def with_accumulation():
    logger, module, _ = fit(skip_steps=2, accumulate_grad_batches=2, log_every_n_steps=1)
    return logger.column(m.IMAGES_PER_S), logger.column(m.TRAIN_LOSS), module.losses[-1]


def bucket(index, num_times, in_flight_s, exposed_s):
    return BucketSummary(
        index=index,
        numel=500,
        num_bytes=1000,
        dtype="float16",
        algorithm="flat",
        num_chunks=2,
        traffic=Traffic(least_across=1000.0, across=1500.0, inside=2000.0),
        num_times=num_times,
        in_flight_s=in_flight_s,
        exposed_s=exposed_s,
    )


TWO_STEPS = CommSummary(
    num_steps=2,
    num_buckets=4,
    num_bytes=4000,
    busy_s=0.25,
    exposed_s=0.1,
    least_bytes_across=4000.0,
    bytes_across=6000.0,
    bytes_inside=8000.0,
    buckets=(bucket(0, 2, 0.2, 0.0), bucket(1, 2, 0.4, 0.1)),
)
WINDOWS = {
    "two nodes": TWO_STEPS,
    "one node": dataclasses.replace(TWO_STEPS, least_bytes_across=0.0, bytes_across=0.0),
    "cuda": dataclasses.replace(TWO_STEPS, busy_s=None, exposed_s=None, buckets=(bucket(0, 2, None, None),)),
    "nothing": CommSummary(busy_s=None, exposed_s=None),
}


class Counted:
    """Stands for `CommTrace`: each drain tells the same of two steps."""

    def __init__(self, window):
        self.window = window
        self.seen = CommSummary()

    def drain(self):
        self.seen += self.window
        return self.window

    def total(self):
        return self.seen


def counting(window=TWO_STEPS, **options):
    class Counting(HybridAllReduceStrategy):
        comm_trace = Counted(window)

    return Counting(**options)


def test_communication_is_logged_per_step_per_bucket_and_against_its_bound(two_ranks):
    columns = two_ranks.run(communication_logged, TWO_STEPS, {"link_bytes_per_s": 32000})[0]
    of_bytes = {m.COMM_BYTES: 2000, m.COMM_LINK_BYTES: 3000, m.COMM_LEAST_LINK_BYTES: 2000, m.COMM_NODE_BYTES: 4000}
    of_clock = {
        m.COMM_BUSY_S: 0.125,
        m.COMM_EXPOSED_S: 0.05,
        m.COMM_EXPOSED_SHARE: 0.1,  # of two steps of half a second
        "comm/exposed_s/bucket_0": 0.0,
        "comm/exposed_s/bucket_1": 0.05,
        m.COMM_ACHIEVED_BYTES_PER_S: 16000,
        m.COMM_ACHIEVED_SHARE: 0.5,
    }
    assert columns.keys() == of_bytes.keys() | of_clock.keys()
    for name, value in of_bytes.items():
        assert columns[name] == dict.fromkeys((2, 4, 6, 8), value), name
    for name, value in of_clock.items():
        assert columns[name] == pytest.approx(dict.fromkeys((6, 8), value)), name


BETWEEN_NODES = {m.COMM_LINK_BYTES, m.COMM_LEAST_LINK_BYTES, m.COMM_ACHIEVED_BYTES_PER_S, m.COMM_ACHIEVED_SHARE}
IN_SECONDS = {name for name, metric in METRICS.items() if name.startswith("comm/") and metric.from_clock}


@pytest.mark.parametrize(
    ("kind", "missing"),
    [("two nodes", {m.COMM_ACHIEVED_SHARE}), ("one node", BETWEEN_NODES), ("cuda", IN_SECONDS)],
)
def test_what_was_not_measured_is_not_logged(two_ranks, kind, missing):
    names = two_ranks.run(communication_logged, WINDOWS[kind], {})[0].keys()
    assert {name for name in METRICS if name.startswith("comm/")} - names == missing


def communication_logged(window, options):
    logger = fit(strategy=counting(window, **options))[0]
    return {name: logger.column(name) for _, row in logger.rows for name in row if name.startswith("comm/")}


def test_stock_strategies_log_what_they_have(two_ranks):
    names = two_ranks.run(names_under_ddp)[0]
    assert names == {m.TRAIN_LOSS, m.TRAIN_LR, m.IMAGES_PER_S, m.VAL_LOSS, m.VAL_ACC}


def names_under_ddp():
    logger = fit(strategy="ddp", precision="32-true")[0]
    return {name for _, row in logger.rows for name in row if name in METRICS}


def test_between_logged_steps_nothing_is_read(two_ranks):
    assert two_ranks.run(reads_of_the_scale) == [4, 4]


def reads_of_the_scale():
    reads = []

    class Watches(pl.Callback):
        def on_train_start(self, trainer, module):
            scale = trainer.precision_plugin.loss_scale
            watched = type("Watched", (type(scale),), {"value": property(lambda s: reads.append(0) or 1.0)})
            scale.__class__ = watched

    fit(more=[Watches()])
    return len(reads)


# ---- RunReport -------------------------------------------------------------------------------------------------------


def test_a_report_has_a_picture_a_summary_and_a_table(two_ranks, tmp_path):
    table = two_ranks.run(report_after_a_test, str(tmp_path))[0].splitlines()
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["metrics"][m.TEST_ACC] == 0.75
    assert summary["metrics"][m.VAL_ACC] == 0.5
    assert summary["images_per_s"] == 32.0
    assert (summary["num_steps"], summary["world_size"], summary["precision"]) == (8, 2, "16-true")
    assert summary["communication"] == {
        "num_steps": 8,
        "num_buckets": 16,
        "num_bytes": 16000,
        "link_bytes": 24000.0,
        "least_link_bytes": 16000.0,
        "node_bytes": 32000.0,
        "busy_s": 1.0,
        "exposed_s": pytest.approx(0.4),
        "exposed_s_per_step": pytest.approx(0.05),
        "achieved_bytes_per_s": 16000.0,
        "link_bytes_per_s": 32000.0,
        "achieved_share": 0.5,
        "per_bucket": [
            {
                "index": index,
                "numel": 500,
                "dtype": "float16",
                "num_bytes": 1000,
                "algorithm": "flat",
                "num_chunks": 2,
                "num_times": 8,
                "link_bytes": 1500.0,
                "least_link_bytes": 1000.0,
                "node_bytes": 2000.0,
                "mean_exposed_s": pytest.approx(exposed_s),
                "mean_in_flight_s": pytest.approx(in_flight_s),
                "achieved_bytes_per_s": pytest.approx(1000 / in_flight_s),
                "achieved_share": pytest.approx(1000 / in_flight_s / 32000),
            }
            for index, exposed_s, in_flight_s in ((0, 0.0, 0.1), (1, 0.05, 0.2))
        ],
    }
    assert table == [
        "test accuracy  75.00%",
        "throughput     32 images/s on 2 ranks",
        "skipped steps  0 of 8",
        "communication  50 ms exposed per step (10.0 %), 0.003 MB per node and step, 0.016 MB/s = 50 % of the link",
        f"run directory  {tmp_path}",
        f"picture        {tmp_path}/run.png",
    ]


def report_after_a_test(run_dir):
    report = RunReport(run_dir)
    _, module, trainer = fit(more=[report], strategy=counting(loss_scale=1024.0, link_bytes_per_s=32000.0))
    trainer.test(module, toy.loader(), verbose=False)
    return report.table(trainer)


@pytest.mark.parametrize("settings", [{"validate": False}, {"precision": "32-true"}, {"max_epochs": 0}], ids=str)
def test_a_report_is_written_whatever_was_not_measured(two_ranks, tmp_path, settings):
    two_ranks.run(report_of, str(tmp_path), settings)
    assert (tmp_path / "run.png").stat().st_size > 10_000
    assert (tmp_path / "summary.json").is_file()


def report_of(run_dir, settings):
    report = RunReport(run_dir)
    return report.table(fit(more=[report], **settings)[2])


def test_a_dry_run_writes_nothing(two_ranks, tmp_path):
    table = two_ranks.run(report_of, str(tmp_path), {"fast_dev_run": True})[0]
    assert list(tmp_path.iterdir()) == []
    assert "skipped steps  0 of 1\n" in table
    assert table.endswith("not written (fast_dev_run)")


def test_the_report_of_a_resumed_run_shows_all_of_it(two_ranks, tmp_path):
    whole, resumed = two_ranks.run(curves_of_whole_and_resumed, str(tmp_path))[0]
    assert [step for step, _ in whole[m.TRAIN_LOSS]] == [2, 4, 6, 8]
    assert [step for step, _ in whole[m.VAL_LOSS]] == [4, 8]
    assert {name: points for name, points in whole.items() if not m.metric_of(name).from_clock} == {
        name: points for name, points in resumed.items() if not m.metric_of(name).from_clock
    }


def curves_of_whole_and_resumed(run_dir):
    reports = [RunReport(run_dir) for _ in range(3)]
    fit(more=[reports[0]])
    trainer = fit(more=[reports[1]], max_epochs=1)[2]
    trainer.save_checkpoint(f"{run_dir}/some.ckpt")
    fit(more=[reports[2]], ckpt_path=f"{run_dir}/some.ckpt")
    return reports[0].curves, reports[2].curves


def communication_of_whole_and_resumed(run_dir, forget):
    """Logged at step 5 only: of all the others no window is ever drained."""

    def run(report, **settings):
        strategy = HybridAllReduceStrategy(ranks_per_node=1)
        return fit(more=[report], strategy=strategy, log_every_n_steps=5, **settings)[2]

    path = f"{run_dir}/some.ckpt"
    reports = [RunReport(run_dir) for _ in range(3)]
    run(reports[0])
    run(reports[1], max_epochs=1).save_checkpoint(path)
    if forget:
        checkpoint = torch.load(path, weights_only=True)
        (state,) = (state for name, state in checkpoint["callbacks"].items() if name.startswith("RunReport"))
        del state["communication"]
        dist.barrier()
        if dist.get_rank() == 0:
            torch.save(checkpoint, path)
        dist.barrier()
    run(reports[2], ckpt_path=path)
    return [reports[0].communication(), reports[2].communication()]


@pytest.mark.parametrize(("forget", "num_steps"), [(False, 8), (True, 4)], ids=["resumed", "from an old checkpoint"])
def test_the_communication_of_a_resumed_run_is_that_of_all_steps(two_ranks, tmp_path, forget, num_steps):
    whole, resumed = two_ranks.run(communication_of_whole_and_resumed, str(tmp_path), forget)[0]
    assert (whole.num_steps, resumed.num_steps) == (8, num_steps)
    assert resumed.num_bytes * 8 == whole.num_bytes * num_steps > 0
    assert whole.bytes_across == whole.least_bytes_across == whole.num_bytes  # two nodes of one rank
    assert sum(bucket.num_times for bucket in resumed.buckets) == resumed.num_buckets
    assert 0 < resumed.exposed_s <= resumed.busy_s
    assert sum(resumed.exposed_by_bucket_s.values()) == pytest.approx(resumed.exposed_s)


@pytest.mark.parametrize("kind", ["one node", "cuda", "nothing"])
def test_a_report_says_null_of_what_was_not_measured(two_ranks, tmp_path, kind):
    table = two_ranks.run(report_of_window, str(tmp_path), WINDOWS[kind])[0]
    section = json.loads((tmp_path / "summary.json").read_text())["communication"]
    assert section["achieved_bytes_per_s"] is section["achieved_share"] is None
    assert (section["exposed_s_per_step"] is None) == (kind != "one node")
    assert (section["link_bytes"] > 0) == (kind == "cuda")
    assert [bucket["mean_in_flight_s"] for bucket in section["per_bucket"]] == {
        "one node": [pytest.approx(0.1), pytest.approx(0.2)],
        "cuda": [None],
        "nothing": [],
    }[kind]
    words = {"one node": "none between nodes", "cuda": "  time not measured", "nothing": "  not measured"}[kind]
    assert words in next(row for row in table.splitlines() if row.startswith("communication"))


def report_of_window(run_dir, window):
    report = RunReport(run_dir)
    return report.table(fit(more=[report], strategy=counting(window))[2])


# ---- SeedEachStep ----------------------------------------------------------------------------------------------------


class Draws(pl.Callback):
    def __init__(self):
        self.numbers = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.numbers.append(torch.rand(()).item())


def test_random_numbers_of_a_step_are_its_own(two_ranks):
    """Different on each rank and in each step and for each seed; the same whatever was drawn before."""
    one, other = two_ranks.run(numbers_drawn, 0, 0)
    assert len(set(one + other)) == 16
    assert two_ranks.run(numbers_drawn, 0, 7) == [one, other]
    assert set(two_ranks.run(numbers_drawn, 1, 0)[0]).isdisjoint(one)


def numbers_drawn(seed, num_before):
    torch.manual_seed(0)
    torch.rand(num_before)
    draws = Draws()
    trainer = toy.trainer(callbacks=[SeedEachStep(seed), draws], precision="32-true")
    trainer.fit(toy.Toy(), toy.loader())
    assert trainer.world_size == dist.get_world_size()
    return draws.numbers
