"""Normalization of images after their transfer to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_hybrid.data.order import Batch

# Statistics of ImageNet's training images, as fractions of 255. Published ResNet recipes use these values.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class NormalizeOnDevice:
    """Callable that converts uint8 images to normalized fp32 images on their device.

    The result is `(level - 255 mean) / (255 std)`. Images are transferred as one byte per value, and only become four
    bytes on the device. The memory format channels_last is kept. Batches that are not uint8 are returned unchanged.

    Raises:
        ValueError: There is not one mean and one positive standard deviation per channel, as fractions of 255.

    >>> on_device = NormalizeOnDevice(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    >>> images, _ = on_device((torch.full((1, 3, 1, 1), 255, dtype=torch.uint8), torch.tensor([0])))
    >>> images.flatten()
    tensor([1., 1., 1.])
    """

    def __init__(
        self, *, mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD
    ) -> None:
        for name, values in (("mean", mean), ("std", std)):
            if (
                len(values) != 3
                or not all(0 <= value <= 1 for value in values)
                or (name == "std" and 0 in values)
            ):
                raise ValueError(
                    f"`{name}` (={list(values)}) must be three numbers for red, green and blue, as "
                    f"fractions of 255{' above zero' if name == 'std' else ''}. For ImageNet, set "
                    f"data.{name}={list(IMAGENET_MEAN if name == 'mean' else IMAGENET_STD)}."
                )
        self.mean = tuple(mean)
        self.std = tuple(std)
        self._levels: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, batch: Batch) -> Batch:
        """Normalize the images of a batch `(images, labels)` on their device."""
        images, labels = batch
        # With a prefetcher, Lightning's hook also calls this. The second call changes nothing.
        if images.dtype is not torch.uint8:
            return batch
        # The images may be from another stream. Their memory must not be reused before this stream has read it.
        if images.is_cuda:
            images.record_stream(torch.cuda.current_stream(images.device))
        mean, std = self._levels_on(images.device)
        # In place, so that only one float32 batch is allocated. It keeps the memory format of the images.
        return torch.sub(images, mean).div_(std), labels

    def _levels_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._levels:  # created once, because it waits for the device
            # Computed in float64, so that the product is rounded only once.
            levels = torch.tensor([self.mean, self.std], dtype=torch.float64) * 255
            mean, std = levels.to(device=device, dtype=torch.float32).view(2, 1, 3, 1, 1)
            self._levels[device] = (mean, std)
        return self._levels[device]
