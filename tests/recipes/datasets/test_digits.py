"""Digits: who reads which image when; nothing is lost, read twice, or forgotten by a resumed run."""

from __future__ import annotations

from collections import Counter

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_hybrid.data import EvalLoader, ImageSet, Normalize, TrainLoader, batch_size_per_rank
from recipes.datasets.digits import NUM_TRAIN, DigitsDataModule, digits_split
from tests import toy

AS_STORED = Normalize(mean=0.0, std=1.0)


def numbered(num_images: int) -> ImageSet:
    """Images whose label is their own number, all pixels of the same grey."""
    labels = torch.arange(num_images)
    return ImageSet(images=(labels % 251 + 1).to(torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 1, 4, 4), labels=labels)


def train_loader(num_images=103, **changes) -> TrainLoader:
    settings = {"global_batch_size": 12, "world_size": 2, "rank": 0, "accumulate_grad_batches": 1, "seed": 3}
    settings |= {"shift_pixels": 0, "normalize": AS_STORED} | changes
    return TrainLoader(numbered(num_images), **settings)


def labels_of(batches) -> list[list[int]]:
    return [labels.tolist() for _, labels in batches]


# ---- the split -------------------------------------------------------------------------------------------------------


def test_the_split_is_stratified_disjoint_and_always_the_same():
    one, other = digits_split(), digits_split()
    assert len(one["train"].labels) == NUM_TRAIN
    for name, image_set in one.items():
        assert torch.equal(image_set.images, other[name].images)
        assert image_set.images.dtype is torch.uint8
        shares = torch.bincount(image_set.labels) / len(image_set.labels)
        assert (shares - 0.1).abs().max() < 0.01
    seen = [hash(image.numpy().tobytes()) for image_set in one.values() for image in image_set.images]
    assert len(set(seen)) == len(seen) == 1797


def test_training_images_are_normalised():
    module = DigitsDataModule(global_batch_size=128, seed=0, shift_pixels=0)
    module.setup("fit")
    images = torch.cat([images for images, _ in module.train_dataloader()])
    assert images.dtype is torch.float32
    assert images.mean().abs() < 0.02
    assert (images.std() - 1).abs() < 0.02


# ---- training: order -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_ranks_share_each_step_and_the_epoch_without_overlap(world_size, accumulate):
    """And the images of a step are the same ones, however many ranks and rounds share it."""
    loaders = [
        train_loader(global_batch_size=36, world_size=world_size, rank=rank, accumulate_grad_batches=accumulate)
        for rank in range(world_size)
    ]
    batches = [labels_of(loader) for loader in loaders]
    assert {len(own) for own in batches} == {2 * accumulate}
    alone = labels_of(train_loader(global_batch_size=36, world_size=1))
    for step in range(2):
        rounds = range(step * accumulate, (step + 1) * accumulate)
        together = [label for r in rounds for own in batches for label in own[r]]
        assert len(set(together)) == 36
        assert set(together) == set(alone[step])
    assert len(set(alone[0]) & set(alone[1])) == 0


def test_the_images_left_out_change_from_epoch_to_epoch():
    loader = train_loader(world_size=1)
    left_out = [set(range(103)) - {label for own in labels_of(loader) for label in own} for _ in range(3)]
    assert [len(labels) for labels in left_out] == [7, 7, 7]  # 103 = 8 * 12 + 7
    assert left_out[0] != left_out[1] != left_out[2]


def test_order_depends_on_seed_and_epoch_alone():
    assert labels_of(train_loader()) == labels_of(train_loader())
    assert labels_of(train_loader()) != labels_of(train_loader(seed=4))
    later = train_loader()
    later.set_epoch(1)
    first_then_second = train_loader()
    first, second = labels_of(first_then_second), labels_of(first_then_second)
    assert first != second
    assert labels_of(later) == second


def test_a_shift_depends_on_seed_epoch_and_image_not_on_rank_or_batch():
    def corners(**changes):
        loader = train_loader(num_images=48, shift_pixels=1, **changes)
        return {int(label): image for images, labels in loader for image, label in zip(images, labels, strict=True)}

    alone = corners(world_size=1)
    halves = corners(rank=0) | corners(rank=1)
    assert alone.keys() == halves.keys()
    assert all(torch.equal(alone[label], halves[label]) for label in alone)
    again, other = corners(world_size=1), corners(world_size=1, seed=4)
    assert all(torch.equal(alone[label], again[label]) for label in alone)
    assert any(not torch.equal(alone[label], other[label]) for label in alone)
    assert {tuple(image[0].ne(0).sum(0).tolist()) for image in alone.values()} >= {(4, 4, 4, 4), (0, 3, 3, 3)}


# ---- training: resume ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches_done", [0, 3, 8])
def test_a_loader_continues_from_its_state(batches_done):
    loader, expected = train_loader(shift_pixels=1), train_loader(shift_pixels=1)
    for _ in labels_of(loader), labels_of(expected):
        pass
    iterator = iter(loader)
    rest = list(expected)[batches_done:]
    for _ in range(batches_done):
        next(iterator)
    state = loader.state_dict()
    resumed = train_loader(shift_pixels=1)
    resumed.load_state_dict(state)
    if batches_done == 8:  # the end of an epoch: the next one begins
        rest = list(expected)
    for (images, labels), (expected_images, expected_labels) in zip(resumed, rest, strict=True):
        assert torch.equal(labels, expected_labels)
        assert torch.equal(images, expected_images)


def test_the_state_is_the_same_on_every_rank():
    states = []
    for rank in range(2):
        loader = train_loader(rank=rank)
        iterator = iter(loader)
        next(iterator)
        states.append(loader.state_dict())
    assert states[0] == states[1]
    assert (states[0]["steps_done"], states[0]["batches_done_of_step"]) == (1, 0)


class Remembers(pl.LightningModule):
    """Which batches came, and nothing learnt from them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 10)
        self.seen = []

    def training_step(self, batch, batch_idx):
        images, labels = batch
        self.seen.append((self.trainer.current_epoch, batch_idx, labels.tolist(), images.double().sum().item()))
        return nn.functional.cross_entropy(self.layer(images.flatten(1)), labels)

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SavesAt(pl.Callback):
    """Write a checkpoint in one hook, at one place of the run."""

    def __init__(self, path, hook, epoch, batch_idx):
        def save(trainer, *_):
            if (trainer.current_epoch, trainer.fit_loop.batch_idx) == (epoch, batch_idx):
                trainer.save_checkpoint(path)

        setattr(self, hook, save)


def seen_by_a_fit(callbacks=(), ckpt_path=None, **settings):
    module, data = Remembers(), DigitsDataModule(global_batch_size=300, seed=5)
    settings = {"max_epochs": 3, "precision": "32-true", "strategy": "hybrid_allreduce"} | settings
    toy.trainer(callbacks=list(callbacks), **settings).fit(module, data, ckpt_path=ckpt_path)
    return module.seen


# an epoch has 4 batches; Lightning treats each of these places in another way
PLACES = {
    "middle of the first epoch": ("on_train_batch_end", 0, 1),
    "middle of a later epoch": ("on_train_batch_end", 1, 1),
    "last batch": ("on_train_batch_end", 0, 3),
    "validation after the last batch": ("on_validation_end", 1, 3),
    "end of an epoch": ("on_train_epoch_end", 0, 3),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("strategy", ["ddp", "hybrid_allreduce"])
def test_a_resumed_fit_sees_the_batches_that_were_left(two_ranks, tmp_path, place, strategy):
    hook, epoch, batch_idx = PLACES[place]
    path = str(tmp_path / "some.ckpt")
    whole = two_ranks.run(fit_and_save_at, path, hook, epoch, batch_idx, strategy)
    rest = two_ranks.run(resume_from, path, strategy)
    for rank in range(2):
        assert len(whole[rank]) == 12
        assert rest[rank] == whole[rank][epoch * 4 + batch_idx + 1 :]
    assert whole[0] != whole[1]


def fit_and_save_at(path, hook, epoch, batch_idx, strategy, accumulate=1):
    callbacks = [SavesAt(path, hook, epoch, batch_idx)]
    return seen_by_a_fit(callbacks, strategy=strategy, accumulate_grad_batches=accumulate)


def resume_from(path, strategy, accumulate=1):
    return seen_by_a_fit(ckpt_path=path, strategy=strategy, accumulate_grad_batches=accumulate)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("place", "num_ranks", "accumulate"),
    [
        ("middle of a later epoch", 1, 4),
        ("middle of a later epoch", 3, 1),
        ("last batch", 4, 1),
        ("end of an epoch", 1, 4),
    ],
)
def test_other_ranks_and_accumulation_resume_the_steps_that_were_left(
    rank_pool, tmp_path, place, num_ranks, accumulate
):
    """Two ranks with two batches each were interrupted between two of an epoch's four steps."""
    hook, epoch, step = PLACES[place]
    path = str(tmp_path / "some.ckpt")
    whole = steps_of(rank_pool.ranks(2).run(fit_and_save_at, path, hook, epoch, 2 * step + 1, "hybrid_allreduce", 2), 2)
    rest = steps_of(rank_pool.ranks(num_ranks).run(resume_from, path, "hybrid_allreduce", accumulate), accumulate)
    assert len(whole) == 12
    assert rest == whole[epoch * 4 + step + 1 :]


def steps_of(seen, accumulate):
    """Epoch and sorted labels of each step, over all ranks and batches; batches are numbered as they come."""
    steps = []
    for batches in zip(*seen, strict=True):
        ((epoch, batch_idx),) = {batch[:2] for batch in batches}
        labels = [label for batch in batches for label in batch[2]]
        if batch_idx % accumulate == 0:
            steps.append((epoch, batch_idx // accumulate, labels))
        else:
            steps[-1][2].extend(labels)
    return [(*step, sorted(labels)) for *step, labels in steps]


def test_every_epoch_starts_anew_where_batches_are_limited(two_ranks):
    """Lightning stops after two of four batches; the next epoch must not go on with the third."""
    seen = two_ranks.run(fit_with_limit)[0]
    assert [(epoch, batch_idx) for epoch, batch_idx, *_ in seen] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    loader = TrainLoader(
        digits_split()["train"],
        global_batch_size=300,
        world_size=2,
        rank=0,
        accumulate_grad_batches=1,
        seed=5,
        shift_pixels=0,
        normalize=AS_STORED,
    )
    loader.set_epoch(2)
    assert [labels for *_, labels, _ in seen[4:]] == labels_of(loader)[:2]


def fit_with_limit():
    return seen_by_a_fit(limit_train_batches=2)


# ---- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size_per_rank", [1, 8, 17, 25, 100])
def test_evaluation_reads_every_image_once_in_equally_many_batches(world_size, batch_size_per_rank):
    loaders = [
        EvalLoader(
            numbered(50),
            world_size=world_size,
            rank=rank,
            batch_size_per_rank=batch_size_per_rank,
            normalize=AS_STORED,
        )
        for rank in range(world_size)
    ]
    batches = [labels_of(loader) for loader in loaders]
    assert {len(own) for own in batches} == {len(loader) for loader in loaders}
    assert len({len(own) for own in batches}) == 1
    assert max(len(batch) for own in batches for batch in own) <= batch_size_per_rank + (50 % world_size > 0)
    assert Counter(label for own in batches for batch in own for label in batch) == Counter(range(50))


class TakesAllForOdd(pl.LightningModule):
    """Takes every number for odd; counts its batches."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.acc = MulticlassAccuracy(2, average="micro")
        self.num_batches = 0

    def test_step(self, batch, batch_idx):
        _, numbers = batch
        self.num_batches += 1
        self.acc(numbers % 2, torch.ones_like(numbers))
        self.log("acc", self.acc, on_step=False, on_epoch=True)


def test_accuracy_over_unequal_shares_is_exact(three_ranks):
    """31 images: shares of 11, 10 and 10, in 3 batches each; 15 of 31 numbers are odd."""
    results = three_ranks.run(accuracy_of_unequal_shares)
    assert [num_batches for num_batches, _ in results] == [3, 3, 3]
    assert {accuracy for _, accuracy in results} == {torch.tensor(15 / 31).item()}


def accuracy_of_unequal_shares():
    loader = EvalLoader(numbered(31), world_size=3, rank=dist.get_rank(), batch_size_per_rank=5, normalize=AS_STORED)
    module, trainer = TakesAllForOdd(), toy.trainer()
    trainer.test(module, loader, verbose=False)
    return module.num_batches, trainer.callback_metrics["acc"].item()


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("global_batch_size", "nearest"), [(127, "126 or 128"), (1, "2"), (0, "2"), (-4, "2")], ids=str
)
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do(global_batch_size, nearest):
    with pytest.raises(ValueError, match=rf"`global_batch_size` \(={global_batch_size}\).*={nearest}\.$"):
        batch_size_per_rank(global_batch_size=global_batch_size, world_size=2)


def test_more_ranks_than_images_to_evaluate_are_refused():
    with pytest.raises(ValueError, match=r"`world_size` \(=4\) must be at most"):
        EvalLoader(numbered(3), world_size=4, rank=0, batch_size_per_rank=8, normalize=AS_STORED)


def test_a_batch_larger_than_the_set_is_refused():
    with pytest.raises(ValueError, match=r"`global_batch_size` \(=1258\) must be at most"):
        DigitsDataModule(global_batch_size=NUM_TRAIN + 1, seed=0)
