"""Packing of images: shuffled, resumable after a kill, complete or absent, with a list of corrupt files."""

import io

import numpy as np
import pytest
from PIL import Image

from recipes.datasets.images.shards import ShardedImages
from recipes.datasets.packing import Packing
from tests.recipes.datasets.images.pictures import image_of, write_root


@pytest.fixture
def root(tmp_path):
    return write_root(tmp_path / "root", num_train=23, num_val=4)


def packing_of(root, out, **changes):
    options = {
        "splits": ["train", "val"],
        "seed": 0,
        "short_side": None,
        "quality": 90,
        "shard_bytes": 6000,
        "max_corrupt_images": 0,
        "num_threads": 2,
        "verify": True,
        **changes,
    }
    return Packing(root=str(root), out=str(out), **options)


def files_of(out):
    contents = {}
    for path in sorted(out.rglob("*")):
        if path.is_file():
            contents[path.relative_to(out).as_posix()] = path.read_bytes()
    return contents


def numbers_of(out):
    images = ShardedImages(out / "train")
    return [int(images.name(index)[-10:-5]) for index in range(len(images))]


def test_images_are_stored_once_each_in_a_shuffled_order_that_the_seed_decides(root, tmp_path):
    packed = packing_of(root, tmp_path / "a").run()
    assert [(part.split, part.num_images, part.num_corrupt) for part in packed] == [
        ("train", 23, 0),
        ("val", 4, 0),
    ]
    packing_of(root, tmp_path / "b").run()
    packing_of(root, tmp_path / "c", seed=1).run()
    numbers = numbers_of(tmp_path / "a")
    numbers_of_seed_1 = numbers_of(tmp_path / "c")
    assert sorted(numbers) == list(range(23))
    assert numbers != sorted(numbers)
    assert numbers != numbers_of_seed_1
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    sizes = [path.stat().st_size for path in sorted((tmp_path / "a" / "train").glob("*.bin"))]
    assert len(sizes) > 3
    # About 6000, from the mean size of a sample.
    assert all(3000 < size < 9000 for size in sizes[:-1])
    assert not list(tmp_path.glob("a/*/*.part"))
    assert not list(tmp_path.glob("a/*/*.unfinished"))


class KilledError(BaseException):
    """Kill of the process, which the code under test must not catch."""


@pytest.mark.parametrize("when", [9, 22])
def test_a_killed_packing_goes_on_and_ends_with_the_same_bytes(root, tmp_path, monkeypatch, when):
    packing_of(root, tmp_path / "whole", num_threads=1).run()
    prepared = Packing.prepared
    calls = []

    def killed(self, data):
        calls.append(1)
        if len(calls) == 23 + when:  # the first 23 calls belong to the sample
            raise KilledError
        return prepared(self, data)

    monkeypatch.setattr(Packing, "prepared", killed)
    with pytest.raises(KilledError):
        packing_of(root, tmp_path / "killed", num_threads=1).run()
    assert not (tmp_path / "killed" / "train" / "index.npz").exists()
    num_whole = len(list((tmp_path / "killed" / "train").glob("*.part")))
    calls.clear()

    def counted(self, data):
        calls.append(1)
        return prepared(self, data)

    monkeypatch.setattr(Packing, "prepared", counted)
    packing_of(root, tmp_path / "killed", num_threads=1).run()
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "killed")
    assert len(calls) < 23 + 8 or num_whole == 0  # complete shards were not made again


def test_another_packing_into_the_same_folder_is_refused(root, tmp_path):
    packing_of(root, tmp_path / "out").run()
    before = files_of(tmp_path / "out")
    packing_of(root, tmp_path / "out").run()
    assert files_of(tmp_path / "out") == before
    with pytest.raises(
        ValueError,
        match=r"`short_side` \(=32\) differs from the value of the packing in .*\(=None\)",
    ):
        packing_of(root, tmp_path / "out", short_side=32).run()
    (root / "train" / "n01" / "00099.JPEG").write_bytes(image_of(99))
    with pytest.raises(ValueError, match=r"`num_images` \(=24\)"):
        packing_of(root, tmp_path / "out").run()


@pytest.mark.parametrize("out", ["train", "val", "train/n01", "val/shards", "shards/../train"])
def test_shards_do_not_go_into_a_folder_of_the_unpacked_images(root, out):
    before = files_of(root)
    with pytest.raises(ValueError, match=r"`out` \(=.*\) must not be .*/root/(train|val) or"):
        packing_of(root, root / out).run()
    assert files_of(root) == before


def test_shards_may_go_beside_the_splits(root):
    packing_of(root, root / "shards").run()
    assert ShardedImages(root / "shards" / "train").classes == ("n01", "n02", "n03")


def test_long_short_sides_are_resized_and_others_stay_as_they_are(root, tmp_path):
    small = root / "train" / "n01" / "00300.JPEG"
    small.write_bytes(image_of(0))
    Image.open(small).resize((20, 24)).save(small, format="JPEG")
    packing_of(root, tmp_path / "out", short_side=32).run()
    images = ShardedImages(tmp_path / "out" / "train")
    for index in range(len(images)):
        data = images.read(index)
        number = int(images.name(index)[-10:-5])
        image = Image.open(io.BytesIO(data))
        if number == 300:
            assert data == small.read_bytes()
            continue
        expected_size = (44, 32) if number % 2 else (32, 44)
        assert image.size == expected_size
        original = Image.open(io.BytesIO(image_of(number)))
        resized = original.resize(image.size, Image.Resampling.BILINEAR)
        difference = np.asarray(image).astype(int) - np.asarray(resized).astype(int)
        # The error of the second JPEG encoding.
        assert np.abs(difference).mean() < 4


def test_corrupt_images_are_listed_and_left_out_within_the_budget(root, tmp_path):
    for number in (3, 8):
        path = root / "train" / f"n0{number % 3 + 1}" / f"{number:05d}.JPEG"
        path.write_bytes(image_of(number)[:-200])
    packed = packing_of(root, tmp_path / "out", max_corrupt_images=2).run()
    assert (packed[0].num_images, packed[0].num_corrupt) == (21, 2)
    whole_numbers = sorted(set(range(23)) - {3, 8})
    assert sorted(numbers_of(tmp_path / "out")) == whole_numbers
    listed = (tmp_path / "out" / "train" / "corrupt.txt").read_text().splitlines()
    assert sorted(line.split("\t")[0][-10:] for line in listed) == ["00003.JPEG", "00008.JPEG"]
    with pytest.raises(ValueError, match=r"`max_corrupt_images` \(=1\).* So far, 2 images"):
        packing_of(root, tmp_path / "strict", max_corrupt_images=1).run()


def test_checking_finds_a_flipped_bit(root, tmp_path):
    packing = packing_of(root, tmp_path / "out")
    packing.run()
    packing.check()
    path = tmp_path / "out" / "val" / "shard-00000.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"val/shard-00000\.bin is the first of 1 in val/"):
        packing.check()


def test_settings_that_make_no_sense_are_refused(root, tmp_path):
    for change, match in (
        ({"shard_bytes": 0}, r"`shard_bytes` \(=0\)"),
        ({"quality": 101}, r"`quality` \(=101\)"),
        ({"short_side": 0}, r"`short_side` \(=0\)"),
    ):
        with pytest.raises(ValueError, match=match):
            packing_of(root, tmp_path / "out", **change)
    with pytest.raises(ValueError, match=r"must not be the same folder as `root`"):
        packing_of(root, root)
