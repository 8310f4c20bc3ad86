"""Bad input: an early error that names the remedy, or another image in place of the broken one, with a count."""

import shutil
from unittest import TestCase

import numpy as np
import pytest
import torch

from recipes.datasets.images import source as source_module
from recipes.datasets.images.crops import EvalCrop, render_crop
from recipes.datasets.images.decode import CorruptImageError, decode_rgb
from recipes.datasets.images.imagenet import ImageNetDataModule
from recipes.datasets.images.shards import INDEX_NAME, ShardedImages, ShardIndex, damaged_shards
from recipes.datasets.images.source import DecodedImages, ImageSource
from tests.recipes.datasets.images.pictures import image_of, packed, pixels_of, write_root

SMALL = {"num_classes": 3, "image_size": 16, "eval_resize": 20, "seed": 5, "num_threads": 2}


@pytest.fixture
def root(tmp_path):
    return write_root(tmp_path / "imagenet", num_train=17, num_val=5)


@pytest.fixture
def shards(root, tmp_path):
    return packed(root, tmp_path / "packed")


def module_of(root, **changes):
    settings = {**SMALL, "global_batch_size": 8, **changes}
    module = ImageNetDataModule(root=str(root), **settings)
    module.setup("fit")
    return module


def put(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"tar")


def a_class_more(root):
    for split in ("train", "val"):
        shutil.copytree(root / split / "n03", root / split / "n04")


def one_class(root):
    for split in ("train", "val"):
        shutil.rmtree(root / split / "n01")
        shutil.rmtree(root / split / "n03")


def classes_left_out(root):
    for path in (root / "val").glob("*/*"):
        path.rename(root / "val" / path.name)


ARCHIVES = [f"n0{number}.tar" for number in range(4, 9)]
INCOMPLETE = {
    "no folder": (shutil.rmtree, r"does not exist"),
    "a level too deep": (
        lambda root: (root / "val").rename(root.parent / "val"),
        r"must contain train/ and val/, but val/",
    ),
    "half unpacked": (
        lambda root: put(root / "train", *ARCHIVES),
        r"train/ contains n04\.tar, n05\.tar, n06\.tar",
    ),
    "validation as in its archive": (
        classes_left_out,
        r"must have each image in the folder of its class, but val/ contains 01000\.JPEG, .* and 2 more.*valprep",
    ),
    "an empty class": (
        lambda root: (shutil.rmtree(root / "train" / "n02"), put(root / "train" / "n02")),
        r"must have images in each class folder, but train/ has no images in n02",
    ),
    "other classes in validation": (
        lambda root: (root / "val" / "n02").rename(root / "val" / "n04"),
        r"different classes in train/ and val/ \(n02 only in train/; n04 only in val/\)",
    ),
    "one class": (
        one_class,
        r"`root` \(=.*imagenet\) must have at least two class folders .* only class is n02\. Add",
    ),
    "a class more than the network has": (
        a_class_more,
        r"`num_classes` \(=3\) must equal the number of classes.*which is 4\. Set model\.num_classes=4",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), INCOMPLETE.values(), ids=INCOMPLETE)
def test_an_incomplete_set_is_refused_with_what_is_there(root, spoil, message):
    spoil(root)
    with pytest.raises(ValueError, match=message):
        module_of(root)


def test_archives_and_strange_files_beside_what_was_unpacked_do_no_harm(root):
    put(root / "train", "n01.tar")
    put(root / "train" / "n01", "._00000.JPEG", "notes.txt")
    assert module_of(root).train_rows.num_images == 17


def test_a_batch_larger_than_the_set_or_that_does_not_divide_is_refused(root):
    with pytest.raises(
        ValueError,
        match=r"`global_batch_size` \(=18\) must be at most the number of training images",
    ):
        module_of(root, global_batch_size=18).train_dataloader()
    with pytest.raises(ValueError, match=r"`max_corrupt_images` \(=-1\)"):
        module_of(root, max_corrupt_images=-1)
    with pytest.raises(ValueError, match=r"`decoder` \(='gif'\)"):
        module_of(root, decoder="gif")


def test_a_shard_cut_short_or_missing_is_found_before_training(shards):
    path = shards / "train" / "shard-00001.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(
        ValueError,
        match=rf"shard-00001\.bin has {len(whole) - 1} bytes, but must have {len(whole)} bytes",
    ):
        module_of(shards)
    path.unlink()
    with pytest.raises(ValueError, match=r"shard-00001\.bin is missing"):
        module_of(shards)


def test_a_packing_that_was_not_finished_is_refused(shards):
    (shards / "train" / INDEX_NAME).unlink()
    with pytest.raises(
        ValueError,
        match=r"is not packed completely: train/ has shards but no index\.npz.*finish",
    ):
        module_of(shards)


def test_a_damaged_index_is_refused(shards):
    path = shards / "train" / INDEX_NAME
    data = bytearray(path.read_bytes())
    data[data.index(ShardIndex.load(path).labels.tobytes()) + 5] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"The shard index .*index\.npz is damaged: Bad CRC-32"):
        module_of(shards)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"The shard index .*index\.npz is damaged"):
        module_of(shards)


SPOILED = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-200]),
    "unreadable": lambda path: (path.unlink(), path.symlink_to("/nowhere/at/all")),
}


@pytest.mark.parametrize("how", SPOILED)
def test_another_image_stands_in_for_a_broken_one_on_every_rank(root, how):
    """The next image of the set replaces it. Batches keep their shape, and all other pixels stay."""
    sound = module_of(root, global_batch_size=17)
    (expected, _), *_ = sound.train_dataloader()
    expected = expected.clone()
    order = sound.train_dataloader().order.permutation(0).tolist()
    source = sound.train_rows.source
    broken = 4
    SPOILED[how](root / "train" / source.name(broken).split("train/")[1].lstrip("/"))

    module = module_of(root, global_batch_size=17)
    with TestCase().assertLogs("recipes") as logged:
        (images, labels), *_ = module.train_dataloader()
        assert images.shape == expected.shape
        first = images.clone()
        (again, _), *_ = module_of(root, global_batch_size=17).train_dataloader()
    assert torch.equal(first, again)
    position = order.index(broken)
    sound_positions = [index for index in range(17) if index != position]
    assert torch.equal(first[sound_positions], expected[sound_positions])
    assert labels[position] == source.labels[broken + 1]
    row = torch.zeros_like(first[position])
    pixels = decode_rgb(source.read(broken + 1), decoder="pillow")
    render_crop(pixels, row, sound.train_crop.frame(*pixels.shape[:2], image=broken, epoch=0))
    assert torch.equal(first[position], row)
    assert list(module.train_rows.corrupt) == [broken]
    messages = [record.message for record in logged.records if "cannot be read" in record.message]
    assert len(messages) == 2  # one per module, however often the image is read
    assert source.name(broken) in messages[0]
    assert "1 of at most 16" in messages[0]


def test_more_broken_images_than_allowed_end_the_run_naming_one(root):
    for number in (1, 2, 4):
        (root / "train" / f"n0{number % 3 + 1}" / f"{number:05d}.JPEG").write_bytes(b"")
    assert len(list(module_of(root, max_corrupt_images=3).train_dataloader())) == 2
    with pytest.raises(
        CorruptImageError,
        match=r"`max_corrupt_images` \(=2\).*found 3 .*, the last of which is .*\.JPEG \(The file is em",
    ):
        list(module_of(root, max_corrupt_images=2, global_batch_size=17).train_dataloader())


def test_a_set_without_any_readable_image_is_an_error_not_a_loop(root):
    for path in (root / "train").glob("*/*.JPEG"):
        path.write_bytes(b"")
    with pytest.raises(CorruptImageError, match=r"None of the 17 images can be read"):
        list(module_of(root, max_corrupt_images=17).train_dataloader())


class OneSound(ImageSource):
    def __init__(self, sound):
        self.classes = ("n01",) * 5
        self.labels = np.arange(5)
        self.sound = sound
        self.asked = []

    def read(self, index):
        self.asked.append(index)
        if index != self.sound:
            raise OSError("gone")
        return image_of(index)

    def name(self, index):
        return f"image {index}"


def rows_of(source, decoder="pillow", max_corrupt_images=4):
    crop = EvalCrop(image_size=16, eval_resize=20)
    return DecodedImages(source, crop, decoder=decoder, max_corrupt_images=max_corrupt_images)


@pytest.mark.parametrize("first", range(5))
def test_the_one_sound_image_is_found_from_everywhere_and_each_broken_one_is_read_once(first):
    source = OneSound(3)
    rows = rows_of(source)
    row = torch.zeros(3, 16, 16, dtype=torch.uint8)
    assert [rows.load((first + step) % 5, row, epoch=0) for step in range(10)] == [3] * 10
    assert sorted(index for index in source.asked if index != 3) == [0, 1, 2, 4]
    assert rows.corrupt == {index: f"image {index}" for index in (0, 1, 2, 4)}


def test_images_are_decoded_by_the_decoder_that_was_chosen(monkeypatch):
    used = []

    def decode_rgb(data, decoder):
        used.append(decoder)
        return pixels_of(3)

    monkeypatch.setattr(source_module, "decode_rgb", decode_rgb)
    row = torch.zeros(3, 16, 16, dtype=torch.uint8)
    rows_of(OneSound(3), decoder="simplejpeg").load(3, row, epoch=0)
    assert used == ["simplejpeg"]


def test_a_flipped_bit_in_a_shard_is_found_when_read(shards):
    before = ShardedImages(shards / "train")
    path = shards / "train" / "shard-00000.bin"
    index = before.index
    data = bytearray(path.read_bytes())
    data[int(index.offsets[1] + index.num_bytes[1] // 2)] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(CorruptImageError, match="The image has a wrong checksum"):
        ShardedImages(shards / "train").read(1)
    assert ShardedImages(shards / "train").read(2) == before.read(2)
    assert damaged_shards(shards / "train") == ["shard-00000.bin"]
    assert damaged_shards(shards / "val") == []
    module = module_of(shards, global_batch_size=17)
    assert [tuple(images.shape) for images, _ in module.train_dataloader()] == [(17, 3, 16, 16)]
    assert list(module.train_rows.corrupt) == [1]


def test_a_shard_cut_short_while_it_is_read_is_no_crash(shards):
    images = ShardedImages(shards / "train")
    images.read(0)
    path = shards / "train" / "shard-00000.bin"
    with open(path, "r+b") as file:
        file.truncate(10)
    with pytest.raises(
        CorruptImageError, match=r"The shard contains only 10 of \d+ bytes of the image"
    ):
        images.read(0)
