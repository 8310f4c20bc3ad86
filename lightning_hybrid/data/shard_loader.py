"""The training loader of an elastic run: a step has the same shards whatever hosts there are, and a rank some of them.

shard s of step n       what rank s of `max_hosts` x `devices` ranks would read as its batch n
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_hybrid.data.batch_counters import uncount_cut_epoch
from lightning_hybrid.data.exact_loader import exact
from lightning_hybrid.data.order import Batch, EpochOrder, Indices, ResumableLoader
from lightning_hybrid.data.place import Place

_STATE = ("state_dict", "load_state_dict")


def shards_of(rank: int, world_size: int, num_shards: int) -> list[int]:
    """Return the shards of a rank: consecutive, and on all ranks as many, or one less on the later ones.

    >>> [shards_of(rank, 3, 8) for rank in range(3)]
    [[0, 1, 2], [3, 4, 5], [6, 7]]
    """
    return [int(shard) for shard in np.array_split(np.arange(num_shards), world_size)[rank]]


class ShardLoader:
    """Gives Lightning the batch of a rank's first shard, and the strategy those of all its shards.

    Everything but iteration is the user's loader's.

    Args:
        loader: one of `lightning_hybrid.data`, or a `DataLoader` that resumes exactly, under a `DistributedSampler`.
        num_shards: of a step.
        seed: of the run.
        prepare: puts what moves batches to the device around the loader of a shard.

    Raises:
        ValueError: the loader's order is not a function of (seed, epoch, shard).
    """

    def __init__(self, loader: Any, num_shards: int, seed: int, prepare: Callable[[Any], Any]) -> None:
        if isinstance(loader, DataLoader) and type(_sampler_of(loader)) is DistributedSampler:
            loader = _Dealt(loader, num_shards, seed)
        if not isinstance(loader, ResumableLoader):
            raise ValueError(
                f"`elastic` cannot deal the batches of the training loader (={type(loader).__name__}) to other ranks: "
                "its order must follow from seed and epoch. Give a loader of `lightning_hybrid.data`, or a "
                "`DataLoader` whose sampler is left to Lightning, or is a `DistributedSampler`."
            )
        loader.order = replace(loader.order, world_size=num_shards, rank=0, accumulate_grad_batches=1)
        self._loader, self._prepare = loader, prepare
        self.shards: Sequence[int] = (0,)  # of this rank
        self.first = 0  # shard of the batch that Lightning has
        self._streams: dict[int, Iterator[Any]] = {}
        self._batches: dict[int, Any] = {}  # of the step, by shard
        self._number = 0  # of the step in its epoch

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "__getstate__", "__setstate__") or (name in _STATE and isinstance(self._loader, _Dealt)):
            raise AttributeError(name)  # copying asks before there is one; Lightning keeps no state of a `DataLoader`
        return getattr(self._loader, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardLoader:
        made = copy.copy(self)  # as loaders of torch's: without what is being read
        made._streams, made._batches = {}, {}
        return made

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        loader = self._loader
        self._drop(list(self._streams))
        if loader.batches_done >= len(loader):
            loader.epoch, loader.batches_done = loader.epoch + 1, 0
        for self._number in range(loader.batches_done, len(loader)):
            self._batches.clear()
            self.first = self.shards[0]
            first = self.batch_of(self.first)
            loader.batches_done, loader._is_resumed = self._number + 1, False
            yield first

    def batch_of(self, shard: int) -> Any:
        """Return this step's batch of a shard."""
        if shard not in self._batches:
            if shard not in self._streams:
                self._streams[shard] = iter(self._prepare(self._of_shard(shard)))
            self._batches[shard] = next(self._streams[shard])
        return self._batches[shard]

    def use(self, shards: Sequence[int]) -> None:
        """Let this rank have these shards from now on, of the present step too."""
        self.shards = shards
        self._drop([shard for shard in self._streams if shard not in shards])

    def _drop(self, shards: Sequence[int]) -> None:
        for shard in shards:
            del self._streams[shard]  # a generator ends its threads, and a `DataLoader`'s iterator its workers
            self._batches.pop(shard, None)

    def _of_shard(self, shard: int) -> Any:
        loader = self._loader
        if isinstance(loader, _Dealt):
            return loader.of_shard(shard, Place(loader.epoch, 0, self._number))
        one = copy.copy(loader)
        one.order = replace(loader.order, rank=shard)
        one.batches_done, one._trainer = self._number, None
        return one


class _Dealt(ResumableLoader):
    # The place in a user's `DataLoader`, by the trainer's counters.

    def __init__(self, loader: DataLoader[Any], num_shards: int, seed: int) -> None:
        sampler = _sampler_of(loader)
        self._source, self._num_shards, self._seed = loader, num_shards, seed
        self._length = len(self.of_shard(0, Place(0)))
        num_images, batch = len(sampler.dataset), loader.batch_size or 1
        # Only its numbers of shards and batches count: the sampler itself orders.
        super().__init__(EpochOrder(num_images=num_images, global_batch_size=num_shards, seed=sampler.seed))
        self.batch_size = batch

    def of_shard(self, shard: int, place: Place) -> Any:
        """Return the loader of a shard from a place on, whose random numbers follow from shard and place."""
        one, sampler = copy.copy(self._source), _sampler_of(self._source)
        own: Any = DistributedSampler(
            sampler.dataset,
            num_replicas=self._num_shards,
            rank=shard,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
            drop_last=sampler.drop_last,
        )
        object.__setattr__(one, "sampler", own)  # `DataLoader` refuses to set it
        of_batches: Any = one.batch_sampler
        if of_batches is not None:
            batches = BatchSampler(own, of_batches.batch_size, of_batches.drop_last)
            object.__setattr__(one, "batch_sampler", batches)
        return exact(one, _At(shard, self._num_shards, self._seed, place))

    def __len__(self) -> int:
        if self.trainer is not None:
            uncount_cut_epoch(self.trainer)
        return self._length

    def _batches(self, epoch: int, shares: Iterator[Indices]) -> Iterator[Batch]:
        raise NotImplementedError  # streams of shards are read instead


@dataclass
class _At:
    # Who reads a shard, and from where on: for `exact`.
    rank: int
    world_size: int
    seed: int
    place: Place
    accumulate_grad_batches: int = 1
    sets_epochs: bool = True  # each shard has a sampler that Lightning does not see

    def is_reading(self, holder: Iterator[Any]) -> bool:
        return True

    def is_within_training(self) -> bool:
        return True

    def place_of(self, resume: Any) -> Place:
        return self.place


def _sampler_of(loader: Any) -> Any:
    return getattr(loader.batch_sampler, "sampler", loader.sampler)
