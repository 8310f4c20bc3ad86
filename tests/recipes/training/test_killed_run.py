"""Runs that are killed at any point and restarted with the same command end bit-identical to undisturbed ones."""

import os
import signal
import time
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_hybrid import DurableCheckpointIO
from lightning_hybrid.callbacks.metrics import metric_of
from lightning_hybrid.checkpoint import file as checkpoint_file
from lightning_hybrid.checkpoint import host_copy
from recipes.training.csv_logger import read_rows
from tests.recipes.training.test_train import run
from tests.scenes import same

SHORT = (
    "logger=csv callbacks=[default,ema] ~callbacks.report trainer.max_epochs=2 trainer.limit_train_batches=6 "
    "trainer.limit_val_batches=1 trainer.limit_test_batches=1 trainer.log_every_n_steps=1 model.width=0.0625 "
    "trainer.enable_progress_bar=false trainer.enable_model_summary=false callbacks.last.every_n_train_steps=2 "
    "callbacks.ema.decay=0.9 strategy.loss_scale=dynamic resume=auto"
).split()
SAME = "state_dict optimizer_states lr_schedulers MasterWeightPrecision global_step current_model_state averaging_state"
# Phase, rank (None: both at once), and the function and number of the call before or after which the rank dies.
OF_A_FILE = {
    "copy": (host_copy, "_copy_at", 10, False),
    "write": (checkpoint_file._ChecksumFile, "_put", 10, False),
    "fsync": (os, "fsync", 1, True),
    "rename": (os, "replace", 1, True),
    "renamed": (checkpoint_file, "sync_directory", 1, False),
}
KILLS = {
    "loading": 0,
    "forward": 1,
    "backward": None,
    "communication": 1,
    "optimizer": 0,
    "after the step": None,
}
KILLS |= {
    "validation": 1,
    "copy": 0,
    "write": None,
    "fsync": 0,
    "rename": None,
    "renamed": 0,
    "test": 1,
}


class DieAt(Callback):
    """Callback that kills this process, or the whole run, once in a phase of the fifth step or later.

    A marker file keeps it from a second kill after a restart.
    """

    def __init__(self, mark, phase):
        self.mark = Path(mark)
        self.phase = phase
        self.rank = KILLS[phase]

    def die(self, *_):
        if not self.mark.exists():
            self.mark.touch()
            os.kill(0 if self.rank is None else os.getpid(), signal.SIGKILL)
            # The signal to other processes of the group may be faster than the signal to this one.
            time.sleep(60)

    def dies_in(self, owner, name, num_calls=1, is_before=False):
        function = getattr(owner, name)
        calls = []

        def trapped(*args, **kwargs):
            calls.append(1)
            if is_before and len(calls) >= num_calls:
                self.die()
            result = function(*args, **kwargs)
            if len(calls) >= num_calls:
                self.die()
            return result

        trapped._wrapped_by_lr_sched = True  # a schedule checks whether its step is wrapped
        setattr(owner, name, trapped)

    def is_here(self, trainer, *phases):
        return (
            self.phase in phases
            and trainer.global_rank == (self.rank or 0)
            and not self.mark.exists()
        )

    def on_train_batch_start(self, trainer, module, *_):
        if not self.is_here(trainer, *KILLS) or trainer.global_step != 4:
            return
        if self.phase == "loading":
            self.die()
        elif self.phase == "backward":
            list(module.parameters())[8].register_hook(self.die)
        elif self.phase in OF_A_FILE:
            self.dies_in(*OF_A_FILE[self.phase])
        else:
            places = {"forward": (module, "forward"), "optimizer": (trainer.optimizers[0], "step")}
            places["communication"] = (trainer.strategy._comm.engine, "submit")
            if self.phase in places:
                self.dies_in(*places[self.phase])

    def on_train_batch_end(self, trainer, *_):
        if self.is_here(trainer, "after the step") and trainer.global_step == 5:
            self.die()

    def on_validation_batch_start(self, trainer, *_):
        if self.is_here(trainer, "validation") and trainer.global_step >= 5:
            self.die()

    def on_test_batch_start(self, trainer, *_):
        if self.is_here(trainer, "test"):
            self.die()


def end_of(folder):
    """Return the promised content of the last and the best checkpoint, and the repeatable columns of rows."""
    results = []
    for name in ("last", "best"):
        content = DurableCheckpointIO().load_checkpoint(folder / "checkpoints" / f"{name}.ckpt")
        loader_state = content["loops"]["fit_loop"]["state_dict"].get("combined_loader")
        results.append([loader_state, *(content[part] for part in SAME.split())])
    rows = []
    for row in read_rows(folder / "csv" / "metrics.csv"):
        rows.append({name: text for name, text in row.items() if text and is_repeatable(name)})
    return results, rows


def is_repeatable(name):
    metric = metric_of(name)
    return metric is None or not (metric.from_clock or name.startswith("memory/"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run(*SHORT, f"hydra.run.dir={folder}").returncode == 0
    return end_of(folder)


@pytest.mark.long
@pytest.mark.parametrize("phase", KILLS)
def test_a_killed_run_goes_on_by_the_same_command_to_the_same_bits_and_rows(
    undisturbed, phase, tmp_path
):
    die = f"{{_target_: tests.recipes.training.test_killed_run.DieAt, mark: '{tmp_path}/died', phase: {phase}}}"
    command = [*SHORT, f"+callbacks.die={die}", f"hydra.run.dir={tmp_path}/run"]
    assert run(*command).returncode
    assert (tmp_path / "died").exists()
    again = run(*command)
    assert again.returncode == 0, again.stderr
    assert same(end_of(tmp_path / "run"), undisturbed)
