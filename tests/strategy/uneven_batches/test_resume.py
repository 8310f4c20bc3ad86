"""Runs that resume after the loaders of some ranks have ended, bit-identical to uninterrupted runs."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.scenes import Saves, same
from tests.strategy.uneven_batches import support
from tests.strategy.uneven_batches.support import BATCH_SIZE, Numbered, fits

pytestmark = pytest.mark.filterwarnings("ignore:The training loader may resume inexactly")
# 3 and 7 batches. After 3 whole batches, another request would make the sampler draw again.
UNEVEN = (
    12,
    27,
)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return (self.samples[index] for index in range(len(self.samples)))


def of_rank(is_stream=False, sizes=UNEVEN, **options):
    """Return the loader of this rank, either shuffled anew in each epoch or of a stream."""
    samples = Numbered(dist.get_rank(), sizes)
    if is_stream:
        return DataLoader(Stream(samples), batch_size=BATCH_SIZE, **options)
    generator = torch.Generator().manual_seed(5)
    return DataLoader(samples, batch_size=BATCH_SIZE, shuffle=True, generator=generator, **options)


def steps_of(results):
    return [[step["numbers"] for step in rank["steps"]] for rank in results]


def check_resumed(ranks, path, *, saved_step, train=of_rank, num_epochs=2, **scene):
    """Train with and without an interruption, and compare the samples of the remaining steps and the weights."""
    scene = {"train": train, "max_epochs": num_epochs, **scene}
    whole = fits(ranks, callbacks=[Saves(path, step=saved_step)], **scene)
    resumed = fits(ranks, ckpt_path=path, **scene)
    for first, second in zip(steps_of(whole), steps_of(resumed), strict=True):
        assert second == first[saved_step:]
    for first, second in zip(whole, resumed, strict=True):
        assert same(first["weights"], second["weights"])
        assert second["global_step"] == first["global_step"]


def test_after_the_end_of_rank_zeros_loader(two_ranks, tmp_path):
    check_resumed(two_ranks, tmp_path / "5.ckpt", saved_step=5)


def test_in_the_tail_of_streams_with_accumulation(two_ranks, tmp_path):
    """Rank zero's three batches end within a step, and all ranks make three whole steps of two batches."""
    train = partial(of_rank, is_stream=True)
    options = {"train": train, "accumulate_grad_batches": 2}
    check_resumed(two_ranks, tmp_path / "3.ckpt", saved_step=3, **options)


def test_after_every_batch_of_a_tail(two_ranks, tmp_path):
    """Every checkpoint except the first comes from a run in which rank zero read no batch at all."""
    scene = {"train": of_rank, "max_epochs": 2}
    paths = {step: tmp_path / f"{step}.ckpt" for step in (5, 6, 7)}
    whole = fits(two_ranks, callbacks=[Saves(paths[5], step=5)], **scene)
    fits(two_ranks, callbacks=[Saves(paths[6], step=6)], ckpt_path=paths[5], **scene)
    fits(two_ranks, callbacks=[Saves(paths[7], step=7)], ckpt_path=paths[6], **scene)
    resumed = fits(two_ranks, ckpt_path=paths[7], **scene)
    for first, second in zip(whole, resumed, strict=True):
        assert same(first["weights"], second["weights"])


SCENES = {
    "longest first": {"train": partial(of_rank, sizes=(27, 17, 20, 10)), "saved_step": 6},
    "at the end of two loaders": {
        "train": partial(of_rank, sizes=(27, 17, 20, 10)),
        "saved_step": 5,
    },
    "shortest first": {"train": partial(of_rank, sizes=(10, 20, 17, 27)), "saved_step": 4},
    "workers": {"train": partial(of_rank, sizes=(10, 20, 17, 27), num_workers=1), "saved_step": 6},
    "stream": {"train": partial(of_rank, is_stream=True, sizes=(10, 20, 17, 27)), "saved_step": 6},
    "fp16": {
        "train": partial(of_rank, sizes=(10, 20, 17, 27)),
        "saved_step": 5,
        "precision": "16-true",
    },
    "second epoch": {"train": partial(of_rank, sizes=(10, 20, 17, 27)), "saved_step": 12},
    "end of the epoch": {"train": partial(of_rank, sizes=(10, 20, 17, 27)), "saved_step": 7},
    "accumulation": {
        "train": partial(of_rank, sizes=(10, 20, 17, 27)),
        "saved_step": 2,
        "accumulate_grad_batches": 3,
    },
}


@pytest.mark.long
@pytest.mark.parametrize("name", SCENES)
def test_four_ranks_resume_in_the_tail(four_ranks, tmp_path, name):
    check_resumed(four_ranks, tmp_path / "saved.ckpt", **SCENES[name])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_exact_resume_off_repeats_the_epoch_together(two_ranks, tmp_path):
    """As in `ddp`, loaders start again. The ranks still agree on the end of the epoch."""
    path = tmp_path / "5.ckpt"
    scene = {"train": of_rank, "max_epochs": 2, "exact_resume": False}
    fits(two_ranks, callbacks=[Saves(path, step=5)], **scene)
    resumed = fits(two_ranks, ckpt_path=path, **scene)
    assert support.same_weights(resumed)
