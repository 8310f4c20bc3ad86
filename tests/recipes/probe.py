"""Callbacks with which a test inspects or ends a run."""

import json
import os
import signal
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.callbacks import Callback


class Probe(Callback):
    """Callback that writes the configuration of each rank to `rank<r>.json` in `directory`."""

    def __init__(self, directory, note=None):
        self.directory = Path(directory)
        self.note = note

    def on_train_start(self, trainer, pl_module):
        content = {
            "directory": HydraConfig.get().runtime.output_dir,
            "note": self.note,
            "lr": pl_module.optimizer.keywords["lr"],
            "seed": trainer.datamodule.seed,
            "num_threads": os.environ["OMP_NUM_THREADS"],
        }
        (self.directory / f"rank{trainer.global_rank}.json").write_text(json.dumps(content))


class Kill(Callback):
    """Callback with which rank zero kills the session of the run, including itself, in the middle of a step."""

    def __init__(self, after_step):
        self.after_step = after_step

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == self.after_step and trainer.is_global_zero:
            os.killpg(0, signal.SIGKILL)
