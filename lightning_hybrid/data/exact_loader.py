"""A user's own `DataLoader` with which a resumed run goes on: the images that were left, and their random numbers.

    index list n     is drawn from the user's sampler; a resumed run draws those before it again, and drops them
    global streams   are seeded by (seed, epoch, cycle, n), for content by the rank too, in the worker that reads it
    own streams      of samplers are saved as they were when the iteration began
    checksum         of the index lists so far: an order that does not come again is refused, on any rank

A cycle is an iteration within an epoch: shorter loaders of a `CombinedLoader` have several.
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils import data
from torch.utils.data import DataLoader, DistributedSampler

from lightning_hybrid.data.index_lists import CONTENT, END, START, IndexLists, checksum_of_batch
from lightning_hybrid.data.random_streams import SeededStreams, restore_stream, state_of_stream, streams_of
from lightning_hybrid.lightning_names import lightning_function

_LACKS = "the checkpoint, of one rank alone, of other ranks or of a step that is made again, lacks its sampler's state"
_FROM_EPOCH = (DistributedSampler, data.SequentialSampler)
# What they draw from global streams, they draw before their first index.
_DRAW_AT_ONCE = (*_FROM_EPOCH, data.RandomSampler, data.WeightedRandomSampler, data.SubsetRandomSampler)


class NotExactError(RuntimeError):
    """The rest of an epoch cannot be that of the run before: some images would come again, and others never."""


class Place(NamedTuple):
    """Where an iteration begins: after `batches` of a cycle of an epoch."""

    epoch: int
    cycle: int = 0
    batches: int = 0


def can_be_exact(loader: object) -> bool:
    """Return whether `exact` is for this loader: torch's, without a state of its own that would be restored.

    torchdata's is not: under a distributed sampler it is lost, and with it a batch of a stream.
    """
    is_torchdata = any(kind.__module__.startswith("torchdata.") for kind in type(loader).__mro__)
    return isinstance(loader, DataLoader) and (is_torchdata or not hasattr(loader, "load_state_dict"))


def exact(loader: DataLoader[Any], reader: Any) -> ExactLoader:
    """Return a copy of `loader`, of its class, that resumes. The user's own object stays as it is.

    `reader`: data `rank` of `world_size`, `seed`, `accumulate_grad_batches`, and a method `place_of(loader)`.
    """
    made: Any = copy.copy(loader)
    made.__class__ = type(type(loader).__name__, (ExactLoader, type(loader)), {"__module__": __name__})
    made.begin(reader)
    return made


class ExactLoader(DataLoader[Any]):
    """What `exact` adds to the class of a loader; its state is that after the last batch that it gave."""

    def begin(self, reader: Any) -> None:
        """Set up the copy."""
        self.reader, self._iterator, self.number = reader, None, 0  # of several loaders
        self.loaded: dict[str, Any] | None = None  # to go on from
        self.has_begun = self._has_ended_once = False
        self.is_stream = isinstance(self.dataset, data.IterableDataset)
        name = "sampler" if self.batch_sampler is None else "batch_sampler"
        sampler = getattr(self, name)
        object.__setattr__(self, name, IndexLists(sampler, self))  # `DataLoader` refuses to set it
        inner: Any = getattr(sampler, "sampler", sampler)
        in_wrapper = getattr(getattr(inner, "dataset", None), "_sampler", None)  # Lightning's, of other samplers
        self._own_streams = list(streams_of(self, sampler, inner, in_wrapper).values())
        self.draws_at_once = type(inner) in _DRAW_AT_ONCE and type(sampler) in (data.BatchSampler, *_DRAW_AT_ONCE)
        self.follows_from_epoch = self.draws_at_once and type(inner) in _FROM_EPOCH
        # The order of which Lightning deals each step's images to any number of ranks.
        is_dealt = self.draws_at_once and type(inner) is DistributedSampler and self.batch_size is not None
        self._dealt = (len(inner.dataset), inner.seed, inner.shuffle, self.drop_last) if is_dealt else None
        self._seeded, self._total = SeededStreams(), 0  # batches of the epoch, all cycles
        self._before: list[Any] = []  # own streams when the iteration began
        self._set_place(Place(-1))

    def _set_place(self, place: Place) -> None:
        self.place, self._batches, self._is_over = place, place.batches, False
        self._is_followed, self._has_more = True, False  # one batch comes for each index list; none, but it should
        self.checksum: int | None = 0
        self.checksums: deque[int] = deque()  # of index lists whose batches are yet to be given
        self.expected: tuple[int, int | None] | None = None
        self._kept: dict[int, Any] = {}  # of a stream: states by number of batches
        if place.epoch >= 0:
            lightning_function("fabric.utilities.data._set_sampler_epoch")(self, place.epoch)

    itself = property(lambda self: self)  # also where another object stands before it and gives its attributes

    @property
    def _keeper(self) -> Any:
        # Of the place in a stream: torchdata's loader, or the data set.
        owners = (super(), self.dataset if self.num_workers == 0 else None) if self.is_stream else ()
        return next((one for one in owners if hasattr(one, "load_state_dict")), None)

    # ---- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch; `own` is what ranks do not share."""
        own: dict[str, Any] = {"seed": self.reader.seed, "checksum": self.checksum, "kept": dict(self._kept)}
        if self._own_streams:
            own |= {"streams": self._before, "streams_now": [state_of_stream(one) for one in self._own_streams]}
        place = {**self.place._asdict(), "batches": self._batches, "total": self._total, "is_over": self._is_over}
        layout = {"world_size": self.reader.world_size, "batch_size": self.batch_size, "num_workers": self.num_workers}
        more = {"accumulate_grad_batches": self.reader.accumulate_grad_batches, "dealt": self._dealt, "own": own}
        return place | layout | more

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
            return "in_order=False lets its workers decide on the order"
        if not self._is_followed:
            return "it does not give one batch for each index list of its sampler"
        if self.is_stream:
            cost = "it reads the batches before the checkpoint again, as its state is out of reach, and "
            return f"{'' if self._keeper else cost}what a stream counts from epoch to epoch does not come again"
        own = ", ".join(f"`{name}`" for name in streams_of(self.dataset))
        return f"random numbers that its data set draws from {own} do not come again" if own else ""

    # ---- iteration -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Any:
        return _Run(self)

    def words(self, purpose: int, number: int = 0) -> tuple[int, ...]:
        """Return what seeds random numbers."""
        rank = (self.reader.rank,) if purpose == CONTENT else ()
        return self.reader.seed % 2**64, self.number, *self.place[:2], number, purpose, *rank

    def seeded_for(self, purpose: int, number: int = 0) -> AbstractContextManager[None]:
        """Return the context in which they are drawn."""
        return self._seeded(*self.words(purpose, number))

    def start(self) -> Iterator[Any]:
        """Begin an iteration where the reader says."""
        place = self.reader.place_of(self)
        if place.cycle and not self.has_begun and not self._has_ended_once:
            self._has_ended_once = True  # Lightning asks again, and remembers that this loader has ended
            return iter(())
        state, self.loaded = self.loaded or {}, None
        is_here, own = place[:2] == (state.get("epoch"), state.get("cycle")), state.get("own") or {}
        if place.batches:
            self._refuse_other(state, place, is_here)
        is_first, self.has_begun = not (self.has_begun or state), True
        is_certain = self.is_stream or self.follows_from_epoch or own.get("checksum") is None
        if not (is_here or is_certain) and state["batches"]:
            self._draw_again(state, own)
        length = None if self.is_stream else lightning_function("fabric.utilities.data.sized_len")(self)
        is_over = bool(length) and place.batches >= length
        if state and not own and self._own_streams:
            warnings.warn(f"The training loader's order may be another one: {_LACKS}.", stacklevel=2)
        if not is_here or is_over:  # a sampler that is drawn to its end again may draw once more
            self._restore(own.get("streams_now", ()))
        self._set_place(place)
        self._has_more = bool(length) and 0 < place.batches < length
        if is_here or place.cycle == 0:
            self._total = place.batches + (state["total"] - state["batches"] if is_here else 0)
        if is_over:
            return iter(())
        if is_first or not self.persistent_workers:
            # What a `DataLoader` draws to seed its workers: other numbers of the run stay those of `ddp`.
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        if is_here and own:
            self._restore(own.get("streams", ()))
            is_same_batch = state["batch_size"] == self.batch_size
            self.expected = (state["batches"], own["checksum"]) if is_same_batch else None
        self._before = [state_of_stream(one) for one in self._own_streams]
        kept = own.get("kept", {}) if is_here else {}
        if num_read := max((number for number in kept if number <= place.batches), default=0):
            self._keeper.load_state_dict(kept[num_read])
        generator, self.generator = self.generator, None
        try:
            with self.seeded_for(START):
                batches: Iterator[Any] = super().__iter__()
        finally:
            self.generator = generator
        if self.is_stream:
            total, self._batches = self._total, num_read
            while self._batches < place.batches:
                self.read(batches)
            self._total = total
        return batches

    def _restore(self, states: Sequence[Any]) -> None:
        for stream, state in zip(self._own_streams, states, strict=False):  # a checkpoint of `ddp` has none
            restore_stream(stream, state)

    def _draw_again(self, state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        # The iteration before, to the batch: there are no indices of the next one to compare with.
        self._restore(own.get("streams", ()))
        self._set_place(Place(state["epoch"], state["cycle"]))
        self.expected = state["batches"], own["checksum"]
        try:
            deque(islice(self._index_sampler, state["batches"]), maxlen=0)
        except NotExactError as error:
            warnings.warn(f"{error} From this epoch's end on, images may be others.", stacklevel=2)

    def read(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, and count it."""
        with nullcontext() if self.num_workers else self.seeded_for(CONTENT, self._batches):
            batch = next(batches, END)
        if batch is END:
            self._is_over, self._is_followed = True, not self._has_more
            if self._has_more:  # its sampler had given all by then
                raise self._error(self.caveat)
            raise StopIteration
        self._batches, self._total, self._has_more = self._batches + 1, self._total + 1, False
        if (keeper := self._keeper) is not None:
            self._kept[self._batches] = copy.deepcopy(keeper.state_dict())
            # Lightning may hold one batch, and a step that was not made is read again.
            self._kept.pop(self._batches - self.reader.accumulate_grad_batches - 2, None)
        elif self.is_stream:
            self.checksum = checksum_of_batch(batch)
            self.compare(self._batches, self.checksum)
        elif self._is_followed:
            self._is_followed = 1 <= len(self.checksums) <= 1 + self.num_workers * (self.prefetch_factor or 0)
            self.checksum = self.checksums.popleft() if self._is_followed else None
            if not self._is_followed and self.place.batches:
                raise self._error(self.caveat)
        return batch

    def compare(self, number: int, checksum: int | None) -> None:
        """Compare with what the run before had drawn by then."""
        if self.expected is not None and number == self.expected[0]:
            expected, self.expected = self.expected[1], None
            if checksum != expected:
                raise self._error(
                    f"its {'data set' if self.is_stream else 'sampler'} does not give again what it gave before the "
                    "checkpoint, as it draws from streams that it makes itself, counts its iterations, or is another "
                    "one. Let its order follow from `set_epoch`, a generator that it holds, or global streams"
                )

    def _refuse_other(self, state: Mapping[str, Any], place: Place, is_here: bool) -> None:
        # The batches from the place on must be those that were left. Of a checkpoint of `ddp` nothing is known.
        reader, why = self.reader, self.caveat if self.num_workers and not self.in_order else ""
        now = {"world_size": reader.world_size, "batch_size": self.batch_size, "num_workers": self.num_workers}
        differs = [key for key in tuple(now)[: 2 + self.is_stream] if state and now[key] != state[key]]
        own = state.get("own")
        if differs and (self._dealt is None or self._dealt != state["dealt"] or place.cycle):
            key = differs[0]
            why = f"`{key}` (={now[key]}) must be that of the checkpoint: set {key}={state[key]}"
        elif differs:
            ways = reader.world_size * reader.accumulate_grad_batches
            images = state["batch_size"] * state["world_size"] * state["accumulate_grad_batches"]
            if self.batch_size * ways != images:
                why = (
                    f"`batch_size` (={self.batch_size}) must give the {images} images of a step: set {images / ways:g}"
                )
        elif own is not None and own["checksum"] is None:
            why = "it did not give one batch for each index list of its sampler"
        elif state and (
            place.batches < 0 or (own is None and not self.follows_from_epoch) or (self._own_streams and not is_here)
        ):
            why = _LACKS
        if why:
            raise self._error(why)

    def _error(self, why: str) -> NotExactError:
        return NotExactError(
            f"The training loader ({type(self).__name__} of {type(self.dataset).__name__}) cannot be resumed in "
            f"mid-epoch: {why}. Or resume from an epoch's end, or with exact_resume=False from other images."
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
