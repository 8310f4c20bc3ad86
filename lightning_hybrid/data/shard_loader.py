"""Training loaders of an elastic run: a step has the same shards on any number of hosts, and a rank has some of them.

shard s of step n       batch n of rank s of `max_hosts` x `devices` ranks
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

_START = 0  # word that seeds the global streams while the loader of a shard starts


def shards_of(rank: int, world_size: int, num_shards: int) -> list[int]:
    """Return the shards of a rank: consecutive, and on all ranks as many, or one less on the later ones.

    >>> [shards_of(rank, 3, 8) for rank in range(3)]
    [[0, 1, 2], [3, 4, 5], [6, 7]]
    """
    return [int(shard) for shard in np.array_split(np.arange(num_shards), world_size)[rank]]


class ShardLoader:
    """Loader that gives Lightning the batch of a rank's first shard, and the strategy those of all its shards.

    Everything but iteration is the user's loader's. Only the training loop's own iterator moves the place.

    Args:
        loader: A loader of `lightning_hybrid.data`, or a `DataLoader` under a `DistributedSampler`.
        reader: The run's: it says where the iterations of a `DataLoader` begin, and has the seed of the run.
        prepare: Puts what moves batches to the device around the loader of a shard.

    Raises:
        ValueError: The loader's order is not a function of (seed, epoch, shard).
    """

    def __init__(self, loader: Any, reader: Any, prepare: Callable[[Any], Any]) -> None:
        source: _Source
        if isinstance(loader, ResumableLoader):
            source = _SourceOfData(loader, reader)
        elif can_be_dealt(loader):
            source = _SourceOfUser(loader, reader)
        else:
            raise ValueError(
                f"An elastic run cannot deal the batches of the training loader (={_name_of(loader)}) to other ranks: "
                "its order must follow from seed and epoch. Give a loader of `lightning_hybrid.data`, or a "
                "`DataLoader` without a batch sampler of its own, whose sampler is left to Lightning, or is a "
                "`DistributedSampler`."
            )
        self._loader = loader
        self._source = source
        self._prepare = prepare
        self.shards: Sequence[int] = (0,)  # of this rank
        self.first = 0  # shard of the batch that Lightning has
        self._streams: dict[int, Iterator[Any]] = {}
        self._batches: dict[int, Any] = {}  # of the step, by shard
        self._number = 0  # of the step in its epoch
        self._seeded = SeededStreams()

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_source", "__getstate__", "__setstate__"):
            raise AttributeError(name)  # copying asks before there is one
        if name == "exact_resume" and self._source.exact_resume is not None:
            return self._source.exact_resume
        return getattr(self._loader, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardLoader:
        copied = copy.copy(self)  # as loaders of torch's: without what is being read
        copied._streams = {}
        copied._batches = {}
        return copied

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        return PlaceIterator(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the place of training in the epoch."""
        return self._source.state_dict(self.shards[0])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the place of a state."""
        self._source.load_state_dict(state)

    # ---- iterators -------------------------------------------------------------------------------------------------

    def is_read_by_training(self, holder: Iterator[Any]) -> bool:
        """Return whether the training loop holds this iterator."""
        return self._source.is_read_by_training(holder)

    def plain_pass(self) -> Iterator[Any]:
        """Begin an iteration over the batches of this rank's first shard, which moves nothing."""
        yield from self._prepare(self._source.of_shard(self.shards[0], 0))

    def rest_of_epoch(self) -> Iterator[Any]:
        """Yield the batches of the first shard from the place on, and move it."""
        self._drop(list(self._streams))
        for number in range(self._source.begin(), len(self)):
            self._number = number
            self._batches.clear()
            self.first = self.shards[0]
            batch = self.batch_of(self.first)
            self._source.note_batches_done(number + 1)
            yield batch

    def batch_of(self, shard: int) -> Any:
        """Return this step's batch of a shard."""
        if shard in self._batches:
            return self._batches[shard]
        if shard in self._streams:
            self._batches[shard] = next(self._streams[shard])
            return self._batches[shard]
        # A `DataLoader` draws as it starts. Hosts start the loaders of shards at different steps, and draw the same.
        with self._seeded(_START):
            self._streams[shard] = iter(self._prepare(self._source.of_shard(shard, self._number)))
            self._batches[shard] = next(self._streams[shard])
        return self._batches[shard]

    def use(self, shards: Sequence[int]) -> None:
        """Let this rank have these shards from now on, of the present step too."""
        self.shards = shards
        self._drop([shard for shard in self._streams if shard not in shards])

    def _drop(self, shards: Sequence[int]) -> None:
        for shard in shards:
            del self._streams[
                shard
            ]  # a generator ends its threads, and a `DataLoader`'s iterator its workers
            self._batches.pop(shard, None)

    def description(self) -> str:
        """Return what decides on the images of shards, in words: the same on all hosts."""
        return self._source.description()


class _Source:
    # The loaders of shards, and the place of training in the user's loader.

    exact_resume: ShardedPlace | None = None

    def of_shard(self, shard: int, batches_done: int) -> Any:
        raise NotImplementedError

    def begin(self) -> int:
        # Batches of the epoch that are done as training begins to iterate.
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
    # A loader of `lightning_hybrid.data`, which has a place of its own.

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
        return (
            f"{order.num_images} images, seed {order.seed}, {order.global_batch_size} images a step"
        )

    def __len__(self) -> int:
        return len(self._loader)


class _SourceOfUser(_Source):
    # A `DataLoader`, whose place is that of a loader that resumes exactly.

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
        order = f"shuffled with seed {sampler.seed}" if sampler.shuffle else "in their own order"
        cut = f"drop_last={self._loader.drop_last}"
        return f"{len(sampler.dataset)} images {order}, batches of {self._loader.batch_size}, {cut}"

    def __len__(self) -> int:
        length = self._place.length
        assert length is not None  # as `DistributedSampler` has one
        return length


@dataclass
class _ReaderOfShard:
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


def can_be_dealt(loader: Any) -> bool:
    """Return whether other ranks can read the batches of this loader: its order follows from seed, epoch and shard."""
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
    object.__setattr__(copied, "sampler", sampler)  # `DataLoader` refuses to set it
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
