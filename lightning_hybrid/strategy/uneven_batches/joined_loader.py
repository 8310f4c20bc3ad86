"""Training loader whose epoch ends on all ranks at the same time, when no rank has a batch left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any

from lightning_hybrid.data.place import OuterIterator
from lightning_hybrid.data.prefetch import LoaderInPlace
from lightning_hybrid.lightning_names import lightning_function
from lightning_hybrid.strategy.uneven_batches.agreement import END, BatchAgreement


class JoinedLoader(LoaderInPlace):
    """Loader that yields a batch in every step until the loaders of all ranks are exhausted.

    Only the training loop's own iterator is joined with other ranks. Any other reader gets a plain pass over this
    rank's batches.

    Args:
        loader: Loader of this rank.
        agreement: Object with which ranks agree on each batch.
        length: Maximum number of batches of all ranks. None: it is not known.
        is_training: Function that returns whether an iterator belongs to the training loop.
        num_fetched: Function that returns the number of batches of this epoch that the training loop has fetched.
    """

    _own_attributes = ("_loader", "_agreement", "_length", "_is_training", "_num_fetched")

    def __init__(
        self,
        loader: Iterable[Any],
        agreement: BatchAgreement,
        *,
        length: int | None,
        is_training: Callable[[Iterator[Any]], bool],
        num_fetched: Callable[[], int],
    ) -> None:
        self._loader: Any = loader
        self._agreement = agreement
        self._length = length
        self._is_training = is_training
        self._num_fetched = num_fetched

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("The training loader has no length on at least one rank.")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return _JoinedBatches(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy is read by user code, so it is a plain loader of this rank's batches.
        return deepcopy(self._loader, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unpickled, (self._loader,)


class StatefulJoinedLoader(JoinedLoader):
    """`JoinedLoader` that exposes the state of this rank's stateful loader."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's loader."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of this rank's loader."""
        self._loader.load_state_dict(state)


class _JoinedBatches(OuterIterator):
    """Iterator of a `JoinedLoader`, which exchanges the size of each batch with the other ranks."""

    def __init__(self, loader: JoinedLoader) -> None:
        super().__init__()
        self._joined_loader = loader
        self._own_length: int | None = None
        self._is_begun = False
        self._is_look = False  # whether user code iterates instead of the training loop
        self._has_ended = False  # on this rank
        self._is_over = False  # on all ranks

    def __next__(self) -> Any:
        if self.inner is None:
            self._begin()
        assert self.inner is not None
        if self._is_look:
            return next(self.inner)
        if self._is_over:
            raise StopIteration

        batch = self._own_batch()
        batch = self._joined_loader._agreement.next_batch(batch, has_ended=self._has_ended)
        if batch is END:
            self._is_over = True
            raise StopIteration
        return batch

    def _own_batch(self) -> Any:
        """Return the next batch of this rank's loader, or None if the loader is exhausted."""
        assert self.inner is not None
        # Like Lightning, do not ask a loader with a length for more batches. At its end the sampler would draw random
        # numbers once more. A resumed run does not reach that end, so its next epoch would have another order.
        has_given_all = (
            self._own_length is not None and self._joined_loader._num_fetched() >= self._own_length
        )
        if has_given_all and self._is_begun:
            self._has_ended = True
        if self._has_ended:
            return None

        # A run that is resumed after the loader's end requests one batch, because a stateful loader ends its epoch
        # here. Another loader returns a batch of an epoch that is over, which is dropped.
        self._is_begun = True
        batch = next(self.inner, END)
        if has_given_all or batch is END:
            self._has_ended = True
            return None
        return batch

    def _begin(self) -> None:
        loader = self._joined_loader
        self._own_length = lightning_function("fabric.utilities.data.sized_len")(loader._loader)
        self._is_look = not loader._is_training(self)
        self.inner = iter(loader._loader)
        if not self._is_look:
            loader._agreement.begin_epoch()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy begins at the first batch, like copies of other loaders' iterators.
        return iter, (self._joined_loader,)


def joined(
    loader: Any,
    agreement: BatchAgreement,
    *,
    length: int | None,
    is_training: Callable[[Iterator[Any]], bool],
    num_fetched: Callable[[], int],
) -> JoinedLoader:
    """Wrap a loader in a `JoinedLoader`, which exposes state-dict methods if the wrapped loader has them.

    The arguments are those of the class.
    """
    loader_type = JoinedLoader
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        loader_type = StatefulJoinedLoader
    return loader_type(
        loader, agreement, length=length, is_training=is_training, num_fetched=num_fetched
    )


def _unpickled(loader: Any) -> Any:
    return loader
