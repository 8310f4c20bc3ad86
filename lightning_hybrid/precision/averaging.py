"""Averages of weights are averages of the fp32 masters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_hybrid.lightning_names import lightning_types
from lightning_hybrid.precision.master_weights import MasterWeights


class AverageOfMasters(AveragedModel):
    """torch's averaged model, over a LightningModule's masters where it has some.

    Where ranks share the update, each averages its parts of the masters, and `gather_` makes the average whole: after
    each update, unless who owns the average sets `gathers_at_update` to False and calls it before the average is read.
    """

    gathers_at_update: Any = True

    def update_parameters(self, model: nn.Module) -> None:
        """Average the fp32 values."""
        # Half-precision ones are rounded, and torch takes no mix of both in one list.
        masters = masters_of(model)
        average: Any = self if masters is None or masters.gather_ is None else _PartsOfAverage(self, masters, model)
        AveragedModel.update_parameters(average, _Masters(model))
        if self.gathers_at_update:
            self.gather_(model)

    @torch.no_grad()
    def gather_(self, model: nn.Module) -> None:
        """Make the average whole on every rank. Collective where ranks share the update; else it is."""
        masters = masters_of(model)
        if masters is not None and masters.gather_ is not None:
            each = zip(model.parameters(), self.module.parameters(), strict=True)
            held = [(pair, average) for one, average in each if (pair := masters.pair_of(one)) is not None]
            masters.gather_([pair for pair, _ in held], [average for _, average in held])


def average_masters(callbacks: Iterable[object]) -> None:
    """Let Lightning's averaging callbacks average masters: exactly torch's class is replaced, a user's own is left."""
    kinds = lightning_types("pytorch.callbacks.WeightAveraging")
    for callback in callbacks:
        average = getattr(callback, "_average_model", None) if isinstance(callback, kinds) else None
        if type(average) is AveragedModel:  # a subclass may average in its own way
            average.__class__ = AverageOfMasters


def masters_of(module: Any) -> MasterWeights | None:
    """Return the masters of a LightningModule, None where it has none."""
    masters: MasterWeights | None = getattr(module.trainer.precision_plugin, "masters", None)
    return masters


def write_master_(module: Any, tensor: Tensor, value: Tensor) -> None:
    """Give the master of a LightningModule's parameter a value; do nothing where there is none."""
    masters = masters_of(module)
    if masters is not None and (pair := masters.pair_of(tensor)) is not None:
        pair.take_(value)


class _Masters(nn.Module):
    """A view of a module that shows the masters in place of its parameters, where there are some."""

    of: nn.Module

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "of", model)  # not a submodule

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        masters = masters_of(self.of)
        pairs = ((one, None if masters is None else masters.pair_of(one)) for one in self.of.parameters())
        return (one if pair is None else pair.master for one, pair in pairs)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        return self.of.buffers()


class _PartsOfAverage(nn.Module):
    """A view of an averaged model that shows, of each parameter, what stands against the master that a rank has."""

    of: AveragedModel

    def __init__(self, of: AveragedModel, masters: MasterWeights, model: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "of", of)  # not a submodule
        self._shown = []
        for average, parameter in zip(of.module.parameters(), model.parameters(), strict=True):
            pair = masters.pair_of(parameter)
            shown = average if pair is None else pair.part_of(average)
            assert shown.untyped_storage().data_ptr() == average.untyped_storage().data_ptr()  # it is written
            self._shown.append(shown)
        self.use_buffers, self.avg_fn, self.multi_avg_fn = of.use_buffers, of.avg_fn, of.multi_avg_fn
        self.n_averaged: Any = of.n_averaged  # counted in place

    @property
    def module(self) -> nn.Module:
        return self

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return iter(self._shown)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        return self.of.module.buffers()


def averages_of(callbacks: Iterable[Any]) -> list[nn.Module]:
    """Return the copies of a module that callbacks such as EMA keep."""
    names = ("pytorch.callbacks.WeightAveraging", "pytorch.callbacks.StochasticWeightAveraging")
    kinds = tuple(kind for name in names for kind in lightning_types(name))
    found = (getattr(one, "_average_model", None) for one in callbacks if isinstance(one, kinds))
    return [one.module if isinstance(one, AveragedModel) else one for one in found if one is not None]
