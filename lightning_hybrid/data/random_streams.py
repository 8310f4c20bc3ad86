"""Random numbers that follow from a place in a run: the global streams, and those that samplers hold."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def seed_streams(*words: int) -> None:
    """Seed the global streams of torch, NumPy and Python by a hash of these numbers."""
    digest = blake2b(struct.pack(f"<{len(words)}Q", *words), digest_size=20).digest()
    for_torch, for_python, for_numpy = struct.unpack("<QQI", digest)
    # Not by `torch.manual_seed`: that would seed the streams of GPUs too, from which dropout draws.
    torch.default_generator.manual_seed(for_torch)
    random.seed(for_python)
    if not isinstance(np.random.get_bit_generator(), np.random.MT19937):  # of a worker's user: no other can be seeded
        np.random.set_bit_generator(np.random.MT19937())
    np.random.seed(for_numpy)


class SeededStreams:
    """Contexts in which the global streams are seeded by numbers, and after which they are as they were before.

    In a context within a context the outer one's streams begin again when the inner one ends.

    >>> seeded = SeededStreams()
    >>> with seeded(3, 4):
    ...     one = torch.rand(1), np.random.rand(), random.random()
    >>> with seeded(3, 4):
    ...     one == (torch.rand(1), np.random.rand(), random.random())
    True
    """

    def __init__(self) -> None:
        # To exchange NumPy's generator costs a tenth of copying its state back.
        self._spare = np.random.MT19937()
        self._outer: tuple[int, ...] | None = None

    @contextmanager
    def __call__(self, *words: int) -> Iterator[None]:
        """Seed by `words` within."""
        outer, self._outer = self._outer, words
        if outer is None:
            of_torch, of_python = torch.default_generator.get_state(), random.getstate()
            of_numpy, generator = np.random.get_state(legacy=False), np.random.get_bit_generator()
            np.random.set_bit_generator(self._spare)
        seed_streams(*words)
        try:
            yield
        finally:
            self._outer = outer
            if outer is None:
                torch.default_generator.set_state(of_torch)
                random.setstate(of_python)
                np.random.set_bit_generator(generator)
                if of_numpy["has_gauss"]:  # the other one of a pair of normal numbers, which an exchange loses
                    np.random.set_state(of_numpy)
            else:
                seed_streams(*outer)


class SeededIndex:
    """An index on its way to a worker of a `DataLoader`, which gets the plain index, and seeded streams.

    It is unpickled in the worker's main thread, just before the worker reads the batch.
    """

    def __init__(self, index: Any, words: tuple[int, ...]) -> None:
        self._index, self._words = index, words

    def __reduce__(self) -> tuple[Any, ...]:
        return _seeded_index, (self._index, self._words)


def _seeded_index(index: Any, words: tuple[int, ...]) -> Any:
    seed_streams(*words)
    return index


def streams_of(*owners: object) -> dict[str, Any]:
    """Return the streams of random numbers that these objects hold, each once, by the name of class and attribute."""
    found = {}
    for owner in owners:
        for name, value in getattr(owner, "__dict__", {}).items():
            # `SystemRandom` has no state.
            if isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom):
                found.setdefault(id(value), (f"{type(owner).__name__}.{name}", value))
    return dict(found.values())


def state_of_stream(stream: Any) -> Any:
    """Return a state that a checkpoint can hold: numbers and tensors."""
    if isinstance(stream, torch.Generator):
        return stream.get_state()
    if isinstance(stream, random.Random):
        return stream.getstate()
    is_old = isinstance(stream, np.random.RandomState)
    state = stream.get_state(legacy=False) if is_old else stream.bit_generator.state
    return apply_to_collection(state, np.ndarray, lambda array: torch.from_numpy(array.copy()))


def restore_stream(stream: Any, state: Any) -> None:
    """Let the stream go on from `state`."""
    if isinstance(stream, torch.Generator):
        stream.set_state(state)
    elif isinstance(stream, random.Random):
        stream.setstate(state)
    else:
        state = apply_to_collection(state, Tensor, lambda tensor: tensor.numpy())
        if isinstance(stream, np.random.RandomState):
            stream.set_state(state)
        else:
            stream.bit_generator.state = state
