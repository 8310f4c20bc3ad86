"""Injection of a fault: what is done to a rank, and in which phase of its training."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_hybrid.atomic_file import atomic_path

MIDDLE = "net.4"  # its gradient is there in the middle of backward
OF_A_SUM = ("sum, first bucket", "sum, middle bucket", "sum, last bucket")
PHASES = (
    "setup",  # the process group is there, the engine is not
    "forward",
    "backward",
    *OF_A_SUM,  # in the thread of a stage: the first bucket's before its first stage, the others' before their last
    "update",
    "validation",
    "between epochs",
    "end of fit",  # training is done, the engine still there
    "teardown",  # while the engine is closed
)
AT_CONSTRUCTION = ("has_another_plan",)
"""Kinds without a phase: `rank.train_rank` injects them."""


class Inject(Callback):
    """Callback that injects the fault of `spec`: `kind` on `rank` in `step` or later, at its `phase`. Notes when.

    Last in the list of callbacks, so that at the end of training the others' collectives are done.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.folder = Path(spec["folder"])
        self._is_done = False

    # ---- phases ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Reach phase `setup`."""
        self._reach(trainer, "setup", step=0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wrap the stages, for phases within a sum: stages run in threads of their own."""
        if self.spec["phase"] in OF_A_SUM and self.spec["rank"] == trainer.global_rank:
            threads: Any = trainer.strategy._comm.engine._carrier  # type: ignore[attr-defined]
            threads._has_run = self._before_a_stage(trainer, threads._has_run)

    def _before_a_stage(
        self, trainer: pl.Trainer, has_run: Callable[..., bool]
    ) -> Callable[..., bool]:
        phase = self.spec["phase"]

        def reached(stage_thread: Any, chunk: Any) -> bool:
            bucket = chunk.bucket
            is_in_last = stage_thread.successor is None
            is_here = {
                OF_A_SUM[0]: bucket.plan.index == 0 and stage_thread.is_first,
                OF_A_SUM[1]: bucket.plan.index > 0 and not bucket.is_last and is_in_last,
                OF_A_SUM[2]: bucket.is_last and is_in_last,
            }
            try:
                if is_here[phase]:
                    self._reach(trainer, phase)
            except torch.OutOfMemoryError as error:
                # where a stage's own errors come from, once it begins
                bucket.compare_contents = partial(_raise, error)
            return has_run(stage_thread, chunk)

        return reached

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Reach phase `forward`. Hook a gradient for `backward`."""
        self._reach(trainer, "forward")
        if self.spec["phase"] == "backward" and self._is_now(trainer):
            middle_of(trainer).register_hook(lambda _: self._reach(trainer, "backward"))

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        """Reach phase `update`."""
        self._reach(trainer, "update")

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Reach phase `validation`."""
        self._reach(trainer, "validation")

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Reach phase `between epochs`."""
        self._reach(trainer, "between epochs")

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Reach phase `end of fit`. For `teardown` wrap the watchdog's end."""
        self._reach(trainer, "end of fit")
        if self.spec["phase"] == "teardown" and self._is_now(trainer):
            # This call is in the middle of the close of the engine, whose collectives are done.
            watch: Any = trainer.strategy._comm.engine._watchdog  # type: ignore[attr-defined]
            leave = watch.leave

            def trapped() -> None:
                self._reach(trainer, "teardown")
                leave()

            watch.leave = trapped

    def _is_now(self, trainer: pl.Trainer, step: int | None = None) -> bool:
        is_mine = self.spec["rank"] == trainer.global_rank
        return (
            is_mine
            and trainer.global_step >= (self.spec["step"] if step is None else step)
            and not self._is_done
        )

    def _reach(self, trainer: pl.Trainer, phase: str, step: int | None = None) -> None:
        if (
            phase != self.spec["phase"]
            or self.spec["kind"] in AT_CONSTRUCTION
            or not self._is_now(trainer, step)
        ):
            return
        self._is_done = True
        write_answer(self.folder / "injected.json", {"time_s": time.monotonic()})
        getattr(self, self.spec["kind"])(trainer)

    # ---- of a rank ---------------------------------------------------------------------------------------------------

    def nothing(self, trainer: pl.Trainer) -> None:
        """Do nothing here, for a fault of a link or none. Give time to spoil the link."""
        time.sleep(self.spec.get("pause_s", 0.0))

    def dies(self, trainer: pl.Trainer) -> None:
        """Die as by the kernel, out of memory of the host."""
        os.kill(os.getpid(), signal.SIGKILL)

    def stops(self, trainer: pl.Trainer) -> None:
        """Stop the whole process: a debugger, a machine that swaps."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def hangs(self, trainer: pl.Trainer) -> None:
        """Block the thread of the training, or of a stage, for good: a file system, a lock."""
        time.sleep(3600)

    def lags(self, trainer: pl.Trainer) -> None:
        """Block the thread for a while."""
        time.sleep(3.0)

    def raises(self, trainer: pl.Trainer) -> None:
        """Raise an error: no memory on the device."""
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    def other_plan(self, trainer: pl.Trainer) -> None:
        """Change the plan of buckets in memory: other chunks, which other ranks do not follow."""
        engine: Any = trainer.strategy._comm.engine  # type: ignore[attr-defined]
        for key, bucket in engine._buckets.items():
            engine._buckets[key] = replace(bucket, num_chunks=bucket.num_chunks + 1)


def _raise(error: Exception, *_: object) -> None:
    raise error


def middle_of(trainer: pl.Trainer) -> Tensor:
    """Return the weights in the middle of the network."""
    layer = trainer.lightning_module.get_submodule(MIDDLE)
    assert isinstance(layer, nn.Linear)
    return layer.weight


def write_answer(path: Path, answer: dict[str, Any]) -> None:
    """Write JSON whole or not at all: another process looks for it all the time."""
    with atomic_path(path, has_rivals=True) as part:
        part.write_text(json.dumps(answer))
