"""Image datasets that are packed into a few large shards with an index.

    index.npz          position and label of each image, see `ShardIndex`
    shard-00000.bin    the concatenated image files
    shard-00001.bin    ...

One `pread` reads an image, in any order, from any thread or process. Each image and each shard has a CRC-32.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_hybrid.atomic_file import atomic_path, sync
from recipes.datasets.images.decode import CorruptImageError
from recipes.datasets.images.source import ImageSource

FORMAT_VERSION = 1
INDEX_NAME = "index.npz"


def shard_name(shard: int) -> str:
    """Return the file name of the shard with the given number.

    >>> shard_name(7)
    'shard-00007.bin'
    """
    return f"shard-{shard:05d}.bin"


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """Index of a packed dataset, with the position, checksum and label of each image.

    Arrays have one element per image, in the order in which the images are stored.

    Attributes:
        shards: Number of the shard that contains the image.
        offsets: Offset in the shard, in bytes.
        num_bytes: Size of the image file in bytes.
        crc32s: CRC-32 of the image file.
        labels: Index into `classes`.
        names: Names for messages.
        shard_num_bytes: Size of each shard in bytes.
        shard_crc32s: CRC-32 of each shard.
        classes: Names of the classes.
        about: Options with which the shards were packed, in JSON.
    """

    shards: NDArray[np.int32]
    offsets: NDArray[np.int64]
    num_bytes: NDArray[np.int32]
    crc32s: NDArray[np.uint32]
    labels: NDArray[np.int64]
    names: NDArray[np.bytes_]
    shard_num_bytes: NDArray[np.int64]
    shard_crc32s: NDArray[np.uint32]
    classes: tuple[str, ...]
    about: str

    def save(self, path: Path) -> None:
        """Write the index to a file atomically."""
        arrays: dict[str, Any] = {
            field.name: np.asarray(getattr(self, field.name)) for field in fields(self)
        }
        arrays["format_version"] = np.asarray(FORMAT_VERSION)
        with atomic_path(path) as part, part.open("wb") as file:
            np.savez(file, **arrays)
            sync(file)

    @classmethod
    def joined(cls, parts: Sequence[ShardIndex]) -> ShardIndex:
        """Concatenate the indices of several shards into one index."""
        joined = {
            field.name: np.concatenate([getattr(part, field.name) for part in parts])
            for field in fields(cls)
            if field.name not in ("classes", "about")
        }
        return cls(**joined, classes=parts[0].classes, about=parts[0].about)

    @classmethod
    def load(cls, path: Path) -> ShardIndex:
        """Read the index of a packed dataset from a file that `save` wrote.

        Raises:
            ValueError: The index is damaged, has another version, or is inconsistent.
        """
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
                columns = {name: arrays[name] for name in arrays.files}
        except Exception as error:
            # A damaged file raises many kinds of exceptions, even MemoryError.
            raise ValueError(
                f"The shard index {path} is damaged: {error}. Pack the images again."
            ) from error
        version = columns.pop("format_version", np.asarray(-1))
        if version.shape == () and version.dtype.kind in "iu":
            version = int(version)
        else:
            version = -1
        if version != FORMAT_VERSION or columns.keys() != {field.name for field in fields(cls)}:
            raise ValueError(
                f"The shard index {path} has version {version}, but this release reads only version "
                f"{FORMAT_VERSION}. Pack the images again with `lightning-hybrid pack` of this release."
            )
        _check_arrays(path, columns)
        columns["classes"] = tuple(str(name) for name in columns["classes"])
        columns["about"] = str(columns["about"])
        index = cls(**columns)
        if len(index.labels) and not (
            index.labels.min() >= 0 and index.labels.max() < len(index.classes)
        ):
            raise ValueError(
                f"The shard index {path} has labels from {index.labels.min()} to "
                f"{index.labels.max()}, but {len(index.classes)} classes need labels from 0 to "
                f"{len(index.classes) - 1}. Pack the images again."
            )
        return index


_INTEGERS = (
    "shards",
    "offsets",
    "num_bytes",
    "crc32s",
    "labels",
    "shard_num_bytes",
    "shard_crc32s",
)


def _refuse(path: Path, name: str, rule: str) -> None:
    raise ValueError(
        f"The shard index {path} is invalid: `{name}` {rule}. Pack the images again, or copy the index "
        "again."
    )


def _check_arrays(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    for name in _INTEGERS:
        if arrays[name].dtype.kind not in "iu" or arrays[name].ndim != 1:
            _refuse(
                path,
                name,
                f"(={arrays[name].dtype}, {arrays[name].ndim}D) must be a one-dimensional array of "
                "integers",
            )
    for name, kind in (("names", "S"), ("classes", "U")):
        if arrays[name].dtype.kind != kind or arrays[name].ndim != 1:
            _refuse(path, name, f"(={arrays[name].dtype}) must be a one-dimensional array of names")
    num_images = len(arrays["labels"])
    num_shards = len(arrays["shard_num_bytes"])
    for name in ("shards", "offsets", "num_bytes", "crc32s", "names"):
        if len(arrays[name]) != num_images:
            _refuse(
                path,
                name,
                f"(={len(arrays[name])} rows) must have one row per label, but there are "
                f"{num_images} labels",
            )
    if len(arrays["shard_crc32s"]) != num_shards:
        _refuse(
            path,
            "shard_crc32s",
            f"(={len(arrays['shard_crc32s'])} rows) must have one row per shard, but there are "
            f"{num_shards} shards",
        )


def _check_bounds(path: Path, index: ShardIndex) -> None:
    arrays = vars(index)
    num_images = len(index.labels)
    num_shards = len(index.shard_num_bytes)
    shards, offsets, num_bytes = (
        arrays[name].astype(np.int64) for name in ("shards", "offsets", "num_bytes")
    )
    if num_images and not (shards.min() >= 0 and shards.max() < num_shards):
        _refuse(
            path,
            "shards",
            f"(={shards.min()} to {shards.max()}) must be from 0 to {num_shards - 1}, because there are "
            f"{num_shards} shards",
        )
    for name, values, least in (("offsets", offsets, 0), ("num_bytes", num_bytes, 1)):
        if num_images and values.min() < least:
            _refuse(path, name, f"(={values.min()}) must be at least {least}")
    room = arrays["shard_num_bytes"].astype(np.int64)[shards] - offsets
    if num_images and (num_bytes > room).any():
        row = int((num_bytes > room).argmax())
        _refuse(
            path,
            "num_bytes",
            f"(={num_bytes[row]}) of image {row} must not reach beyond the end of its shard",
        )


class ShardedImages(ImageSource):
    """Image source that reads images from the shards in a folder.

    The constructor checks the size of each shard. The CRC-32 of an image is checked when it is read.

    Raises:
        ValueError: Packing was not finished, the index is damaged, or a shard is missing or has another size.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / INDEX_NAME).is_file():
            raise ValueError(
                f"`root` (={folder.parent}) is not packed completely: {folder.name}/ has shards "
                f"but no {INDEX_NAME}. Run the same `lightning-hybrid pack` command again to finish "
                "the packing."
            )
        self.index = ShardIndex.load(folder / INDEX_NAME)
        _check_bounds(folder / INDEX_NAME, self.index)
        self.classes, self.labels = self.index.classes, self.index.labels
        # A truncated file is found before training starts. The CRC-32 of 100 KB takes 16 us, and decoding takes 1 ms.
        for shard, num_bytes in enumerate(self.index.shard_num_bytes):
            path = folder / shard_name(shard)
            if path.is_file():
                actual_bytes = path.stat().st_size
            else:
                actual_bytes = None
            if actual_bytes != num_bytes:
                if actual_bytes is None:
                    fault = "is missing"
                else:
                    fault = f"has {actual_bytes} bytes"
                raise ValueError(
                    f"`root` (={folder.parent}) contains an incomplete packing: "
                    f"{folder.name}/{path.name} {fault}, but must have {num_bytes} bytes. Copy the file "
                    f"again, or remove {INDEX_NAME} and run `lightning-hybrid pack` again."
                )
        self._files: dict[tuple[int, int], int] = {}  # (process id, shard) -> file descriptor

    def read(self, index: int) -> bytes:
        """Read one image file from its shard, verify its checksum and return its bytes."""
        at = int(self.index.offsets[index])
        num_bytes = int(self.index.num_bytes[index])
        data = os.pread(self._file(int(self.index.shards[index])), num_bytes, at)
        if len(data) != num_bytes or zlib.crc32(data) != self.index.crc32s[index]:
            if len(data) != num_bytes:
                fault = f"The shard contains only {len(data)} of {num_bytes} bytes of the image"
            else:
                fault = "The image has a wrong checksum"
            raise CorruptImageError(fault)
        return data

    def name(self, index: int) -> str:
        """Return an image's shard and original file name, for messages."""
        name = os.fsdecode(bytes(self.index.names[index]))
        return f"{self.folder}/{shard_name(int(self.index.shards[index]))}:{name}"

    def _file(self, shard: int) -> int:
        # a forked process opens its own descriptor, so that neither closes the other's
        key = (
            os.getpid(),
            shard,
        )
        descriptor = self._files.get(key)
        if descriptor is None:
            descriptor = os.open(
                self.folder / shard_name(shard), os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
            )
            first = self._files.setdefault(key, descriptor)
            if first != descriptor:  # another thread opened it first
                os.close(descriptor)
            return first
        return descriptor

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}

    def __del__(self) -> None:
        for (process, _), descriptor in getattr(self, "_files", {}).items():
            if process == os.getpid():
                os.close(descriptor)


def holds_shards(folder: Path) -> bool:
    """Return whether a folder contains packed shards, even if packing was not finished."""
    return (folder / INDEX_NAME).is_file() or (folder / shard_name(0)).is_file()


def packed_classes(folder: Path) -> tuple[str, ...]:
    """Read only the class names from the index of a packed split.

    Raises:
        ValueError: The index is missing or damaged.
    """
    path = folder / INDEX_NAME
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return tuple(str(name) for name in arrays["classes"])
    except Exception:
        return ShardedImages(folder).classes  # raises an error that explains the damage


def damaged_shards(folder: Path) -> list[str]:
    """Read all shards in a folder, and return the file names of shards with a wrong checksum."""
    images = ShardedImages(folder)
    paths = [folder / shard_name(shard) for shard in range(len(images.index.shard_crc32s))]
    crc32s = zip(paths, images.index.shard_crc32s, strict=True)
    return [path.name for path, crc32 in crc32s if crc32_of(_blocks(path)) != crc32]


def crc32_of(blocks: Iterable[bytes]) -> int:
    """Compute the CRC-32 of several consecutive blocks of bytes.

    >>> crc32_of([b"ab", b"c"]) == crc32_of([b"abc"])
    True
    """
    crc32 = 0
    for block in blocks:
        crc32 = zlib.crc32(block, crc32)
    return crc32


def _blocks(path: Path) -> Iterable[bytes]:
    with open(path, "rb") as file:
        while block := file.read(2**20):
            yield block
