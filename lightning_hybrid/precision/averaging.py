"""Averages of weights are averages of the fp32 masters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_hybrid.lightning_names import lightning_types


class AverageOfMasters(AveragedModel):
    """torch's averaged model, over a LightningModule's masters where it has some."""

    def update_parameters(self, model: nn.Module) -> None:
        """Average the fp32 values."""
        # Half-precision ones are rounded, and torch takes no mix of both in one list.
        super().update_parameters(_Masters(model))


def average_masters(callbacks: Iterable[object]) -> None:
    """Let Lightning's averaging callbacks average masters: exactly torch's class is replaced, a user's own is left."""
    kinds = lightning_types("pytorch.callbacks.WeightAveraging")
    for callback in callbacks:
        average = getattr(callback, "_average_model", None) if isinstance(callback, kinds) else None
        if type(average) is AveragedModel:  # a subclass may average in its own way
            average.__class__ = AverageOfMasters


def master_of(module: Any, tensor: Tensor) -> Tensor:
    """Return the master of a LightningModule's parameter, or `tensor` itself where there is none."""
    masters = getattr(module.trainer.precision_plugin, "masters", None)
    pair = None if masters is None else masters.pair_of(tensor)
    return tensor if pair is None else pair.master


class _Masters(nn.Module):
    """A view of a module that shows the masters in place of its parameters, where there are some."""

    of: nn.Module

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "of", model)  # not a submodule

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return (master_of(self.of, tensor) for tensor in self.of.parameters())

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        return self.of.buffers()
