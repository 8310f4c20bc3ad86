"""Runner of one case of the batteries under Lightning's `ddp` and under `hybrid_allreduce`.

A row of `ordinary` is a LightningModule with data, as users write them. `Row` is the simplest one. Other rows state
their differences in a line of a table or in a class. A row is trained, and `judge.judge` compares the results.

A behavior of `as_ddp` is a function of a `Run` that returns its observations. They must be equal after `judge.plain`
has made them comparable.
"""

import dataclasses
import functools
import importlib
import logging
import os
import random
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning_utilities.core.rank_zero import WarningCache
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.precision.loss_scale import DynamicLossScale
from tests import toy
from tests.battery import judge
from tests.rank_pool import RankError, Ranks
from tests.toy import NUM_CLASSES, NUM_FEATURES

STRATEGIES = ("ddp", "hybrid_allreduce")
ORDINARY = ("models", "layers", "state", "optimizers", "loops", "loaders", "callbacks")
AS_DDP = ("fits", "trainers", "endings", "strategies", "checkpoints")
HALF = {"16-true": torch.float16, "bf16-true": torch.bfloat16}

HALF_SHOWS = dict.fromkeys(HALF, "keeps trained parameters in half precision")
"""What a row is refused with that needs a trained parameter in fp32; the words name a cure."""

FIRST_SCALE = 2.0**8
"""Of the loss: from the usual 65,536 down, the first steps of many rows would be skipped, as under mixed precision."""

ROUNDINGS = 8
"""How many roundings of the largest loss may add up, all to one side: four (weight, input, activation, gradient) in
each of two layers. What is lost in silence (a gradient, a batch, a buffer) costs hundreds in fp16."""


# Everything runs in ranks of the pool.
num_ranks = dist.get_world_size
barrier = dist.barrier


def leave() -> None:
    """Leave the process group after an error, so that ranks that wait in a collective also get an error."""
    if dist.is_initialized():
        dist.destroy_process_group()


def on_ranks(ranks: Ranks, function: Any, *arguments: Any) -> list[Any]:
    """Return the result of `function` on each rank. A hang or a death also gives a result."""
    try:
        return ranks.run(function, *arguments)
    except RankError as error:
        return [judge.Result(error=str(error)) for _ in range(ranks.world_size)]


def samples() -> toy.Blobs:
    """Return 32 samples for each rank, so that the number of steps does not depend on the number of ranks."""
    return toy.Blobs(32 * num_ranks())


class Row(pl.LightningModule):
    """Small classifier of blobs. Rows override a few attributes or methods of it."""

    epochs = 3
    lr = 0.1
    settings: dict[str, Any] = {}  # of the Trainer, also under `ddp`
    find_unused = False  # DDP's `find_unused_parameters`
    ignored_warnings: tuple[str, ...] = ()  # warnings that also occur under `ddp`
    worlds: tuple[int, ...] = (1, 2)
    # Bound under `ddp` on the ratio between the mean of the last three losses and the mean of the first three.
    falls_to = 0.7
    roundings = ROUNDINGS
    refused: dict[str, str] = {}  # precision -> text of the expected error
    different: dict[str, str] = {}  # precision -> description of a deliberate difference from `ddp`
    parts: dict[str, Callable[[], Any]] = {
        "net": lambda: nn.Sequential(
            nn.Linear(NUM_FEATURES, 16), nn.ReLU(), nn.Linear(16, NUM_CLASSES)
        )
    }
    # in addition to `parts`; a plain tensor becomes a buffer
    adds: dict[str, Callable[[], Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        # Facts must equal those under `ddp` in every precision, bit for bit.
        self.facts: dict[str, Any] = {}
        self.build()

    def build(self) -> None:
        for name, make in (self.parts | self.adds).items():
            value = make()
            if type(value) is Tensor:
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def note(self, loss: Tensor) -> Tensor:
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.note(self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def train_dataloader(self) -> Any:
        return DataLoader(samples(), batch_size=8)

    def after_fit(self) -> None:
        """Record facts after the end of the fit."""


class Manual(Row):
    """Manual loop with one backward pass and one step in each batch."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.note(self.loss(batch)))
        optimizer.step()


def row(base: type[Row] = Row, **special: Any) -> type[Row]:
    """Make a row from special attributes, and from methods given as functions of `self`."""
    return type("Special", (base,), special)


@functools.cache
def rows() -> dict[str, type[Row]]:
    """Return all rows by name, such as `models.Plain`."""
    all_rows = {}
    for table in ORDINARY:
        module = importlib.import_module(f"tests.battery.ordinary.{table}")
        rows_of_table = dict(module.ROWS)
        for name, kind in vars(module).items():
            is_row = isinstance(kind, type) and issubclass(kind, Row)
            if is_row and kind.__module__ == module.__name__ and not name.startswith("_"):
                rows_of_table[name] = kind
        for name, kind in rows_of_table.items():
            all_rows[f"{table}.{name}"] = kind
    return all_rows


def train(name: str, strategy: str, precision: str) -> judge.Result:
    """Train a row on this rank. An error becomes part of the result, so that the ranks of the pool survive."""
    kind = rows()[name]
    result = judge.Result()
    ignored = list(kind.ignored_warnings)
    if kind.find_unused:
        ignored.append("find_unused_parameters=True was specified")
    with warnings.catch_warnings():
        for message in ignored:
            warnings.filterwarnings("ignore", message)
        try:
            torch.manual_seed(0)
            module = kind()
            result.start = toy.weights(module)
            result.trained = [n for n, p in module.named_parameters() if p.requires_grad]
            settings = {"max_epochs": kind.epochs, "precision": precision, **kind.settings}
            settings["strategy"] = strategy_of(strategy, precision, kind.find_unused)
            trainer = toy.trainer(**settings)
            torch.manual_seed(1 + dist.get_rank())
            trainer.fit(module)
            module.after_fit()
            result.losses = module.losses
            result.facts = module.facts
            result.state = toy.weights(module)
        except Exception as error:
            for frame in traceback.extract_tb(error.__traceback__):
                if "site-packages" not in frame.filename:
                    raised_at = f"{Path(frame.filename).name}:{frame.lineno}"
            notes = " ".join(getattr(error, "__notes__", []))
            result.error = f"{type(error).__name__}: {error} [{raised_at}] {notes}"
            leave()
    return result


def strategy_of(name: str, precision: str, find_unused: bool) -> Strategy:
    """Make Lightning's strategy or ours with defaults, and with the initial loss scale `FIRST_SCALE`."""
    if name == "ddp":
        return DDPStrategy(find_unused_parameters=find_unused)
    scale = DynamicLossScale(FIRST_SCALE) if precision == "16-true" else None
    return HybridAllReduceStrategy(loss_scale=scale, find_unused_parameters=find_unused)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Conditions under which a behavior is observed."""

    strategy: str
    precision: str
    folder: Path

    def trainer(self, **settings: Any) -> pl.Trainer:
        """Make a trainer like `toy.trainer` that writes below `folder`."""
        defaults = {
            "strategy": self.strategy,
            "precision": self.precision,
            "default_root_dir": self.folder,
            "max_epochs": 2,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
        }
        return toy.trainer(**{**defaults, **settings})

    def fit(
        self,
        module: Any = None,
        *loaders: Any,
        start: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Any:
        """Fit `module` and return trainer and module. `start` holds arguments of `Trainer.fit`."""
        trainer = self.trainer(**settings)
        module = module or Plain()
        trainer.fit(module, *(loaders or (loader(),)), **(start or {}))
        return trainer, module

    def saved(self, module: Any = None, **settings: Any) -> tuple[Any, Any, Path]:
        """Fit one epoch, save a checkpoint, and return trainer, module and path."""
        trainer, module = self.fit(module, **{"max_epochs": 1, **settings})
        path = self.folder / "a.ckpt"
        trainer.save_checkpoint(path)
        return trainer, module, path

    def files(self) -> list[str]:
        """Return the names of all files under `folder`, once every rank is done."""
        barrier()
        paths = [path for path in self.folder.rglob("*") if not path.is_dir()]
        return sorted(str(path.relative_to(self.folder)) for path in paths)


class Plain(pl.LightningModule):
    """Linear classifier that logs in each of its steps, and keeps what a behavior stores in `seen`."""

    def __init__(self, lr: float = 0.1, tag: str = "a") -> None:
        super().__init__()
        self.save_hyperparameters()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Linear(NUM_FEATURES, 8)
            self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())

    def loss(self, batch: Any, name: str) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x).float(), y)
        self.log(name, loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch, "loss")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch, "val_loss")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch, "test_loss")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


def plain_with(**hooks: Any) -> Plain:
    """Return a `Plain` with these methods."""
    return type("Special", (Plain,), hooks)()


def loader(num_batches: int = 4) -> DataLoader:
    """Make a loader with this number of batches on every rank."""
    return toy.loader(num_batches * 4 * num_ranks(), batch_size=4)


BEHAVIORS: dict[str, Callable[[Run], Any]] = {}
ON_ONE_RANK: set[str] = set()
"""Where one rank alone fails or goes on, others would wait for it."""


def behavior(function: Any = None, *, name: str = "", on_one_rank: bool = False) -> Any:
    """Register a function of a `Run` as a behavior under its name."""
    if function is None:
        return functools.partial(behavior, name=name, on_one_rank=on_one_rank)
    name = name or function.__name__
    assert name not in BEHAVIORS, name
    BEHAVIORS[name] = function
    ON_ONE_RANK.update([name] * on_one_rank)
    return function


def behaviors() -> dict[str, Callable[[Run], Any]]:
    """Return all behaviors by name, in the order of the tables."""
    for table in AS_DDP:
        importlib.import_module(f"tests.battery.as_ddp.{table}")
    return BEHAVIORS


def observe(name: str, strategy: str, precision: str, folder: str) -> Any:
    """Return the observations of a behavior on this rank in a comparable form, including errors."""
    run = Run(strategy=strategy, precision=precision, folder=Path(folder) / strategy)
    os.makedirs(run.folder, exist_ok=True)
    barrier()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    loud = logging.getLogger("lightning.pytorch").level
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # Lightning shows some warnings only once per process. This makes it show them again.
    unheard = mock.patch.object(WarningCache, "__contains__", return_value=False)
    with unheard, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            seen = behaviors()[name](run)
        except Exception as error:
            seen = f"raises {type(error).__name__}: {error}"
            leave()
        finally:
            logging.getLogger("lightning.pytorch").setLevel(loud)
    comparable = functools.partial(judge.plain, folder=run.folder, is_exact=precision == "32-true")
    messages = set()
    for warning in caught:
        # Warnings of torch and Python appear once per process, or when the collector runs.
        if issubclass(warning.category, UserWarning) and "lightning" in warning.filename:
            messages.add(comparable(f"{warning.category.__name__}: {warning.message}"))
    return {"seen": comparable(seen), "warnings": sorted(messages)}
