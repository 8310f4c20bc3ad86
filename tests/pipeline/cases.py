"""Scenes for `tests.scenes.fit` in pipeline stages and with gradient accumulation, which must give the same bits."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_hybrid import HybridPipelineStrategy
from tests import toy
from tests.scenes import Seen


def in_stages(*, data: Dataset | None = None, batch_size: int = 8, **scene: Any) -> dict[str, Any]:
    """Return a scene of two stages and four micro-batches, unless other options are passed."""
    options = {"kind": HybridPipelineStrategy, "num_stages": 2, "num_microbatches": 4}
    return {"train": partial(loader_of, data or toy.Blobs(), batch_size), **options, **scene}


def accumulated(
    *, data: Dataset | None = None, batch_size: int = 8, num: int = 4, **scene: Any
) -> dict[str, Any]:
    """Return a scene of the same steps on the data ranks only, with each batch in `num` parts."""
    train = partial(loader_of, data or toy.Blobs(), batch_size // num)
    return {"train": train, "accumulate_grad_batches": num, **scene}


def loader_of(data: Dataset, batch_size: int) -> DataLoader:
    return DataLoader(data, batch_size=batch_size, shuffle=False)


class Photos(Dataset):
    """Images of ten classes. Each image is a pure function of its index."""

    def __init__(self, *size: int, num: int = 8) -> None:
        self.size = size
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.rand(3, *self.size, generator=generator), index % 10


class InBlocks(nn.Module):
    """Network whose blocks accept and return several tensors."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def pipeline_blocks(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, *x: Any) -> Any:
        for block in self.blocks:
            x = block(*x)
        return x


class Validated(toy.Toy):
    """Classifier that logs its loss in validation, averaged over all ranks."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


def joined(piped: list[Seen]) -> dict[int, Any]:
    """Return the optimizer state of all stages."""
    state = {}
    for seen in piped:
        state |= seen.states[0]
    return state
