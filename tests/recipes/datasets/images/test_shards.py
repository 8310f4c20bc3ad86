"""Shards: an index appears whole or not at all and is never believed blindly; descriptors are closed by their owner."""

import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recipes.datasets.images import shards as shards_module
from recipes.datasets.images.shards import INDEX_NAME, ShardedImages, ShardIndex, holds_shards, shard_name
from tests.recipes.datasets.images.pictures import image_of, packed, write_root


@pytest.fixture
def folder(tmp_path) -> Path:
    return packed(write_root(tmp_path / "root", 5, 3), tmp_path / "packed", shard_bytes=3000) / "train"


def number_of(images, index):
    return int(images.name(index).split("/")[-1][:5])


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors in /proc")


def test_an_index_is_never_unpickled(folder):
    """A pickle can run any program; numpy writes one for arrays of objects."""
    index = ShardIndex.load(folder / INDEX_NAME)
    replace(index, names=np.array([b"a", 3, None], dtype=object)).save(folder / INDEX_NAME)
    with pytest.raises(ValueError, match=r"is damaged \(Object arrays cannot be loaded"):
        ShardIndex.load(folder / INDEX_NAME)


def test_an_index_of_a_later_version_is_refused_even_if_it_looks_alike(folder, monkeypatch):
    index = ShardIndex.load(folder / INDEX_NAME)
    monkeypatch.setattr(shards_module, "FORMAT_VERSION", 2)
    index.save(folder / INDEX_NAME)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"version 2\) must be of version 1"):
        ShardIndex.load(folder / INDEX_NAME)


WRONG = {
    "huge": lambda array: array.astype(np.int64) + 2**40,
    "short": lambda array: array[:-1],
    "fractions": lambda array: array.astype(np.float64),
    "square": lambda array: array[None],
    "words": lambda array: np.asarray(["zzz"] * len(array)),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("field", ["shards", "offsets", "num_bytes", "labels", "names", "shard_num_bytes", "classes"])
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
    assert all(images.read(index) == image_of(number_of(images, index)) for index in (0, 4, 1, 3, 2))
    assert num_descriptors() == before + len(list(folder.glob("*.bin"))) >= before + 2
    del images
    assert num_descriptors() == before


@needs_proc
def test_a_copy_opens_its_own_files_and_nobody_closes_anothers(folder):
    """A copy in this process, and what a forked process inherits: entries that another process made."""
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
    os.close(descriptor)  # still open: this raises if it is not
