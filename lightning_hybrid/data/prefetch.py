"""Loader wrapper that moves batches to the device and prefetches the next batch."""

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
    """Base class of loader wrappers that take the place of the user's loader during training.

    Everything except iteration is delegated to the wrapped loader `_loader`. Attributes are read from and written to
    the wrapped loader.
    """

    _loader: Any
    _own_attributes: tuple[str, ...] = ("_loader",)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        # During copying and unpickling, attributes are read before `_loader` is set. Without this check, they would
        # recurse.
        if name in self._own_attributes:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Samplers, `dataset` and worker settings stay on the loader, where Lightning and users look for them.
        if name in self._own_attributes:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)


class DevicePrefetcher(LoaderInPlace):
    """Loader wrapper that moves batches to a device and prefetches them on a CUDA side stream.

    On CUDA, batches are copied on a side stream. The copy is asynchronous only if the batch is in pinned memory
    (`DataLoader(pin_memory=True)`). If the loader itself prefetches and returns new memory for each batch, batch
    `i + 1` is fetched and copied while step `i` runs. A `DataLoader` with workers does so. Other loaders can declare it
    by an attribute `reads_ahead = True`. From any other loader, a batch is fetched only when it is needed, after the
    copy of the previous batch. On a CPU, nothing is prefetched. Lightning does not move these batches again.

    If the loader has a method `on_device(batch)`, for example to normalize uint8 images, the method is called after the
    copy, and the floating-point tensors that it returns are cast to the compute dtype. Without this method, batches
    keep their dtypes.

    Args:
        loader: Iterable of batches.
        device: Device to which batches are moved.
        compute_dtype: Dtype to which the floating-point tensors returned by `on_device` are cast, or None.
        is_training: Function that returns whether the training loop holds an iterator. Other iterators belong to user
            code, and do not change the state and the waiting time. If None, every iterator belongs to training.
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
        # A user's own loader may have an attribute of this name with another meaning.
        on_device = getattr(loader, "on_device", None)
        self._on_device: Callable[[Any], Any] | None = on_device if callable(on_device) else None
        self._compute_dtype = compute_dtype
        self._is_training = is_training
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        # Other loaders may reuse tensors, and their data set may change between two steps.
        self._looks_ahead = self._stream is not None and _reads_ahead(loader)
        self._state: dict[str, Any] | None = None
        self._wait_s = 0.0

    def take_wait_s(self) -> float:
        """Return how long the host has waited for the loader since the last call, in seconds.

        The time is near 0 if the loader is fast enough.
        """
        wait_s = self._wait_s
        self._wait_s = 0.0
        return wait_s

    def __iter__(self) -> Iterator[Any]:
        return _Batches(self)

    def _fetch(self, batches: Iterator[Any], *, is_look: bool) -> _Fetched | Exception:
        # An error is returned, because it must be raised after the previous batch,
        # which the consumer does not have yet.
        try:
            if self._copied is not None and not self._looks_ahead:
                # The loader may reuse the memory of the last batch, so its copy in the last step must be complete.
                self._copied.synchronize()
            start_s = perf_counter()
            try:
                batch = next(batches)
            finally:
                if not is_look:
                    self._wait_s += perf_counter() - start_s
            state: dict[str, Any] | None = None
            if self._has_state and not is_look:
                # The state is saved here, because the loader may be one batch ahead when a checkpoint is written.
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
        # The device waits for the copy, but the host does not.
        stream.wait_stream(self._stream)
        # The allocator must not reuse this memory for the side stream while the consumer still uses it.
        apply_to_collection(
            batch, dtype=Tensor, function=lambda tensor: tensor.record_stream(stream)
        )


class _Fetched(NamedTuple):
    """Batch on the device, with the loader's state after this batch."""

    batch: Any
    state: dict[str, Any] | None


class _Batches(Iterator[Any]):
    """Iterator of a `DevicePrefetcher`.

    This is not a generator, because users may copy objects that hold it, such as the trainer. A copy starts at the
    first batch, because Lightning does not copy iterators of torch's loaders either.
    """

    def __init__(self, prefetcher: DevicePrefetcher) -> None:
        self._prefetcher = prefetcher
        self._batches: Iterator[Any] | None = None
        self._upcoming: _Fetched | Exception | None = None
        self._is_over = False
        self._is_look = False  # whether user code holds the iterator

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
        if isinstance(fetched, Exception):  # for example, a StopIteration
            self._is_over = True
            self._batches = None
            self._upcoming = None
            raise fetched
        ahead._wait(fetched.batch)
        if ahead._looks_ahead:
            # The next batch is fetched before the consumer gets the current one,
            # so that the copy overlaps with its step.
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
    if isinstance(loader, DataLoader) and loader.num_workers > 0:
        return True
    return getattr(loader, "reads_ahead", False) is True


class StatefulDevicePrefetcher(DevicePrefetcher):
    """`DevicePrefetcher` for a loader with a state dict.

    The state does not include batches that are prefetched but not yet used.
    """

    _has_state = True

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last batch that the consumer has received."""
        return self._loader.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the last batch recorded in `state`."""
        self._state = None
        self._loader.load_state_dict(state)


def prefetch(
    loader: Iterable[Any],
    device: torch.device,
    compute_dtype: torch.dtype | None = None,
    is_training: Callable[[Iterator[Any]], bool] | None = None,
) -> DevicePrefetcher:
    """Wrap a loader in a `DevicePrefetcher`, unless it is already wrapped."""
    if isinstance(loader, DevicePrefetcher):
        return loader
    has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    kind = StatefulDevicePrefetcher if has_state else DevicePrefetcher
    return kind(loader, device, compute_dtype, is_training)


def unwrapped(loader: Any) -> Any:
    """Return a loader without the wrapper that an earlier `fit` call may have added.

    The wrapper belongs to the trainer of the earlier call, so it cannot be used again.
    """
    while isinstance(loader, LoaderInPlace):
        loader = loader._loader
    if hasattr(loader, "exact_resume"):
        loader = loader.exact_resume.user_loader
    return loader
