"""Storage of images in folders as users have them, and in shards with a verified index."""

import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recipes.datasets.images import folder as folder_module
from recipes.datasets.images import shards as shards_module
from recipes.datasets.images.folder import ImageFolder, check_root
from recipes.datasets.images.shards import (
    INDEX_NAME,
    ShardedImages,
    ShardIndex,
    holds_shards,
    shard_name,
)
from tests.recipes.datasets.images.pictures import image_of, packed, write_root, write_split


@pytest.fixture
def folder(tmp_path) -> Path:
    return (
        packed(write_root(tmp_path / "root", 5, 3), tmp_path / "packed", shard_bytes=3000) / "train"
    )


def number_of(images, index):
    return int(images.name(index).split("/")[-1][:5])


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/fd").is_dir(), reason="counts descriptors in /proc"
)


def test_an_index_is_never_unpickled(folder):
    """A pickle can run any program, and NumPy writes one for arrays of objects."""
    index = ShardIndex.load(folder / INDEX_NAME)
    replace(index, names=np.array([b"a", 3, None], dtype=object)).save(folder / INDEX_NAME)
    with pytest.raises(ValueError, match=r"is damaged: Object arrays cannot be loaded"):
        ShardIndex.load(folder / INDEX_NAME)


def test_an_index_of_a_later_version_is_refused_even_if_it_looks_alike(folder, monkeypatch):
    index = ShardIndex.load(folder / INDEX_NAME)
    monkeypatch.setattr(shards_module, "FORMAT_VERSION", 2)
    index.save(folder / INDEX_NAME)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"version 2, but this release reads only version 1"):
        ShardIndex.load(folder / INDEX_NAME)


WRONG = {
    "huge": lambda array: array.astype(np.int64) + 2**40,
    "short": lambda array: array[:-1],
    "fractions": lambda array: array.astype(np.float64),
    "square": lambda array: array[None],
    "words": lambda array: np.asarray(["zzz"] * len(array)),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    "field", ["shards", "offsets", "num_bytes", "labels", "names", "shard_num_bytes", "classes"]
)
def test_a_wrong_field_of_an_index_is_named(folder, field, wrong):
    with np.load(folder / INDEX_NAME) as arrays:
        named = {name: arrays[name] for name in arrays.files}
    if named[field].dtype.kind in "SU" and wrong in ("huge", "fractions", "words"):
        named[field] = np.arange(len(named[field]))
    else:
        named[field] = WRONG[wrong](named[field])
    np.savez(folder / INDEX_NAME, **named)
    with pytest.raises(ValueError, match=rf"({INDEX_NAME}|root).* again"):
        ShardedImages(folder)


def test_a_split_is_packed_if_it_has_an_index_or_a_first_shard(folder, tmp_path):
    assert not holds_shards(tmp_path)
    assert holds_shards(folder)
    (folder / shard_name(0)).unlink()
    assert holds_shards(folder)
    with pytest.raises(ValueError, match=r"shard-00000\.bin is missing"):
        ShardedImages(folder)
    (folder / shard_name(0)).write_bytes(b"")
    (folder / INDEX_NAME).unlink()
    assert holds_shards(folder)


@needs_proc
def test_each_shard_is_opened_once_and_closed_with_the_images(folder):
    before = num_descriptors()
    images = ShardedImages(folder)
    assert all(
        images.read(index) == image_of(number_of(images, index)) for index in (0, 4, 1, 3, 2)
    )
    assert num_descriptors() == before + len(list(folder.glob("*.bin"))) >= before + 2
    del images
    assert num_descriptors() == before


@needs_proc
def test_a_copy_opens_its_own_files_and_nobody_closes_anothers(folder):
    """This covers a copy in this process, and a forked process that inherits entries of another process."""
    images = ShardedImages(folder)
    images.read(0)
    copy = pickle.loads(pickle.dumps(images))
    before = num_descriptors()
    assert copy.read(0) == images.read(0)
    assert num_descriptors() == before + 1
    del copy
    (descriptor,) = images._files.values()
    images._files = {(os.getpid() + 1, 0): descriptor}  # as a fork of this process sees it
    assert images.read(0) == image_of(number_of(images, 0))
    assert len(images._files) == 2
    del images
    os.close(descriptor)  # raises if it is already closed


@pytest.fixture
def train(tmp_path):
    write_split(tmp_path / "train", 6)
    return tmp_path / "train"


def numbers_of(images):
    return [images.name(index).split("/")[-1] for index in range(len(images))]


def test_images_are_known_by_their_suffix_in_any_case(train):
    for name in ("a.JPEG", "b.jpeg", "c.JPG", "d.jpg", "e.PNG", "f.png", "g.JPEG.txt", ".h.jpg"):
        (train / "n02" / name).write_bytes(b"")
    assert [name for name in numbers_of(ImageFolder(train)) if name[0].isalpha()] == [
        *("a.JPEG", "b.jpeg", "c.JPG", "d.jpg", "e.PNG", "f.png")
    ]


def test_the_order_is_that_of_the_names_whatever_the_disk_says(train, monkeypatch):
    expected = ImageFolder(train)
    listdir = os.listdir
    scandir = os.scandir

    class Backwards:
        def __init__(self, path):
            self.entries = sorted(scandir(path), key=lambda entry: entry.name, reverse=True)

        def __enter__(self):
            return iter(self.entries)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(
        folder_module.os, "listdir", lambda path: sorted(listdir(path), reverse=True)
    )
    monkeypatch.setattr(folder_module.os, "scandir", Backwards)
    result = ImageFolder(train)
    assert result.classes == expected.classes == ("n01", "n02", "n03")
    assert (
        numbers_of(result)
        == numbers_of(expected)
        == [f"{number:05d}.JPEG" for number in (0, 3, 1, 4, 2, 5)]
    )


def test_a_name_that_is_no_text_is_read_all_the_same(train):
    names = [b"\xff\xfe.JPEG", "grün.JPEG".encode()]
    for name in names:
        with open(os.fsencode(train / "n01") + b"/" + name, "wb") as file:
            file.write(image_of(7))
    images = ImageFolder(train)
    results = [
        index
        for index in range(len(images))
        if os.fsencode(images.name(index)).split(b"/")[-1] in names
    ]
    assert [images.read(index) for index in results] == [image_of(7)] * 2


def test_a_class_may_be_a_link_and_a_hidden_folder_is_no_class(train):
    (train / "n04").symlink_to(train / "n01")
    (train / ".cache").mkdir()
    assert ImageFolder(train).classes == ("n01", "n02", "n03", "n04")


def test_a_root_without_training_images_is_told_from_one_without_validation(tmp_path):
    (tmp_path / "val").mkdir()
    with pytest.raises(ValueError, match=r"train/ is missing\. Set data\.root"):
        check_root(tmp_path)
    check_root(tmp_path, splits=["val"])
    (tmp_path / "val").rename(tmp_path / "train")
    with pytest.raises(
        ValueError,
        match=r"val/ is missing\. Move some images of each class, say a tenth, from train/",
    ):
        check_root(tmp_path)
