"""Loaders of image sets that fit in memory: exact over ranks, and resumable after any batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


class ImageSet(NamedTuple):
    """Stored samples: images uint8 `"sample channels height width"`, labels int64 `"sample"`."""

    images: Tensor
    labels: Tensor


class Normalise(NamedTuple):
    """uint8 grey levels -> fp32 `(level - mean) / std`."""

    mean: float
    std: float

    @classmethod
    def fitted_to(cls, images: Tensor) -> Normalise:
        """With the mean and standard deviation of these (training) images."""
        levels = images.double()
        return cls(mean=levels.mean().item(), std=levels.std().item())

    def __call__(self, images: Tensor) -> Tensor:
        """Normalise a batch."""
        return (images.float() - self.mean) / self.std


def batch_size_per_rank(*, global_batch_size: int, world_size: int, accumulate_grad_batches: int = 1) -> int:
    """Images that one rank takes at a time: `global_batch_size / (world_size * accumulate_grad_batches)`.

    Raises:
        ValueError: It does not divide.

    >>> batch_size_per_rank(global_batch_size=65536, world_size=1024, accumulate_grad_batches=2)
    32
    >>> batch_size_per_rank(global_batch_size=128, world_size=3)
    Traceback (most recent call last):
        ...
    ValueError: `global_batch_size` (=128) must be a multiple of `world_size * accumulate_grad_batches` (=3 * 1): \
42.67 images per rank is not a whole number. Nearest that fit: global_batch_size=126 or 129.
    """
    num_parts = world_size * accumulate_grad_batches
    if global_batch_size < 1 or global_batch_size % num_parts:
        below = max(global_batch_size, 0) // num_parts * num_parts
        nearest = f"{below} or {below + num_parts}" if below else f"{num_parts}"
        raise ValueError(
            f"`global_batch_size` (={global_batch_size}) must be a multiple of `world_size * accumulate_grad_batches` "
            f"(={world_size} * {accumulate_grad_batches}): {global_batch_size / num_parts:.2f} images per rank is not "
            f"a whole number{' above zero' if global_batch_size < 1 else ''}. Nearest that fit: "
            f"global_batch_size={nearest}."
        )
    return global_batch_size // num_parts


class TrainLoader:
    """One rank's share of shuffled epochs, resumable after any batch.

    The order of an epoch is a permutation drawn from (seed, epoch) alone. Step s takes its places `s * G ... (s+1) * G`
    (G = global batch); of these, each of the `accumulate_grad_batches` rounds takes a run of `world_size` times the
    batch of a rank, and each rank its part of the run. So

    - ranks are disjoint, and their union over an epoch is the epoch: `len(images) // G` whole steps. The
      `len(images) mod G` images at the end of the permutation are left out, other ones each epoch;
    - the images of a step do not depend on how many ranks share it;
    - augmentation is a function of (seed, epoch, image), so it needs no state either.

    The state is therefore `{epoch, batches_done}` and the same on every rank, which matters because Lightning saves
    rank zero's alone. Lightning never exhausts a loader that has a length, and tells it the epoch through
    `loader.sampler.set_epoch`; both ways to begin a new epoch (that, or iterating again after the last batch) work.

    Yields:
        `(images, labels)`: images fp32 `"batch 1 16 16"`, normalised; labels int64 `"batch"`.
    """

    def __init__(
        self,
        image_set: ImageSet,
        *,
        global_batch_size: int,
        world_size: int,
        rank: int,
        accumulate_grad_batches: int,
        seed: int,
        shift_pixels: int,
        normalise: Normalise,
    ) -> None:
        self.image_set = image_set
        self.global_batch_size = global_batch_size
        self.batch_size_per_rank = batch_size_per_rank(
            global_batch_size=global_batch_size,
            world_size=world_size,
            accumulate_grad_batches=accumulate_grad_batches,
        )
        self.world_size, self.rank = world_size, rank
        self.num_batches = len(image_set.labels) // global_batch_size * accumulate_grad_batches
        self.seed = seed
        self.shift_pixels = shift_pixels
        self.normalise = normalise
        self.epoch = self.batches_done = 0

    @property
    def sampler(self) -> TrainLoader:
        """Itself: Lightning looks for `set_epoch` here."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`, unless that epoch is already under way (as after a resume)."""
        if epoch != self.epoch:
            self.epoch, self.batches_done = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Where this loader stands; the same on every rank."""
        return {
            "epoch": self.epoch,
            "batches_done": self.batches_done,
            "num_batches": self.num_batches,
            "global_batch_size": self.global_batch_size,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after `batches_done` batches of `epoch`.

        Raises:
            ValueError: The checkpoint comes from another order of images (seed, global batch or accumulation).
        """
        for name in ("seed", "global_batch_size", "num_batches"):
            if state[name] != getattr(self, name):
                cure = "trainer.accumulate_grad_batches" if name == "num_batches" else name
                raise ValueError(
                    f"`{name}` (={getattr(self, name)}) must be that of the checkpoint (={state[name]}): the resumed "
                    f"epoch would repeat some images and miss others. Set {cure} as it was in the interrupted run."
                )
        self.epoch, self.batches_done = state["epoch"], state["batches_done"]

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.batches_done >= self.num_batches:  # nobody called `set_epoch`
            self.epoch, self.batches_done = self.epoch + 1, 0
        order = np.random.default_rng([self.seed, self.epoch, 0]).permutation(len(self.image_set.labels))
        shifts = self._shifts()
        while self.batches_done < self.num_batches:
            start = (self.batches_done * self.world_size + self.rank) * self.batch_size_per_rank
            indices = torch.from_numpy(order[start : start + self.batch_size_per_rank])
            images, labels = (stored[indices] for stored in self.image_set)
            self.batches_done += 1  # before the yield: nothing after the last one would run
            yield self.normalise(shifted(images, shifts[indices])), labels

    def _shifts(self) -> Tensor:
        """How far each image of the set moves in this epoch: int64 `"sample 2"`, rows then columns."""
        generator = np.random.default_rng([self.seed, self.epoch, 1])
        size = (len(self.image_set.labels), 2)
        return torch.from_numpy(generator.integers(-self.shift_pixels, self.shift_pixels + 1, size=size))


class EvalLoader:
    """One rank's share of an image set in which every image comes exactly once over all ranks.

    Rank r takes images r, r + world_size, ...; nothing is repeated to make the shares equal, so they differ by up to
    one image. The number of batches is the same on every rank all the same, and at least one: what ranks do together
    at a batch, such as DDP's broadcast of BatchNorm statistics before the first, finds all of them.

    Raises:
        ValueError: There are more ranks than images.
    """

    def __init__(
        self, image_set: ImageSet, *, world_size: int, rank: int, batch_size_per_rank: int, normalise: Normalise
    ) -> None:
        smallest_share, rest = divmod(len(image_set.labels), world_size)
        if smallest_share < 1:
            raise ValueError(
                f"`world_size` (={world_size}) must be at most the number of images to evaluate "
                f"(={len(image_set.labels)}): a rank would have none. Use fewer ranks, or set limit_val_batches=0."
            )
        largest_share = smallest_share + (rest > 0)
        self.num_batches = min(-(-largest_share // batch_size_per_rank), smallest_share)
        self.share = ImageSet(*(stored[rank::world_size] for stored in image_set))
        self.normalise = normalise

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        parts = (stored.tensor_split(self.num_batches) for stored in self.share)
        for images, labels in zip(*parts, strict=True):
            yield self.normalise(images), labels


def shifted(images: Tensor, shifts: Tensor) -> Tensor:
    """Each image moved by its own whole pixels (rows down, columns right); what comes in from outside is black.

    >>> image = torch.tensor([[[[1, 2], [3, 4]]]], dtype=torch.uint8)
    >>> shifted(image, torch.tensor([[1, 0]]))
    tensor([[[[0, 0],
              [1, 2]]]], dtype=torch.uint8)
    """
    height, width = images.shape[-2:]
    margin = int(shifts.abs().max()) if len(shifts) else 0
    if margin == 0:
        return images
    padded = F.pad(images, (margin,) * 4)
    rows = torch.arange(height) + margin - shifts[:, 0, None]
    columns = torch.arange(width) + margin - shifts[:, 1, None]
    batch, channel = torch.arange(len(images)), torch.arange(images.shape[1])
    return padded[batch[:, None, None, None], channel[:, None, None], rows[:, None, :, None], columns[:, None, None, :]]
