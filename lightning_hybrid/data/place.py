"""Tracking of the training position in a loader, which only the training loop may change."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol


class Place(NamedTuple):
    """Position in the training data at which an iteration begins.

    Args:
        epoch: Index of the epoch.
        cycle: Index of the iteration in the epoch. Shorter loaders of a `CombinedLoader` have several iterations.
        batches: Number of finished batches in the cycle.
    """

    epoch: int
    cycle: int = 0
    batches: int = 0


class HasPlace(Protocol):
    """Protocol for loaders whose position is changed only by the training loop."""

    def is_read_by_training(self, holder: Iterator[Any]) -> bool:
        """Return whether the training loop holds an iterator."""

    def rest_of_epoch(self) -> Iterator[Any]:
        """Iterate over the remaining batches of the epoch, and advance the loader's position."""

    def plain_pass(self) -> Iterator[Any]:
        """Iterate over all batches without changing the loader's position."""


class PlaceIterator(Iterator[Any]):
    """Iterator that yields the remaining batches in the training loop, but all batches in user code.

    The inner iterator is created when the first batch is requested, because Lightning creates iterators before it sets
    the epoch. A copy starts from the beginning, because Lightning does not copy iterators of torch's loaders either.

    Args:
        loader: Loader with a position.

    Attributes:
        holder: Iterator of a prefetcher that the training loop or user code holds instead of this iterator.
    """

    def __init__(self, loader: HasPlace) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = None
        # The reference is removed with the first batch. If iterators referred to each other, workers would stay alive.
        self.holder: Iterator[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_batches": None}

    def __next__(self) -> Any:
        if self._batches is None:
            holder = self if self.holder is None else self.holder
            self.holder = None
            if self._loader.is_read_by_training(holder):
                self._batches = self._loader.rest_of_epoch()
            else:
                self._batches = self._loader.plain_pass()
        return next(self._batches)


class OuterIterator(Iterator[Any]):
    """Base class of iterators that wrap another iterator in the training loop.

    Attributes:
        inner: Wrapped iterator, or None before it has started.
    """

    def __init__(self) -> None:
        self.inner: Iterator[Any] | None = None


def is_held_by_training(trainer: Any, iterator: Iterator[Any]) -> bool:
    """Return whether the training loop of a trainer holds an iterator, directly or wrapped.

    `iter(trainer.train_dataloader)` in a hook, or after the fit, creates an iterator that the loop does not hold. If
    the loop holds an `OuterIterator`, it also holds the inner iterator.
    """
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is None or fetcher._combined_loader is None:
        return False
    loop_iterator = fetcher._combined_loader._iterator
    if loop_iterator is None:
        return False
    return any(_leads_to(held, iterator) for held in loop_iterator.iterators)


def _leads_to(held: Iterator[Any] | None, iterator: Iterator[Any]) -> bool:
    while held is not iterator:
        if not isinstance(held, OuterIterator):
            return False
        held = held.inner
    return True


class IteratorsOfTraining:
    """Callable that returns whether a trainer's training loop holds an iterator.

    The object does not keep the trainer alive. A copy uses the same trainer. An unpickled object has no trainer.

    Args:
        trainer: Trainer whose loop reads loaders, or None.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer: weakref.ref[Any] | None = None
        if trainer is not None:
            self._trainer = weakref.ref(trainer)

    def _live_trainer(self) -> Any:
        return None if self._trainer is None else self._trainer()

    def __call__(self, iterator: Iterator[Any]) -> bool:
        """Return whether the training loop holds an iterator."""
        trainer = self._live_trainer()
        return trainer is not None and is_held_by_training(trainer, iterator)

    def __deepcopy__(self, memo: dict[int, Any]) -> IteratorsOfTraining:
        return IteratorsOfTraining(self._live_trainer())

    def __reduce__(self) -> Any:
        return IteratorsOfTraining, (None,)
