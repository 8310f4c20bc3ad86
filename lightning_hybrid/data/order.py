"""Deterministic order of training images, and loaders that can resume at any position."""

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
    resumes_within_epoch,
    rewind_to_whole_steps,
    uncount_cut_epoch,
)
from lightning_hybrid.data.place import PlaceIterator, is_held_by_training

Batch = tuple[Any, Any]  # inputs and targets
Indices = NDArray[np.int64]


def batch_size_per_rank(
    *, global_batch_size: int, world_size: int, accumulate_grad_batches: int = 1
) -> int:
    """Compute the batch size of a rank from the global batch size.

    It is `global_batch_size / (world_size * accumulate_grad_batches)`.

    Raises:
        ValueError: The quotient is not a whole number.
    """
    num_parts = world_size * accumulate_grad_batches
    if global_batch_size < 1 or global_batch_size % num_parts:
        below = max(global_batch_size, 0) // num_parts * num_parts
        nearest = f"{below} or {below + num_parts}" if below else f"{num_parts}"
        raise ValueError(
            f"`global_batch_size` (={global_batch_size}) must be a multiple of `world_size * accumulate_grad_batches` "
            f"(={world_size} * {accumulate_grad_batches}), because every rank needs a positive whole number of "
            f"images, not {global_batch_size / num_parts:.2f}. Set global_batch_size={nearest}."
        )
    return global_batch_size // num_parts


def largest_global_batch_size(
    num_images: int, *, world_size: int, accumulate_grad_batches: int = 1
) -> int:
    """Return the largest valid global batch size for a data set of `num_images` images.

    The result has at least one image per rank and batch, even if that exceeds the number of images.

    >>> largest_global_batch_size(41, world_size=2, accumulate_grad_batches=4)
    40
    """
    num_parts = world_size * accumulate_grad_batches
    return max(num_parts, num_images // num_parts * num_parts)


@dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """Deterministic assignment of training images to the batches of one rank.

    The order of an epoch is a permutation P that depends only on (seed, epoch). With G = `global_batch_size`, A =
    `accumulate_grad_batches`, W = `world_size` and b = G / (A W), batch a of step s of rank r is

        P[s G + (a W + r) b : s G + (a W + r + 1) b]

    Ranks therefore read disjoint sets of images. An epoch has `num_images // G` steps. The images that are left out
    differ from epoch to epoch. The images of a step do not depend on W and A, which may change between steps.

    Args:
        num_images: Number of training images.
        global_batch_size: Number of images per step, over all ranks.
        seed: Seed of the order.
        world_size: Number of ranks.
        rank: Rank of this process.
        accumulate_grad_batches: Number of batches per step on each rank.

    Raises:
        ValueError: G is not a multiple of A W or exceeds `num_images`, or `rank` is out of range.

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
                f"(={self.num_images}), because an epoch would have no step otherwise. Set global_batch_size={most} "
                "or less."
            )
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"`rank` (={self.rank}) must be from 0 to `world_size - 1` (={self.world_size - 1}). Pass the global "
                "rank of this process."
            )

    @property
    def batch_size_per_rank(self) -> int:
        """Number of images in a batch of one rank."""
        return batch_size_per_rank(
            global_batch_size=self.global_batch_size,
            world_size=self.world_size,
            accumulate_grad_batches=self.accumulate_grad_batches,
        )

    @property
    def num_steps(self) -> int:
        """Number of steps in an epoch."""
        return self.num_images // self.global_batch_size

    @property
    def num_batches(self) -> int:
        """Number of batches of this rank in an epoch."""
        return self.num_steps * self.accumulate_grad_batches

    def permutation(self, epoch: int) -> Indices:
        """Return the order of all images in an epoch, which is equal on all ranks."""
        # The last number of the seed is its purpose. Augmentation uses [seed, epoch, 1].
        return np.random.default_rng([self.seed, epoch, 0]).permutation(self.num_images)

    def share(self, permutation: Indices, batch: int) -> Indices:
        """Return the image indices of a batch of this rank, given the batch's index in the epoch.

        The result is a view of the permutation.
        """
        # Batches of successive steps are adjacent, because s G + a W b = (s A + a) W b.
        start = (batch * self.world_size + self.rank) * self.batch_size_per_rank
        return permutation[start : start + self.batch_size_per_rank]


class ResumableLoader(ABC):
    """Base class of loaders that follow an `EpochOrder` and can resume at any position.

    The state counts steps of the global batch, so it is equal on all ranks. Lightning saves only rank zero's state. A
    run can resume exactly from a checkpoint between two steps with any `world_size` and `accumulate_grad_batches`. It
    can resume exactly from a checkpoint within a step only with the same values. A new epoch begins with
    `sampler.set_epoch` or with another iteration.

    With a trainer, the position after a resume is taken from the trainer's counters, which are corrected first (see
    `batch_counters`). The images of an unfinished step are then read again, for any number of ranks.

    Args:
        order: Order of the images.
        trainer: Trainer that iterates over the loader. The strategies of this package set it if it is None. With other
            strategies, it is needed to resume a run with `max_steps` exactly from the end of an epoch.
    """

    # The order of an epoch differs if one of these values differs.
    _SAME: ClassVar[tuple[str, ...]] = ("seed", "global_batch_size", "num_images")
    _SAME_IN_STEP: ClassVar[tuple[str, ...]] = ("world_size", "accumulate_grad_batches")

    def __init__(self, order: EpochOrder, *, trainer: pl.Trainer | None = None) -> None:
        self.order = order
        self.epoch = 0
        self.batches_done = 0
        self._accumulated_before = order.accumulate_grad_batches  # value of the interrupted run
        self._is_resumed = False  # whether no batch has been read since a resume
        # A weak reference, so that copies of the loader do not copy the trainer.
        self._trainer = None if trainer is None else weakref.ref(trainer)

    @abstractmethod
    def _batches(self, epoch: int, shares: Iterator[Indices]) -> Iterator[Batch]:
        """Yield one batch for each array of image indices.

        The generator is closed when the consumer stops.
        """

    @property
    def sampler(self) -> ResumableLoader:
        """The loader itself, on which Lightning calls `set_epoch`."""
        return self

    @property
    def trainer(self) -> pl.Trainer | None:
        """Trainer that iterates over the loader, or None if it is unknown."""
        return None if self._trainer is None else self._trainer()

    def bind_trainer(self, trainer: pl.Trainer) -> None:
        """Set the trainer whose counters determine the position after a resume."""
        self._trainer = weakref.ref(trainer)

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of an epoch, unless the loader is already in that epoch.

        For example, the position in the epoch must not change after a resume.

        Raises:
            RuntimeError: The trainer is unknown, and `epoch` does not follow the resumed position.
        """
        trainer = self.trainer
        if trainer is not None and trainer.training and trainer.fit_loop.is_resuming:
            self._resume_by_counters(trainer)
        # Lightning also sets the epoch after a resume, which must not change the position in that epoch.
        elif epoch != self.epoch:
            if (
                self._is_resumed
                and trainer is None
                and (epoch, len(self)) != (self.epoch + 1, self.batches_done)
            ):
                raise RuntimeError(
                    f"`epoch` (={epoch}) must match the resumed position (batch {self.batches_done} of {len(self)} in "
                    f"epoch {self.epoch}), because images would be skipped otherwise. With `max_steps`, Lightning "
                    f"counts an epoch twice. Pass the trainer to the loader: {type(self).__name__}(..., "
                    "trainer=trainer)."
                )
            self.epoch = epoch
            self.batches_done = 0

    def _resume_by_counters(self, trainer: pl.Trainer) -> None:
        goes_on = resumes_within_epoch(trainer)
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
        """Yield this rank's batches of a full pass over the data, without leaving out images.

        The images are distributed over the ranks, so that each image is read once. They are augmented as in epoch 0.
        """
        order = self.order
        shares = eval_shares(
            num_images=order.num_images,
            world_size=order.world_size,
            rank=order.rank,
            # Batches may have one more image than this.
            batch_size_per_rank=max(1, order.batch_size_per_rank - 1),
        )
        return self._batches(0, iter(shares))

    def state_dict(self) -> dict[str, int]:
        """Return the position of this loader, which is equal on all ranks."""
        steps_done, batches_done = divmod(self.batches_done, self.order.accumulate_grad_batches)
        place = {
            "epoch": self.epoch,
            "steps_done": steps_done,
            "batches_done_of_step": batches_done,
        }
        return place | {name: getattr(self.order, name) for name in self._SAME + self._SAME_IN_STEP}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at the position in `state`.

        Raises:
            ValueError: The checkpoint has a different order of images, or is from the middle of a step that was divided
                differently over ranks and batches.
        """
        if missing := sorted(self.state_dict().keys() - state.keys()):
            raise ValueError(
                f"`{missing[0]}` was not found in the checkpoint's state of the training loader, which contains only "
                f"{sorted(state)}. The checkpoint was written by another loader or version. Use the training loader "
                "and the version of the interrupted run."
            )
        self._refuse_other(
            state, self._SAME, "the resumed epoch would repeat some images and skip others"
        )
        # Between two steps, the numbers of ranks and batches may change. In the middle of a step, they may change if
        # there is a trainer, because the trainer repeats the step.
        if state["batches_done_of_step"] and self._trainer is None:
            why = (
                f"the checkpoint is from the middle of a step ({state['batches_done_of_step']} of "
                f"{state['accumulate_grad_batches']} batches), whose images would be divided differently among ranks"
            )
            self._refuse_other(state, self._SAME_IN_STEP, why)
        self.epoch = state["epoch"]
        accumulate = self.order.accumulate_grad_batches
        self.batches_done = state["steps_done"] * accumulate + state["batches_done_of_step"]
        self._accumulated_before = state["accumulate_grad_batches"]
        self._is_resumed = True

    def _refuse_other(self, state: dict[str, Any], names: tuple[str, ...], why: str) -> None:
        cures = {
            "num_images": "Use the data set of the interrupted run, with the same images",
            "world_size": "Set `devices` and `num_nodes` of the Trainer as in the interrupted run",
            "accumulate_grad_batches": "Set `accumulate_grad_batches` of the Trainer as in the interrupted run",
        }
        for name in names:
            own_value = getattr(self.order, name)
            if state[name] != own_value:
                cure = cures.get(name, f"Set {name}={state[name]} as in the interrupted run")
                raise ValueError(
                    f"`{name}` (={own_value}) must equal the value in the checkpoint (={state[name]}), because {why}. "
                    f"{cure}."
                )

    def __len__(self) -> int:
        # Lightning calls this method after it has read a checkpoint, and before it checks whether epochs are left.
        if self.trainer is not None:
            uncount_cut_epoch(self.trainer)
        return self.order.num_batches

    def __iter__(self) -> Iterator[Batch]:
        return PlaceIterator(self)

    def is_read_by_training(self, holder: Iterator[Batch]) -> bool:
        """Return whether an iterator advances the position of the loader.

        With a trainer, only the iterator of its training loop does so. Without a trainer, every iterator does.
        """
        return self.trainer is None or is_held_by_training(self.trainer, holder)

    def plain_pass(self) -> Iterator[Batch]:
        """Yield all batches of the epoch without changing the position."""
        reader = copy.copy(self)
        permutation = self.order.permutation(self.epoch)
        shares = (self.order.share(permutation, batch) for batch in range(self.order.num_batches))
        with closing(reader._batches(self.epoch, shares)) as batches:  # type: ignore[type-var]
            yield from batches

    def rest_of_epoch(self) -> Iterator[Batch]:
        """Yield the remaining batches of the epoch, and advance the position.

        If no batch of the epoch is left, the next epoch begins.
        """
        if self.batches_done >= len(self):
            # `set_epoch` was not called at the end of the epoch.
            # Lightning itself never exhausts a loader with a length.
            self.epoch += 1
            self.batches_done = 0
        permutation = self.order.permutation(self.epoch)
        shares = (
            self.order.share(permutation, batch) for batch in range(self.batches_done, len(self))
        )
        with closing(self._batches(self.epoch, shares)) as batches:  # type: ignore[type-var]
            for batch in batches:
                # The position is updated before the yield, because code after the last yield would not run.
                self.batches_done += 1
                self._is_resumed = False
                yield batch


def eval_shares(
    *, num_images: int, world_size: int, rank: int, batch_size_per_rank: int
) -> list[Indices]:
    """Return the image indices of one rank's evaluation batches, without repeated images.

    Rank r reads the images r, r + world_size, ... Because no image is repeated, the numbers of images per rank differ
    by up to one. All ranks have the same number of batches, at least one. A batch may therefore have one more image
    than `batch_size_per_rank`.

    Raises:
        ValueError: There are more ranks than images.

    >>> [share.tolist() for share in eval_shares(num_images=7, world_size=2, rank=0, batch_size_per_rank=2)]
    [[0, 2], [4, 6]]
    """
    smallest_share, num_left = divmod(num_images, world_size)
    if smallest_share < 1:
        raise ValueError(
            f"`world_size` (={world_size}) must be at most the number of images to evaluate (={num_images}), because "
            "every rank needs at least one image. Use fewer ranks, or set limit_val_batches=0."
        )
    # The number of batches is equal on all ranks, because collectives in a batch, such as DDP's broadcast of BatchNorm
    # statistics, need all ranks. No batch may be empty, so there are at most as many batches as images in the smallest
    # share.
    largest_share = smallest_share + (num_left > 0)
    num_batches = min(-(-largest_share // batch_size_per_rank), smallest_share)
    return np.array_split(np.arange(rank, num_images, world_size), num_batches)
