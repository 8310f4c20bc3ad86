"""Callback that initializes a network with the weights of an equally deep or shallower network."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_hybrid.checkpoint.file import check_whole, load_unchecked

BLOCK = re.compile(r"\.(\d+)\.")


class StartFrom(Callback):
    """Callback that initializes the network with the weights of a checkpoint.

    A resumed run keeps its own weights. Block i of a stack of blocks gets the weights of block i mod m if the stack in
    the checkpoint had m blocks (Gong et al. 2019, "Efficient training of BERT by progressively stacking", PMLR
    97:2337). Tensors of another shape keep their initial values. A deep network can therefore start from a shallow one,
    and a training phase can start from the previous phase.

    Args:
        path: Checkpoint of `recipes/train.py`.

    Raises:
        ValueError: The file does not exist, or none of its tensors has the name and shape of a tensor of the network.
    """

    def __init__(self, path: str) -> None:
        if not Path(path).is_file():
            raise ValueError(
                f"`path` (={path}) is not an existing checkpoint file. Set "
                "callbacks.start_from.path=<run directory>/checkpoints/last.ckpt."
            )
        check_whole(Path(path))
        self.path = path

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Copy the checkpoint's weights into the network, before the strategy creates fp32 master weights."""
        if stage != "fit" or trainer.ckpt_path is not None:
            return
        saved = load_unchecked(Path(self.path), map_location="cpu", mmap=True)["state_dict"]
        own_state = pl_module.state_dict()
        sources = sources_of(own_state, saved)
        if not sources:
            raise ValueError(
                f"`callbacks.start_from.path` (={self.path}) contains no tensor with the name and "
                "shape of a tensor of this network. Set model=<name> as in the run that wrote the "
                "checkpoint. Only the depth may differ."
            )
        with torch.no_grad():
            for name, source in sources.items():
                own_state[name].copy_(saved[source])
        share = sum(own_state[name].numel() for name in sources) / sum(
            tensor.numel() for tensor in own_state.values()
        )
        rank_zero_info(
            f"Initialized {len(sources)} of {len(own_state)} tensors ({share:.1%} of the "
            f"elements) from {self.path}."
        )


def sources_of(own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each tensor name of the network to the name of the checkpoint tensor that initializes it.

    Tensors for which the checkpoint has no tensor of the same shape are left out.

    >>> deep, shallow = ({f"layer.{i}.weight": torch.zeros(2) for i in range(n)} for n in (5, 2))
    >>> list(sources_of(deep, shallow).values())
    ['layer.0.weight', 'layer.1.weight', 'layer.0.weight', 'layer.1.weight', 'layer.0.weight']
    """
    depths = _depths(found)

    def source_of(name: str) -> str:
        row = BLOCK.search(name)
        if row is None or (depth := depths.get(name[: row.start()])) is None:
            return name
        return f"{name[: row.start()]}.{int(row[1]) % depth}.{name[row.end() :]}"

    pairs = ((name, source_of(name)) for name in own)
    return {
        name: source
        for name, source in pairs
        if source in found and found[source].shape == own[name].shape
    }


def _depths(names: Iterable[str]) -> dict[str, int]:
    """Return the number of blocks in each stack, keyed by the prefix that their tensor names share."""
    depths = dict[str, int]()
    for name in names:
        if row := BLOCK.search(name):
            prefix = name[: row.start()]
            depths[prefix] = max(depths.get(prefix, 0), int(row[1]) + 1)
    return depths
