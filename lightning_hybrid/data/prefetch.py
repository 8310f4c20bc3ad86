"""Batches on the device, in time: the next one before the current step ends where the loader itself reads ahead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader

_OWN = ("_loader", "_device", "_on_device", "_compute_dtype", "_stream", "_copied", "_looks_ahead", "_state", "_wait_s")


class DevicePrefetcher:
    """Iterate over ``loader`` with each batch on ``device``.

    On CUDA the copy runs on a side stream (truly asynchronous from pinned memory: ``DataLoader(pin_memory=True)``).
    Where the loader reads ahead by itself and hands out new memory (a ``DataLoader`` with workers; any loader with a
    true attribute ``reads_ahead``), batch ``i + 1`` is fetched and moved while step ``i`` runs. Any other loader is
    asked for a batch when it is due and not before, for it may fill the same tensors again, and its data set may be
    changed between two steps; what was copied from one batch has been copied before the next is asked for. On a CPU
    nothing is fetched ahead. What the consumer gets needs no further transfer: Lightning's own is then a no-op.

    Where the loader has a method ``on_device(batch)``, such as normalisation of images that travel as uint8, it is
    applied after moving, and its floating-point images get the compute dtype. All other batches keep their dtypes.

    The seconds for which the loader kept the consumer waiting add up; :meth:`take_wait_s` reads them.

    Everything but iteration is the loader's: attributes are read from and written to it, so samplers, ``dataset`` and
    worker settings stay where Lightning and users look for them.

    Args:
        loader: any iterable of batches.
        device: where batches go.
        compute_dtype: of the images that ``on_device`` returns; None: as they are.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device, compute_dtype: torch.dtype | None = None) -> None:
        self._loader = loader
        self._device = device
        self._on_device: Callable[[Any], Any] | None = getattr(loader, "on_device", None)
        self._compute_dtype = compute_dtype
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._looks_ahead = self._stream is not None and _reads_ahead(loader)
        self._state: dict[str, Any] | None = None
        self._wait_s = 0.0

    def take_wait_s(self) -> float:
        """Seconds spent waiting for the loader since this was last asked: near 0 where it keeps up.

        Of the host's time alone: no device is asked. At the start of an epoch they include the loader's first two
        batches, which nothing hides.
        """
        wait_s, self._wait_s = self._wait_s, 0.0
        return wait_s

    def __iter__(self) -> Iterator[Any]:
        self._state = None
        batches = iter(self._loader)
        upcoming = None
        while True:
            fetched = self._fetch(batches) if upcoming is None else upcoming
            if isinstance(fetched, StopIteration):
                return
            if isinstance(fetched, Exception):
                raise fetched
            current, state = fetched
            self._wait(current)
            # Fetched before the current batch is handed out: the consumer's step hides the copy.
            upcoming = self._fetch(batches) if self._looks_ahead else None
            self._state = state
            yield current

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def _fetch(self, batches: Iterator[Any]) -> tuple[Any, dict[str, Any] | None] | Exception:
        """The next batch and the loader's state after it. An error is kept until its batch is due: none is lost."""
        try:
            if self._copied is not None and not self._looks_ahead:
                self._copied.synchronize()  # a step ago, and of a copy alone: the loader may fill that memory again
            start_s = time.perf_counter()
            try:
                batch = next(batches)
            finally:
                self._wait_s += time.perf_counter() - start_s
            state = self._snapshot()
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                moved = self._prepare(move_data_to_device(batch, self._device))
                if self._stream is not None:
                    self._copied = self._stream.record_event()
                return moved, state
        except Exception as error:
            return error

    def _prepare(self, batch: Any) -> Any:
        if self._on_device is None:
            return batch
        batch, dtype = self._on_device(batch), self._compute_dtype
        if dtype is None:
            return batch
        return apply_to_collection(batch, Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one)

    def _snapshot(self) -> dict[str, Any] | None:
        """The loader's state just after a batch was fetched; None for loaders without one."""
        return None

    def _wait(self, batch: Any) -> None:
        if self._stream is None:
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_stream(self._stream)
        # The allocator must not reuse this memory for the side stream while the consumer still reads it.
        apply_to_collection(batch, dtype=Tensor, function=lambda tensor: tensor.record_stream(stream))

    def __getattr__(self, name: str) -> Any:
        # Copying and unpickling ask for attributes before there is a loader: without this they would recurse.
        if name in _OWN:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)


def _reads_ahead(loader: object) -> bool:
    return (isinstance(loader, DataLoader) and loader.num_workers > 0) or bool(getattr(loader, "reads_ahead", False))


class StatefulDevicePrefetcher(DevicePrefetcher):
    """A :class:`DevicePrefetcher` over a loader with ``state_dict`` and ``load_state_dict``.

    The state it reports is that of the batch handed out last, not of the one already fetched, so that a resumed run
    repeats none and skips none.
    """

    def _snapshot(self) -> dict[str, Any] | None:
        state: dict[str, Any] = self._loader.state_dict()  # type: ignore[attr-defined]
        return state

    def state_dict(self) -> dict[str, Any]:
        """State after the batch handed out last."""
        return self._loader.state_dict() if self._state is None else self._state  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch that ``state`` was taken at."""
        self._state = None
        self._loader.load_state_dict(state)  # type: ignore[attr-defined]


def prefetch(loader: Iterable[Any], device: torch.device, compute_dtype: torch.dtype | None = None) -> DevicePrefetcher:
    """The prefetcher that fits ``loader``, which stays as it is if it already is one.

    >>> list(prefetch([torch.ones(1)], torch.device("cpu")))
    [tensor([1.])]
    """
    if isinstance(loader, DevicePrefetcher):
        return loader
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return (StatefulDevicePrefetcher if stateful else DevicePrefetcher)(loader, device, compute_dtype)
