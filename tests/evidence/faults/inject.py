"""Injection of a fault: what is done to a rank, and in which phase of its training."""

import json
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
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
AT_CONSTRUCTION = tuple(f"has_another_{what}" for what in ("plan", "seed", "network", "version", "order"))
"""Kinds without a phase: `rank.train_rank` injects them."""


class Inject(Callback):
    """Callback that injects the fault of `spec`: `kind` on `rank` in `step` or later, at its `phase`; notes when.

    Last in the list of callbacks, so that at the end of training the others' collectives are done.
    """

    are_images_gone = False  # in this process

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec, self.folder = spec, Path(spec["folder"])
        self._is_done = False
        self._spoil_batch: Callable[[Any], None] | None = None
        self._after_setup: Callable[[pl.Trainer], None] | None = None

    # ---- phases ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Reach phase `setup`."""
        self._reach(trainer, "setup", step=0)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Inject what needs the wrapped model."""
        if self._after_setup is not None:
            self._after_setup(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wrap the stages, for phases within a sum: stages run in threads of their own."""
        if self.spec["phase"] in OF_A_SUM and self.spec["rank"] in (None, trainer.global_rank):
            threads: Any = trainer.strategy._comm.engine._carrier  # type: ignore[attr-defined]
            threads._has_run = self._before_a_stage(trainer, threads._has_run)

    def _before_a_stage(self, trainer: pl.Trainer, has_run: Callable[..., bool]) -> Callable[..., bool]:
        phase = self.spec["phase"]

        def reached(stage_thread: Any, chunk: Any) -> bool:
            bucket, is_in_last = chunk.bucket, stage_thread.successor is None
            is_here = {
                OF_A_SUM[0]: bucket.plan.index == 0 and stage_thread.is_first,
                OF_A_SUM[1]: bucket.plan.index > 0 and not bucket.is_last and is_in_last,
                OF_A_SUM[2]: bucket.is_last and is_in_last,
            }
            try:
                if is_here[phase]:
                    self._reach(trainer, phase)
            except torch.OutOfMemoryError as error:
                bucket.compare_contents = partial(_raise, error)  # where a stage's own errors come from, once it begins
            return has_run(stage_thread, chunk)

        return reached

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Reach phase `forward`; hook a gradient for `backward`; spoil the batch where asked."""
        self._reach(trainer, "forward")
        if self._spoil_batch is not None:
            self._spoil_batch(batch)
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
        """Reach phase `end of fit`; for `teardown` wrap the watchdog's end."""
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
        is_mine = self.spec["rank"] in (None, trainer.global_rank)
        return is_mine and trainer.global_step >= (self.spec["step"] if step is None else step) and not self._is_done

    def _reach(self, trainer: pl.Trainer, phase: str, step: int | None = None) -> None:
        if phase != self.spec["phase"] or self.spec["kind"] in AT_CONSTRUCTION or not self._is_now(trainer, step):
            return
        self._is_done = True
        write_answer(self.folder / "injected.json", {"time_s": time.monotonic()})
        getattr(self, self.spec["kind"])(trainer)

    # ---- of a rank ---------------------------------------------------------------------------------------------------

    def nothing(self, trainer: pl.Trainer) -> None:
        """Do nothing here, for a fault of a link or none; give time to spoil the link."""
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

    def returns_none(self, trainer: pl.Trainer) -> None:
        """Return no loss from here on."""
        _spoil_loss(trainer, lambda loss: None)

    def loader_raises(self, trainer: pl.Trainer) -> None:
        """Fail at the next image: a file is gone."""
        type(self).are_images_gone = True

    def allocates_too_much(self, trainer: pl.Trainer) -> None:
        """Ask for 2 GiB where the operating system gives 1 GiB more."""
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, -1))
        torch.empty(2**31, dtype=torch.uint8)

    def other_plan(self, trainer: pl.Trainer) -> None:
        """Change the plan of buckets in memory: other chunks, which other ranks do not follow."""
        engine: Any = trainer.strategy._comm.engine  # type: ignore[attr-defined]
        for key, bucket in engine._buckets.items():
            engine._buckets[key] = replace(bucket, num_chunks=bucket.num_chunks + 1)

    def reseeds_the_data(self, trainer: pl.Trainer) -> None:
        """Change the order of the next epoch: someone seeds by the clock, or by the rank."""
        loader: Any = trainer.train_dataloader
        loader.sampler.seed += 1

    # ---- of one rank's model -----------------------------------------------------------------------------------------

    def master_bit_flips(self, trainer: pl.Trainer) -> None:
        """Flip the lowest bit of one weight's mantissa, as by a cosmic ray."""
        weight = middle_of(trainer)
        masters = getattr(trainer.precision_plugin, "masters", None)
        pair = None if masters is None else masters.pair_of(weight)
        _flip(weight if pair is None else pair.master)

    def half_bit_flips(self, trainer: pl.Trainer) -> None:
        """Flip the same in the fp16 copy that the forward reads."""
        _flip(middle_of(trainer))

    def momentum_bit_flips(self, trainer: pl.Trainer) -> None:
        """Flip the highest bit of the mantissa in the optimizer's state: the lowest may vanish in rounding."""
        _flip(trainer.optimizers[0].state[middle_of(trainer)]["momentum_buffer"], bit=22)

    def loads_another_checkpoint(self, trainer: pl.Trainer) -> None:
        """Load other masters, as from a stale file on one host: DDP synchronises only the weights."""
        self._after_setup = self.master_bit_flips

    def layer_overflows(self, trainer: pl.Trainer) -> None:
        """Set weights so large that the layer's output is beyond half precision."""
        with torch.no_grad():
            middle_of(trainer).fill_(6e4)

    def layer_dies(self, trainer: pl.Trainer) -> None:
        """Set a bias so low that the ReLU behind it never opens again."""
        layer = trainer.lightning_module.get_submodule(MIDDLE)
        assert isinstance(layer, nn.Linear)
        with torch.no_grad():
            layer.bias.fill_(-1e4)

    # ---- of numbers --------------------------------------------------------------------------------------------------

    def nan_once(self, trainer: pl.Trainer) -> None:
        """Make the loss of one batch nan."""

        def spoil(loss: Tensor) -> Tensor:
            _spoil_loss(trainer, lambda loss: loss)
            return loss * float("nan")

        _spoil_loss(trainer, spoil)

    def nan_for_good(self, trainer: pl.Trainer) -> None:
        """Make the loss of every batch from now on nan."""
        _spoil_loss(trainer, lambda loss: loss * float("nan"))

    def overflows_now_and_then(self, trainer: pl.Trainer) -> None:
        """Overflow every second step's gradients: the scale falls to its floor and stays there."""
        _spoil_loss(trainer, lambda loss: loss * float("inf") if trainer.global_step % 2 else loss)

    def zero_gradients(self, trainer: pl.Trainer) -> None:
        """Make the loss independent of the weights."""
        _spoil_loss(trainer, lambda loss: 0.0 * loss)

    def inf_in_one_batch(self, trainer: pl.Trainer) -> None:
        """Make one value of one image infinite."""

        def spoil(batch: Any) -> None:
            self._spoil_batch = None
            _put_inf(batch)

        self._spoil_batch = spoil

    def inf_in_images(self, trainer: pl.Trainer) -> None:
        """Make one value of every batch from now on infinite."""
        self._spoil_batch = _put_inf

    def nan_in_labels(self, trainer: pl.Trainer) -> None:
        """Replace labels by probabilities, one of them nan, in every batch from now on."""

        def spoil(batch: Any) -> None:
            batch[1] = F.one_hot(batch[1], 4).float()
            batch[1][3, 1] = float("nan")

        self._spoil_batch = spoil

    def label_out_of_range(self, trainer: pl.Trainer) -> None:
        """Set a label that is no class."""

        def spoil(batch: Any) -> None:
            batch[1][3] = 99

        self._spoil_batch = spoil


def _spoil_loss(trainer: pl.Trainer, spoil: Callable[[Tensor], Tensor | None]) -> None:
    module: Any = trainer.lightning_module
    module.spoil = spoil


def _put_inf(batch: Any) -> None:
    batch[0][5, 2] = float("inf")


def _flip(tensor: Tensor, bit: int = 0) -> None:
    """Flip a bit in memory, without torch's count of writes."""
    integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    tensor.detach().view(integers).view(-1).numpy()[5] ^= 1 << bit


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
