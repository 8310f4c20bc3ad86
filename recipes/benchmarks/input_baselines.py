"""Input pipelines to compare with: torchvision's way with worker processes, and DALI on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from recipes.datasets.images.crops import NUM_DRAWS, random_box


class PillowImages(Dataset[tuple[Tensor, int]]):
    """Samples as `ImageFolder`, `RandomResizedCrop` and `RandomHorizontalFlip` of torchvision make them, with Pillow.

    It ends in uint8, as fast recipes have it; the usual `ToTensor` and `Normalize` in the worker would cost it more.
    """

    def __init__(self, paths: Sequence[str], labels: Sequence[int], image_size: int) -> None:
        self.paths, self.labels, self.image_size = paths, labels, image_size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with open(self.paths[index], "rb") as file:
            image = Image.open(file).convert("RGB")
        draws = [random.random() for _ in range(NUM_DRAWS)]
        box = random_box(image.height, image.width, draws, area=(0.08, 1.0), aspect=(3 / 4, 4 / 3))
        image = image.crop((box.left, box.top, box.left + box.width, box.top + box.height))
        image = image.resize((self.image_size, self.image_size), Image.Resampling.BILINEAR)
        if draws[2] < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), self.labels[index]


def dataloader_batches(
    paths: Sequence[str], labels: Sequence[int], *, image_size: int, batch_size: int, num_workers: int
) -> Iterator[Any]:
    """Yield batches of `PillowImages` without end; the workers live as long as the iterator."""
    loader = DataLoader(
        PillowImages(paths, labels, image_size),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=num_workers,
        persistent_workers=True,
    )
    while True:
        yield from loader


def dali_batches(
    paths: Sequence[str], labels: Sequence[int], *, image_size: int, batch_size: int, num_workers: int
) -> Callable[[], Iterator[Any]] | None:
    """Make endless batches of DALI's CPU pipeline, which decodes the crop alone; None where it is not installed."""
    try:
        from nvidia.dali import fn, pipeline_def, types
    except ImportError:
        return None

    @pipeline_def(batch_size=batch_size, num_threads=num_workers, device_id=None)
    def pipeline() -> tuple[Any, Any]:
        files, classes = fn.readers.file(files=list(paths), labels=list(labels), random_shuffle=True)
        images = fn.decoders.image_random_crop(files, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3])
        images = fn.resize(images, size=[image_size, image_size], interp_type=types.INTERP_TRIANGULAR)
        return fn.flip(images, horizontal=fn.random.coin_flip()), classes

    def batches() -> Iterator[Any]:
        built = pipeline()
        built.build()
        while True:
            yield built.run()

    return batches
