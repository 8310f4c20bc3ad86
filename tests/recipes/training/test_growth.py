"""A run holds at its end what it held in its middle."""

import gc
import json
import os
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch.distributed as dist

from tests.recipes.training.test_train import SHORT, succeed

NUM_STEPS = 400


def held():
    """What the kernel and torch count of this process."""
    gc.collect()
    lines = [
        line.split()
        for file in ("status", "smaps_rollup")
        for line in Path("/proc/self", file).read_text().splitlines()
    ]
    of_kernel = {line[0]: int(line[1]) for line in lines if line[0] in ("Threads:", "Private_Dirty:")}
    counts = {"files": len(os.listdir("/proc/self/fd")), "groups": len(dist.distributed_c10d._world.pg_map)}
    return of_kernel | counts | {"objects": len(gc.get_objects())}


class Holds(pl.Callback):
    """Each rank writes what it held after half of the steps and after all, in the middle of a validation's interval."""

    def __init__(self, directory):
        self.directory, self.found = Path(directory), []

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step in (NUM_STEPS // 2, NUM_STEPS):
            self.found.append(held())
            (self.directory / f"held{trainer.global_rank}.json").write_text(json.dumps(self.found))


@pytest.mark.long
def test_nothing_grows_with_the_steps_of_a_run(tmp_path):
    """4 MiB in 200 steps is a leak of 20 KiB a step: allocators alone move private memory by some hundred KiB.

    Of threads, files and groups two more: one a validation or a checkpoint would be ten.
    """
    given = [each for each in SHORT if "max_epochs" not in each and "logger" not in each]
    given += ["logger=csv", f"trainer.max_steps={NUM_STEPS}", "trainer.max_epochs=-1", "global_batch_size=64"]
    holds = "+callbacks.holds={_target_: tests.recipes.training.test_growth.Holds, directory: ${run_dir}}"
    succeed(*given, "model.width=0.0625", holds, f"hydra.run.dir={tmp_path}")
    for rank in range(2):
        middle, end = json.loads((tmp_path / f"held{rank}.json").read_text())
        assert end.pop("Private_Dirty:") < middle.pop("Private_Dirty:") + 4096
        assert end.pop("objects") < 1.01 * middle.pop("objects")
        assert all(end[name] <= middle[name] + 2 for name in middle), (middle, end)
