"""The place of a training loader, and the iterator that may move it: the training loop's own."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol


class Place(NamedTuple):
    """Position at which an iteration begins: after `batches` of a cycle of an epoch.

    A cycle is an iteration within an epoch: shorter loaders of a `CombinedLoader` have several.
    """

    epoch: int
    cycle: int = 0
    batches: int = 0


class HasPlace(Protocol):
    """Loader whose place only the training loop moves."""

    def is_read_by_training(self, holder: Iterator[Any]) -> bool:
        """Return whether the training loop holds this iterator."""

    def rest_of_epoch(self) -> Iterator[Any]:
        """Begin an iteration from the loader's place on, which moves the place."""

    def plain_pass(self) -> Iterator[Any]:
        """Begin an iteration over all batches, which moves nothing."""


class PlaceIterator(Iterator[Any]):
    """Iterator over a loader with a place: the rest of the epoch for the training loop, a plain pass for user code.

    The iterator begins with its first batch, because Lightning makes iterators before it knows the epoch. A copy begins
    again, as Lightning leaves iterators of torch's loaders out of its own copies.

    Args:
        loader: The loader with a place.
    """

    def __init__(self, loader: HasPlace) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = None
        # A prefetcher puts its own iterator here, which Lightning or the user holds in place of this one. The first
        # batch takes it away again: of iterators that hold each other the workers would live on.
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
    """Base of an iterator that the training loop holds in place of another one.

    Attributes:
        inner: The other iterator, once it has begun.
    """

    def __init__(self) -> None:
        self.inner: Iterator[Any] | None = None


def is_held_by_training(trainer: Any, iterator: Iterator[Any]) -> bool:
    """Return whether the training loop of `trainer` holds `iterator`, and False for one that user code made.

    `iter(trainer.train_dataloader)` in a hook, or after the fit, makes an iterator that the loop does not hold. The
    loop also holds an iterator that is the inner one of another.
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
    """Test for iterators that the training loop of a trainer holds.

    It does not keep the trainer alive. A copy asks the same trainer. An unpickled one knows no trainer.

    Args:
        trainer: The trainer whose loop reads loaders, or None.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer: weakref.ref[Any] | None = None
        if trainer is not None:
            self._trainer = weakref.ref(trainer)

    def _live_trainer(self) -> Any:
        return None if self._trainer is None else self._trainer()

    def __call__(self, iterator: Iterator[Any]) -> bool:
        """Return whether the training loop holds this iterator."""
        trainer = self._live_trainer()
        return trainer is not None and is_held_by_training(trainer, iterator)

    def __deepcopy__(self, memo: dict[int, Any]) -> IteratorsOfTraining:
        return IteratorsOfTraining(self._live_trainer())

    def __reduce__(self) -> Any:
        return IteratorsOfTraining, (None,)
