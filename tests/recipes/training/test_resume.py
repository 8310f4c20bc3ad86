"""Choice of the checkpoint to resume from, continued rows, and killed runs that end like undisturbed ones."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hybrid.checkpoint.file import DamagedCheckpointError, write_checkpoint
from recipes.training import resume
from recipes.training.csv_logger import CSVRows, num_rows_of, read_rows
from recipes.training.tracking import TrackerRun, saved_state
from tests.recipes.composed import composed
from tests.scenes import fit
from tests.toy import Toy


def saved(folder, name, global_step, *, age_s=0.0, **entries):
    path = folder / name
    content = {
        "global_step": global_step,
        "optimizer_states": [],
        "callbacks": {},
        "w": torch.ones(100),
        **entries,
    }
    write_checkpoint(content, path)
    os.utime(path, (1e9 - age_s, 1e9 - age_s))
    return path


def test_the_checkpoint_of_the_most_steps_is_taken_and_of_those_of_one_step_the_latest(tmp_path):
    assert resume.newest_whole(tmp_path / "checkpoints") is None
    (tmp_path / ".last.ckpt.part").write_bytes(b"half of a checkpoint")
    assert resume.newest_whole(tmp_path) is None
    saved(tmp_path, "last.ckpt", 4)
    saved(tmp_path, "weights.ckpt", 9).unlink()
    torch.save({"global_step": 9, "state_dict": {}}, tmp_path / "weights.ckpt")  # save_weights_only
    old = saved(tmp_path, "stopped.ckpt", 6, age_s=100)
    assert resume.newest_whole(tmp_path) == old
    assert resume.newest_whole(tmp_path) != saved(tmp_path, "best.ckpt", 6, age_s=200)
    new = saved(tmp_path, "other.ckpt", 6)
    (tmp_path / "link.ckpt").symlink_to(new)
    assert resume.newest_whole(tmp_path) == new


def cut(path):
    path.write_bytes(path.read_bytes()[:-50])


def flip(path):
    content = bytearray(path.read_bytes())
    begin = content.find(torch.ones(100).numpy().tobytes())
    assert begin > 0
    content[begin + 200] ^= 4  # within a weight, so torch alone would load it
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


def put_objects(path):
    torch.save({"global_step": 9, "optimizer_states": [], "path": path}, path)


@pytest.mark.parametrize("damage", [cut, flip, empty, put_objects], ids=lambda f: f.__name__)
def test_damaged_checkpoints_are_named_and_passed_over(tmp_path, damage):
    saved(tmp_path, "last.ckpt", 4, age_s=50)
    good = saved(tmp_path, "last.ckpt", 6)  # the previous file is now last.previous.ckpt
    bad = saved(tmp_path, "stopped.ckpt", 8)
    damage(bad)
    with pytest.warns(
        UserWarning,
        match=rf"`.*stopped.ckpt` (is damaged|contains).* skips this checkpoint, and resumes from {good}",
    ):
        assert resume.newest_whole(tmp_path) == good
    damage(good)
    with pytest.warns(UserWarning, match="skips this checkpoint") as caught:
        assert resume.newest_whole(tmp_path) == tmp_path / "last.previous.ckpt"
    if damage is put_objects:
        words = "contains objects"
    else:
        words = "is damaged: "
    assert sum(words in str(warning.message) for warning in caught) == 2
    damage(tmp_path / "last.previous.ckpt")
    with pytest.raises(
        ValueError,
        match=r"`resume` \(=auto\) found no undamaged checkpoint in .*last.previous.ckpt",
    ):
        resume.newest_whole(tmp_path)


def configured(run_dir, *overrides):
    return composed("train", "trainer.devices=1", f"run_dir={run_dir}", *overrides)


def test_a_path_must_be_a_whole_checkpoint(tmp_path):
    assert resume.checkpoint(configured(tmp_path)) is None
    assert resume.checkpoint(configured(tmp_path, "resume=auto")) is None
    with pytest.raises(ValueError, match=r"`resume` \(=no.ckpt\) is not an existing file"):
        resume.checkpoint(configured(tmp_path, "resume=no.ckpt"))
    path = saved(tmp_path, "some.ckpt", 4)
    assert resume.checkpoint(configured(tmp_path, f"resume={path}")) == str(path)
    flip(path)
    with pytest.raises(DamagedCheckpointError, match=r"some.ckpt` is damaged: "):
        resume.checkpoint(configured(tmp_path, f"resume={path}"))


def test_another_configuration_is_refused_by_name_and_what_changes_no_number_is_not(tmp_path):
    kept = resume.saved_configuration(configured(tmp_path))
    saved(tmp_path / "checkpoints", "last.ckpt", 4, callbacks={"Configuration": {"kept": kept}})
    changes_no_number = (
        "trainer.max_epochs=99",
        "trainer.devices=4",
        "logger=csv",
        "strategy.comm.algorithm=flat",
    )
    for keys in ((), changes_no_number):
        assert resume.checkpoint(configured(tmp_path, "resume=auto", *keys)) is not None
    for key, value, was in (
        ("optim.lr", "1.5", kept["optim"]["lr"]),
        ("optim", "sgd", "lightning_hybrid.optim.LARS"),
    ):
        with pytest.raises(
            ValueError, match=rf"^`{key}.* differs from the value in the checkpoint .*\(={was}\)"
        ) as caught:
            resume.checkpoint(configured(tmp_path, "resume=auto", f"{key}={value}"))
        assert "without `resume`" in str(caught.value)
    assert resume.checkpoint(
        configured(tmp_path, "resume=auto", "optim.lr=1.5", "~callbacks.configuration")
    )
    kept["model"] |= {"slice_fc": "node"}
    callbacks = {"Configuration": {"kept": kept}}
    path = saved(tmp_path / "checkpoints", "last.ckpt", 5, callbacks=callbacks)
    assert resume.checkpoint(configured(tmp_path, "resume=auto")) is not None
    now = resume.saved_configuration(configured(tmp_path))
    now["model"] |= {"checkpoint_activations": True, "slice_fc": "off", "dropout": 0.25}
    with pytest.raises(ValueError, match=r"^`model.dropout` \(=0.25\)") as caught:
        resume.refuse_other_configuration(path, now)
    assert "checkpoint_activations" not in str(caught.value)
    assert "slice_fc" not in str(caught.value)


def test_a_run_shorter_than_its_checkpoint_is_refused_and_an_equally_long_one_is_not(tmp_path):
    progress = {"current": {"completed": 11, "processed": 12}}
    loops = {"fit_loop": {"epoch_progress": progress}}
    saved(tmp_path / "checkpoints", "last.ckpt", 48, epoch=11, loops=loops)
    for enough in ("trainer.max_epochs=12", "trainer.max_epochs=-1", "trainer.max_steps=48"):
        assert resume.checkpoint(configured(tmp_path, "resume=auto", enough)) is not None
    for key, value, num_done in (("max_epochs", 11, 12), ("max_steps", 47, 48)):
        with pytest.raises(
            ValueError,
            match=rf"^`trainer.{key}` \(={value}\) must be at least {num_done}, because the checkpoint .*last.ckpt",
        ):
            resume.checkpoint(configured(tmp_path, "resume=auto", f"trainer.{key}={value}"))


def fit_from(paths, call="fit"):
    """Fit with a different checkpoint on each rank, and return the error and the number of steps."""
    callbacks = [resume.SameCheckpoint(paths[dist.get_rank()])]
    seen = fit(callbacks=callbacks, max_steps=2, raises=True, call=call)
    return seen.error, seen.global_step


def test_ranks_that_found_different_checkpoints_all_say_so_before_training(two_ranks, tmp_path):
    step_4 = str(saved(tmp_path, "one.ckpt", 4))
    step_6 = str(saved(tmp_path / "b", "one.ckpt", 6))
    assert two_ranks.run(fit_from, [step_4, step_4]) == [("", 2)] * 2
    rule = "selects different checkpoints on different ranks (rank 0: one.ckpt, crc32 "
    for paths, words in (
        ([step_4, None], "rank 1: no checkpoint"),
        ([step_4, step_6], "rank 1: one.ckpt, crc32 "),
    ):
        for rank, (error, num_steps) in enumerate(two_ranks.run(fit_from, paths)):
            assert rule in error, f"rank {rank}"
            assert words in error, f"rank {rank}"
            assert num_steps == 0, f"rank {rank}"
    # Validation resumes from no checkpoint.
    assert two_ranks.run(fit_from, [step_4, step_6], "validate") == [("", 0)] * 2


class Logging(Toy):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        if self.trainer.global_step == 6:  # a column that starts late
            self.log("late", 1.0)
        return loss


def logged(folder, from_step=None, settings=()):
    """Return the rows of a fit that saves after every step. A resumed fit continues in the same file."""
    if from_step is None:
        path = None
    else:
        path = f"{folder}/step={from_step}.ckpt"
    num_rows = saved_state(path).get("num_rows", {}).get("CSVRows", 0)
    logger = CSVRows(save_dir=folder, name="", version="csv", num_rows_kept=num_rows)
    saves = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    options = {
        "enable_checkpointing": True,
        "max_steps": 8,
        "log_every_n_steps": 1,
        **dict(settings),
    }
    fit(
        module=Logging,
        logger=logger,
        callbacks=[TrackerRun(), saves],
        ckpt_path=path,
        max_epochs=-1,
        **options,
    )
    rows = []
    for row in read_rows(Path(folder) / "csv" / "metrics.csv"):
        rows.append({name: value for name, value in row.items() if value})
    return rows


def logged_twice(folder, from_step, settings):
    whole = logged(folder, None, settings)
    return whole, logged(folder, from_step, settings)


@pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists", "ignore:You're resuming from a checkpoint that ended"
)
@pytest.mark.parametrize(
    ("settings", "from_step"),
    [({}, 6), ({"log_every_n_steps": 2}, 5), ({"accumulate_grad_batches": 2}, 6)],
    ids=str,
)
def test_no_row_is_missing_and_none_comes_twice(one_rank, tmp_path, settings, from_step):
    """The interrupted run had continued after the checkpoint. Some steps are not logged, or have several batches."""
    ((first, resumed),) = one_rank.run(logged_twice, str(tmp_path), from_step, settings)
    if "log_every_n_steps" in settings:
        steps = ["1", "3", "5", "7"]
        steps_with_late = ["7"]
    else:
        steps = [str(step) for step in range(8)]
        steps_with_late = ["6", "7"]
    for rows in (first, resumed):
        assert [row["step"] for row in rows] == steps
        assert [row["step"] for row in rows if "late" in row] == steps_with_late
    assert [row["epoch"] for row in resumed] == [row["epoch"] for row in first]
    num_kept = sum(int(step) < from_step for step in steps)
    assert resumed[:num_kept] == first[:num_kept]


def test_rows_are_on_the_disk_before_they_are_counted_and_are_found_where_a_kill_left_them(
    tmp_path, monkeypatch
):
    synced = []
    fsync = os.fsync
    moved = os.replace
    monkeypatch.setattr(
        "recipes.training.csv_logger.os.fsync",
        lambda number: (synced.append(os.fstat(number).st_size), fsync(number)),
    )
    monkeypatch.setattr(
        "recipes.training.csv_logger.os.replace",
        lambda *paths: (synced.append("moved"), moved(*paths)),
    )
    path = tmp_path / "csv" / "metrics.csv"
    logger = CSVRows(save_dir=tmp_path, name="", version="csv")
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.log_metrics({"loss": 2.0}, step=1)
    assert num_rows_of(logger) == 2
    assert synced[-1] == path.stat().st_size, "the file itself, once all is in it"
    path.rename(path.with_name(".metrics.csv.part"))
    synced.clear()
    again = CSVRows(save_dir=tmp_path, name="", version="csv", num_rows_kept=2)
    again.log_metrics({"loss": 3.0}, step=2)
    assert synced[0] != "moved"
    assert num_rows_of(again) == 3
    assert [row["loss"] for row in read_rows(path)] == ["1.0", "2.0", "3.0"]


def test_rows_that_the_machine_lost_are_reported(tmp_path):
    logger = CSVRows(save_dir=tmp_path, name="", version="csv")
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.sync()
    again = CSVRows(save_dir=tmp_path, name="", version="csv", num_rows_kept=3)
    with pytest.warns(UserWarning, match=r"metrics.csv has 1 rows, but the checkpoint expects 3"):
        again.log_metrics({"loss": 2.0}, step=3)
    again.save()
    assert [row["loss"] for row in read_rows(tmp_path / "csv" / "metrics.csv")] == ["1.0", "2.0"]
