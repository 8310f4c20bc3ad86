"""Digits, and loaders of images in memory: split, views and positions. `tests/data/test_order.py` tests the order."""

import pytest
import torch

from recipes.datasets.digits import NUM_TRAIN, DigitsDataModule, digits_split
from recipes.datasets.in_memory.loader import EvalLoader, ImageSet, Normalize, TrainLoader
from tests.scenes import same

AS_STORED = Normalize(mean=0.0, std=1.0)


def numbered(num_images: int) -> ImageSet:
    """Return images whose label is their own index, with all pixels of the same gray."""
    labels = torch.arange(num_images)
    return ImageSet(
        images=(labels % 251 + 1).to(torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 1, 4, 4),
        labels=labels,
    )


def train_loader(num_images=103, **changes) -> TrainLoader:
    settings = {
        "global_batch_size": 12,
        "world_size": 2,
        "rank": 0,
        "accumulate_grad_batches": 1,
        "seed": 3,
        "shift_pixels": 0,
        "normalize": AS_STORED,
        **changes,
    }
    return TrainLoader(numbered(num_images), **settings)


def test_the_split_is_stratified_disjoint_and_always_the_same():
    split = digits_split()
    again = digits_split()
    assert len(split["train"].labels) == NUM_TRAIN
    for name, image_set in split.items():
        assert torch.equal(image_set.images, again[name].images)
        assert image_set.images.dtype is torch.uint8
        shares = torch.bincount(image_set.labels) / len(image_set.labels)
        assert (shares - 0.1).abs().max() < 0.01
    hashes = []
    for image_set in split.values():
        hashes += [hash(image.numpy().tobytes()) for image in image_set.images]
    assert len(hashes) == 1797
    assert len(set(hashes)) == len(hashes)


def test_training_images_are_normalized():
    module = DigitsDataModule(global_batch_size=128, seed=0, shift_pixels=0)
    module.setup("fit")
    images = torch.cat([images for images, _ in module.train_dataloader()])
    assert images.dtype is torch.float32
    assert images.mean().abs() < 0.02
    assert (images.std() - 1).abs() < 0.02


def test_a_shift_depends_on_seed_epoch_and_image_not_on_rank_or_batch():
    def corners(**changes):
        loader = train_loader(num_images=48, shift_pixels=1, **changes)
        images_by_label = {}
        for images, labels in loader:
            images_by_label.update(zip(labels.tolist(), images, strict=True))
        return images_by_label

    alone = corners(world_size=1)
    halves = corners(rank=0) | corners(rank=1)
    assert same(alone, halves)
    assert same(alone, corners(world_size=1))
    assert not same(alone, corners(world_size=1, seed=4))
    rows_per_column = {tuple(image[0].ne(0).sum(0).tolist()) for image in alone.values()}
    assert rows_per_column >= {(4, 4, 4, 4), (0, 3, 3, 3)}


@pytest.mark.parametrize("batches_done", [3, 8])
def test_a_loader_continues_from_its_state_which_is_that_of_every_rank(batches_done):
    loaders = [train_loader(shift_pixels=1, rank=rank) for rank in (0, 1)]
    expected = train_loader(shift_pixels=1)
    resumed = train_loader(shift_pixels=1)
    whole = list(expected)
    for loader in loaders:
        iterator = iter(loader)
        for _ in range(batches_done):
            next(iterator)
    assert loaders[0].state_dict() == loaders[1].state_dict()
    resumed.load_state_dict(loaders[0].state_dict())
    # At the end of an epoch, the next one begins.
    if batches_done < 8:
        remaining = whole[batches_done:]
    else:
        remaining = list(expected)
    assert same(list(resumed), remaining)


def test_more_than_the_set_has_is_refused():
    with pytest.raises(ValueError, match=r"`world_size` \(=4\) must be at most"):
        EvalLoader(numbered(3), world_size=4, rank=0, batch_size_per_rank=8, normalize=AS_STORED)
    with pytest.raises(ValueError, match=r"`global_batch_size` \(=1258\) must be at most"):
        DigitsDataModule(global_batch_size=NUM_TRAIN + 1, seed=0)


def test_a_negative_seed_is_refused():
    message = r"`seed` \(=-1\) must be an integer, 0 or more: random number generators accept"
    with pytest.raises(ValueError, match=message):
        DigitsDataModule(global_batch_size=8, seed=-1)
