"""Weights to begin with: those of an earlier run, where its network was shallower block by block."""

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
    """Callback that begins a fit with the weights of a checkpoint. A fit that is resumed has its own.

    Block i of a row of n is given the weights of block i mod m where that row had m (Gong et al. 2019, "Efficient
    training of BERT by progressively stacking", PMLR 97:2337). A tensor is taken where its shape is the same; others
    stay as they were drawn. So a deep network starts from a shallow one, and a phase of training from the one before.

    Args:
        path: A checkpoint of `recipes/train.py`.

    Raises:
        ValueError: There is no such file, or none of its tensors fits.
    """

    def __init__(self, path: str) -> None:
        if not Path(path).is_file():
            raise ValueError(
                f"`path` (={path}) must be a checkpoint, and is no file. Set callbacks.start_from.path=<run directory>"
                "/checkpoints/last.ckpt."
            )
        check_whole(Path(path))
        self.path = path

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Copy the weights, before a strategy takes masters of them."""
        if stage != "fit" or trainer.ckpt_path is not None:
            return
        saved = load_unchecked(Path(self.path), map_location="cpu", mmap=True)["state_dict"]
        own_state = pl_module.state_dict()
        sources = sources_of(own_state, saved)
        if not sources:
            raise ValueError(
                f"`callbacks.start_from.path` (={self.path}) must be of a network with tensors of the same names and "
                "shapes, and none is. Set model=... as it was there, of any depth."
            )
        with torch.no_grad():
            for name, source in sources.items():
                own_state[name].copy_(saved[source])
        share = sum(own_state[name].numel() for name in sources) / sum(
            tensor.numel() for tensor in own_state.values()
        )
        rank_zero_info(
            f"start from {self.path}: {len(sources)} of {len(own_state)} tensors, {share:.1%} of the elements"
        )


def sources_of(own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, str]:
    """Map names of own tensors to those of the found tensors that they are given.

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
    """Count the blocks of each row, by the name before the first number."""
    depths = dict[str, int]()
    for name in names:
        if row := BLOCK.search(name):
            prefix = name[: row.start()]
            depths[prefix] = max(depths.get(prefix, 0), int(row[1]) + 1)
    return depths
