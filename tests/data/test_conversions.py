"""Resumes with other ranks, batch sizes and accumulation, which read the remaining images of each step or raise.

The table has 36 conversions between all pairs of 1, 2 and 4 ranks with 1 and 2 batches per step, always with 8 images
per step.
"""

from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

from tests import toy
from tests.data.user_loaders import NO_SAMPLER

pytestmark = pytest.mark.filterwarnings("ignore")
NUM_IMAGES = 36  # a step has 8, so the last step of an epoch has 4
IMAGES_PER_STEP = 8
NUM_EPOCHS = 2


class Layout(NamedTuple):
    ranks: int
    accumulate: int
    batch_size: int

    def __str__(self) -> str:
        return f"{self.ranks} x {self.accumulate} x {self.batch_size}"


def layout(ranks: int, accumulate: int) -> Layout:
    return Layout(ranks, accumulate, IMAGES_PER_STEP // (ranks * accumulate))


LAYOUTS = [layout(ranks, accumulate) for ranks, accumulate in product((1, 2, 4), (1, 2))]
# Steps after which to stop, the last batch of the first epoch (5), and its end.
STOPS = (
    "1",
    "3",
    "5",
    "epoch",
    "7",
)
STOP_WITHIN_STEP = "3, within the next step"


class Steps(pl.LightningModule):
    """Module that records the step and the images of each batch on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.read: list[tuple[int, list[int]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.read.append((self.trainer.global_step, batch.tolist()))
        return self.net(batch.float()[:, None] / NUM_IMAGES).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class SavesSteps(pl.Callback):
    """Callback that saves after steps, within a step, and at the end of the first epoch."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        step = str(trainer.global_step)
        is_within_step = trainer.fit_loop._should_accumulate()
        if step in STOPS and not is_within_step:
            trainer.save_checkpoint(self.folder / f"{step}.ckpt")
        if step == "3" and is_within_step:
            trainer.save_checkpoint(self.folder / f"{STOP_WITHIN_STEP}.ckpt")

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.folder / "epoch.ckpt")


def shuffled(batch_size: int, workers: int) -> DataLoader:
    if workers:
        context = "fork"
    else:
        context = None
    return DataLoader(
        range(NUM_IMAGES),
        batch_size,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context=context,
    )


def weighted(batch_size: int, workers: int) -> DataLoader:
    weights = [1.0 + image % 7 for image in range(NUM_IMAGES)]
    return DataLoader(
        range(NUM_IMAGES), batch_size, sampler=WeightedRandomSampler(weights, NUM_IMAGES)
    )


def not_dealt(batch_size: int, workers: int) -> DataLoader:
    return DataLoader(range(NUM_IMAGES), batch_size, shuffle=True)


def fit(
    of: Layout,
    folder: str,
    stop: str | None,
    workers: int = 0,
    make: Any = shuffled,
    **settings: Any,
) -> list[tuple[int, list[int]]] | str:
    """Return the samples that a rank reads in a whole fit or after a stop, or the error that ended the fit."""
    pl.seed_everything(3, verbose=False)
    module = Steps()
    trainer = toy.trainer(
        max_epochs=NUM_EPOCHS,
        accumulate_grad_batches=of.accumulate,
        callbacks=[SavesSteps(folder)] if stop is None else [],
        **settings,
    )
    path = None if stop is None else f"{folder}/{stop}.ckpt"
    try:
        trainer.fit(module, make(of.batch_size, workers), ckpt_path=path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return module.read


def fits(of: Layout, folder: str, stops: tuple[str | None, ...], *args: Any) -> list[Any]:
    return [fit(of, folder, stop, *args) for stop in stops]


def images_by_step(of_ranks: list[Any]) -> dict[int, list[int]]:
    """Return the images of each step over all ranks."""
    steps: dict[int, list[int]] = {}
    for read in of_ranks:
        assert not isinstance(read, str), read
        for step, images in read:
            steps.setdefault(step, []).extend(images)
    return {step: sorted(images) for step, images in steps.items()}


def outcomes(
    pool: Any, saved: Layout, resumed: Layout, folder: Path, stops: tuple[str, ...], workers: int
) -> Any:
    """Return the images by step of a whole fit in one layout, and of its resumes in another one from each stop."""
    (whole,) = zip(
        *pool.ranks(saved.ranks).run(fits, saved, str(folder), (None,), workers), strict=True
    )
    of_ranks = pool.ranks(resumed.ranks).run(
        fits, resumed, str(folder), stops, workers, timeout_s=300
    )
    return images_by_step(whole), [
        images_by_step(by_rank) for by_rank in zip(*of_ranks, strict=True)
    ]


def steps_done(stop: str) -> int:
    if stop == "epoch":
        return 5
    return int(stop[0])


def wrong_stops(
    pool: Any, saved: Layout, resumed: Layout, folder: Path, stops: tuple[str, ...], workers: int
) -> Any:
    """Return the stops after which a step reads other images than in the uninterrupted fit."""
    whole, after_stops = outcomes(pool, saved, resumed, folder, stops, workers)
    assert [len(images) for images in whole.values()] == [8, 8, 8, 8, 4] * NUM_EPOCHS
    wrong = {}
    for stop, read in zip(stops, after_stops, strict=True):
        expected = {step: images for step, images in whole.items() if step >= steps_done(stop)}
        if read != expected:
            wrong[stop] = read
    return wrong


ONE_STOP = [  # one of each kind: ranks for batches, batches for ranks, more ranks, fewer
    (layout(2, 1), layout(1, 2)),
    (layout(1, 2), layout(2, 1)),
    (layout(2, 2), layout(4, 1)),
    (layout(1, 1), layout(4, 2)),
    (layout(1, 1), layout(1, 2)),
]


@pytest.mark.parametrize(("saved", "resumed"), ONE_STOP, ids=str)
def test_every_step_after_a_resume_reads_what_it_reads_undisturbed(
    rank_pool, tmp_path, saved, resumed
):
    assert wrong_stops(rank_pool, saved, resumed, tmp_path, ("3",), 0) == {}


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2], ids=["no workers", "workers"])
@pytest.mark.parametrize("resumed", LAYOUTS, ids=str)
@pytest.mark.parametrize("saved", LAYOUTS, ids=str)
def test_all_36_conversions_from_every_stop(rank_pool, tmp_path, saved, resumed, workers):
    if saved.accumulate > 1:
        stops = (*STOPS, STOP_WITHIN_STEP)
    else:
        stops = STOPS
    assert wrong_stops(rank_pool, saved, resumed, tmp_path, stops, workers) == {}


def refusal(
    pool: Any, saved: Layout, resumed: Layout, folder: Path, make: Any = shuffled, **settings: Any
) -> str:
    """Return the error of a resume from the third step, which is the same on all ranks, or an empty string."""
    pool.ranks(saved.ranks).run(_fit_with, saved, str(folder), None, make, settings)
    errors = pool.ranks(resumed.ranks).run(_fit_with, resumed, str(folder), "3", make, settings)
    texts = {error if isinstance(error, str) else "" for error in errors}
    assert len(texts) == 1, errors
    return texts.pop()


def _fit_with(
    of: Layout, folder: str, stop: str | None, make: Any, settings: dict[str, Any]
) -> Any:
    return fit(of, folder, stop, 0, make, **settings)


@pytest.mark.parametrize(
    ("resumed", "cure"),
    [
        (
            Layout(2, 1, 2),
            "times 2 ranks times 1 accumulated batches must equal the number of samples per step in the "
            "checkpoint (=8). Set batch_size=4.",
        ),
        (
            Layout(1, 2, 8),
            "times 1 ranks times 2 accumulated batches must equal the number of samples per step in the "
            "checkpoint (=8). Set batch_size=4.",
        ),
        (
            Layout(3, 1, 2),
            "Set batch_size=4, accumulate_grad_batches=1 and train on 2 ranks, as in the checkpoint",
        ),
        (
            Layout(2, 2, 4),
            "`accumulate_grad_batches` (=2) must divide the number of finished batches of the epoch (=3)",
        ),
    ],
    ids=str,
)
def test_other_images_of_a_step_are_refused_with_the_numbers_that_fit(
    rank_pool, tmp_path, resumed, cure
):
    text = refusal(rank_pool, layout(2, 1), resumed, tmp_path)
    assert text.startswith("NotExactError: The training loader (DataLoader of range)")
    assert cure in text


@pytest.mark.parametrize(
    ("make", "settings"),
    [(weighted, {}), (not_dealt, NO_SAMPLER)],
    ids=["weighted", "no distributed sampler"],
)
def test_an_order_that_lightning_does_not_deal_is_refused_under_other_ranks(
    rank_pool, tmp_path, make, settings
):
    text = refusal(rank_pool, layout(2, 1), layout(1, 2), tmp_path, make, **settings)
    assert "`world_size` (=1) must equal the value in the checkpoint (=2), because" in text
    assert "Resume with world_size=2." in text


def test_a_larger_accumulation_of_the_same_batches_resumes_between_its_steps(rank_pool, tmp_path):
    """4 steps of one batch are 2 steps of two batches, so the fifth batch is next."""
    (read,) = rank_pool.ranks(1).run(saves_after_four, str(tmp_path))
    whole, resumed = read
    assert resumed == whole[4:]


def saves_after_four(folder: str) -> list[list[list[int]]]:
    images = []
    for accumulate, path in ((1, None), (2, f"{folder}/4.ckpt")):
        pl.seed_everything(3, verbose=False)
        module = Steps()
        trainer = toy.trainer(
            max_epochs=1, accumulate_grad_batches=accumulate, callbacks=[SavesFourth(folder)]
        )
        trainer.fit(module, shuffled(4, 0), ckpt_path=path)
        images.append([batch for _, batch in module.read])
    return images


class SavesFourth(pl.Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(f"{self.folder}/4.ckpt")


def test_ranks_of_a_conversion_read_disjoint_images(rank_pool, tmp_path):
    rank_pool.ranks(2).run(fits, layout(2, 1), str(tmp_path), (None,))
    of_ranks = rank_pool.ranks(4).run(fits, layout(4, 1), str(tmp_path), ("1",))
    first_epoch = [
        image for (read,) in of_ranks for step, images in read if step < 5 for image in images
    ]
    assert len(first_epoch) == len(set(first_epoch)) == NUM_IMAGES - IMAGES_PER_STEP
