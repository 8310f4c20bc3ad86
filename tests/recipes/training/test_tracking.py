"""Tracking: what W&B receives, that a resumed run goes on in its run, and what happens where there is no tracker."""

import os
import socket
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_hybrid.callbacks import metrics as m
from recipes.training import resume, tracking
from recipes.training.build import build
from tests import toy
from tests.recipes.composed import composed
from tests.recipes.training.wandb_file import runs_in

SMALL = [
    "trainer.devices=1",
    "trainer.limit_train_batches=2",
    "trainer.limit_val_batches=1",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "precision=32-true",
]


def configured(run_dir, *overrides):
    return composed("train", *SMALL, f"run_dir={run_dir}", *overrides)


@contextmanager
def environment(**variables):
    """W&B's own variables as given, and as they were afterwards."""
    ours = {name: value for name, value in os.environ.items() if name.startswith("WANDB_")}
    for name in ours:
        del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            del os.environ[name]
        os.environ.update(ours)


def tracked(run_dir, *overrides, **variables):
    """A short run as `recipes/train.py` makes it, on this rank. Its checkpoint's run id."""
    import wandb

    with environment(WANDB_SILENT="true", **variables):
        cfg = configured(run_dir, *overrides)
        ckpt_path = resume.checkpoint(cfg)
        trainer, module, data = build(cfg, ckpt_path)
        tracking.begin(trainer, cfg, overrides=overrides)
        try:
            trainer.fit(module, data, ckpt_path=ckpt_path)
        finally:
            wandb.teardown()  # finishes, and forgets the environment
            wandb.run = None  # a disabled one stays
    return tracking.saved_run_id(f"{run_dir}/checkpoints/last.ckpt")


def test_an_offline_run_holds_configuration_history_and_best_values(one_rank, tmp_path):
    about = [
        "optim.lr=30.0",
        "trainer.max_epochs=2",
        "logger.group=seeds",
        "logger.tags=[a,b]",
        "logger.notes=why",
    ]
    (kept,) = one_rank.run(tracked, str(tmp_path), *about, timeout_s=120.0)
    (found,) = runs_in(tmp_path)
    assert found.run.run_id == kept
    assert (found.run.run_group, list(found.run.tags), found.run.notes) == (
        "seeds",
        ["a", "b"],
        "why",
    )
    assert found.config["optim"]["lr"] == 30.0
    assert found.config["trainer"]["accumulate_grad_batches"] == 1  # resolved
    assert found.config["overrides"] == about
    assert found.config["code"] is None or len(found.config["code"]["commit"]) == 40

    losses = found.column(m.TRAIN_LOSS)
    assert [step for step, _ in losses] == [0, 1, 2, 3]
    assert found.summary[m.TRAIN_LOSS] == {"min": min(value for _, value in losses)}
    for name, best in ((m.VAL_ACC, max), (m.VAL_ACC_TOP5, max), (m.VAL_LOSS, min)):
        values = [value for _, value in found.column(name)]
        assert len(values) == 2
        assert found.summary[name] == {best.__name__: best(values)}
    assert found.summary[m.TRAIN_LR] == found.column(m.TRAIN_LR)[-1][1]


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists and is not empty", "ignore:The dirpath has changed"
)
def test_a_resumed_run_goes_on_in_its_run(one_rank, tmp_path):
    first = tmp_path / "first"
    other = tmp_path / "other"
    (begun,) = one_rank.run(tracked, str(first), "trainer.max_epochs=1")
    assert one_rank.run(tracked, str(first), "trainer.max_epochs=2", "resume=auto") == [begun]
    path = f"resume={first}/checkpoints/last.ckpt"
    assert one_rank.run(tracked, str(other), "trainer.max_epochs=3", path) == [begun]
    assert one_rank.run(tracked, str(other), "trainer.max_epochs=4", path, "logger.id=mine") == [
        "mine"
    ]
    # saved for later
    assert one_rank.run(tracked, str(other), "trainer.max_epochs=5", path, "logger=csv") == [begun]
    message = [
        (each.run.run_id, [step for step, _ in each.column(m.TRAIN_LOSS)])
        for each in runs_in(first)
    ]
    assert message == [(begun, [0, 1]), (begun, [2, 3])]
    rows = [row["_step"] for each in runs_in(first) for row in each.history]
    # W&B's own count goes on too: the files can be synchronised one after the other
    assert rows == list(range(len(rows)))
    assert [each.run.run_id for each in runs_in(other)] == [begun, "mine"]


def error_against(address, run_dir, key):
    """The message that a user reads, and how many steps were made before."""
    import wandb

    with environment(WANDB_BASE_URL=address, WANDB_API_KEY=key, WANDB_SILENT="true"):
        cfg = configured(run_dir, "logger.offline=false", "logger.settings.init_timeout=2")
        trainer, *_ = build(cfg)
        message = toy.error_of(tracking.begin, trainer, cfg, overrides=[])
        wandb.teardown()
        return message, trainer.global_step


@pytest.mark.parametrize("key", ["abc", pytest.param("a" * 40, marks=pytest.mark.long)])
def test_a_server_that_does_not_let_the_run_in_is_an_early_error(one_rank, tmp_path, key):
    """A key that cannot be one, and a server that takes calls and never answers: within seconds, where `conf/logger`
    waits for 30."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        ((message, num_steps),) = one_rank.run(
            error_against, address, str(tmp_path), key, timeout_s=25.0
        )
    assert message.startswith(
        "ValueError: `logger.offline` (=False) needs a W&B server that lets this run in: "
    )
    assert "leave `logger.offline` and WANDB_MODE out" in message
    assert num_steps == 0
    assert key != "abc" or "WANDB_API_KEY invalid" in message


def tracked_disabled(run_dir):
    return tracked(run_dir, "trainer.max_epochs=1", WANDB_MODE="disabled")


@pytest.mark.long
def test_a_disabled_tracker_writes_nothing_and_keeps_no_id(one_rank, tmp_path):
    assert one_rank.run(tracked_disabled, str(tmp_path), timeout_s=120.0) == [None]
    assert not list(tmp_path.rglob("*.wandb"))


def test_without_wandb_metrics_go_to_a_file_and_tensorboard_is_named_where_it_is_missing(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(tracking, "_is_installed", lambda package: False)
    with pytest.warns(UserWarning, match="wandb is not installed: metrics go to csv/metrics.csv"):
        logger = tracking.logger_of(configured(tmp_path))
    assert isinstance(logger, CSVLogger)
    assert Path(logger.log_dir) == tmp_path / "csv"
    with pytest.raises(
        ValueError, match=r"`logger` \(=tensorboard\) needs the package tensorboard or tensorboardX"
    ):
        tracking.logger_of(configured(tmp_path, "logger=tensorboard"))


def test_tensorboard_writes_into_the_run_directory(tmp_path):
    pytest.importorskip("tensorboard", reason="an extra: pip install -e '.[tensorboard]'")
    logger = tracking.logger_of(configured(tmp_path, "logger=tensorboard"))
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.finalize("success")
    assert len(list((tmp_path / "tensorboard").glob("events.*"))) == 1


class Own:
    """An object that torch would have to be allowed to load."""


def test_the_id_is_read_from_whole_checkpoints_only(tmp_path):
    path = tmp_path / "some.ckpt"
    for checkpoint in ({}, {"callbacks": {}}, {"callbacks": {"TrackerRun": {"run_id": None}}}):
        torch.save(checkpoint, path)
        assert tracking.saved_run_id(str(path)) is None
    torch.save({"callbacks": {}, "hyper_parameters": Own()}, path)
    with pytest.warns(UserWarning, match="cannot be read: the tracker begins a new run"):
        assert tracking.saved_run_id(str(path)) is None
    torch.save(
        {"callbacks": {"TrackerRun": {"run_id": "abc"}}, "state_dict": {"w": torch.ones(1000)}},
        path,
    )
    assert tracking.saved_run_id(str(path)) == "abc"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        ValueError, match=r"`resume` \(=.*some.ckpt\) must be a whole checkpoint of Lightning's: "
    ):
        tracking.saved_run_id(str(path))


@pytest.mark.parametrize(
    ("is_offline", "sent"), [(False, [("run.html", "report-x", "report")]), (True, [])]
)
def test_the_page_of_a_run_is_an_artifact_where_wandb_is_online(tmp_path, is_offline, sent):
    seen = []

    class Run:
        id = "x"
        disabled = False
        offline = is_offline

        def log_artifact(self, path, *, name, type):
            seen.append((Path(path).name, name, type))

    logger = type("WandbLogger", (), {"experiment": Run()})()
    trainer = type("Trainer", (), {"loggers": [logger]})()
    tracking.send_report(trainer, str(tmp_path))  # a run without the report
    (tmp_path / "run.html").touch()
    tracking.send_report(trainer, str(tmp_path))
    assert seen == sent
