"""Data module for ImageNet and datasets with the same layout, as image files or packed into shards."""

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
    """Data module for ImageNet and for other datasets with the same layout, in folders or in shards.

    Files are `root/{train,val}/<class>/*.JPEG`. Shards are in `root/train` and `root/val`. Training uses a new random
    resized crop and flip in each epoch. Evaluation resizes the short side to `eval_resize` and crops the center.
    Arguments that are not listed here are those of `ImageDataModule`.

    Args:
        root: Folder that contains `train` and `val`. Shards of `recipes/pack.py` are recognized by their index.
        num_classes: Number of classes of the network. The dataset must have the same number.
        image_size: Height and width of the network's input in pixels.
        eval_resize: Length in pixels to which evaluation resizes the short side before the center crop.
        area: Minimum and maximum area of a training crop, as fractions (Szegedy et al. 2014). NVIDIA's MLPerf entries
            use 0.05 to 1.
        aspect: Minimum and maximum ratio of width to height of a training crop.
        flip: Flip half of the training crops horizontally.
        max_corrupt_images: Maximum number of unreadable images per rank and split, which are replaced (see
            `DecodedImages`). The default is our choice: it covers copy errors, and is at most 1 in 80,000 of ImageNet.
        decoder: `simplejpeg` or `pillow`. None: the faster one that is installed.

    Raises:
        ValueError: An argument is invalid, the dataset has other classes, or, in `setup`, it is incomplete.
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
        for name, value, least, why in (
            (
                "num_classes",
                num_classes,
                1,
                "each class has a folder. Set data.num_classes to the number of class folders",
            ),
            (
                "image_size",
                image_size,
                1,
                "images are cropped to this height and width in pixels. Set data.image_size=224",
            ),
            (
                "max_corrupt_images",
                max_corrupt_images,
                0,
                "at most this number of unreadable images is replaced. Set "
                "data.max_corrupt_images=0 to replace none",
            ),
        ):
            require_whole(name, value, why, least=least)
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
        # Checked here and not in `setup`, so that errors appear before any rank starts.
        train, val = (classes_of(self.root / split) for split in ("train", "val"))
        check_same_classes(self.root, train, val, num_classes=num_classes)

    def setup(self, stage: str) -> None:
        """Open the training and validation images on every rank, unless they are already open."""
        if hasattr(self, "train_rows"):
            return
        train, val = (open_images(self.root / split) for split in ("train", "val"))
        self.train_rows = self._decoded(train, self.train_crop)
        self.eval_rows = self._decoded(val, self.eval_crop)

    def num_train_images_up_to(self, most: int) -> int:
        """Count the training images, but stop at `most`."""
        folder = self.root / "train"
        if holds_shards(folder):
            return min(most, len(ShardedImages(folder)))
        return num_images_up_to(folder, most)

    def _decoded(self, images: ImageSource, crop: Crop) -> DecodedImages:
        return DecodedImages(
            images, crop, decoder=self.decoder, max_corrupt_images=self.max_corrupt_images
        )


def classes_of(folder: Path) -> tuple[str, ...]:
    """Return the class names of a split that is stored as shards or as image files.

    The folders of the classes are not read.

    Raises:
        ValueError: There are no classes, or the folder has another layout.
    """
    if holds_shards(folder):
        return packed_classes(folder)
    return class_folders(folder)


def count_classes(root: str) -> int:
    """Return the number of classes of the training images of the dataset in the folder `root`.

    Raises:
        ValueError: There is no such dataset.
    """
    check_root(Path(root))
    return len(classes_of(Path(root) / "train"))


def open_images(folder: Path) -> ImageSource:
    """Open the images of a split that is stored as shards or as image files.

    Raises:
        ValueError: The images are incomplete.
    """
    if holds_shards(folder):
        return ShardedImages(folder)
    return ImageFolder(folder)
