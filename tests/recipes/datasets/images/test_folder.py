"""Image folders as people have them: other suffixes, links, hidden folders, names that are no text."""

import os

import pytest

from recipes.datasets.images import folder as folder_module
from recipes.datasets.images.folder import ImageFolder, check_root
from tests.recipes.datasets.images.pictures import image_of, write_split


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
    listdir, scandir = os.listdir, os.scandir

    class Backwards:
        def __init__(self, path):
            self.entries = sorted(scandir(path), key=lambda entry: entry.name, reverse=True)

        def __enter__(self):
            return iter(self.entries)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(folder_module.os, "listdir", lambda path: sorted(listdir(path), reverse=True))
    monkeypatch.setattr(folder_module.os, "scandir", Backwards)
    found = ImageFolder(train)
    assert found.classes == expected.classes == ("n01", "n02", "n03")
    assert numbers_of(found) == numbers_of(expected) == [f"{number:05d}.JPEG" for number in (0, 3, 1, 4, 2, 5)]


def test_a_name_that_is_no_text_is_read_all_the_same(train):
    names = [b"\xff\xfe.JPEG", "grün.JPEG".encode()]
    for name in names:
        with open(os.fsencode(train / "n01") + b"/" + name, "wb") as file:
            file.write(image_of(7))
    images = ImageFolder(train)
    found = [index for index in range(len(images)) if os.fsencode(images.name(index)).split(b"/")[-1] in names]
    assert [images.read(index) for index in found] == [image_of(7)] * 2


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
    with pytest.raises(ValueError, match=r"val/ is missing\. Move some images of each class, say a tenth, from train/"):
        check_root(tmp_path)
