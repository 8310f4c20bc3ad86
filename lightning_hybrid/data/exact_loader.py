"""A user's own `DataLoader` with which a resumed run goes on: the images that were left, and their random numbers.

    index list n     is drawn from the user's sampler; a resumed run draws those before it again, and drops them
    global streams   are seeded by (seed, epoch, cycle, n), for content by the rank too, in the worker that reads it
    own streams      of samplers are saved as they were when the iteration began
    checksum         of the index lists so far: an order that does not come again is refused, on any rank

A cycle is an iteration within an epoch: shorter loaders of a `CombinedLoader` have several.
"""

from __future__ import annotations

import copy
import pickle
import zlib
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import data
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_hybrid.data.random_streams import (
    SeededIndex,
    SeededStreams,
    restore_stream,
    state_of_stream,
    streams_of,
)
from lightning_hybrid.lightning_names import lightning_function

_START, _ITER, _ORDER, _CONTENT = range(4)  # what random numbers are for
# What they draw from global streams, they draw before their first index.
_DRAW_AT_ONCE = (
    *(data.RandomSampler, data.SequentialSampler, DistributedSampler),
    *(data.WeightedRandomSampler, data.SubsetRandomSampler),
)
_END = object()


class NotExactError(RuntimeError):
    """The rest of an epoch cannot be that of the run before: some images would come again, and others never."""


class Place(NamedTuple):
    """Where an iteration begins: after `batches` of a cycle of an epoch."""

    epoch: int
    cycle: int = 0
    batches: int = 0


class Reader(Protocol):
    """Who reads: data rank, of how many, with which seed, and how many batches make a step."""

    rank: int
    world_size: int
    seed: int
    accumulate_grad_batches: int

    def place_of(self, loader: ExactLoader) -> Place:
        """Return where the iteration of `loader` that begins now is."""


def can_be_exact(loader: object) -> bool:
    """Return whether `exact` is for this loader: torch's, without a state of its own that would be restored.

    torchdata's state is lost under a distributed sampler, and a batch of a stream with it: it is not used.
    """
    is_torchdata = any(kind.__module__.startswith("torchdata.") for kind in type(loader).__mro__)
    return isinstance(loader, DataLoader) and (is_torchdata or not hasattr(loader, "load_state_dict"))


def exact(loader: DataLoader[Any], reader: Reader) -> ExactLoader:
    """Return a copy of `loader`, of its class, that resumes. The user's own object stays as it is."""
    made: Any = copy.copy(loader)
    made.__class__ = type(type(loader).__name__, (ExactLoader, type(loader)), {"__module__": __name__})
    made.begin(reader)
    return made  # type: ignore[no-any-return]


class ExactLoader(DataLoader[Any]):
    """What `exact` adds to the class of a loader; its state is that after the last batch that it gave."""

    def begin(self, reader: Reader) -> None:
        """Set up the copy."""
        self.reader, self._iterator, self.place = reader, None, Place(-1)
        self.loaded: dict[str, Any] | None = None  # to go on from
        self.has_begun = self._was_over = False
        self.is_stream = isinstance(self.dataset, IterableDataset)
        name = "sampler" if self.batch_sampler is None else "batch_sampler"
        sampler = getattr(self, name)
        object.__setattr__(self, name, _Indices(sampler, self))  # `DataLoader` refuses to set it
        inner: Any = getattr(sampler, "sampler", sampler)
        in_wrapper = getattr(getattr(inner, "dataset", None), "_sampler", None)  # Lightning's, of other samplers
        self._own_streams = list(streams_of(self, sampler, inner, in_wrapper).values())
        self._draws_at_once = type(inner) in _DRAW_AT_ONCE and type(sampler) in (data.BatchSampler, *_DRAW_AT_ONCE)
        self.follows_from_epoch = self._draws_at_once and type(inner) in (DistributedSampler, data.SequentialSampler)
        # The order of which Lightning deals each step's images to any number of ranks.
        is_dealt = self.follows_from_epoch and type(inner) is DistributedSampler and self.batch_size is not None
        self._dealt = (len(inner.dataset), inner.seed, inner.shuffle, self.drop_last) if is_dealt else None
        self._seeded = SeededStreams()
        self._batches = self._total = self._checksum = 0  # given: of the cycle, of the epoch
        self._is_followed = True  # it gives one batch for each index list
        self._checksums: deque[int] = deque()  # of index lists whose batches are yet to be given
        self._before: list[Any] = []  # own streams when the iteration began
        self._kept: dict[int, Any] = {}  # of a stream: states by number of batches

    # ---- state -----------------------------------------------------------------------------------------------------

    @property
    def _keeper(self) -> Any:
        # Of the place in a stream: torchdata's loader, or the data set.
        owners = (super(), self.dataset if self.num_workers == 0 else None) if self.is_stream else ()
        return next((one for one in owners if hasattr(one, "load_state_dict")), None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch; `own` is what ranks do not share."""
        own: dict[str, Any] = {"seed": self.reader.seed, "checksum": self._checksum if self._is_followed else None}
        if self._own_streams:
            own |= {"streams": self._before, "streams_now": [state_of_stream(one) for one in self._own_streams]}
        if self._keeper is not None:
            own["kept"] = dict(self._kept)
        return {
            **self.place._asdict(),
            "batches": self._batches,
            "total": self._total,
            "world_size": self.reader.world_size,
            "accumulate_grad_batches": self.reader.accumulate_grad_batches,
            "batch_size": self.batch_size,
            "num_workers": self.num_workers,
            "dealt": self._dealt,
            "own": own,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state in which `of_ranks` has `own` by rank. torchdata's, as `ddp` saves it, is not used."""
        if "of_ranks" in state_dict:
            of_ranks, reader = state_dict["of_ranks"], self.reader
            is_same_world = state_dict["world_size"] == reader.world_size
            self.loaded = {**state_dict, "own": of_ranks.get(reader.rank) if is_same_world else None}
            reader.seed = (self.loaded["own"] or next(iter(of_ranks.values())))["seed"]

    @property
    def caveat(self) -> str:
        """What cannot be exact, or has a cost; empty: nothing."""
        if self.num_workers and not self.in_order:
            return "`in_order` (=False) lets its workers decide on the order: it cannot be resumed in mid-epoch"
        if not self._is_followed:
            return "it does not give one batch for each index list of its sampler: it cannot be resumed in mid-epoch"
        if self.is_stream and self._keeper is None:
            return (
                "its data set is a stream whose state is out of reach: a resumed run reads the batches before the "
                "checkpoint again and drops them, and an order that is not a function of the epoch does not come "
                "again. Give the data set `state_dict` and `load_state_dict` and the loader num_workers=0, or take "
                "torchdata's StatefulDataLoader"
            )
        own = ", ".join(f"`{name}`" for name in streams_of(self.dataset))
        return f"random numbers that its data set draws from {own} do not come again" if own else ""

    # ---- iteration -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Any:
        return _Run(self)

    def _seeded_for(self, purpose: int, number: int = 0) -> AbstractContextManager[None]:
        return self._seeded(*self._words(purpose, number))

    def _words(self, purpose: int, number: int) -> tuple[int, ...]:
        rank = (self.reader.rank,) if purpose == _CONTENT else ()
        return self.reader.seed % 2**64, self.place.epoch, self.place.cycle, number, purpose, *rank

    def start(self) -> Iterator[Any]:
        """Begin an iteration where the reader says."""
        place = self.reader.place_of(self)
        if place.cycle and not self.has_begun and not self._was_over:
            self._was_over = True  # Lightning asks again, and remembers that this loader has ended once
            return iter(())
        state, self.loaded = self.loaded or {}, None
        goes_on_here = bool(state) and place[:2] == (state["epoch"], state["cycle"])
        if place.batches:
            self._refuse_other(state, place, goes_on_here)
        is_first, self.has_begun = not (self.has_begun or state), True
        own, num_batches = state.get("own") or {}, None if self.is_stream else length_of(self)
        is_over = num_batches is not None and place.batches >= num_batches
        streams = own.get("streams" if goes_on_here and not is_over else "streams_now", [])
        for stream, saved in zip(self._own_streams, streams, strict=False):  # of a stock file: none
            restore_stream(stream, saved)
        self.place, self._batches, self._total = place, place.batches, place.batches
        self._checksum, self._checksums, self._kept = 0, deque(), {}
        self._is_followed = True
        if is_over:  # a sampler that is drawn to its end again may draw once more than it did
            return iter(())
        self._expected = (state["batches"], own.get("checksum")) if goes_on_here and own else None
        self._before = [state_of_stream(one) for one in self._own_streams]
        lightning_function("fabric.utilities.data._set_sampler_epoch")(self, place.epoch)
        kept = own.get("kept", {}) if goes_on_here else {}
        num_read = max((number for number in kept if number <= place.batches), default=0)
        if num_read:
            self._keeper.load_state_dict(kept[num_read])
        generator, self.generator = self.generator, None
        try:
            with self._seeded_for(_START):
                batches: Iterator[Any] = super().__iter__()
        finally:
            self.generator = generator
        if is_first or not self.persistent_workers:
            # What a `DataLoader` draws to seed its workers: other numbers of the run stay those of `ddp`.
            torch.empty((), dtype=torch.int64).random_(generator=generator)
        if self.is_stream:
            self._batches = num_read
            while self._batches < place.batches:
                self.read(batches)
        return batches

    def read(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, and count it."""
        with nullcontext() if self.num_workers else self._seeded_for(_CONTENT, self._batches):
            batch = next(batches)
        self._batches += 1
        self._total += self._batches > self.place.batches
        if self._keeper is not None:
            self._kept[self._batches] = copy.deepcopy(self._keeper.state_dict())
            self._kept.pop(self._batches - self.reader.accumulate_grad_batches - 2, None)
        elif self.is_stream:
            self._checksum = _checksum_of_batch(batch)
            self._compare(self._batches, self._checksum)
        elif self._is_followed:
            most = 1 + self.num_workers * (self.prefetch_factor or 0)
            self._is_followed = 1 <= len(self._checksums) <= most
            if self._is_followed:
                self._checksum = self._checksums.popleft()
            elif self.place.batches:
                raise NotExactError(f"{_name(self)} cannot be resumed: {self.caveat}. {_CURE}")
        return batch

    def indices(self, sampler: Any) -> Iterator[Any]:
        """Iterate over what `sampler` gives, from the place on."""
        with self._seeded_for(_ITER):  # now: a `DataLoader` with workers makes two of these, and asks one
            indices = iter(sampler)
        return self._rest_of(indices)

    def _rest_of(self, indices: Iterator[Any]) -> Iterator[Any]:
        number, checksum = 0, 0
        while True:
            is_drawn = self.is_stream or (number > 0 and self._draws_at_once)
            with nullcontext() if is_drawn else self._seeded_for(_ORDER, number):
                index = next(indices, _END)
            if index is _END:
                if self._expected is not None and number < self._expected[0]:
                    self._compare(self._expected[0], None)
                return
            words, number = self._words(_CONTENT, number), number + 1
            if not self.is_stream:
                checksum = _checksum_of_index(index, checksum)
                self._compare(number, checksum)
                if number <= self.place.batches:
                    self._checksum = checksum
                    continue
                self._checksums.append(checksum)
            yield SeededIndex(index, words) if self.num_workers else index

    def _compare(self, number: int, checksum: int | None) -> None:
        if self._expected is not None and number == self._expected[0]:
            (_, expected), self._expected = self._expected, None
            if checksum != expected:
                what = "data set does not give the batches" if self.is_stream else "sampler does not give the indices"
                raise NotExactError(
                    f"{_name(self)} cannot be resumed in mid-epoch: its {what} that it gave before the checkpoint, as "
                    "it draws from streams that it makes itself, counts its iterations, or is another one. Let its "
                    f"order follow from `set_epoch`, from a generator that it holds, or from global streams. {_CURE}"
                )

    def _refuse_other(self, state: Mapping[str, Any], place: Place, goes_on_here: bool) -> None:
        """Check that the batches from `place` on are those that were left.

        Raises:
            NotExactError: names what differs.
        """
        name, reader = _name(self), self.reader
        if self.num_workers and not self.in_order:
            raise NotExactError(f"{name} cannot be resumed: {self.caveat}. Set in_order=True. {_CURE}")
        if not state:
            return  # of `ddp`: what is known is said
        now = {"world_size": reader.world_size, "batch_size": self.batch_size}
        if self.is_stream:
            now["num_workers"] = self.num_workers
        differs = [key for key, value in now.items() if value != state[key]]
        if differs and not (self._dealt is not None and self._dealt == state["dealt"] and place.cycle == 0):
            key = differs[0]
            raise NotExactError(
                f"{name}: `{key}` (={now[key]}) must be that of the checkpoint (={state[key]}) in mid-epoch, as its "
                f"order is not one that can be dealt otherwise. Set {key}={state[key]}. {_CURE}"
            )
        before, images = (
            size * world * accumulate
            for size, world, accumulate in (
                (state["batch_size"], state["world_size"], state["accumulate_grad_batches"]),
                (self.batch_size, reader.world_size, reader.accumulate_grad_batches),
            )
        ) if differs else (0, 0)
        if before != images:
            fits = before / (reader.world_size * reader.accumulate_grad_batches)
            raise NotExactError(
                f"{name}: `batch_size` (={self.batch_size}) on {reader.world_size} ranks, "
                f"{reader.accumulate_grad_batches} batches a step, must give the {before} images a step of the "
                f"checkpoint in mid-epoch. Set batch_size={fits:g}. {_CURE}"
            )
        is_known = self.follows_from_epoch or state["own"] is not None
        if not differs and (not is_known or (self._own_streams and not goes_on_here)):
            raise NotExactError(
                f"{name} cannot be resumed in mid-epoch: the checkpoint, saved by one rank that an error ended or "
                f"within a step that is made again, lacks the state of its sampler. Resume from another one. {_CURE}"
            )


class _Run(Iterator[Any]):
    # Begins at the first batch: Lightning makes iterators before it knows the epoch.

    def __init__(self, loader: ExactLoader) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_batches": None}

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._loader.start()
        return self._loader.read(self._batches)


class _Indices:
    # Stands for the sampler or batch sampler in the copy of its loader.

    def __init__(self, sampler: Any, loader: ExactLoader) -> None:
        self.__dict__.update(_sampler=sampler, _loader=loader)

    def __iter__(self) -> Iterator[Any]:
        return self._loader.indices(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_sampler", "_loader"):  # copying asks before there is one
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._sampler, name, value)


_CURE = "Or resume from an epoch's end, or with exact_resume=False from other images."


def _name(loader: DataLoader[Any]) -> str:
    return f"The training loader ({type(loader).__name__} of {type(loader.dataset).__name__})"


def length_of(loader: Any) -> int | None:
    """Return the number of batches, if it is known."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _checksum_of_index(index: Any, before: int) -> int:
    try:
        return zlib.crc32(array("q", index if isinstance(index, list | tuple) else [index]), before)
    except (TypeError, OverflowError):  # keys
        return zlib.crc32(pickle.dumps(index), before)


def _checksum_of_batch(batch: Any) -> int:
    # Of the first numbers of each tensor: all of a batch would take too long.
    parts = [one.flatten()[:64].tolist() if isinstance(one, Tensor) else one for one in torch.utils._pytree.tree_leaves(batch)]
    return zlib.crc32(repr([one for one in parts if isinstance(one, list | str | int | float)]).encode())
