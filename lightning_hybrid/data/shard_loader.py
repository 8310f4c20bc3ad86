"""Training loaders for elastic runs, whose data shards do not depend on the number of hosts.

Each rank reads some shards of a step. Shard s of step n is batch n of rank s in a run with `max_hosts` x `devices`
ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_hybrid.data.exact_loader import exact
from lightning_hybrid.data.order import ResumableLoader
from lightning_hybrid.data.place import Place, PlaceIterator
from lightning_hybrid.data.random_streams import SeededStreams
from lightning_hybrid.data.sharded_place import ShardedPlace

_START = 0  # number that seeds the global generators while the loader of a shard starts


def shards_of(rank: int, world_size: int, num_shards: int) -> list[int]:
    """Return the consecutive data shards that a rank reads.

    Later ranks may have one shard less.

    >>> [shards_of(rank, 3, 8) for rank in range(3)]
    [[0, 1, 2], [3, 4, 5], [6, 7]]
    """
    return [int(shard) for shard in np.array_split(np.arange(num_shards), world_size)[rank]]


class ShardLoader:
    """Training loader of an elastic run that reads the batches of all data shards of a rank.

    Lightning receives the batch of the rank's first shard, and `batch_of` returns the batch of any shard. All other
    attributes are those of the user's loader. Only the training loop's own iterator changes the position.

    Args:
        loader: Loader of `lightning_hybrid.data`, or `DataLoader` with a `DistributedSampler`.
        reader: Reader with the seed of the run. It returns the position at which iterations of a `DataLoader` begin.
        prepare: Function that wraps the loader of a shard in a prefetcher.

    Raises:
        ValueError: The loader's order does not depend only on (seed, epoch, shard).
    """

    def __init__(self, loader: Any, reader: Any, prepare: Callable[[Any], Any]) -> None:
        source: _Source
        if isinstance(loader, ResumableLoader):
            source = _SourceOfData(loader, reader)
        elif can_be_dealt(loader):
            source = _SourceOfUser(loader, reader)
        else:
            raise ValueError(
                f"The order of the training loader ({_name_of(loader)}) must depend only on seed and epoch, because "
                "an elastic run reassigns its batches when hosts join or fail. Use a loader of "
                "`lightning_hybrid.data`, or a `DataLoader` without a custom batch sampler, with a "
                "`DistributedSampler` or the sampler that Lightning sets."
            )
        self._loader = loader
        self._source = source
        self._prepare = prepare
        self.shards: Sequence[int] = (0,)  # shards of this rank
        self.first = 0  # shard whose batch Lightning has received
        self._streams: dict[int, Iterator[Any]] = {}
        self._batches: dict[int, Any] = {}  # batches of the current step, by shard
        self._number = 0  # index of the current step in its epoch
        self._seeded = SeededStreams()

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_source", "__getstate__", "__setstate__"):
            raise AttributeError(name)  # `copy` reads attributes before they exist.
        if name == "exact_resume" and self._source.exact_resume is not None:
            return self._source.exact_resume
        return getattr(self._loader, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardLoader:
        copied = copy.copy(self)  # a copy has no iterators, like a copy of torch's loaders
        copied._streams = {}
        copied._batches = {}
        return copied

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        return PlaceIterator(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state, including the current training position in the epoch."""
        return self._source.state_dict(self.shards[0])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at the position in `state`."""
        self._source.load_state_dict(state)

    # ---- iterators -------------------------------------------------------------------------------------------------

    def is_read_by_training(self, holder: Iterator[Any]) -> bool:
        """Return whether the training loop holds an iterator."""
        return self._source.is_read_by_training(holder)

    def plain_pass(self) -> Iterator[Any]:
        """Yield all batches of this rank's first shard, without changing the position."""
        yield from self._prepare(self._source.of_shard(self.shards[0], 0))

    def rest_of_epoch(self) -> Iterator[Any]:
        """Yield the remaining batches of this rank's first shard, and advance the position."""
        self._drop(list(self._streams))
        for number in range(self._source.begin(), len(self)):
            self._number = number
            self._batches.clear()
            self.first = self.shards[0]
            batch = self.batch_of(self.first)
            self._source.note_batches_done(number + 1)
            yield batch

    def batch_of(self, shard: int) -> Any:
        """Return the batch of a data shard in the current step."""
        if shard in self._batches:
            return self._batches[shard]
        if shard in self._streams:
            self._batches[shard] = next(self._streams[shard])
            return self._batches[shard]
        # A `DataLoader` draws random numbers when it starts. Hosts must draw the same numbers, although they start the
        # loader of a shard in different steps.
        with self._seeded(_START):
            self._streams[shard] = iter(self._prepare(self._source.of_shard(shard, self._number)))
            self._batches[shard] = next(self._streams[shard])
        return self._batches[shard]

    def use(self, shards: Sequence[int]) -> None:
        """Set the data shards that this rank reads from the current step on."""
        self.shards = shards
        self._drop([shard for shard in self._streams if shard not in shards])

    def _drop(self, shards: Sequence[int]) -> None:
        for shard in shards:
            # When an iterator is deleted, its threads or the workers of its `DataLoader` exit.
            del self._streams[shard]
            self._batches.pop(shard, None)

    def description(self) -> str:
        """Return a description of the settings that determine which samples each data shard contains.

        The settings must be equal on all hosts.
        """
        return self._source.description()


class _Source:
    """Base class for creating a loader for each data shard and storing the training position."""

    exact_resume: ShardedPlace | None = None

    def of_shard(self, shard: int, batches_done: int) -> Any:
        raise NotImplementedError

    def begin(self) -> int:
        """Begin an iteration of the training loop, and return the number of batches already finished."""
        raise NotImplementedError

    def note_batches_done(self, batches_done: int) -> None:
        raise NotImplementedError

    def is_read_by_training(self, holder: Iterator[Any]) -> bool:
        raise NotImplementedError

    def state_dict(self, shard: int) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def description(self) -> str:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


class _SourceOfData(_Source):
    """Creator of shard loaders from a loader of `lightning_hybrid.data`, which stores its own position."""

    def __init__(self, loader: ResumableLoader, reader: Any) -> None:
        loader.order = replace(
            loader.order, world_size=reader.world_size, rank=0, accumulate_grad_batches=1
        )
        self._loader = loader

    def of_shard(self, shard: int, batches_done: int) -> Any:
        loader = copy.copy(self._loader)
        loader.order = replace(self._loader.order, rank=shard)
        loader.batches_done = batches_done
        loader._trainer = None
        return loader

    def begin(self) -> int:
        loader = self._loader
        if loader.batches_done >= len(loader):
            loader.epoch += 1
            loader.batches_done = 0
        return loader.batches_done

    def note_batches_done(self, batches_done: int) -> None:
        self._loader.batches_done = batches_done
        self._loader._is_resumed = False

    def is_read_by_training(self, holder: Iterator[Any]) -> bool:
        return self._loader.is_read_by_training(holder)

    def state_dict(self, shard: int) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)

    def description(self) -> str:
        order = self._loader.order
        return f"{order.num_images} images, seed {order.seed}, {order.global_batch_size} images per step"

    def __len__(self) -> int:
        return len(self._loader)


class _SourceOfUser(_Source):
    """Creator of shard loaders from a user's `DataLoader`, whose position is stored separately."""

    def __init__(self, loader: DataLoader[Any], reader: Any) -> None:
        self._loader = loader
        self._reader = reader
        first = _loader_of_shard(loader, 0, reader.world_size)
        self.exact_resume = place = ShardedPlace(first, reader)
        self._place = place

    def of_shard(self, shard: int, batches_done: int) -> Any:
        place = Place(self._place.current.place.epoch, 0, batches_done)
        reader = _ReaderOfShard(shard, self._reader.world_size, self._reader.seed, place)
        return exact(_loader_of_shard(self._loader, shard, self._reader.world_size), reader)

    def begin(self) -> int:
        return self._place.begin().batches

    def note_batches_done(self, batches_done: int) -> None:
        self._place.current.batches_done = batches_done

    def is_read_by_training(self, holder: Iterator[Any]) -> bool:
        return bool(self._reader.is_reading(holder))

    def state_dict(self, shard: int) -> dict[str, Any]:
        return self._place.state_after(
            _loader_of_shard(self._loader, shard, self._reader.world_size)
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._place.load_state_dict(state)

    def description(self) -> str:
        sampler = _sampler_of(self._loader)
        order = f"shuffled with seed {sampler.seed}" if sampler.shuffle else "not shuffled"
        cut = f"drop_last={self._loader.drop_last}"
        return f"{len(sampler.dataset)} images {order}, batches of {self._loader.batch_size}, {cut}"

    def __len__(self) -> int:
        length = self._place.length
        assert length is not None  # loaders with a `DistributedSampler` have a length
        return length


@dataclass
class _ReaderOfShard:
    """Implementation of `Reader` for the loader of one data shard."""

    rank: int
    world_size: int
    seed: int
    place: Place
    accumulate_grad_batches: int = 1
    sets_epochs: bool = True  # because Lightning does not know the sampler of a shard
    reads_to_end: bool = False  # because the loader is read only to its length

    def is_reading(self, holder: Iterator[Any]) -> bool:
        return True

    def is_within_training(self) -> bool:
        return True

    def place_of(self, resume: Any) -> Place:
        return self.place


def can_be_dealt(loader: Any) -> bool:
    """Return whether the batches of a loader can be reassigned to other ranks.

    They can be reassigned if the order of the loader depends only on the seed, the epoch and the shard.
    """
    if not isinstance(loader, DataLoader) or type(_sampler_of(loader)) is not DistributedSampler:
        return False
    return loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler


def _loader_of_shard(loader: DataLoader[Any], shard: int, num_shards: int) -> Any:
    copied = copy.copy(loader)
    dealt = _sampler_of(loader)
    sampler: Any = DistributedSampler(
        dealt.dataset,
        num_replicas=num_shards,
        rank=shard,
        shuffle=dealt.shuffle,
        seed=dealt.seed,
        drop_last=dealt.drop_last,
    )
    # `DataLoader.__setattr__` does not allow setting this attribute.
    object.__setattr__(copied, "sampler", sampler)
    of_batches: Any = loader.batch_sampler
    if of_batches is not None:
        batch_sampler = BatchSampler(sampler, of_batches.batch_size, of_batches.drop_last)
        object.__setattr__(copied, "batch_sampler", batch_sampler)
    return copied


def _sampler_of(loader: Any) -> Any:
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def _name_of(loader: Any) -> str:
    name = type(loader).__name__
    if isinstance(loader, DataLoader):
        sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        inner = getattr(sampler, "sampler", sampler)
        of_batches = type(loader.batch_sampler) not in (BatchSampler, type(None))
        name += f" with {type(sampler if of_batches else inner).__name__}"
    return name
