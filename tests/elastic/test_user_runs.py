"""Runs of users with a plain `DataLoader(shuffle=True)`: hosts join and fail in the middle of an epoch, runs resume."""

import csv
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_hybrid.callbacks.replica_check import ReplicaCheck
from tests.elastic.user_runs import Net, UserHosts, UserScene, undisturbed, wanted_images


def test_a_host_that_joins_in_the_middle_of_an_epoch_reads_its_shard_from_there(
    tmp_path: Path,
) -> None:
    scene = UserScene(max_steps=40, hold_after=(4, 21))
    run = UserHosts(tmp_path / "run", scene)
    run.start("a")
    run.wait("steps of a", run.has_made(4, "a"))
    run.start("b")
    run.wait("both", run.has_made(5, "a", "b", num_hosts=2))
    run.kill("b")
    run.wait("steps of a", run.has_made(21, "a"))
    run.start("b")
    run.finish("a", "b")
    reference = undisturbed(tmp_path / "reference", scene)
    assert run.images_of_steps() == wanted_images(scene, 40)
    assert run.digests() == reference.digests()
    num_writers = run.num_writers_of_steps()
    assert len(num_writers) > 10
    assert set(num_writers.values()) == {1}, num_writers


class HasObjects(Net):
    """Module with a hyper-parameter that is neither a tensor nor plain data."""

    def __init__(self, folder: Path = Path("images")) -> None:
        super().__init__()
        self.save_hyperparameters()


@pytest.mark.slow
def test_a_host_joins_if_the_hyper_parameters_contain_objects(tmp_path: Path) -> None:
    scene = UserScene(module=HasObjects, max_steps=8, hold_after=(4,))
    run = UserHosts(tmp_path / "run", scene)
    run.start("a")
    run.wait("steps of a", run.has_made(4, "a"))
    run.start("b")
    run.finish("a", "b")
    assert run.has_made(7, "a", "b", num_hosts=2)()


@pytest.mark.slow
def test_a_run_that_max_steps_ended_within_an_epoch_resumes_with_the_remaining_images(
    tmp_path: Path,
) -> None:
    scene = UserScene(max_hosts=1, num_images=16, max_steps=3)
    checkpoint = str(tmp_path / "x.ckpt")
    undisturbed(tmp_path / "first", replace(scene, save_to=checkpoint))
    to_the_end = replace(scene, max_steps=-1, max_epochs=2, ckpt_path=checkpoint)
    resumed = undisturbed(tmp_path / "resumed", to_the_end)
    whole = undisturbed(tmp_path / "whole", replace(scene, max_steps=16))
    expected = wanted_images(scene, 16)
    assert whole.images_of_steps() == expected
    assert resumed.images_of_steps() == {step: expected[step] for step in range(3, 16)}
    digests = whole.digests()
    assert resumed.digests() == {step: digests[step] for step in range(3, 16)}


# ---- hosts that would stop after different steps --------------------------------------------------------


class StopsInStep(pl.Callback):
    """Callback that stops the fit after a given step, as a time limit on this host would."""

    def __init__(self, last_step: int) -> None:
        self.last_step = last_step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == self.last_step


def stops_after_ten(folder: Path) -> list[Any]:
    return [StopsInStep(10)]


def early_stopping(folder: Path) -> list[Any]:
    return [EarlyStopping("own", mode="max", patience=1)]


class Rises(Net):
    """Module that logs a rising value of its host."""

    sign = 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("own", float(self.sign * self.current_epoch), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


class Falls(Rises):
    """Module that logs a falling value of its host, so that it stops early."""

    sign = -1


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "changes_of_b", "last_step"),
    [
        ({}, {"callbacks": stops_after_ten}, 10),
        ({"trainer": {"precision": "16-true"}}, {"callbacks": stops_after_ten}, 10),
        ({"callbacks": early_stopping, "module": Rises}, {"module": Falls}, 32),
    ],
    ids=["in_a_step", "in_half_precision", "by_its_own_value"],
)
def test_all_hosts_stop_after_the_same_step_if_one_stops(
    tmp_path: Path, changes: dict[str, Any], changes_of_b: dict[str, Any], last_step: int
) -> None:
    scene = UserScene(max_epochs=4, elastic={"min_hosts": 2}, **changes)
    run = UserHosts(tmp_path, scene, {"b": replace(scene, **changes_of_b)})
    run.start("a")
    run.start("b")
    run.finish("a", "b")
    ends = {row["host"]: row for row in run.events("end")}
    assert [ends[host]["step"] for host in "ab"] == [last_step, last_step]
    assert ends["a"]["weights"] == ends["b"]["weights"]


# ---- hosts that were started with other settings --------------------------------------------------------


class OtherRate(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.04, momentum=0.9)


class OtherOptimizer(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.05)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes_of_b", "words"),
    [
        ({"module": OtherRate}, r"optimizer=SGD\(lr=0.04"),
        ({"module": OtherOptimizer}, r"optimizer=Adam\(lr=0.05"),
        ({"num_images": 48}, r"data=48 images shuffled"),
        ({"seed": 5}, r"data=64 images shuffled with seed 5"),
        ({"batch_size": 4}, r"batches of 4"),
    ],
    ids=["rate", "optimizer", "images", "seed", "batch"],
)
def test_a_host_that_would_train_something_else_is_refused_with_what_differs(
    tmp_path: Path, changes_of_b: dict[str, Any], words: str
) -> None:
    scene = UserScene(max_steps=12, hold_after=(2,))
    run = UserHosts(tmp_path, scene, {"b": replace(scene, **changes_of_b)})
    run.start("a")
    run.wait("steps of a", run.has_made(2, "a"))
    run.start("b")
    with pytest.raises(RuntimeError, match=f"RefusedError.*{words}"):
        run.wait("the refusal", run.has_ended("b"))
    run.close()


class Spoils(pl.Callback):
    """Callback that changes a weight on this host, as faulty memory would."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            module.net.bias.data += 1


def checks(folder: Path) -> list[Any]:
    return [ReplicaCheck(2)]


def spoils_and_checks(folder: Path) -> list[Any]:
    return [Spoils(), ReplicaCheck(2)]


@pytest.mark.slow
def test_weights_of_hosts_are_compared_while_they_train(tmp_path: Path) -> None:
    scene = UserScene(max_steps=12, callbacks=checks, elastic={"min_hosts": 2})
    run = UserHosts(tmp_path, scene, {"b": replace(scene, callbacks=spoils_and_checks)})
    run.start("a")
    run.start("b")
    with pytest.raises(RuntimeError, match=r"ReplicaDriftError.*between steps 4 and 6.*`net.bias`"):
        run.wait("an error", run.has_ended("a", "b"))
    run.close()


@pytest.mark.slow
def test_a_run_without_faults_passes_the_checks_of_hosts_that_come_and_go(tmp_path: Path) -> None:
    scene = UserScene(max_steps=30, callbacks=checks, hold_after=(4, 14))
    run = UserHosts(tmp_path, scene)
    run.start("a")
    run.wait("steps of a", run.has_made(4, "a"))
    run.start("b")
    run.wait("both", run.has_made(6, "a", "b", num_hosts=2))
    run.kill("b")
    run.wait("steps of a", run.has_made(14, "a"))
    run.start("b")
    run.finish("a", "b")


# ---- loggers --------------------------------------------------------------------------------------------


def csv_of_a_version(folder: Path) -> list[Any]:
    return [CSVLogger(folder / "logs", "x", version=0, flush_logs_every_n_steps=1)]


def forgets_rows(folder: Path) -> list[Any]:
    from lightning_hybrid.elastic import held_loggers

    held_loggers.KEEP_S = 0.5
    return []


@pytest.mark.slow
def test_rows_of_a_csv_file_survive_the_host_that_wrote_them(tmp_path: Path) -> None:
    scene = UserScene(
        max_steps=60, loggers=csv_of_a_version, callbacks=forgets_rows, pause_s=0.1, hold_after=(3,)
    )
    run = UserHosts(tmp_path, scene)
    run.start("a")
    run.wait("steps of a", run.has_made(3, "a"))
    run.start("b")
    run.wait("both", run.has_made(4, "a", "b", num_hosts=2))
    run.wait("rows that b has forgotten", run.has_made(25, "a", "b"))
    run.kill("a")
    run.finish("b")
    with (tmp_path / "logs/x/version_0/metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["loss"]]
    assert {int(row["step"]) for row in rows} == set(range(60))
    of_step: dict[str, set[str]] = {}
    for row in rows:
        of_step.setdefault(row["step"], set()).add(row["loss"])
    assert all(len(values) == 1 for values in of_step.values())


# ---- whole runs -----------------------------------------------------------------------------------------


def saves_often(folder: Path) -> list[Any]:
    return [ModelCheckpoint(folder / "checkpoints", every_n_train_steps=50, save_top_k=-1)]


class Scheduled(Net):
    """Module with a learning-rate schedule by step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def everything(folder: Path) -> list[Any]:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    return [
        EarlyStopping("val_loss", patience=100),
        EMAWeightAveraging(decay=0.9),
        ModelCheckpoint(folder / "checkpoints", every_n_train_steps=50, save_top_k=-1),
    ]


def csv_and_wandb(folder: Path) -> list[Any]:
    from lightning.pytorch.loggers import WandbLogger

    wandb = WandbLogger(id="run", version="run", offline=True, save_dir=folder)
    return [*csv_of_a_version(folder), wandb]


WHOLE_RUNS = {
    "plain": UserScene(max_steps=1200, callbacks=saves_often, pause_s=0.01),
    "callbacks": UserScene(
        max_steps=600,
        module=Scheduled,
        callbacks=everything,
        loggers=csv_and_wandb,
        with_validation=True,
        pause_s=0.02,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", WHOLE_RUNS)
def test_a_run_with_losses_joins_and_a_full_stop_has_the_weights_of_an_undisturbed_one(
    tmp_path: Path, name: str
) -> None:
    scene = replace(WHOLE_RUNS[name], trainer={"enable_checkpointing": True})
    reference = undisturbed(tmp_path / "reference", replace(scene, pause_s=0.0))
    folder = tmp_path / "run"
    run = UserHosts(folder, scene)
    draw = random.Random(0)
    for host in "ab":
        run.start(host)
    run.wait("both hosts", run.has_made(0, "a", "b", num_hosts=2))
    for _ in range(3):
        time.sleep(draw.uniform(0.2, 1.5))
        lost = draw.choice("ab")
        remaining = {"a": "b", "b": "a"}[lost]
        run.kill(lost)
        last = max(row["step"] for row in run.events("step"))
        run.wait("the other continues", run.has_made(last + draw.randrange(2, 9), remaining))
        run.start(lost)
        last = max(row["step"] for row in run.events("step"))
        run.wait("both again", run.has_made(last + 1, "a", "b", num_hosts=2), restarts=True)
    for host in "ab":
        run.kill(host)
    run.look()
    newest = max(folder.glob("checkpoints/*.ckpt"), key=lambda path: path.stat().st_mtime)
    run.resume(replace(scene, ckpt_path=str(newest)))
    for host in "ab":
        run.start(host)
    run.finish("a", "b", limit_s=300)
    images = run.images_of_steps()
    expected = wanted_images(scene, scene.max_steps)
    assert list(images) == list(expected)
    for step, expected_images in expected.items():
        missing = sorted(set(expected_images) - set(images[step]))
        if missing:
            # These images were read by a host that was killed after the all-reduce of the step and before it wrote its
            # row.
            assert missing in run.batches_of_step(step), f"step {step}"
        assert sorted(images[step] + missing) == expected_images, f"step {step}"
    assert run.digests() == reference.digests()
    (reference_end,) = reference.events("end")
    for end in run.events("end"):
        assert end["weights"] == reference_end["weights"], f"host {end['host']}"
