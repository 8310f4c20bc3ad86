"""Tracking: data that W&B receives, resumed runs that continue in their W&B run, and runs without a tracker."""

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
    """Set W&B's environment variables to exactly `variables`, and restore them afterwards."""
    before = remove_variables_of_wandb()
    os.environ.update(variables)
    try:
        yield
    finally:
        remove_variables_of_wandb()
        os.environ.update(before)


def remove_variables_of_wandb():
    names = [name for name in os.environ if name.startswith("WANDB_")]
    return {name: os.environ.pop(name) for name in names}


def tracked(run_dir, *overrides, **variables):
    """Train briefly on this rank as `recipes/train.py` does, and return the run id in the checkpoint."""
    import wandb

    with environment(WANDB_SILENT="true", **variables):
        cfg = configured(run_dir, *overrides)
        ckpt_path = resume.checkpoint(cfg)
        trainer, module, data = build(cfg, ckpt_path)
        tracking.begin(trainer, cfg, overrides=overrides)
        try:
            trainer.fit(module, data, ckpt_path=ckpt_path)
        finally:
            wandb.teardown()  # finishes the run, and forgets the environment
            wandb.run = None  # a disabled run would remain
    return tracking.saved_run_id(f"{run_dir}/checkpoints/last.ckpt")


def test_an_offline_run_holds_configuration_history_and_best_values(one_rank, tmp_path):
    about = [
        "optim.lr=30.0",
        "trainer.max_epochs=2",
        "logger.group=seeds",
        "logger.tags=[a,b]",
        "logger.notes=why",
    ]
    (run_id,) = one_rank.run(tracked, str(tmp_path), *about, timeout_s=120.0)
    (offline_run,) = runs_in(tmp_path)
    assert offline_run.run.run_id == run_id
    assert offline_run.run.run_group == "seeds"
    assert list(offline_run.run.tags) == ["a", "b"]
    assert offline_run.run.notes == "why"
    config = offline_run.config
    assert config["optim"]["lr"] == 30.0
    assert config["trainer"]["accumulate_grad_batches"] == 1  # resolved
    assert config["overrides"] == about
    assert config["code"] is None or len(config["code"]["commit"]) == 40

    losses = offline_run.column(m.TRAIN_LOSS)
    assert [step for step, _ in losses] == [0, 1, 2, 3]
    assert offline_run.summary[m.TRAIN_LOSS] == {"min": min(value for _, value in losses)}
    for name, best in ((m.VAL_ACC, max), (m.VAL_ACC_TOP5, max), (m.VAL_LOSS, min)):
        values = [value for _, value in offline_run.column(name)]
        assert len(values) == 2
        assert offline_run.summary[name] == {best.__name__: best(values)}
    assert offline_run.summary[m.TRAIN_LR] == offline_run.column(m.TRAIN_LR)[-1][1]


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists and is not empty", "ignore:The dirpath has changed"
)
def test_a_resumed_run_continues_the_run_of_wandb(one_rank, tmp_path):
    def run_id_of(folder, *overrides):
        (run_id,) = one_rank.run(tracked, str(folder), *overrides)
        return run_id

    first_folder = tmp_path / "first"
    second_folder = tmp_path / "second"
    first_id = run_id_of(first_folder, "trainer.max_epochs=1")
    assert run_id_of(first_folder, "trainer.max_epochs=2", "resume=auto") == first_id
    resume_key = f"resume={first_folder}/checkpoints/last.ckpt"
    assert run_id_of(second_folder, "trainer.max_epochs=3", resume_key) == first_id
    with_id = ("trainer.max_epochs=4", resume_key, "logger.id=mine")
    assert run_id_of(second_folder, *with_id) == "mine"
    # With another logger, the id is saved for later.
    assert run_id_of(second_folder, "trainer.max_epochs=5", resume_key, "logger=csv") == first_id

    runs = runs_in(first_folder)
    assert [run.run.run_id for run in runs] == [first_id, first_id]
    logged_steps = []
    wandb_steps = []
    for run in runs:
        logged_steps.append([step for step, _ in run.column(m.TRAIN_LOSS)])
        wandb_steps += [row["_step"] for row in run.history]
    assert logged_steps == [[0, 1], [2, 3]]
    # W&B's own count continues too, so the files can be synchronized one after the other.
    assert wandb_steps == list(range(len(wandb_steps)))
    assert [run.run.run_id for run in runs_in(second_folder)] == [first_id, "mine"]


def error_against(address, run_dir, key):
    """Return the message that a user reads, and the number of steps made before it."""
    import wandb

    with environment(WANDB_BASE_URL=address, WANDB_API_KEY=key, WANDB_SILENT="true"):
        cfg = configured(run_dir, "logger.offline=false", "logger.settings.init_timeout=2")
        trainer, *_ = build(cfg)
        message = toy.error_of(tracking.begin, trainer, cfg, overrides=[])
        wandb.teardown()
        return message, trainer.global_step


@pytest.mark.parametrize("key", ["abc", pytest.param("a" * 40, marks=pytest.mark.long)])
def test_a_server_that_does_not_let_the_run_in_is_an_early_error(one_rank, tmp_path, key):
    """An invalid key, and a server that never answers, fail within seconds.

    `conf/logger` would wait for 30 s.
    """
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        ((message, num_steps),) = one_rank.run(
            error_against, address, str(tmp_path), key, timeout_s=25.0
        )
    assert message.startswith(
        "ValueError: `logger.offline` (=False) needs a W&B server that accepts this run: "
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
    with pytest.warns(
        UserWarning, match="wandb is not installed, so metrics are written to csv/metrics.csv"
    ):
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
    """Object that torch can only load with permission."""


def test_the_id_is_read_from_whole_checkpoints_only(tmp_path):
    path = tmp_path / "some.ckpt"
    for checkpoint in ({}, {"callbacks": {}}, {"callbacks": {"TrackerRun": {"run_id": None}}}):
        torch.save(checkpoint, path)
        assert tracking.saved_run_id(str(path)) is None
    torch.save({"callbacks": {}, "hyper_parameters": Own()}, path)
    with pytest.warns(UserWarning, match="cannot be read, so W&B starts a new run"):
        assert tracking.saved_run_id(str(path)) is None
    callbacks = {"TrackerRun": {"run_id": "abc"}}
    torch.save({"callbacks": callbacks, "state_dict": {"w": torch.ones(1000)}}, path)
    assert tracking.saved_run_id(str(path)) == "abc"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        ValueError,
        match=r"`resume` \(=.*some.ckpt\) cannot be read as a Lightning checkpoint: ",
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
