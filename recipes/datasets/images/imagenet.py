"""ImageNet, or any image set in its layout: folders of image files as they are unpacked, or packed into shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_hybrid.checks import require_whole
from recipes.datasets.images.crops import EvalCrop, TrainCrop
from recipes.datasets.images.datamodule import ImageDataModule
from recipes.datasets.images.decode import check_decoder, default_decoder
from recipes.datasets.images.folder import (
    ImageFolder,
    check_root,
    check_same_classes,
    class_folders,
    num_images_up_to,
)
from recipes.datasets.images.normalize import IMAGENET_MEAN, IMAGENET_STD
from recipes.datasets.images.shards import ShardedImages, holds_shards, packed_classes
from recipes.datasets.images.source import Crop, DecodedImages, ImageSource


class ImageNetDataModule(ImageDataModule):
    """A data module of `root/{train,val}/<class>/*.JPEG`, or of shards in `root/train` and `root/val`.

    Training: random resized crop and flip, new ones each epoch. Evaluation: short side to `eval_resize`, centre crop.
    The arguments that are not listed here are those of `ImageDataModule`.

    Args:
        root: The folder above `train` and `val`. `recipes/pack.py` makes shards, which are found by their index.
        num_classes: Classes of the network; the set must have as many.
        image_size: Pixels of a side of the network's input.
        eval_resize: Pixels of the short side that evaluation cuts its centre from.
        area: Least and largest area of a training crop, as fractions (Szegedy et al. 2014); NVIDIA's MLPerf: 0.05 to 1.
        aspect: Least and largest width / height of a training crop.
        flip: Flip half of the training crops left to right.
        max_corrupt_images: So many unreadable images per rank and split are replaced (see `DecodedImages`). Our choice:
            losses of a copy, and no more than 1 in 80,000 of ImageNet.
        decoder: `simplejpeg` or `pillow`; None: the faster of the two that is installed.

    Raises:
        ValueError: An argument is wrong, or the set has other classes; or, in `setup`, it is incomplete.
    """

    def __init__(
        self,
        *,
        root: str,
        global_batch_size: int,
        seed: int,
        num_classes: int = 1000,
        image_size: int = 224,
        eval_resize: int = 256,
        area: Sequence[float] = (0.08, 1.0),
        aspect: Sequence[float] = (3 / 4, 4 / 3),
        flip: bool = True,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        eval_batch_size_per_rank: int = 128,
        num_threads: int | None = None,
        num_batches_ahead: int = 2,
        max_corrupt_images: int = 16,
        decoder: str | None = None,
    ) -> None:
        super().__init__(
            global_batch_size=global_batch_size,
            seed=seed,
            eval_batch_size_per_rank=eval_batch_size_per_rank,
            num_threads=num_threads,
            num_batches_ahead=num_batches_ahead,
            mean=mean,
            std=std,
        )
        for name, value, least in (
            ("num_classes", num_classes, 1),
            ("image_size", image_size, 1),
            ("max_corrupt_images", max_corrupt_images, 0),
        ):
            require_whole(
                name, value, f"it is counted. Set data.{name}={least} or more", least=least
            )
        self.decoder = decoder or default_decoder()
        check_decoder(self.decoder)
        self.train_crop = TrainCrop(
            image_size=image_size,
            seed=seed,
            area=(area[0], area[1]),
            aspect=(aspect[0], aspect[1]),
            flip=flip,
        )
        self.eval_crop = EvalCrop(image_size=image_size, eval_resize=eval_resize)
        self.root = Path(root)
        self.num_classes = num_classes
        self.image_shape = (3, image_size, image_size)
        self.max_corrupt_images = max_corrupt_images
        check_root(self.root)
        # Here and not in `setup`: before any rank is started.
        train, val = (classes_of(self.root / split) for split in ("train", "val"))
        check_same_classes(self.root, train, val, num_classes=num_classes)

    def setup(self, stage: str) -> None:
        """List the images of both splits, once, on every rank."""
        if hasattr(self, "train_rows"):
            return
        train, val = (open_images(self.root / split) for split in ("train", "val"))
        self.train_rows = self._decoded(train, self.train_crop)
        self.eval_rows = self._decoded(val, self.eval_crop)

    def num_train_images_up_to(self, most: int) -> int:
        """Count the training images, but no further than `most`."""
        folder = self.root / "train"
        if holds_shards(folder):
            return min(most, len(ShardedImages(folder)))
        return num_images_up_to(folder, most)

    def _decoded(self, images: ImageSource, crop: Crop) -> DecodedImages:
        return DecodedImages(
            images, crop, decoder=self.decoder, max_corrupt_images=self.max_corrupt_images
        )


def classes_of(folder: Path) -> tuple[str, ...]:
    """Return the names of the classes of one split, stored as shards or as files. No image is listed.

    Raises:
        ValueError: There are none, or not as they must be.
    """
    if holds_shards(folder):
        return packed_classes(folder)
    return class_folders(folder)


def count_classes(root: str) -> int:
    """Count the classes of the set in `root`, for a network that has as many.

    Raises:
        ValueError: There is no such set.
    """
    check_root(Path(root))
    return len(classes_of(Path(root) / "train"))


def open_images(folder: Path) -> ImageSource:
    """Open the images of one split, stored as shards or as files.

    Raises:
        ValueError: They are incomplete.
    """
    if holds_shards(folder):
        return ShardedImages(folder)
    return ImageFolder(folder)
