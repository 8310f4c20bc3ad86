"""Fits that end at any point and in any way: the resumed fit trains on the remaining images bit for bit."""

import os
import signal
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_hybrid.callbacks import StopOnSignal
from recipes.datasets.in_memory.datamodule import InMemoryDataModule
from recipes.datasets.in_memory.loader import ImageSet
from recipes.training.callbacks.step_checkpoint import StepCheckpoint
from tests import toy
from tests.scenes import at

pytestmark = pytest.mark.filterwarnings("ignore")
SIZE = 4
NUM_STEPS = 4


class Numbered(InMemoryDataModule):
    image_shape = (1, SIZE, SIZE)

    def __init__(self, num_train: int, global_batch_size: int) -> None:
        self.num_train = num_train
        super().__init__(
            global_batch_size=global_batch_size, seed=5, shift_pixels=1, eval_batch_size_per_rank=2
        )

    def load(self) -> dict[str, ImageSet]:
        images = torch.randint(
            256, (self.num_train, *self.image_shape), generator=torch.Generator().manual_seed(3)
        )
        images = images.to(torch.uint8)
        train = ImageSet(images, torch.arange(self.num_train))
        return {"train": train, "val": ImageSet(images[:8], torch.arange(8))}


class Reads(pl.LightningModule):
    """Classifier that records epoch, index, previous steps and images of its batches."""

    def __init__(self, schedule: str | None, asks_for_steps: bool) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(
                nn.Flatten(), nn.Linear(SIZE * SIZE, 6), nn.Tanh(), nn.Linear(6, 3)
            )
        self.schedule = schedule
        self.asks_for_steps = asks_for_steps
        self.read: list[tuple[int, int, int, list[int]]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.read.append(
            (self.trainer.current_epoch, batch_idx, self.trainer.global_step, batch[1].tolist())
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1] % 3)

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        if self.asks_for_steps:
            _ = self.trainer.estimated_stepping_batches  # Lightning creates the loader now
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.schedule is None:
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": self.schedule},
        }


class Killed(BaseException):
    """Substitute for SIGKILL that no callback of ours catches."""


@dataclass(frozen=True)
class End:
    how: str  # "max_steps", "signal", "kill" or "error"
    after: int  # steps, or batches
    hook: str = ""
    rank: int = 0  # receives the signal
    saves: str = "steps"  # when checkpoints are written
    every: int = 1
    saves_at_end: bool = False


@dataclass(frozen=True, kw_only=True)
class Case:
    ends: tuple[End, ...]
    ranks: int = 1
    accumulate: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    schedule: str | None = None
    asks_for_steps: bool = False
    is_own_loader: bool = False


def end_here(end: End, trainer: pl.Trainer, module: Any, *_: Any) -> None:
    """End the fit by a signal, a kill or an error, once the given number of batches has begun."""
    if trainer.sanity_checking or len(module.read) != end.after:
        return
    if end.how == "error":
        raise OSError("gone")
    if end.how == "kill":
        raise Killed
    if trainer.global_rank == end.rank:
        os.kill(os.getpid(), signal.SIGTERM)


def saving(folder: str, end: End) -> ModelCheckpoint:
    options: dict[str, Any] = {"save_on_exception": end.how == "error" and end.saves_at_end}
    if end.saves == "epochs":
        options["save_on_train_epoch_end"] = True
    else:
        options["every_n_train_steps"] = end.every
    if end.saves == "steps":
        kind = StepCheckpoint
    else:
        kind = ModelCheckpoint
    return kind(folder, "{epoch}-{step}", save_top_k=-1, **options)


def newest(folder: str) -> str | None:
    """Return the newest checkpoint that rank zero sees, on every rank."""
    message = [None]
    if dist.get_rank() == 0:
        paths = map(str, Path(folder).glob("*.ckpt"))
        message = [max(paths, key=os.path.getmtime, default=None)]
    dist.broadcast_object_list(message)
    return message[0]


def trainer_of(case: Case, strategy: str, folder: str, end: End | None) -> pl.Trainer:
    callbacks: list[pl.Callback] = []
    settings = {
        "max_epochs": 3,
        "accumulate_grad_batches": case.accumulate,
        "limit_val_batches": 2,
        **case.settings,
    }
    if end is not None:
        callbacks = [saving(folder, end)]
        if end.how == "signal":
            callbacks.append(StopOnSignal(folder))
        if end.how == "max_steps":
            settings["max_steps"] = end.after
        else:
            callbacks.insert(0, at(**{end.hook: partial(end_here, end)}))
    return toy.trainer(
        strategy=strategy,
        callbacks=callbacks,
        enable_checkpointing=end is not None,
        num_sanity_val_steps=0,
        **settings,
    )


def run(
    case: Case, strategy: str, folder: str, end: End | None, path: str | None
) -> dict[str, Any]:
    """Fit until the end, optionally from a checkpoint, and return the batches and the state of the trainer."""
    module = Reads(case.schedule, case.asks_for_steps)
    batch = 2 * case.ranks * case.accumulate
    data = Numbered(batch * NUM_STEPS + 1, batch)
    trainer = trainer_of(case, strategy, folder, end)
    sources: dict[str, Any] = {"datamodule": data}
    if case.is_own_loader:  # a user's loader, which has no access to the trainer
        data.trainer = trainer
        data.setup("fit")
        sources = {
            "train_dataloaders": data.train_dataloader(),
            "val_dataloaders": data.val_dataloader(),
        }
        if strategy != "ddp":
            sources["train_dataloaders"]._trainer = None
    try:
        trainer.fit(module, **sources, ckpt_path=path)
    except (Killed, OSError, SystemExit):
        assert end is not None
    return {
        "read": module.read,
        "steps": trainer.global_step,
        "epoch": trainer.fit_loop.epoch_progress.state_dict(),
        "batches": trainer.fit_loop.epoch_loop.batch_progress.state_dict(),
        "steps of loggers": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "weights": toy.weights(module),
        "lr": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
    }


def ended_and_resumed(case: Case, strategy: str, folder: str) -> str:
    """Return the first difference between a fit that ended and resumed and an uninterrupted one."""
    whole = run(case, strategy, folder, None, None)
    path = None
    for number, end in enumerate((*case.ends, None)):
        step = 0
        origin = ""
        if path is not None:
            step = torch.load(path, weights_only=True)["global_step"]
            origin = f"resumed at step {step} from {Path(path).name}: "
        result = run(case, strategy, f"{folder}/{number}", end, path)
        left = [batch for batch in whole["read"] if batch[2] >= step]
        expected = left
        if end is not None:
            expected = left[: len(result["read"])]
        if result["read"] != expected:
            return f"{origin}read {result['read']} of {left}"
        path = newest(f"{folder}/{number}") or path
    # Without batches, Lightning counts nothing.
    counters = ("epoch", "batches", "steps of loggers") * bool(result["read"])
    for name in ("steps", "lr", *counters):
        if result[name] != whole[name]:
            return f"{origin}{name} {result[name]} of {whole[name]}"
    if toy.same_bits(result["weights"], whole["weights"]):
        return ""
    return f"{origin}other weights"


IN_LAST_EPOCH = End("max_steps", 9, saves="epochs")
CHOSEN = {
    # Lightning ends that epoch once more, and the run one epoch early.
    "an epoch's end with max_steps": Case(
        ends=(End("kill", 6, "on_train_batch_start", saves="epochs"),), settings={"max_steps": 11}
    ),
    # Lightning counts that epoch, and the run ends at once.
    "max_steps in the last epoch": Case(ends=(IN_LAST_EPOCH,), settings={"val_check_interval": 1}),
    "the same, with a user's loader": Case(ends=(IN_LAST_EPOCH,), is_own_loader=True),
    # Lightning does not restore a loader that it created before it read the checkpoint.
    "a loader made early": Case(
        ends=(End("kill", 7, "on_train_batch_start"),), asks_for_steps=True
    ),
    # Lightning continues with a part of the step's gradients, without the batch that raised the error.
    "an error within an epoch's last step": Case(
        ends=(End("error", 12, "on_before_backward", saves="epochs", saves_at_end=True),),
        accumulate=3,
        ranks=2,
    ),
    # Lightning saves counters that lose the second epoch in a resumed run.
    "a last batch, then again": Case(
        ends=(
            End("kill", 5, "on_train_batch_start", saves="plain", every=4),
            End("kill", 3, "on_train_batch_end", saves="plain"),
        )
    ),
    "a signal in an epoch": Case(ends=(End("signal", 6, "on_before_backward"),)),
    "a signal in validation": Case(
        ends=(End("signal", 4, "on_validation_start", rank=1),),
        ranks=2,
        schedule="epoch",
        is_own_loader=True,
    ),
}


CASES = [
    *(("hybrid_allreduce", name) for name in CHOSEN),
    *(("ddp", name) for name in list(CHOSEN)[:3]),
]


@pytest.mark.parametrize(("strategy", "name"), CASES)
def test_a_fit_that_ended_anywhere_is_resumed_to_the_bit(rank_pool, tmp_path, strategy, name):
    case = CHOSEN[name]
    for number in range(len(case.ends) + 1):
        (tmp_path / str(number)).mkdir()
    differences = rank_pool.ranks(case.ranks).run(ended_and_resumed, case, strategy, str(tmp_path))
    assert differences == [""] * case.ranks
