"""Digits, and loaders of images in memory: the split, views of images, places. Orders: `tests/data/test_order.py`."""

import pytest
import torch

from recipes.datasets.digits import NUM_TRAIN, DigitsDataModule, digits_split
from recipes.datasets.in_memory.loader import EvalLoader, ImageSet, Normalize, TrainLoader

AS_STORED = Normalize(mean=0.0, std=1.0)


def numbered(num_images: int) -> ImageSet:
    """Images whose label is their own number, all pixels of the same grey."""
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
    }
    settings |= {"shift_pixels": 0, "normalize": AS_STORED} | changes
    return TrainLoader(numbered(num_images), **settings)


def test_the_split_is_stratified_disjoint_and_always_the_same():
    one = digits_split()
    other = digits_split()
    assert len(one["train"].labels) == NUM_TRAIN
    for name, image_set in one.items():
        assert torch.equal(image_set.images, other[name].images)
        assert image_set.images.dtype is torch.uint8
        shares = torch.bincount(image_set.labels) / len(image_set.labels)
        assert (shares - 0.1).abs().max() < 0.01
    seen = [
        hash(image.numpy().tobytes()) for image_set in one.values() for image in image_set.images
    ]
    assert len(set(seen)) == len(seen) == 1797


def test_training_images_are_normalised():
    module = DigitsDataModule(global_batch_size=128, seed=0, shift_pixels=0)
    module.setup("fit")
    images = torch.cat([images for images, _ in module.train_dataloader()])
    assert images.dtype is torch.float32
    assert images.mean().abs() < 0.02
    assert (images.std() - 1).abs() < 0.02


def test_a_shift_depends_on_seed_epoch_and_image_not_on_rank_or_batch():
    def corners(**changes):
        loader = train_loader(num_images=48, shift_pixels=1, **changes)
        return {
            int(label): image
            for images, labels in loader
            for image, label in zip(images, labels, strict=True)
        }

    alone = corners(world_size=1)
    halves = corners(rank=0) | corners(rank=1)
    assert alone.keys() == halves.keys()
    assert all(torch.equal(alone[label], halves[label]) for label in alone)
    again = corners(world_size=1)
    other = corners(world_size=1, seed=4)
    assert all(torch.equal(alone[label], again[label]) for label in alone)
    assert any(not torch.equal(alone[label], other[label]) for label in alone)
    assert {tuple(image[0].ne(0).sum(0).tolist()) for image in alone.values()} >= {
        (4, 4, 4, 4),
        (0, 3, 3, 3),
    }


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
    # at the end of an epoch the next one begins
    if batches_done < 8:
        rest = whole[batches_done:]
    else:
        rest = list(expected)
    for (images, labels), (expected_images, expected_labels) in zip(resumed, rest, strict=True):
        assert torch.equal(labels, expected_labels)
        assert torch.equal(images, expected_images)


def test_more_than_the_set_has_is_refused():
    with pytest.raises(ValueError, match=r"`world_size` \(=4\) must be at most"):
        EvalLoader(numbered(3), world_size=4, rank=0, batch_size_per_rank=8, normalize=AS_STORED)
    with pytest.raises(ValueError, match=r"`global_batch_size` \(=1258\) must be at most"):
        DigitsDataModule(global_batch_size=NUM_TRAIN + 1, seed=0)
