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
        average: Any = self if masters is None or masters.gather_ is None else _parts_of(self, masters, model)
        pairs = ((one, None if masters is None else masters.pair_of(one)) for one in model.parameters())
        shown = (one if pair is None else pair.master for one, pair in pairs)
        AveragedModel.update_parameters(average, _View(model, shown))
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
    for average in average_models(callbacks):
        if type(average) is AveragedModel:  # a subclass may average in its own way
            average.__class__ = AverageOfMasters


def masters_of(module: Any) -> MasterWeights | None:
    """Return the masters of a LightningModule, None where it has none."""
    return getattr(module.trainer.precision_plugin, "masters", None)


def write_master_(module: Any, tensor: Tensor, value: Tensor) -> None:
    """Give the master of a LightningModule's parameter a value; do nothing where there is none."""
    masters = masters_of(module)
    if masters is not None and (pair := masters.pair_of(tensor)) is not None:
        pair.take_(value)


class _View(nn.Module):
    """A view of a module, or of an averaged model, that shows other tensors in place of its parameters."""

    of: nn.Module
    shown: list[Tensor]

    def __init__(self, of: nn.Module, shown: Iterable[Tensor], **attributes: Any) -> None:
        super().__init__()
        vars(self).update(attributes, of=of, shown=list(shown))  # not submodules

    @property
    def module(self) -> nn.Module:
        return self

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return iter(self.shown)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        return self.of.buffers()


def _parts_of(average: AveragedModel, masters: MasterWeights, model: nn.Module) -> _View:
    # Of each parameter, what stands against the master that a rank has.
    shown = []
    for whole, parameter in zip(average.module.parameters(), model.parameters(), strict=True):
        pair = masters.pair_of(parameter)
        shown.append(whole if pair is None else pair.part_of(whole))
        assert shown[-1].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()  # it is written
    # `n_averaged` is counted in place.
    settings = {name: getattr(average, name) for name in ("use_buffers", "avg_fn", "multi_avg_fn", "n_averaged")}
    return _View(average.module, shown, **settings)


def average_models(callbacks: Iterable[object], *names: str) -> list[Any]:
    """Return what Lightning's averaging callbacks average in, and callbacks of more classes by `names`, once made."""
    kinds = tuple(kind for name in ("WeightAveraging", *names) for kind in lightning_types(f"pytorch.callbacks.{name}"))
    found = (getattr(one, "_average_model", None) for one in callbacks if isinstance(one, kinds))
    return [one for one in found if one is not None]


def averages_of(callbacks: Iterable[object]) -> list[nn.Module]:
    """Return the copies of a module that callbacks such as EMA keep."""
    found = average_models(callbacks, "StochasticWeightAveraging")
    return [one.module if isinstance(one, AveragedModel) else one for one in found]
