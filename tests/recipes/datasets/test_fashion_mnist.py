"""Fashion-MNIST from synthetic files: reading, held-out images, and errors."""

import gzip
import hashlib
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch

from recipes.cli import command_line
from recipes.datasets import fashion_mnist, fashion_mnist_files
from recipes.datasets.fashion_mnist import FashionMNISTDataModule
from recipes.training.build import build
from tests.checkout import ROOT
from tests.recipes.composed import composed
from tests.recipes.training.test_recipes import NO_FILES, QUIET

NUM_TRAIN = 60
NUM_TEST = 20


def idx_file(array: np.ndarray) -> bytes:
    """Return the content of an IDX file of bytes."""
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def random_images(num_images: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images of noise, and labels with equal counts for all classes."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (num_images, 28, 28), dtype=np.uint8), np.arange(
        num_images
    ) % 10


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Create a folder with four small files, and replace the published checksums by theirs."""
    folder = tmp_path / "fashion"
    folder.mkdir()
    checksums = {}
    for name, num_images, seed in (("train", NUM_TRAIN, 0), ("t10k", NUM_TEST, 1)):
        images, labels = random_images(num_images, seed)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            content = idx_file(array)
            file_name = f"{name}-{kind}-ubyte.gz"
            (folder / file_name).write_bytes(gzip.compress(content))
            checksums[file_name] = hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(fashion_mnist_files, "SHA256", checksums)
    monkeypatch.setattr(fashion_mnist, "NUM_TRAIN", NUM_TRAIN)
    return folder


def image_sets(root, **options):
    data = FashionMNISTDataModule(global_batch_size=8, seed=0, root=str(root), **options)
    data.setup("fit")
    return data.image_sets


def test_images_and_labels_are_those_of_the_files_in_their_order(root):
    sets = image_sets(root)
    for name, num_images, seed in (("train", NUM_TRAIN, 0), ("test", NUM_TEST, 1)):
        images, labels = random_images(num_images, seed)
        assert torch.equal(sets[name].images, torch.from_numpy(images)[:, None])
        assert torch.equal(sets[name].labels, torch.from_numpy(labels))
        assert sets[name].images.dtype is torch.uint8


def test_without_held_out_images_validation_sees_the_test_images(root):
    sets = image_sets(root)
    assert torch.equal(sets["val"].images, sets["test"].images)
    assert len(sets["train"].labels) == NUM_TRAIN


def test_held_out_images_leave_training_are_of_every_class_and_always_the_same(root):
    sets = image_sets(root, num_held_out=20)
    assert sets["val"].labels.bincount().tolist() == [2] * 10
    assert sets["train"].labels.bincount().tolist() == [4] * 10
    images = torch.cat([sets["train"].images, sets["val"].images])
    assert {image.numpy().tobytes() for image in images} == {
        image.tobytes() for image in random_images(NUM_TRAIN, 0)[0]
    }
    other_seed = FashionMNISTDataModule(
        global_batch_size=8, seed=5, root=str(root), num_held_out=20
    )
    assert torch.equal(other_seed.load()["val"].images, sets["val"].images)
    assert torch.equal(image_sets(root)["test"].images, sets["test"].images)


def test_a_batch_larger_than_what_is_left_to_train_on_is_refused(root):
    with pytest.raises(ValueError, match=r"`global_batch_size` \(=50\) must be at most .* \(=40\)"):
        FashionMNISTDataModule(global_batch_size=50, seed=0, root=str(root), num_held_out=20)
    with pytest.raises(ValueError, match=r"`num_held_out` \(=60\) must be below"):
        FashionMNISTDataModule(global_batch_size=8, seed=0, root=str(root), num_held_out=60)


def test_a_file_that_was_compressed_in_another_way_is_accepted(root):
    path = root / "train-images-idx3-ubyte.gz"
    before = path.read_bytes()
    path.write_bytes(gzip.compress(gzip.decompress(before), compresslevel=1, mtime=7))
    assert path.read_bytes() != before
    assert len(image_sets(root)["train"].labels) == NUM_TRAIN


def test_one_changed_pixel_is_refused_by_the_checksum(root):
    path = root / "t10k-images-idx3-ubyte.gz"
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[-1] ^= 1
    path.write_bytes(gzip.compress(bytes(content)))
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte.gz has the SHA-256 "):
        image_sets(root)


def test_a_file_that_was_cut_is_refused(root):
    path = root / "train-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(ValueError, match=r"train-labels-idx1-ubyte.gz cannot be unpacked"):
        image_sets(root)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\0\0\x09\x01\0\0\0\x01a", "does not begin like an IDX file"),
        (b"\0\0\x08\x01\0\0\0\x02a", r"\(=1 values\) does not have the size"),
    ],
)
def test_a_content_that_is_no_idx_file_is_refused(content, problem):
    with pytest.raises(ValueError, match=problem):
        fashion_mnist.array_of(content)


def test_from_python_the_error_names_the_argument_the_missing_file_and_the_package(root):
    (root / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(
        ValueError,
        match=r"`root` \(=.*Missing files: t10k-labels-idx1-ubyte.gz\. Install .*apt-get install ",
    ):
        FashionMNISTDataModule(global_batch_size=8, seed=0, root=str(root))


def test_the_command_line_refuses_a_folder_without_the_files_in_one_line(tmp_path):
    for overrides in (
        ["data=fashion_mnist"],
        ["recipe=fashion_mnist"],
        ["recipe=fashion_mnist_small_batch"],
    ):
        lines = command_line.refusals(
            "train", [], [*overrides, f"data.root={tmp_path}"], is_sweep=False, also_values=True
        )
        assert len(lines) == 1
        assert lines[0].startswith(
            f"error: `data.root` (={tmp_path}) does not contain all files of Fashion-MNIST"
        )
        assert "apt-get install dataset-fashion-mnist" in lines[0]


def test_the_command_ends_with_that_error_alone_before_torch_is_imported(tmp_path):
    code = (
        "import atexit, runpy, sys\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        f"sys.argv = ['recipes/train.py', 'data=fashion_mnist', 'data.root={tmp_path}']\n"
        "runpy.run_path('recipes/train.py', run_name='__main__')\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'recipes'}"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stdout.strip() == "False"
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("error: `data.root` (=")


def test_method_and_reference_differ_in_batch_precision_optimizer_and_warm_up_alone(root):
    method, reference = (
        composed("train", f"recipe={recipe}", "run_dir=x", f"data.root={root}")
        for recipe in ("fashion_mnist", "fashion_mnist_small_batch")
    )
    differing = {key for key in method if method[key] != reference[key]}
    assert differing - {"data", "callbacks"} == {
        "global_batch_size",
        "precision",
        "warmup_epochs",
        "optim",
        "trainer",
    }
    assert method.batch_size_per_rank == reference.batch_size_per_rank
    assert {**method.data, "global_batch_size": 0} == {**reference.data, "global_batch_size": 0}
    assert method.trainer.max_epochs == reference.trainer.max_epochs


def test_the_method_takes_the_papers_share_of_the_set_in_about_its_number_of_steps():
    cfg = composed("train", "recipe=fashion_mnist", "run_dir=x")
    share = cfg.global_batch_size / 60_000
    assert share == pytest.approx(65_536 / 1_281_167, rel=0.002)
    assert 60_000 // cfg.global_batch_size * cfg.trainer.max_epochs == 1710
    assert cfg.precision == "16-true"
    assert cfg.model.get("pool5_bn", True) is True


@pytest.mark.parametrize("recipe", ["fashion_mnist", "fashion_mnist_small_batch"])
def test_a_recipe_trains_and_tests_on_what_the_files_hold(recipe, root):
    words = [
        *QUIET,
        *NO_FILES,
        f"recipe={recipe}",
        f"data.root={root}",
        "global_batch_size=16",
        "batch_size_per_rank=8",
        "trainer.max_steps=2",
        "warmup_epochs=0",
    ]
    if recipe == "fashion_mnist":
        words.append("strategy.loss_scale=16")  # a dynamic scale skips its first steps
    trainer, module, data = build(composed("train", *words))
    before = [weight.detach().clone() for weight in module.parameters()]
    trainer.fit(module, data)
    assert trainer.global_step == 2
    assert trainer.accumulate_grad_batches == 2
    assert any(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    (metrics,) = trainer.test(module, data, verbose=False)
    num_right = metrics["test/acc"] * NUM_TEST
    assert num_right == pytest.approx(round(num_right))
