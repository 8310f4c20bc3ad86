"""The order of images, a pure function of (seed, epoch, step, rank, world size), and loaders that resume in it."""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
from numpy.typing import NDArray

from lightning_hybrid.checks import make_plain
from lightning_hybrid.data.batch_counters import (
    count_batches_as,
    goes_on_in_epoch,
    rewind_to_whole_steps,
    uncount_cut_epoch,
)
from lightning_hybrid.data.place import PlaceIterator, is_held_by_training

Batch = tuple[Any, Any]  # inputs and targets
Indices = NDArray[np.int64]


def batch_size_per_rank(
    *, global_batch_size: int, world_size: int, accumulate_grad_batches: int = 1
) -> int:
    """Divide the global batch: `global_batch_size / (world_size * accumulate_grad_batches)`.

    Raises:
        ValueError: The quotient is no whole number.
    """
    num_parts = world_size * accumulate_grad_batches
    if global_batch_size < 1 or global_batch_size % num_parts:
        below = max(global_batch_size, 0) // num_parts * num_parts
        nearest = f"{below} or {below + num_parts}" if below else f"{num_parts}"
        raise ValueError(
            f"`global_batch_size` (={global_batch_size}) must be a multiple of `world_size * accumulate_grad_batches` "
            f"(={world_size} * {accumulate_grad_batches}): {global_batch_size / num_parts:.2f} images per rank is not "
            f"a whole number{' above zero' if global_batch_size < 1 else ''}. Nearest that fit: "
            f"global_batch_size={nearest}."
        )
    return global_batch_size // num_parts


def largest_global_batch_size(
    num_images: int, *, world_size: int, accumulate_grad_batches: int = 1
) -> int:
    """Return the largest global batch size that divides the images, with at least one image per part.

    >>> largest_global_batch_size(41, world_size=2, accumulate_grad_batches=4)
    40
    """
    num_parts = world_size * accumulate_grad_batches
    return max(num_parts, num_images // num_parts * num_parts)


@dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """The images of every batch of one rank.

    The order of an epoch is a permutation P drawn from (seed, epoch) alone. With G = `global_batch_size`, A =
    `accumulate_grad_batches`, W = `world_size` and b = G / (A W), rank r takes as its batch a of step s

        P[s G + (a W + r) b : s G + (a W + r + 1) b]

    so that ranks are disjoint, and together take `num_images // G` whole steps; other images are left out each epoch.
    The images of a step do not depend on W and A, which may change between steps.

    Raises:
        ValueError: G does not divide by A W, exceeds `num_images`, or there is no such rank.

    >>> order = EpochOrder(num_images=10, global_batch_size=4, seed=0, world_size=2, rank=1)
    >>> permutation = order.permutation(epoch=0)
    >>> permutation
    array([4, 6, 2, 7, 3, 5, 9, 0, 8, 1])
    >>> order.num_steps, order.share(permutation, 0), order.share(permutation, 1)
    (2, array([2, 7]), array([9, 0]))
    """

    num_images: int
    global_batch_size: int
    seed: int
    world_size: int = 1
    rank: int = 0
    accumulate_grad_batches: int = 1

    def __post_init__(self) -> None:
        make_plain(
            self,
            "num_images",
            "global_batch_size",
            "seed",
            "world_size",
            "rank",
            "accumulate_grad_batches",
        )
        _ = self.batch_size_per_rank
        if self.global_batch_size > self.num_images:
            most = largest_global_batch_size(
                self.num_images,
                world_size=self.world_size,
                accumulate_grad_batches=self.accumulate_grad_batches,
            )
            raise ValueError(
                f"`global_batch_size` (={self.global_batch_size}) must be at most the number of training images "
                f"(={self.num_images}): an epoch would have no step. Set global_batch_size={most} or less."
            )
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"`rank` (={self.rank}) must be from 0 to `world_size - 1` (={self.world_size - 1})."
            )

    @property
    def batch_size_per_rank(self) -> int:
        """Images that one rank takes at a time."""
        return batch_size_per_rank(
            global_batch_size=self.global_batch_size,
            world_size=self.world_size,
            accumulate_grad_batches=self.accumulate_grad_batches,
        )

    @property
    def num_steps(self) -> int:
        """Whole global batches in an epoch."""
        return self.num_images // self.global_batch_size

    @property
    def num_batches(self) -> int:
        """Batches of this rank in an epoch."""
        return self.num_steps * self.accumulate_grad_batches

    def permutation(self, epoch: int) -> Indices:
        """Draw the order of all images in an epoch. The same on every rank."""
        # The last number names the purpose: augmentation draws from [seed, epoch, 1].
        return np.random.default_rng([self.seed, epoch, 0]).permutation(self.num_images)

    def share(self, permutation: Indices, batch: int) -> Indices:
        """Return the images of this rank's batch number `batch` of the epoch. A view of the permutation."""
        # s G + a W b = (s A + a) W b: batches of successive steps follow one another
        start = (batch * self.world_size + self.rank) * self.batch_size_per_rank
        return permutation[start : start + self.batch_size_per_rank]


class ResumableLoader(ABC):
    """Batches of one rank in the order of an `EpochOrder`, from any place on.

    The state counts steps of the global batch, and is the same on every rank: Lightning saves only rank zero's. A
    checkpoint between two steps continues exactly under any `world_size` and `accumulate_grad_batches`; one within a
    step of several batches only under the same two. A new epoch begins by `sampler.set_epoch` or by iterating again.

    With a trainer, the place after a resume is that of the trainer's counters, which are mended first (see
    `batch_counters`): the images of a step that was not made come again, under any number of ranks.

    Args:
        order: The order of the images.
        trainer: The trainer that iterates over the loader. The strategies of this package give it to a loader that has
            none; with another strategy a run with `max_steps` cannot go on exactly from the end of an epoch without it.
    """

    _SAME: ClassVar[tuple[str, ...]] = (
        "seed",
        "global_batch_size",
        "num_images",
    )  # or the order is another one
    _SAME_IN_STEP: ClassVar[tuple[str, ...]] = ("world_size", "accumulate_grad_batches")

    def __init__(self, order: EpochOrder, *, trainer: pl.Trainer | None = None) -> None:
        self.order = order
        self.epoch = self.batches_done = 0
        self._accumulated_before = order.accumulate_grad_batches  # by the run that goes on
        self._is_resumed = False  # and no batch was read since
        # A copy of the loader is not one of the trainer.
        self._trainer = None if trainer is None else weakref.ref(trainer)

    @abstractmethod
    def _batches(self, epoch: int, shares: Iterator[Indices]) -> Iterator[Batch]:
        """Yield one batch for each share of images. The generator is closed when the consumer leaves."""

    @property
    def sampler(self) -> ResumableLoader:
        """The loader itself: Lightning looks for `set_epoch` here."""
        return self

    @property
    def trainer(self) -> pl.Trainer | None:
        """The trainer that iterates over the loader, if it is known."""
        return None if self._trainer is None else self._trainer()

    def bind_trainer(self, trainer: pl.Trainer) -> None:
        """Take the place after a resume from this trainer's counters."""
        self._trainer = weakref.ref(trainer)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`, unless that epoch has already begun (as after a resume).

        Raises:
            RuntimeError: There is no trainer to ask, and `epoch` does not follow the place that was resumed.
        """
        trainer = self.trainer
        if trainer is not None and trainer.training and trainer.fit_loop.is_resuming:
            self._resume_by_counters(trainer)
        # Lightning sets the epoch after a resume too: that must not lose the place within it.
        elif epoch != self.epoch:
            if (
                self._is_resumed
                and trainer is None
                and (epoch, len(self)) != (self.epoch + 1, self.batches_done)
            ):
                raise RuntimeError(
                    f"`epoch` (={epoch}) must follow the place that was resumed, {self.batches_done} of {len(self)} "
                    f"batches of epoch {self.epoch}: images would be left out. With `max_steps` Lightning counts an "
                    f"epoch twice. Give the loader its trainer: {type(self).__name__}(..., trainer=trainer)."
                )
            self.epoch = epoch
            self.batches_done = 0

    def _resume_by_counters(self, trainer: pl.Trainer) -> None:
        goes_on = goes_on_in_epoch(trainer)
        progress: Any = trainer.fit_loop.epoch_progress.current
        self.epoch = progress.processed
        self.batches_done = 0
        if goes_on:
            accumulated_before = self._accumulated_before
            num_before = rewind_to_whole_steps(
                trainer, accumulate_grad_batches_before=accumulated_before
            )
            num_steps = num_before // accumulated_before
            num_more_in_step = trainer.accumulate_grad_batches - accumulated_before
            self.batches_done = num_before + num_steps * num_more_in_step
            count_batches_as(trainer, num_before, self.batches_done)

    def every_image(self) -> Iterator[Batch]:
        """Yield batches of this rank in which every image comes exactly once over all ranks, as in epoch 0."""
        order = self.order
        shares = eval_shares(
            num_images=order.num_images,
            world_size=order.world_size,
            rank=order.rank,
            batch_size_per_rank=max(1, order.batch_size_per_rank - 1),  # one may have an image more
        )
        return self._batches(0, iter(shares))

    def state_dict(self) -> dict[str, int]:
        """Return the place of this loader. The same on every rank."""
        steps_done, batches_done = divmod(self.batches_done, self.order.accumulate_grad_batches)
        place = {
            "epoch": self.epoch,
            "steps_done": steps_done,
            "batches_done_of_step": batches_done,
        }
        return place | {name: getattr(self.order, name) for name in self._SAME + self._SAME_IN_STEP}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the place in `state`.

        Raises:
            ValueError: The checkpoint is of another order of images, or from the middle of a step shared otherwise.
        """
        if missing := sorted(self.state_dict().keys() - state.keys()):
            raise ValueError(
                f"`{missing[0]}` must be in the checkpoint's state of the training loader, which has {sorted(state)}: "
                "another loader or version wrote it. Train with the data of the interrupted run."
            )
        self._refuse_other(
            state, self._SAME, "the resumed epoch would repeat some images and miss others"
        )
        # Between two steps nothing depends on how many ranks and batches shared them. A trainer begins the step again.
        if state["batches_done_of_step"] and self._trainer is None:
            why = (
                f"the checkpoint is from the middle of a step ({state['batches_done_of_step']} of "
                f"{state['accumulate_grad_batches']} batches), which other ranks would share in another way"
            )
            self._refuse_other(state, self._SAME_IN_STEP, why)
        self.epoch = state["epoch"]
        accumulate = self.order.accumulate_grad_batches
        self.batches_done = state["steps_done"] * accumulate + state["batches_done_of_step"]
        self._accumulated_before = state["accumulate_grad_batches"]
        self._is_resumed = True

    def _refuse_other(self, state: dict[str, Any], names: tuple[str, ...], why: str) -> None:
        cures = {
            "num_images": "the data as it was in the interrupted run: the same images",
            "world_size": "`devices` and `num_nodes` of the Trainer as they were in the interrupted run",
            "accumulate_grad_batches": "`accumulate_grad_batches` of the Trainer as it was in the interrupted run",
        }
        for name in names:
            own_value = getattr(self.order, name)
            if state[name] != own_value:
                cure = cures.get(name, f"{name}={state[name]} as it was in the interrupted run")
                raise ValueError(
                    f"`{name}` (={own_value}) must be that of the checkpoint (={state[name]}): {why}. Set {cure}."
                )

    def __len__(self) -> int:
        # Lightning asks for it after it has read a checkpoint, and before it looks whether there is an epoch left.
        if self.trainer is not None:
            uncount_cut_epoch(self.trainer)
        return self.order.num_batches

    def __iter__(self) -> Iterator[Batch]:
        return PlaceIterator(self)

    def is_read_by_training(self, holder: Iterator[Batch]) -> bool:
        """Return whether an iterator moves the place: every one, or with a trainer the one that its loop holds."""
        return self.trainer is None or is_held_by_training(self.trainer, holder)

    def plain_pass(self) -> Iterator[Batch]:
        """Yield all batches of the epoch, and leave the place as it is."""
        reader = copy.copy(self)
        permutation = self.order.permutation(self.epoch)
        shares = (self.order.share(permutation, batch) for batch in range(self.order.num_batches))
        with closing(reader._batches(self.epoch, shares)) as batches:  # type: ignore[type-var]
            yield from batches

    def rest_of_epoch(self) -> Iterator[Batch]:
        """Yield the batches from the place on, and move it. After an epoch's end those of the next epoch."""
        if self.batches_done >= len(self):
            # At the end, and `set_epoch` was not called. Lightning itself never exhausts a loader that has a length.
            self.epoch += 1
            self.batches_done = 0
        permutation = self.order.permutation(self.epoch)
        shares = (
            self.order.share(permutation, batch) for batch in range(self.batches_done, len(self))
        )
        with closing(self._batches(self.epoch, shares)) as batches:  # type: ignore[type-var]
            for batch in batches:
                # Before the yield: nothing after the last one would run.
                self.batches_done += 1
                self._is_resumed = False
                yield batch


def eval_shares(
    *, num_images: int, world_size: int, rank: int, batch_size_per_rank: int
) -> list[Indices]:
    """Divide images into batches of one rank such that every image comes exactly once over all ranks.

    Rank r takes images r, r + world_size, ...; none is repeated, so that shares differ by up to one image. All ranks
    have as many batches, at least one; so a batch has up to one image more than `batch_size_per_rank`.

    Raises:
        ValueError: There are more ranks than images.

    >>> [share.tolist() for share in eval_shares(num_images=7, world_size=2, rank=0, batch_size_per_rank=2)]
    [[0, 2], [4, 6]]
    """
    smallest_share, num_left = divmod(num_images, world_size)
    if smallest_share < 1:
        raise ValueError(
            f"`world_size` (={world_size}) must be at most the number of images to evaluate (={num_images}): a rank "
            "would have none. Use fewer ranks, or set limit_val_batches=0."
        )
    # As many batches on every rank: collectives at a batch, such as DDP's broadcast of BatchNorm statistics before the
    # first, need all ranks. No batch may be empty, so there are at most as many as the smallest share has images.
    largest_share = smallest_share + (num_left > 0)
    num_batches = min(-(-largest_share // batch_size_per_rank), smallest_share)
    return np.array_split(np.arange(rank, num_images, world_size), num_batches)
