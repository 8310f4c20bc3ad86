"""One rank of a short training run with a fault."""

import logging
import os
import time
import warnings
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_hybrid import Comm, HybridAllReduceStrategy, Mean
from lightning_hybrid.callbacks import NumericsMonitor
from lightning_hybrid.comm import CommPlan
from lightning_hybrid.comm.health.tensor_hash import Fingerprint
from tests.evidence.faults.inject import AT_CONSTRUCTION, Inject, write_answer

NUM_FEATURES = 16
NUM_CLASSES = 4
WIDTH = 128
DEPTH = 6
BATCHES_PER_EPOCH = 4  # so that twelve steps include ends of epochs and validations
BUCKET_BYTES = (
    65536  # three buckets for 100,000 fp16 parameters, so that some are in flight while others fill
)
NUM_SAMPLES = 256


class SyntheticImages(Dataset):
    """Dataset in which sample `i` is a pure function of `i`."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.images = torch.randn(num_samples, NUM_FEATURES, generator=generator)
        self.labels = self.images[:, :NUM_CLASSES].argmax(1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


class Network(pl.LightningModule):
    """Stack of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [NUM_FEATURES, *[WIDTH] * DEPTH]
        self.net = nn.Sequential()
        for num_inputs, num_outputs in pairwise(widths):
            self.net.append(nn.Linear(num_inputs, num_outputs))
            self.net.append(nn.ReLU())
        self.net.append(nn.Linear(WIDTH, NUM_CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the cross entropy."""
        images, labels = batch
        return F.cross_entropy(self.net(images).float(), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log nothing, because a collective would reveal a missing rank."""
        self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD with momentum, so that there is state that could differ."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def meet(folder: Path, rank: int, num_ranks: int) -> None:
    """Wait for all ranks. A busy machine starts them at different times, and their time limit is for the fault."""
    (folder / f"ready{rank}").touch()
    for peer in range(num_ranks):
        while not (folder / f"ready{peer}").exists():
            time.sleep(0.02)


def train_rank(spec: dict[str, Any]) -> None:
    """Train, and write the result to `rank<r>.json`."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    folder = Path(spec["folder"])
    meet(folder, rank, int(os.environ["WORLD_SIZE"]))
    trainer = trainer_of(spec, rank)
    images = SyntheticImages(NUM_SAMPLES)
    sampler: DistributedSampler = DistributedSampler(
        images, num_replicas=int(os.environ["WORLD_SIZE"]), rank=rank
    )
    loader = DataLoader(images, batch_size=8, sampler=sampler)
    module = Network()
    if spec["kind"] in AT_CONSTRUCTION:
        write_answer(folder / "injected.json", {"time_s": time.monotonic()})
    answer = {"error": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer.fit(module, loader, DataLoader(SyntheticImages(32), batch_size=8))
        except BaseException as error:
            notes = getattr(error, "__notes__", [])
            answer["error"] = "\n".join([f"{type(error).__name__}: {error}", *notes])
    answer |= {"time_s": time.monotonic(), "num_steps": trainer.global_step}
    fingerprint = Fingerprint(torch.device("cpu"))
    fingerprints = [fingerprint.of(weight) for weight in module.parameters()]
    answer["weights"] = int(fingerprint.combine(fingerprints))
    write_answer(folder / f"rank{rank}.json", answer)


def trainer_of(spec: dict[str, Any], rank: int) -> pl.Trainer:
    """Make the trainer of a rank, with the callback that injects the fault."""
    between = {}
    if dtype := spec["dtype_between_nodes"]:
        between = {"between_nodes": Mean(dtype=dtype)}
    chunk_bytes = 2**18
    if rank == spec["rank"] and spec["kind"] == "has_another_plan":
        chunk_bytes = 2**19
    plan = CommPlan(
        bucket_bytes=BUCKET_BYTES,
        num_buckets=1,
        last_bucket_bytes=BUCKET_BYTES,
        chunk_bytes=chunk_bytes,
    )
    return pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=HybridAllReduceStrategy(
            comm=Comm(plan=plan), timeout=timedelta(seconds=spec["timeout_s"]), **between
        ),
        precision="16-true",
        max_steps=spec["num_steps"],
        max_epochs=-1,
        limit_train_batches=BATCHES_PER_EPOCH,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        log_every_n_steps=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[NumericsMonitor(), Inject(spec)],
    )
