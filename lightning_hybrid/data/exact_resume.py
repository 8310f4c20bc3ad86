"""Exact mid-epoch resume of a training loader, including random states and a check of its order."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, Protocol

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.utils.data import DataLoader, IterableDataset

from lightning_hybrid.data.index_lists import (
    CONTENT,
    END,
    LOOK,
    START,
    IndexLists,
    SamplerTraits,
    checksum_of_batch,
    epoch_of,
)
from lightning_hybrid.data.place import Place
from lightning_hybrid.data.plain_pass import copy_of_loader, is_bound_to, plain_pass
from lightning_hybrid.data.random_streams import (
    SeededStreams,
    restore_stream,
    state_of_stream,
    stream_names,
)
from lightning_hybrid.data.same_attributes import SameAttributes
from lightning_hybrid.data.step_layout import StepLayout
from lightning_hybrid.data.training_pass import TrainingPass
from lightning_hybrid.lightning_names import lightning_function

_LACKS_SAMPLER_STATE = (
    "the checkpoint lacks the state of the sampler, because only one rank saved it, the number of ranks has changed, "
    "or the last step was not finished"
)
_NO_BATCH_PER_LIST = "the loader does not return one batch for each index list of its sampler"
_OUT_OF_ORDER = "with in_order=False, the order of batches depends on the timing of its workers"


class NotExactError(RuntimeError):
    """Error raised when a resumed run would repeat or skip samples of the interrupted epoch."""


class Reader(Protocol):
    """Interface to the training loop of the rank that reads a loader."""

    rank: int
    world_size: int
    seed: int

    @property
    def accumulate_grad_batches(self) -> int:
        """Number of batches per optimizer step."""

    @property
    def sets_epochs(self) -> bool:
        """True if the loader must set the epoch of its samplers, because Lightning does not."""

    @property
    def reads_to_end(self) -> bool:
        """True if the loop reads a loader until it is exhausted, even if its length is known."""

    def is_reading(self, holder: Iterator[Any]) -> bool:
        """Return whether the training loop, rather than user code, holds this iterator."""

    def is_within_training(self) -> bool:
        """Return whether the training loop is currently reading its loaders."""

    def place_of(self, resume: ExactResume) -> Place:
        """Return the position at which the next iteration of a loader must begin."""


class ExactResume:
    """Implementation of exact mid-epoch resume for one training loader.

    Args:
        loader: Copy of the user's loader, of a class derived from `ExactLoader`.
        user_loader: Loader of the user.
        reader: Rank that reads the loader.
    """

    def __init__(self, loader: Any, user_loader: DataLoader[Any], reader: Reader) -> None:
        self.loader = loader
        self.reader = reader
        self.number = 0  # index of this loader among several loaders
        self.is_stream = isinstance(loader.dataset, IterableDataset)
        self.traits = SamplerTraits(user_loader, reader.world_size, reader.rank)
        self._seed_of_script = reader.seed
        self._seed_of_checkpoint = reader.seed
        # State from which to resume, until the first iteration begins.
        self.loaded: dict[str, Any] | None = None
        self.has_state = False  # whether a state of the interrupted run was loaded
        self.has_begun = False
        self.current = TrainingPass(Place(-1))
        self.user_loader = user_loader
        self._has_ended_once = False
        self._num_looks = 0
        self._batches_of_epoch = 0  # number of batches in all cycles of the epoch
        self._seeded = SeededStreams()
        sampler_name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        index_lists = IndexLists(getattr(user_loader, sampler_name), self)
        # `DataLoader` does not allow setting this attribute.
        object.__setattr__(loader, sampler_name, index_lists)
        self._same_attributes = SameAttributes(user_loader, loader)

    def without_resume(self) -> DataLoader[Any]:
        """Return a loader of the user's class without exact resume.

        Attributes that methods of the loader have changed keep their new values.
        """
        plain = copy_of_loader(self.user_loader)
        for name, value in vars(self.loader).items():
            is_replaced = name in ("exact_resume", "sampler", "batch_sampler", "_iterator")
            if not is_replaced and not is_bound_to(self.loader, value):
                object.__setattr__(plain, name, value)
        return plain

    @property
    def layout(self) -> StepLayout:
        """Division of an optimizer step's images over ranks and batches."""
        return StepLayout(
            world_size=self.reader.world_size,
            batch_size=self.loader.batch_size,
            accumulate_grad_batches=self.reader.accumulate_grad_batches,
        )

    @property
    def length(self) -> int | None:
        """Number of batches of an iteration, or None if the loader has no length."""
        length: int | None = lightning_function("fabric.utilities.data.sized_len")(self.loader)
        return length

    @property
    def _keeper(self) -> Any:
        """Object that can save and restore the position in an iterable data set, or None.

        This is torchdata's loader, or the data set itself if there are no workers. Workers would have copies of the
        data set.
        """
        if not self.is_stream:
            return None
        of_user_class = self.loader.of_user_class()
        if hasattr(of_user_class, "load_state_dict"):
            return of_user_class
        dataset = self.loader.dataset
        has_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        return dataset if has_state and self.loader.num_workers == 0 else None

    # ---- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last batch that training has read.

        The entry `own` differs between ranks.
        """
        current = self.current
        own: dict[str, Any] = {
            "seed": self.reader.seed,
            "checksum": current.checksum,
            "kept": dict(current.stream_states),
            # These entries differ between ranks if their loaders have different lengths.
            "batches": current.batches_done,
            "total": self._batches_of_epoch,
            "is_over": current.is_exhausted,
        }
        if self.traits.own_streams:
            own["streams"] = current.own_streams
            own["streams_now"] = self._states_of_streams()
        return {
            "epoch": current.place.epoch,
            "cycle": current.place.cycle,
            "batches": current.batches_done,
            "total": self._batches_of_epoch,
            "is_over": current.is_exhausted,
            "world_size": self.reader.world_size,
            "batch_size": self.loader.batch_size,
            "num_workers": self.loader.num_workers,
            "accumulate_grad_batches": self.reader.accumulate_grad_batches,
            "dealt": self.traits.dealt,
            "sampler_epochs": current.sampler_epochs,
            "sampler_seeds": self.traits.seeds(),
            "dataset_epoch": current.dataset_epoch,
            "own": own,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a checkpointed state that contains the states of all ranks.

        The entry `of_ranks` holds the entry `own` of each rank. A state that torchdata's loader has saved under `ddp`
        is ignored.
        """
        if "of_ranks" not in state_dict:
            return
        of_ranks = state_dict["of_ranks"]
        own = None
        if state_dict["world_size"] == self.reader.world_size:
            own = of_ranks.get(self.reader.rank)
        self.loaded = {**state_dict, "own": own}
        if own is not None:
            for name in ("batches", "total", "is_over"):
                self.loaded[name] = own[name]
        self.has_state = True
        # If the number of ranks has changed, the seed of any rank can be used, because the random numbers of a batch
        # also depend on the rank.
        seed_of = own if own is not None else next(iter(of_ranks.values()))
        self._seed_of_checkpoint = seed_of["seed"]
        self.reader.seed = self._seed_of_checkpoint
        self._take_sampler_seeds(state_dict["sampler_seeds"])

    def _take_sampler_seeds(self, seeds: list[int | None]) -> None:
        """Apply the seeds of the interrupted run to samplers that Lightning has seeded."""
        other_seed = self.traits.other_seed(seeds)
        self.traits.take_seeds(seeds)
        if other_seed is not None and self.traits.other_seed(seeds) is None:
            saved_seed, seed = other_seed
            rank_zero_info(
                f"The training loader continues in the order of the checkpoint, whose seed is {saved_seed}. The call "
                f"seed_everything({seed}) in the script does not change that order."
            )

    def caveat(self) -> str:
        """Return a warning if state is restored inexactly or slowly, or an empty string otherwise."""
        if self.loader.num_workers and not self.loader.in_order:
            return _OUT_OF_ORDER
        if not self.current.matches_index_lists:
            return _NO_BATCH_PER_LIST
        if self.is_stream:
            counts = "counters that an iterable data set keeps across epochs are not restored"
            if self._keeper is not None:
                return counts
            return (
                "it reads the batches before the checkpoint again, because its state is not accessible, and "
                f"{counts}"
            )
        loader = self.user_loader
        names = stream_names(loader.dataset, loader.collate_fn, loader.worker_init_fn)
        if names:
            listed = ", ".join(f"`{name}`" for name in names)
            return f"random numbers that its data set, transforms or `collate_fn` draw from {listed} are not restored"
        return ""

    # ---- random numbers --------------------------------------------------------------------------------------------

    def words(self, purpose: int, batch_number: int = 0) -> tuple[int, ...]:
        """Return the numbers that seed the global random number generators for a purpose."""
        place = self.current.place
        words = (
            self.reader.seed % 2**64,
            self.number,
            place.epoch,
            place.cycle,
            batch_number,
            purpose,
        )
        return (*words, self.reader.rank) if purpose == CONTENT else words

    def seeded_for(self, purpose: int, batch_number: int = 0) -> AbstractContextManager[None]:
        """Return a context manager that seeds the global random number generators for a purpose."""
        return self._seeded(*self.words(purpose, batch_number))

    def _states_of_streams(self) -> list[Any]:
        return [state_of_stream(stream) for stream in self.traits.own_streams]

    def _restore_streams(self, states: Sequence[Any]) -> None:
        # Checkpoints of `ddp` have no such states.
        for stream, state in zip(self.traits.own_streams, states, strict=False):
            restore_stream(stream, state)

    # ---- iteration -------------------------------------------------------------------------------------------------

    def is_read_by_training(self, holder: Iterator[Any]) -> bool:
        """Return whether the training loop holds an iterator."""
        return self.reader.is_reading(holder)

    def plain_pass(self) -> Iterator[Any]:
        """Iterate over all batches without changing the training position."""
        self._num_looks += 1
        words = (self.reader.seed % 2**64, self.number, self._num_looks, LOOK, self.reader.rank)
        return plain_pass(self.user_loader, *words, is_training=self.reader.is_within_training())

    def rest_of_epoch(self) -> Iterator[Any]:
        """Iterate over the remaining batches of the epoch, and advance the training position.

        The iteration begins at the position returned by the reader.
        """
        self._same_attributes.update()
        place = self.reader.place_of(self)
        if place.cycle and not self.has_begun and not self._has_ended_once:
            # Lightning then requests another iterator, and records that this loader was exhausted once.
            self._has_ended_once = True
            return iter(())
        return _Batches(self, self._start(place))

    def _start(self, place: Place) -> Iterator[Any]:
        state = self.loaded if self.loaded is not None else {}
        self.loaded = None
        is_saved_pass = place[:2] == (state.get("epoch"), state.get("cycle"))
        own = state.get("own") or {}
        length = self.length
        is_over = length is not None and place.batches >= length > 0
        if place.batches and not is_over:
            self._refuse_unless_exact(state, place, is_saved_pass)

        is_first = not self.has_begun and not state
        self.has_begun = True
        self._check_order_before(place, state)
        if not is_saved_pass or is_over:
            # The state is restored, because a sampler that is exhausted again may draw once more.
            self._restore_streams(own.get("streams_now", ()))
            if own and self.reader.reads_to_end and not own["is_over"]:
                self._draw_to_end(state, place)

        self.current = TrainingPass(place)
        self.current.expects_batch = length is not None and 0 < place.batches < length
        if is_saved_pass:
            self._batches_of_epoch = place.batches + state["total"] - state["batches"]
        elif place.cycle == 0:
            self._batches_of_epoch = place.batches
        if is_over:
            if is_saved_pass and own:
                self._keep_order_of(state)
            return iter(())

        self._set_epochs(state, is_saved_pass)
        if is_first or not self.loader.persistent_workers:
            # A `DataLoader` would draw the seed of its workers here. This draw keeps later random numbers equal to
            # `ddp`.
            torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
        if is_saved_pass and own:
            self._restore_streams(own.get("streams", ()))
            if self.layout.has_batches_of(StepLayout.from_state(state)):
                self.current.expected = state["batches"], own["checksum"]
        self.current.own_streams = self._states_of_streams()
        return self._iterator_after_place(own.get("kept", {}) if is_saved_pass else {})

    def _draw_to_end(self, state: Mapping[str, Any], place: Place) -> None:
        """Advance samplers to the end of the saved epoch, by drawing the epoch's remaining random numbers.

        The checkpoint was saved after the last batch of the epoch, before the loop requested another batch.
        """
        if self.is_stream or not self.traits.own_streams:
            return  # the sampler of an endless stream
        epochs = self.traits.epochs()
        self.traits.set_epochs(state["sampler_epochs"], state["epoch"])
        self._restore_streams(state["own"]["streams"])
        sampler = self.user_loader.batch_sampler
        deque(self.user_loader.sampler if sampler is None else sampler, maxlen=0)
        self.traits.set_epochs(epochs, place.epoch)

    def _keep_order_of(self, state: Mapping[str, Any]) -> None:
        """Keep the saved order of a finished epoch, for checkpoints written before the next epoch."""
        self.current.checksum = state["own"]["checksum"]
        self.current.own_streams = state["own"].get("streams", [])
        self.current.sampler_epochs = state["sampler_epochs"]
        self.current.dataset_epoch = state["dataset_epoch"]

    def _iterator_after_place(self, stream_states: Mapping[int, Any]) -> Iterator[Any]:
        """Create the user's iterator, and advance it to the start position of the iteration."""
        place = self.current.place
        num_restored = max(
            (number for number in stream_states if number <= place.batches), default=0
        )
        if num_restored:
            self._keeper.load_state_dict(stream_states[num_restored])

        generator = self.loader.generator
        self.loader.generator = None
        try:
            with self.seeded_for(START):
                batches: Iterator[Any] = self.loader.of_user_class().__iter__()
        finally:
            self.loader.generator = generator
        self._same_attributes.update()

        if self.is_stream:
            num_before = self._batches_of_epoch
            self.current.batches_done = num_restored
            while self.current.batches_done < place.batches:
                self.read(batches)
            self._batches_of_epoch = num_before
        return batches

    def _set_epochs(self, state: Mapping[str, Any], is_saved_pass: bool) -> None:
        """Set the epochs of the samplers and the data set to those of the interrupted run.

        In an uninterrupted run, Lightning and the user's hooks set the epochs. The hooks do not run again in the middle
        of an epoch.
        """
        place = self.current.place
        if self.reader.sets_epochs:
            lightning_function("fabric.utilities.data._set_sampler_epoch")(self.loader, place.epoch)
        is_read_before_hooks = bool(state) and self.length is None
        if is_saved_pass:
            self.traits.set_epochs(state["sampler_epochs"], place.epoch)
            if state["dataset_epoch"] is not None:
                self.loader.dataset.set_epoch(state["dataset_epoch"])
        elif place.batches or is_read_before_hooks:
            self.traits.set_epochs([None] * len(self.traits.samplers), place.epoch)
        self.current.sampler_epochs = self.traits.epochs()
        self.current.dataset_epoch = epoch_of(self.loader.dataset)

    def _check_order_before(self, place: Place, state: Mapping[str, Any]) -> None:
        """Warn if the data order of later epochs may differ from the interrupted run."""
        own = state.get("own") or {}
        if state and not own and self.traits.own_streams and not self.traits.follows_from_epoch:
            warnings.warn(
                f"The training loader's order may differ from the interrupted run: {_LACKS_SAMPLER_STATE}.",
                stacklevel=2,
            )
        if self.is_stream or self.traits.follows_from_epoch or own.get("checksum") is None:
            return
        is_saved_pass = place[:2] == (state["epoch"], state["cycle"])
        if state["batches"] and not is_saved_pass:
            self._replay_index_lists(place, state, own)

    def _replay_index_lists(
        self, place: Place, state: Mapping[str, Any], own: Mapping[str, Any]
    ) -> None:
        """Draw the previous epoch's index lists again, and warn if they differ from the interrupted run.

        The next epoch has no index lists yet that could be compared.
        """
        epochs = self.traits.epochs()
        self._restore_streams(own.get("streams", ()))
        self.current = TrainingPass(Place(state["epoch"], state["cycle"]))
        self.traits.set_epochs(state["sampler_epochs"], state["epoch"])
        self.current.expected = state["batches"], own["checksum"]
        index_lists = iter(self.loader._index_sampler)
        try:
            deque(islice(index_lists, state["batches"]), maxlen=0)
        except NotExactError as error:
            warnings.warn(
                f"{error} In later epochs, samples may differ from the interrupted run.",
                stacklevel=2,
            )
        self.traits.set_epochs(epochs, place.epoch)

    def read(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, and advance the training position."""
        current = self.current
        self._same_attributes.update()
        with (
            nullcontext()
            if self.loader.num_workers
            else self.seeded_for(CONTENT, current.batches_done)
        ):
            batch = next(batches, END)
        self._same_attributes.update()
        if batch is END:
            current.is_exhausted = True
            if current.expects_batch:
                # The sampler has returned all index lists.
                current.matches_index_lists = False
                raise self.error(_NO_BATCH_PER_LIST)
            if current.expected is not None and current.batches_done < current.expected[0]:
                self.compare_end_of_order()  # the stream has become shorter
            raise StopIteration
        current.batches_done += 1
        current.expects_batch = False
        self._batches_of_epoch += 1
        self._note_state_after(batch)
        return batch

    def _note_state_after(self, batch: Any) -> None:
        current = self.current
        keeper = self._keeper
        if keeper is not None:
            current.stream_states[current.batches_done] = copy.deepcopy(keeper.state_dict())
            # States of earlier batches are needed, because Lightning may have fetched one batch ahead, and the batches
            # of an unfinished step are read again.
            num_needed = self.reader.accumulate_grad_batches + 2
            current.stream_states.pop(current.batches_done - num_needed, None)
        elif self.is_stream:
            current.checksum = checksum_of_batch(batch)
            self.compare(current.batches_done, current.checksum)
        elif current.matches_index_lists:
            num_ahead = self.loader.num_workers * (self.loader.prefetch_factor or 0)
            current.matches_index_lists = 1 <= len(current.pending_checksums) <= 1 + num_ahead
            if current.matches_index_lists:
                current.checksum = current.pending_checksums.popleft()
            else:
                current.checksum = None
                if current.place.batches:
                    raise self.error(_NO_BATCH_PER_LIST)

    # ---- checks ----------------------------------------------------------------------------------------------------

    def compare(self, batch_number: int, checksum: int | None) -> None:
        """Raise `NotExactError` if the samples before the checkpoint differ from the interrupted run's.

        The checksums are compared at the batch after which the interrupted run was saved.
        """
        expected = self.current.expected
        if expected is None or batch_number != expected[0]:
            return
        self.current.expected = None
        if checksum != expected[1]:
            source = "data set" if self.is_stream else "sampler"
            raise self.error(
                f"the {source} does not reproduce the samples before the checkpoint. {self._possible_seed()}The "
                f"{source} may have changed, or it may create its own random generators or count its iterations. "
                f"Make the order depend on `set_epoch`, on a generator that the {source} holds, or on the global "
                "generators"
            )

    def _possible_seed(self) -> str:
        """Return a hint that different seeds may be the cause of an error, or an empty string."""
        saved_seed = self._seed_of_checkpoint
        # Larger seeds are chosen by torch, in runs without `seed_everything`.
        if saved_seed == self._seed_of_script or saved_seed >= 2**32:
            return ""
        script = f"seed_everything({self._seed_of_script})"
        if self._seed_of_script >= 2**32:
            script = "no `seed_everything`"
        return (
            f"The interrupted run used seed_everything({saved_seed}), but this run uses {script}. Call "
            f"seed_everything({saved_seed}) before the loader is created. "
        )

    def _refuse_other_seed(self, state: Mapping[str, Any]) -> None:
        """Raise an error if the seed of the user's `DistributedSampler` has changed since the checkpoint."""
        other_seed = self.traits.other_seed(state["sampler_seeds"])
        if other_seed is not None:
            saved_seed, seed = other_seed
            raise self.error(
                f"the `DistributedSampler` has seed={seed}, but had seed={saved_seed} in the interrupted run. Call "
                f"seed_everything({saved_seed}) before the loader is created, or set seed={saved_seed} in your "
                "sampler"
            )

    def compare_end_of_order(self) -> None:
        """Raise an error if the data order is shorter than the checkpoint's position in it."""
        if self.current.expected is not None:
            self.compare(self.current.expected[0], None)

    def batches_after(self, batches_done: int) -> int:
        """Convert a number of batches of the interrupted run to batches of this run.

        Raises:
            NotExactError: The samples of a step differ.
        """
        if self.loaded is None:
            return batches_done
        saved = StepLayout.from_state(self.loaded)
        try:
            return self.layout.batches_after(
                batches_done, saved, is_dealt=self._is_dealt_as(self.loaded)
            )
        except ValueError as error:
            raise self.error(str(error)) from None

    def has_other_batches(self) -> bool:
        """Return whether the batches of this run and of the interrupted run contain different samples."""
        return self.loaded is not None and not self.layout.has_batches_of(
            StepLayout.from_state(self.loaded)
        )

    def refuse_second_reader(self) -> None:
        """Raise an error if the training loop starts an iteration before the previous one has ended.

        This happens if user code iterates over the trainer's `CombinedLoader`, which replaces the loop's iterators.
        """
        length = self.length
        is_over = self.current.is_exhausted or (
            length is not None and self.current.batches_done >= length
        )
        if not is_over:
            raise RuntimeError(
                f"A second iteration of the training loader ({type(self.loader).__name__}) began in the middle of an "
                "epoch, which would skip samples. Iterate over `trainer.train_dataloader` instead of the "
                "`CombinedLoader` that holds the training loader."
            )

    def _is_dealt_as(self, state: Mapping[str, Any]) -> bool:
        return self.traits.dealt is not None and self.traits.dealt == state["dealt"]

    def _refuse_unless_exact(
        self, state: Mapping[str, Any], place: Place, is_saved_pass: bool
    ) -> None:
        """Raise an error if a position in the middle of an epoch cannot be resumed exactly.

        Checkpoints of `ddp` have no such state and are not checked.
        """
        if self.loader.num_workers and not self.loader.in_order:
            raise self.error(_OUT_OF_ORDER)
        if not state:
            return
        self._refuse_other_seed(state)
        saved = StepLayout.from_state(state)
        num_workers = self.loader.num_workers
        own = state["own"]
        if any(rank_state["checksum"] is None for rank_state in state["of_ranks"].values()):
            raise self.error(_NO_BATCH_PER_LIST)
        if not self.layout.has_batches_of(saved):
            if place.cycle or state["cycle"]:
                self._refuse_other_cycle(saved)
        elif self.is_stream and num_workers != state["num_workers"]:
            saved_workers = state["num_workers"]
            raise self.error(
                f"`num_workers` (={num_workers}) must equal the value in the checkpoint (={saved_workers}), because "
                f"the order of an iterable data set depends on it. Set num_workers={saved_workers}"
            )
        else:
            lacks_own = own is None and not self.traits.follows_from_epoch
            lacks_streams = bool(self.traits.own_streams) and not is_saved_pass
            if place.batches < 0 or lacks_own or lacks_streams:
                raise self.error(_LACKS_SAMPLER_STATE)

    def _refuse_other_cycle(self, saved: StepLayout) -> None:
        for name in ("world_size", "batch_size"):
            value = getattr(self.layout, name)
            saved_value = getattr(saved, name)
            if value != saved_value:
                raise self.error(
                    "the loader of the checkpoint ran out and was iterated again within the same epoch, so "
                    f"`{name}` (={value}) must equal the value in the checkpoint (={saved_value}). "
                    f"Resume with {name}={saved_value}"
                )

    def error(self, reason: str) -> NotExactError:
        """Create a `NotExactError` that names this loader and the reason."""
        return NotExactError(
            f"The training loader ({type(self.loader).__name__} of {type(self.loader.dataset).__name__}) cannot be "
            f"resumed in the middle of an epoch: {reason}. You can also resume from the end of an epoch, or set "
            "exact_resume=False to continue with different samples."
        )


class _Batches(Iterator[Any]):
    """Iterator of the training loop that counts the batches it returns."""

    def __init__(self, resume: ExactResume, batches: Iterator[Any]) -> None:
        self._resume = resume
        self._batches = batches

    def __next__(self) -> Any:
        return self._resume.read(self._batches)
