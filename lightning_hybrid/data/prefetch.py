"""Batches on the device in time: the next one before the current step ends, if the loader itself reads ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from time import perf_counter
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hybrid.data.place import PlaceIterator
from lightning_hybrid.lightning_names import lightning_function

_MOVE = "fabric.utilities.apply_func.move_data_to_device"
_OWN_ATTRIBUTES = (
    "_loader",
    "_device",
    "_on_device",
    "_compute_dtype",
    "_is_training",
    "_stream",
    "_copied",
    "_looks_ahead",
    "_state",
    "_wait_s",
)


class LoaderInPlace:
    """Base of a loader that a fit puts in the place of another one, `_loader`.

    Everything but iteration is the other loader's: attributes are read from and written to it.
    """

    _loader: Any
    _own_attributes: tuple[str, ...] = ("_loader",)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        # Copying and unpickling ask for attributes before there is a loader: without this they would recurse.
        if name in self._own_attributes:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Samplers, `dataset` and worker settings stay where Lightning and users look for them: on the loader.
        if name in self._own_attributes:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)


class DevicePrefetcher(LoaderInPlace):
    """An iterable over `loader` with each batch on `device`.

    On CUDA the copy runs on a side stream (truly asynchronous from pinned memory: `DataLoader(pin_memory=True)`). If
    the loader reads ahead by itself and gives new memory (a `DataLoader` with workers; any loader with a true attribute
    `reads_ahead`), batch `i + 1` is fetched and moved while step `i` runs. Any other loader is asked for a batch only
    when it is due, after the copy of the one before. On a CPU nothing is fetched ahead. Lightning then moves nothing.

    A method `on_device(batch)` of the loader, such as normalisation of images that travel as uint8, is applied after
    the move, and its floating-point images get the compute dtype. All other batches have their own dtypes.

    Args:
        loader: Any iterable of batches.
        device: Where batches go.
        compute_dtype: dtype of the images that `on_device` returns; None: as they are.
        is_training: Returns whether the training loop holds an iterator. All other iterators belong to user code, and
            leave state and waiting time as they are. None: every iterator counts.
    """

    _own_attributes = _OWN_ATTRIBUTES
    _has_state = False

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device,
        compute_dtype: torch.dtype | None = None,
        is_training: Callable[[Iterator[Any]], bool] | None = None,
    ) -> None:
        self._loader: Any = loader
        self._device = device
        self._on_device: Callable[[Any], Any] | None = getattr(loader, "on_device", None)
        self._compute_dtype = compute_dtype
        self._is_training = is_training
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        # Other loaders may fill the same tensors again, and their data set may change between two steps.
        self._looks_ahead = self._stream is not None and _reads_ahead(loader)
        self._state: dict[str, Any] | None = None
        self._wait_s = 0.0

    def take_wait_s(self) -> float:
        """Return the host's seconds of waiting for the loader since the last call, near 0 if it is fast enough."""
        wait_s = self._wait_s
        self._wait_s = 0.0
        return wait_s

    def __iter__(self) -> Iterator[Any]:
        return _Batches(self)

    def _fetch(self, batches: Iterator[Any], *, is_look: bool) -> _Fetched | Exception:
        # An error is returned and not raised: it is due after the batch that the consumer has yet to get.
        try:
            if self._copied is not None and not self._looks_ahead:
                # Waits for the last copy alone, which was a step ago: the loader may fill that memory again.
                self._copied.synchronize()
            start_s = perf_counter()
            try:
                batch = next(batches)
            finally:
                if not is_look:
                    self._wait_s += perf_counter() - start_s
            state: dict[str, Any] | None = None
            if self._has_state and not is_look:
                # Now, and not when a checkpoint is written: by then the loader may be one batch ahead of the consumer.
                state = self._loader.state_dict()
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                moved = self._prepare(lightning_function(_MOVE)(batch, self._device))
                if self._stream is not None:
                    self._copied = self._stream.record_event()
                return _Fetched(moved, state)
        except Exception as error:
            return error

    def _prepare(self, batch: Any) -> Any:
        if self._on_device is None:
            return batch
        batch = self._on_device(batch)
        dtype = self._compute_dtype
        if dtype is None:
            return batch

        def to_compute_dtype(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return apply_to_collection(batch, Tensor, to_compute_dtype)

    def _wait(self, batch: Any) -> None:
        if self._stream is None:
            return
        stream = torch.cuda.current_stream(self._device)
        # The device waits, not the host.
        stream.wait_stream(self._stream)
        # The allocator must not reuse this memory for the side stream while the consumer still reads it.
        apply_to_collection(
            batch, dtype=Tensor, function=lambda tensor: tensor.record_stream(stream)
        )


class _Fetched(NamedTuple):
    """Batch on the device, and the loader's state after it."""

    batch: Any
    state: dict[str, Any] | None


class _Batches(Iterator[Any]):
    """Iterator of a `DevicePrefetcher`.

    A class and not a generator, because what users copy within a fit, such as the trainer, holds it. A copy begins at
    the first batch, as Lightning leaves iterators of torch's out of its own copies.
    """

    def __init__(self, prefetcher: DevicePrefetcher) -> None:
        self._prefetcher = prefetcher
        self._batches: Iterator[Any] | None = None
        self._upcoming: _Fetched | Exception | None = None
        self._is_over = False
        self._is_look = False  # of user code

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_batches": None, "_upcoming": None}

    def __next__(self) -> Any:
        ahead = self._prefetcher
        if self._is_over:
            raise StopIteration
        if self._batches is None:
            self._batches = self._begin()
        fetched = self._upcoming
        if fetched is None:
            fetched = ahead._fetch(self._batches, is_look=self._is_look)
        if isinstance(fetched, Exception):  # StopIteration is one
            self._is_over = True
            self._batches = None
            self._upcoming = None
            raise fetched
        ahead._wait(fetched.batch)
        if ahead._looks_ahead:
            # Fetched before the consumer gets the current batch: its step hides the copy.
            self._upcoming = ahead._fetch(self._batches, is_look=self._is_look)
        if not self._is_look:
            ahead._state = fetched.state
        return fetched.batch

    def _begin(self) -> Iterator[Any]:
        ahead = self._prefetcher
        if ahead._is_training is not None:
            self._is_look = not ahead._is_training(self)
        if not self._is_look:
            ahead._state = None
        batches = iter(ahead._loader)
        if isinstance(batches, PlaceIterator):
            batches.holder = self
        return batches


def _reads_ahead(loader: object) -> bool:
    return (isinstance(loader, DataLoader) and loader.num_workers > 0) or bool(
        getattr(loader, "reads_ahead", False)
    )


class StatefulDevicePrefetcher(DevicePrefetcher):
    """A `DevicePrefetcher` over a loader with state: its own is that of the last batch that the consumer got."""

    _has_state = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch that the consumer got."""
        return self._loader.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch of `state`."""
        self._state = None
        self._loader.load_state_dict(state)


def prefetch(
    loader: Iterable[Any],
    device: torch.device,
    compute_dtype: torch.dtype | None = None,
    is_training: Callable[[Iterator[Any]], bool] | None = None,
) -> DevicePrefetcher:
    """Return the prefetcher that fits `loader`, or `loader` itself if it already is one."""
    if isinstance(loader, DevicePrefetcher):
        return loader
    has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    kind = StatefulDevicePrefetcher if has_state else DevicePrefetcher
    return kind(loader, device, compute_dtype, is_training)


def unwrapped(loader: Any) -> Any:
    """Return the loader that a user gave, if `loader` is the one of a fit before: it belongs to that fit's trainer."""
    while isinstance(loader, LoaderInPlace):
        loader = loader._loader
    if hasattr(loader, "exact_resume"):
        loader = loader.exact_resume.user_loader
    return loader
