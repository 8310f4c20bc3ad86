"""Image datasets in the folder layout of ImageNet: one folder per split, with one folder per class."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recipes.datasets.images.source import ImageSource

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")
ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".zip")
MAX_NAMED = 3  # names listed in an error


class ImageFolder(ImageSource):
    """Image source that reads image files from one folder per class: `folder/<class>/<name>.JPEG`.

    The suffixes .jpg and .png are accepted too. Classes are numbered in the order of their names. Other files and
    hidden files are ignored.

    Raises:
        ValueError: Images lie outside of class folders, archives are not unpacked, or a class folder is empty or
            missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.classes = class_folders(folder)
        names: list[bytes] = []
        labels = []
        empty = []
        for label, name in enumerate(self.classes):
            files = sorted(file for file in os.listdir(folder / name) if _is_image(file))
            if not files:
                empty.append(name)
            names.extend(os.fsencode(file) for file in files)
            labels.append(np.full(len(files), label, dtype=np.int64))
        if empty:
            raise ValueError(
                f"`root` (={folder.parent}) must have images in each class folder, but {folder.name}/ "
                f"has no images in {_some(empty)}. Unpack these images again, or remove the empty "
                "folders."
            )
        self.labels = np.concatenate(labels)
        # One array takes 20 bytes per image. Python strings would take several times as much, in every process.
        self._names: NDArray[np.bytes_] = np.array(names)

    def read(self, index: int) -> bytes:
        """Return the content of an image file as bytes."""
        with open(self.name(index), "rb", buffering=0) as file:
            return file.read()

    def name(self, index: int) -> str:
        """Return the path of an image file."""
        return f"{self.folder}/{self.classes[self.labels[index]]}/{os.fsdecode(bytes(self._names[index]))}"


def class_folders(folder: Path) -> tuple[str, ...]:
    """Return the names of the class folders of a split, sorted in label order.

    Raises:
        ValueError: Images lie outside of class folders, archives are not unpacked, or there is no class folder.
    """
    folders, loose, archives = _entries(folder)
    packed = [name for name in archives if name.split(".")[0] not in folders]
    if packed:
        raise ValueError(
            f"`root` (={folder.parent}) must contain unpacked images, but {folder.name}/ contains "
            f"{_some(packed)}. Unpack each archive into a folder of the same name."
        )
    if loose:
        raise ValueError(
            f"`root` (={folder.parent}) must have each image in the folder of its class, but "
            f"{folder.name}/ contains {_some(loose)} outside of class folders. Move the images "
            f"into {folder.name}/<class>/, as valprep.sh does for ImageNet's validation images."
        )
    if not folders:
        raise ValueError(
            f"`root` (={folder.parent}) must contain one folder per class, but {folder.name}/ has "
            f"no class folders. Move the images of each class into a folder of their own, such as "
            f"{folder.name}/n01440764/ for ImageNet."
        )
    return tuple(folders)


def num_images_up_to(folder: Path, most: int) -> int:
    """Count the images of a split, but stop at `most`.

    Because of this limit, only some folders of a large dataset are read.
    """
    num_images = 0
    for name in class_folders(folder):
        num_images += sum(map(_is_image, os.listdir(folder / name)))
        if num_images >= most:
            return most
    return num_images


def check_root(
    root: Path, splits: Sequence[str] = ("train", "val"), *, key: str = "data.root"
) -> None:
    """Raise if a dataset folder or the folder of one of its splits does not exist.

    The message suggests a correction, which sets the configuration key `key`.

    Raises:
        ValueError: The folder does not exist, or a split is missing.
    """
    if not root.is_dir():
        raise ValueError(
            f"`root` (={root}) does not exist. Set {key} to a folder that contains "
            f"{' and '.join(f'{split}/' for split in splits)}."
        )
    missing = [split for split in splits if not (root / split).is_dir()]
    if missing:
        archives = _entries(root)[2]
        if archives:
            hint = f"; unpack {_some(archives)} first"
        else:
            hint = ""
        above = (
            f"Set {key} to the folder that contains {' and '.join(f'{split}/' for split in splits)}"
        )
        if missing == ["val"]:
            above = (
                "Move some images of each class, say a tenth, from train/<class>/ to val/<class>/"
            )
        raise ValueError(
            f"`root` (={root}) must contain {' and '.join(f'{split}/' for split in splits)}, but "
            f"{missing[0]}/ is missing{hint}. {above}."
        )


def check_same_classes(
    root: Path, train: Sequence[str], val: Sequence[str], *, num_classes: int
) -> None:
    """Raise if training and validation have different classes, only one class, or not `num_classes` of them.

    Labels are numbered by class name, so they would have different meanings in splits with different classes.

    Raises:
        ValueError: The class folders differ, there is only one, or their number is not `num_classes`.

    >>> check_same_classes(Path("data"), ["cat", "dog"], ["cat", "cow"], num_classes=2)
    Traceback (most recent call last):
        ...
    ValueError: `root` (=data) has different classes in train/ and val/ (dog only in train/; cow only in val/), so \
labels would have different meanings. Add the missing class folders.
    """
    only = [
        (sorted({*classes} - {*other_classes}), name)
        for classes, other_classes, name in ((train, val, "train"), (val, train, "val"))
    ]
    if tuple(train) != tuple(val):
        differences = "; ".join(
            f"{_some(names)} only in {split}/" for names, split in only if names
        )
        raise ValueError(
            f"`root` (={root}) has different classes in train/ and val/ ({differences}), so labels "
            "would have different meanings. Add the missing class folders."
        )
    if len(train) < 2:
        raise ValueError(
            f"`root` (={root}) must have at least two class folders in train/ and val/, but the only "
            f"class is {_some(train)}. Add the folders of the other classes."
        )
    if len(train) != num_classes:
        raise ValueError(
            f"`num_classes` (={num_classes}) must equal the number of classes in `root` (={root}), "
            f"which is {len(train)}. Set model.num_classes={len(train)}, or add the missing class "
            "folders. For your own images, set data=images model=resnet50, which counts the "
            "classes."
        )


def _entries(folder: Path) -> tuple[list[str], list[str], list[str]]:
    # Sorted, because the order determines the class numbers.
    folders = []
    images = []
    archives = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                folders.append(entry.name)
            elif _is_image(entry.name):
                images.append(entry.name)
            elif entry.name.lower().endswith(ARCHIVE_SUFFIXES):
                archives.append(entry.name)
    return sorted(folders), sorted(images), sorted(archives)


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


def _some(names: Sequence[str]) -> str:
    """Join the first few names of a list, and append the number of omitted names.

    >>> _some(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    if len(names) > MAX_NAMED:
        suffix = f" and {len(names) - MAX_NAMED} more"
    else:
        suffix = ""
    return ", ".join(names[:MAX_NAMED]) + suffix
