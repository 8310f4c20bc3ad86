"""Fits under a pipeline and under accumulation, which must agree to the bit, and what they leave behind."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_hybrid import Comm, HybridAllReduceStrategy, HybridPipelineStrategy
from tests import toy


def state_of(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
    """Weights and buffers, and the optimizer's state as far as this rank has it, by number of the parameter."""
    optimizer = trainer.optimizers[0].state_dict()["state"] if trainer.optimizers else {}
    return {"weights": toy.weights(module), "optimizer": optimizer, "num_skipped": module.num_skipped}


class CountsSkips(pl.Callback):
    """Remembers how many steps were skipped."""

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Ask before teardown forgets it."""
        module.num_skipped = getattr(trainer.precision_plugin, "num_skipped_steps", 0)


def fit(
    strategy: Any,
    *,
    precision: str = "32-true",
    module: Any = toy.Toy,
    batch_size: int = 8,
    num_samples: int = 64,
    **settings: Any,
) -> tuple[pl.Trainer, Any]:
    """Fit a new module, and return it with its trainer."""
    made = module()
    callbacks = [CountsSkips(), *settings.pop("callbacks", [])]
    trainer = toy.trainer(strategy=strategy, precision=precision, callbacks=callbacks, **settings)
    trainer.fit(made, toy.loader(num_samples, batch_size))
    return trainer, made


def by_pipeline(options: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """What a fit under `HybridPipelineStrategy(**options)` leaves."""
    return state_of(*fit(HybridPipelineStrategy(**options), **settings))


def by_accumulation(num: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What a fit on the data ranks alone leaves, with the batch in `num` parts of a step."""
    size = settings.get("batch_size", 8) // num
    settings = {**settings, "batch_size": size, "accumulate_grad_batches": num}
    return state_of(*fit(HybridAllReduceStrategy(comm=Comm(tune="off"), ranks_per_node=None), **settings))


def loader_of(data: Any, batch_size: int) -> DataLoader:
    """A loader in order."""
    return DataLoader(data, batch_size=batch_size, shuffle=False)


def same(one: Any, other: Any) -> bool:
    """Whether two trees of tensors hold the same bits."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def joined(results: list[dict[str, Any]]) -> dict[int, Any]:
    """The optimizer's state of all ranks of a pipeline."""
    return {key: value for each in results for key, value in each["optimizer"].items()}


def rank() -> int:
    """This rank."""
    return dist.get_rank()
