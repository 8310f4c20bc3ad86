"""How one behaviour is observed under a strategy, and compared.

A behaviour is a function of a `Run`: it makes trainers, does something with them, and returns what it has seen. It is
run under `ddp` and under `hybrid_allreduce`, and what it returns must be equal once `plain` has made it comparable.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import logging
import os
import random
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning_utilities.core.rank_zero import WarningCache
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests import toy

TABLES = ("fits", "trainers", "endings", "loaders", "modules", "strategies", "checkpoints", "callbacks")
STRATEGIES = ("ddp", "hybrid_allreduce")
ONE_RANK = ("bad_settings", "skipped_by_none", "interrupted", "callback_OnExceptionCheckpoint")
OWN_NAMES = re.compile(
    r"HybridAllReduceStrategy|DDPStrategy|hybrid_allreduce|\bddp\b|DurableCheckpointIO|TorchCheckpointIO"
    r"|MasterWeightPrecision|HalfPrecision"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Under what a behaviour is observed."""

    strategy: str
    precision: str
    folder: Path

    def trainer(self, **settings: Any) -> pl.Trainer:
        """As `toy.trainer`; what it writes is under `folder`."""
        return toy.trainer(
            **{
                "strategy": self.strategy,
                "precision": self.precision,
                "default_root_dir": self.folder,
                "max_epochs": 2,
                "num_sanity_val_steps": 0,
                "log_every_n_steps": 1,
                **settings,
            }
        )

    def files(self) -> list[str]:
        """Names of all files under `folder`, once every rank is done."""
        barrier()
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if not path.is_dir())


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


class Plain(pl.LightningModule):
    """A linear classifier that logs in each of its steps."""

    def __init__(self, lr: float = 0.1, tag: str = "a") -> None:
        super().__init__()
        self.save_hyperparameters()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Linear(toy.NUM_FEATURES, 8)
            self.head = nn.Linear(8, toy.NUM_CLASSES)

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


def loader(num_batches: int = 4) -> DataLoader:
    """Of as many batches on every rank."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return toy.loader(num_batches * 4 * world, batch_size=4)


# ---- behaviours ------------------------------------------------------------------------------------------------------


def behaviours() -> dict[str, Callable[[Run], Any]]:
    """All of them by name, in the order of the tables."""
    found: dict[str, Callable[[Run], Any]] = {}
    for table in TABLES:
        module = importlib.import_module(f"tests.battery.as_ddp.{table}")
        for name, behaviour in module.BEHAVIOURS.items():
            assert name not in found, name
            found[name] = behaviour
    return found


def observe(name: str, strategy: str, precision: str, folder: str) -> Any:
    """What a behaviour shows on this rank, made comparable; an error that it raises is part of it."""
    run = Run(strategy=strategy, precision=precision, folder=Path(folder) / strategy)
    os.makedirs(run.folder, exist_ok=True)
    barrier()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    loud = logging.getLogger("lightning.pytorch").level
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    unheard = mock.patch.object(WarningCache, "__contains__", return_value=False)  # of what Lightning said before
    with unheard, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            seen = behaviours()[name](run)
        except Exception as error:
            seen = f"raises {type(error).__name__}: {error}"
            if dist.is_initialized():  # other ranks may wait for this one in a collective
                dist.destroy_process_group()
        finally:
            logging.getLogger("lightning.pytorch").setLevel(loud)
    comparable = functools.partial(plain, run=run, is_exact=precision == "32-true")
    # Those of torch and Python come once in a process, or when the collector runs.
    told = [one for one in told if issubclass(one.category, UserWarning) and "lightning" in one.filename]
    known = {comparable(f"{one.category.__name__}: {one.message}") for one in told}
    return {"seen": comparable(seen), "warnings": sorted(known)}


def worlds(name: str) -> tuple[int, ...]:
    """On how many ranks a behaviour is compared: where one rank alone fails or goes on, others would wait for it."""
    return (1,) if name in ONE_RANK or name.startswith("error_in_") else (1, 2)


def plain(value: Any, *, run: Run, is_exact: bool) -> Any:
    """Make what was seen comparable between processes and strategies: objects by type, tensors by dtype and value.

    Without `is_exact` numbers that are computed in the precision are left out, and the width of floating dtypes.
    """
    again = functools.partial(plain, run=run, is_exact=is_exact)
    if isinstance(value, Tensor):
        width = str(value.dtype) if is_exact or not value.is_floating_point() else "floating"
        content = value.tolist() if is_exact or not value.is_floating_point() else None
        return "tensor", width, str(value.device), tuple(value.shape), value.requires_grad, content
    if value is None or type(value) in (bool, int):
        return value
    if isinstance(value, float):
        return ("float", repr(value) if is_exact else None)
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, str | Path):
        text = re.sub(r"<[\w.]*?(\w+) object at 0x\w+>", r"<\1>", str(value))
        text = OWN_NAMES.sub("<own>", text.replace(str(run.folder), "<folder>"))
        return text if is_exact else re.sub(r"torch\.(float|b?float16|float32)\b", "floating", text)
    if isinstance(value, torch.dtype):
        return str(value) if is_exact or not value.is_floating_point else "floating"
    if isinstance(value, Mapping):
        return type(value).__name__, [(again(key), again(each)) for key, each in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        each = sorted(map(again, value), key=repr) if isinstance(value, set | frozenset) else map(again, value)
        return type(value).__name__, list(each)
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return again(value.__qualname__)
    return again(f"<{type(value).__name__}>")


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """Where two observations differ, in words."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        parts = [(name, one[name], other[name]) for name in one]
    elif type(one) is type(other) and isinstance(one, list | tuple) and len(one) == len(other):
        parts = [(_name_of(a, number), a, b) for number, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        return [] if one == other else [f"{place}: ddp {_shortened(one)}, ours {_shortened(other)}"]
    return [found for name, a, b in parts for found in differences(a, b, f"{place}.{name}")]


def _name_of(item: Any, number: int) -> Any:
    return item[0] if isinstance(item, tuple) and item and isinstance(item[0], str) else number


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 400 else f"{text[:200]} ... {text[-200:]}"
