"""One rank of a short training run in which something goes wrong on purpose."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
import warnings
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.callbacks import CheckReplicas, WatchNumbers
from lightning_hybrid.comm import CommPlan
from lightning_hybrid.fingerprint import Fingerprint

NUM_FEATURES, NUM_CLASSES, WIDTH, DEPTH = 16, 4, 128, 6
BUCKET_BYTES = (
    65536  # three buckets of the 100,000 parameters in fp16, so that some are in flight while others are made
)
MIDDLE = "net.4"  # its gradient is there in the middle of backward


class Images(Dataset):
    """Sample ``i`` is a pure function of ``i``."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.images = torch.randn(num_samples, NUM_FEATURES, generator=generator)
        self.labels = self.images[:, :NUM_CLASSES].argmax(1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


class Network(pl.LightningModule):
    """A stack of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [NUM_FEATURES, *[WIDTH] * DEPTH]
        layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, NUM_CLASSES))
        self.spoil: Any = None  # what to do to the loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross entropy."""
        images, labels = batch
        loss = F.cross_entropy(self.net(images).float(), labels)
        return loss if self.spoil is None else self.spoil(loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Momentum, so that there is state to differ."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Inject(Callback):
    """Makes the fault of ``spec`` happen: ``kind`` on ``rank`` in ``step``, at its ``phase``; and notes when."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec, self.folder = spec, Path(spec["folder"])
        self._is_done = False

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Phase ``forward``; for ``backward`` a hook is put in place."""
        self._reach(trainer, "forward")
        if self.spec["phase"] == "backward" and self._is_now(trainer):
            middle_of(trainer).register_hook(lambda _: self._reach(trainer, "backward"))

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        """Phase ``update``."""
        self._reach(trainer, "update")

    def _is_now(self, trainer: pl.Trainer) -> bool:
        is_mine = self.spec["rank"] in (None, trainer.global_rank)
        return is_mine and trainer.global_step >= self.spec["step"] and not self._is_done

    def _reach(self, trainer: pl.Trainer, phase: str) -> None:
        if phase != self.spec["phase"] or not self._is_now(trainer):
            return
        self._is_done = True
        _write(self.folder / "injected.json", {"time_s": time.monotonic()})
        getattr(self, self.spec["kind"])(trainer)

    # ---- faults ------------------------------------------------------------------------------------------------------

    def nothing(self, trainer: pl.Trainer) -> None:
        """None here: a link's, or none at all. Time for whoever spoils the link."""
        time.sleep(self.spec.get("pause_s", 0.0))

    def dies(self, trainer: pl.Trainer) -> None:
        """As by the kernel, out of memory of the host."""
        os.kill(os.getpid(), signal.SIGKILL)

    def stops(self, trainer: pl.Trainer) -> None:
        """The whole process stands still: a debugger, a machine that swaps."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def hangs(self, trainer: pl.Trainer) -> None:
        """The training thread never comes back: a file system, a lock."""
        time.sleep(3600)

    def lags(self, trainer: pl.Trainer) -> None:
        """It does come back."""
        time.sleep(3.0)

    def raises(self, trainer: pl.Trainer) -> None:
        """No memory on the device."""
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    def other_plan(self, trainer: pl.Trainer) -> None:
        """A bucket's plan changes in memory: another way of cutting it up, which other ranks do not follow."""
        engine: Any = trainer.strategy._engine  # type: ignore[attr-defined]
        for key, bucket in engine._buckets.items():
            engine._buckets[key] = replace(bucket, num_chunks=bucket.num_chunks + 1)

    def bit_flips(self, trainer: pl.Trainer) -> None:
        """The lowest bit of one weight's mantissa, as by a cosmic ray."""
        weight = middle_of(trainer)
        masters = getattr(trainer.precision_plugin, "masters", None)
        twin = None if masters is None else masters.twin_of(weight)
        tensor = weight if twin is None else twin.master
        tensor.detach().view(torch.int32).view(-1)[5] ^= 1

    def nan_once(self, trainer: pl.Trainer) -> None:
        """The loss of one batch."""
        module = trainer.lightning_module
        assert isinstance(module, Network)

        def spoil(loss: Tensor) -> Tensor:
            module.spoil = None
            return loss * float("nan")

        module.spoil = spoil

    def nan_for_good(self, trainer: pl.Trainer) -> None:
        """The loss of every batch from now on."""
        module = trainer.lightning_module
        assert isinstance(module, Network)
        module.spoil = lambda loss: loss * float("nan")

    def layer_overflows(self, trainer: pl.Trainer) -> None:
        """Weights so large that what the layer puts out is beyond half precision."""
        with torch.no_grad():
            middle_of(trainer).fill_(6e4)


def middle_of(trainer: pl.Trainer) -> Tensor:
    """The weights in the middle of the network."""
    layer = trainer.lightning_module.get_submodule(MIDDLE)
    assert isinstance(layer, nn.Linear)
    return layer.weight


def train(spec: dict[str, Any]) -> None:
    """Run it, and write what became of it to ``rank<r>.json``."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, folder = int(os.environ["RANK"]), Path(spec["folder"])
    chunk_bytes = 2**19 if spec["kind"] == "starts_with_another_plan" and rank == spec["rank"] else 2**18
    plan = CommPlan(bucket_bytes=BUCKET_BYTES, num_buckets=1, last_bucket_bytes=BUCKET_BYTES, chunk_bytes=chunk_bytes)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=HybridAllReduceStrategy(plan=plan, timeout=timedelta(seconds=spec["timeout_s"])),
        precision=spec["precision"],
        max_steps=spec["num_steps"],
        max_epochs=-1,
        log_every_n_steps=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[WatchNumbers(), CheckReplicas(every_n_steps=5), Inject(spec)],
    )
    module, loader = Network(), DataLoader(Images(256), batch_size=8)
    if spec["kind"] == "starts_with_another_plan":
        _write(folder / "injected.json", {"time_s": time.monotonic()})
    told: dict[str, Any] = {"error": None}
    try:
        trainer.fit(module, loader)
    except BaseException as error:
        told["error"] = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    told |= {"time_s": time.monotonic(), "num_steps": trainer.global_step}
    fingerprint = Fingerprint(torch.device("cpu"))
    told["weights"] = int(fingerprint.combine([fingerprint.of(weight) for weight in module.parameters()]))
    _write(folder / f"rank{rank}.json", told)


def _write(path: Path, told: dict[str, Any]) -> None:
    """Whole or not at all: it is looked for all the time."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(told))
    partial.rename(path)
