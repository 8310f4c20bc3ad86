"""Sampler wrapper for exact resume, which skips index lists up to the resumed position."""

from __future__ import annotations

import os
import re
import zlib
from array import array
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor
from torch.utils import data
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from lightning_hybrid.data.random_streams import SeededIndex, streams_of
from lightning_hybrid.data.training_pass import TrainingPass

# Purposes of random numbers. The purpose is part of the seed.
START, ITER, ORDER, CONTENT, LOOK = range(5)
END = object()

_ORDER_FROM_EPOCH = (DistributedSampler, data.SequentialSampler)
# These samplers use the global random number generators only before their first index.
_DRAW_AT_ONCE = (
    *_ORDER_FROM_EPOCH,
    data.RandomSampler,
    data.WeightedRandomSampler,
    data.SubsetRandomSampler,
)


class SamplerTraits:
    """Properties of a loader's samplers, which determine how its data order can be restored.

    Args:
        loader: Loader with the user's samplers.
        world_size: Number of ranks that read different samples.
        rank: Index of this rank among them.

    Attributes:
        samplers: Sampler of the loader, and the samplers that it draws from.
        own_streams: Random number generators that the loader and its samplers hold.
        draws_at_once: Whether all random numbers are drawn before the first index.
        follows_from_epoch: Whether the order depends only on the epoch and the sampler's seed.
        dealt: Values that determine the order of a `DistributedSampler` for any number of ranks, or None for any other
            sampler.
    """

    def __init__(self, loader: DataLoader[Any], world_size: int, rank: int) -> None:
        sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self.samplers: list[Any] = _chain_of(sampler)
        self.own_streams: list[Any] = streams_of([loader, *self.samplers])

        image_sampler: Any = getattr(sampler, "sampler", sampler)
        draws_by_batch = type(sampler) not in (data.BatchSampler, *_DRAW_AT_ONCE)
        self.draws_at_once = type(image_sampler) in _DRAW_AT_ONCE and not draws_by_batch
        self.follows_from_epoch = type(image_sampler) in _ORDER_FROM_EPOCH and not draws_by_batch

        # Lightning distributes the order of such a sampler over any number of ranks, so that a step's images do not
        # depend on the number of ranks.
        self._is_dealt = (
            type(image_sampler) is DistributedSampler
            and not draws_by_batch
            and loader.batch_size is not None
            and (image_sampler.num_replicas, image_sampler.rank) == (world_size, rank)
        )
        self._image_sampler = image_sampler
        self._drops_last = loader.drop_last

    @property
    def dealt(self) -> tuple[Any, ...] | None:
        """Settings that determine the data order for any number of ranks, or None if there are none.

        The settings are the number of images, the seed and the options of the `DistributedSampler`. None means that the
        order depends on the number of ranks.
        """
        if not self._is_dealt:
            return None
        sampler = self._image_sampler
        return (
            len(sampler.dataset),
            sampler.seed,
            sampler.shuffle,
            sampler.drop_last,
            self._drops_last,
        )

    def seeds(self) -> list[int | None]:
        """Return the seed of each sampler, or None for samplers other than `DistributedSampler`."""
        seeds: list[int | None] = []
        for sampler in self.samplers:
            seeds.append(sampler.seed if isinstance(sampler, DistributedSampler) else None)
        return seeds

    def take_seeds(self, seeds: list[int | None]) -> None:
        """Apply the seeds of an interrupted run to samplers that use the seed of `seed_everything`."""
        seed_of_run = int(os.environ.get("PL_GLOBAL_SEED", 0))
        for sampler, seed in zip(self.samplers, seeds, strict=False):
            is_seeded_by_run = (
                isinstance(sampler, DistributedSampler) and sampler.seed == seed_of_run
            )
            if is_seeded_by_run and seed is not None:
                sampler.seed = seed

    def other_seed(self, seeds: list[int | None]) -> tuple[int, int] | None:
        """Return the (saved, current) seeds of the first sampler whose seed has changed, or None."""
        for sampler, seed in zip(self.samplers, seeds, strict=False):
            if isinstance(sampler, DistributedSampler) and seed not in (None, sampler.seed):
                return seed, sampler.seed
        return None

    def epochs(self) -> list[int | None]:
        """Return the epoch of each sampler, or None for samplers that do not store their epoch."""
        return [epoch_of(sampler) for sampler in self.samplers]

    def set_epochs(self, epochs: list[int | None], default: int) -> None:
        """Set the epoch of each sampler, replacing None with `default`."""
        for sampler, epoch in zip(self.samplers, epochs, strict=False):
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(default if epoch is None else epoch)


def epoch_of(owner: Any) -> int | None:
    """Return the epoch of an object with a `set_epoch` method, or None if it does not store its epoch."""
    if not callable(getattr(owner, "set_epoch", None)):
        return None
    epoch = getattr(owner, "epoch", getattr(owner, "_epoch", None))
    if isinstance(epoch, Tensor) and epoch.numel() == 1:
        epoch = epoch.item()
    return epoch if isinstance(epoch, int) and not isinstance(epoch, bool) else None


def _chain_of(sampler: Any) -> list[Any]:
    """Return a sampler and all samplers nested in it, including those inside Lightning's wrapper."""
    chain: list[Any] = []
    waiting = [sampler]
    while waiting:
        owner = waiting.pop(0)
        if any(owner is known_sampler for known_sampler in chain):
            continue
        chain.append(owner)
        for name, value in getattr(owner, "__dict__", {}).items():
            if isinstance(value, Sampler) or name in ("sampler", "batch_sampler"):
                waiting.append(value)
            elif name == "dataset" and hasattr(value, "_sampler"):
                waiting.append(value._sampler)
    return chain


class FollowsOrder(Protocol):
    """Interface of loaders with exact resume, as required by `IndexLists`."""

    loader: Any
    traits: SamplerTraits
    is_stream: bool
    current: TrainingPass

    def words(self, purpose: int, batch_number: int = 0) -> tuple[int, ...]:
        """Return the numbers that seed the global random number generators for a purpose."""

    def seeded_for(self, purpose: int, batch_number: int = 0) -> AbstractContextManager[None]:
        """Return a context manager that seeds the global random number generators for a purpose."""

    def compare(self, batch_number: int, checksum: int | None) -> None:
        """Raise an error if the samples before the checkpoint differ from the interrupted run's."""

    def compare_end_of_order(self) -> None:
        """Raise an error if the data order is shorter than the checkpoint's position in it."""


class IndexLists:
    """Sampler wrapper that seeds, checks and skips the index lists of the wrapped sampler.

    Index lists before the resumed position are skipped. The wrapper replaces the sampler or batch sampler in the copy
    of a loader.

    Args:
        sampler: Sampler or batch sampler of the user.
        resume: Exact resume of the loader.
    """

    def __init__(self, sampler: Any, resume: FollowsOrder) -> None:
        vars(self).update(_sampler=sampler, _resume=resume)

    def __iter__(self) -> Iterator[Any]:
        # The sampler's iterator is created here and not with the first index, as in a `DataLoader`. With workers, a
        # `DataLoader` creates two iterators and uses one of them.
        with self._resume.seeded_for(ITER):
            indices = iter(self._sampler)
        return self._after_place(indices)

    def _after_place(self, indices: Iterator[Any]) -> Iterator[Any]:
        """Yield the index lists after the resumed position.

        Earlier lists are drawn, checked and discarded.
        """
        resume = self._resume
        batch_number = 0
        checksum = 0
        while True:
            draws_nothing = resume.is_stream or (batch_number > 0 and resume.traits.draws_at_once)
            with nullcontext() if draws_nothing else resume.seeded_for(ORDER, batch_number):
                index = next(indices, END)
            if index is END:
                resume.compare_end_of_order()
                return

            words = resume.words(CONTENT, batch_number)
            batch_number += 1
            if not resume.is_stream:
                checksum = _checksum_of_index(index, checksum)
                resume.compare(batch_number, checksum)
                if batch_number <= resume.current.place.batches:
                    resume.current.checksum = checksum
                    continue
                resume.current.pending_checksums.append(checksum)
            yield SeededIndex(index, words) if resume.loader.num_workers else index

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_sampler", "_resume"):
            raise AttributeError(name)  # `copy` reads attributes before they exist.
        return getattr(self._sampler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._sampler, name, value)


def _checksum_of_index(index: Any, before: int) -> int:
    """Return the checksum `before` of earlier index lists, updated with the list `index`."""
    numbers = index if isinstance(index, list | tuple) else [index]
    try:
        return zlib.crc32(array("q", numbers), before)
    except (TypeError, OverflowError):
        # Indices may have other types. The default `repr` of an object contains its address, which is removed because
        # it differs between processes.
        text = re.sub(r" at 0x[0-9a-f]+", "", repr(index))
        return zlib.crc32(text.encode(), before)


def checksum_of_index_lists(index_lists: Iterable[Any]) -> int:
    """Return the checksum that a loader with exact resume computes for index lists."""
    checksum = 0
    for index in index_lists:
        checksum = _checksum_of_index(index, checksum)
    return checksum


def checksum_of_batch(batch: Any) -> int:
    """Return a checksum of the values in a batch.

    The checksum covers only the first 64 values of each tensor, because computing it for all values would take too
    long.
    """
    values: list[Any] = []
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            values.append(leaf.flatten()[:64].tolist())
        elif isinstance(leaf, str | int | float):
            values.append(leaf)
    return zlib.crc32(repr(values).encode())
