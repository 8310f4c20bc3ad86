"""Injection of a fault into a rank, in a phase of its training."""

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

MIDDLE = "net.4"  # its gradient is ready in the middle of backward
OF_A_SUM = ("sum, first bucket", "sum, middle bucket", "sum, last bucket")
PHASES = (
    "setup",  # the process group exists, but not the engine
    "forward",
    "backward",
    *OF_A_SUM,  # in a stage's thread: before the first stage for the first bucket, before the last stage for others
    "update",
    "validation",
    "between epochs",
    "end of fit",  # training is done, the engine still exists
    "teardown",  # while the engine closes
)
AT_CONSTRUCTION = ("has_another_plan",)
"""Kinds without a phase: `rank.train_rank` injects them."""


class Inject(Callback):
    """Callback that injects the fault of `spec` and records the time.

    The fault is `kind` on `rank`, in `step` or later, at its `phase`. The callback must be the last in the list, so
    that at the end of training the collectives of the other callbacks are done.
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
        """Wrap the stages for phases within an all-reduce, because stages run in separate threads."""
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
                # This is where errors of a running stage are raised.
                bucket.compare_contents = partial(_raise, error)
            return has_run(stage_thread, chunk)

        return reached

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Reach phase `forward`, and hook a gradient for `backward`."""
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
        """Reach phase `end of fit`. For `teardown`, wrap the watchdog's end."""
        self._reach(trainer, "end of fit")
        if self.spec["phase"] == "teardown" and self._is_now(trainer):
            # The engine calls this in the middle of its close, when its collectives are done.
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

    # ---- faults of a rank --------------------------------------------------------------------------------------------

    def nothing(self, trainer: pl.Trainer) -> None:
        """Do nothing here, for a fault of a link or no fault. Leave time to change the link."""
        time.sleep(self.spec.get("pause_s", 0.0))

    def dies(self, trainer: pl.Trainer) -> None:
        """Kill the process, as the kernel does when the host runs out of memory."""
        os.kill(os.getpid(), signal.SIGKILL)

    def stops(self, trainer: pl.Trainer) -> None:
        """Stop the whole process, like a debugger or a machine that swaps."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def hangs(self, trainer: pl.Trainer) -> None:
        """Block the thread of training or of a stage forever, like a file system or a lock."""
        time.sleep(3600)

    def lags(self, trainer: pl.Trainer) -> None:
        """Block the thread for a while."""
        time.sleep(3.0)

    def raises(self, trainer: pl.Trainer) -> None:
        """Raise an out-of-memory error of the device."""
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    def other_plan(self, trainer: pl.Trainer) -> None:
        """Change the number of chunks in the plan of buckets in memory, which other ranks do not follow."""
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
    """Write JSON atomically, because another process polls the file."""
    with atomic_path(path, has_rivals=True) as part:
        part.write_text(json.dumps(answer))
