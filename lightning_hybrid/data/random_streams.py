"""Random numbers that follow from a place in a run: the global streams, and those that samplers hold."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_char
from typing import Any
from zlib import crc32

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_GLOBAL: Any = np.random.mtrand  # NumPy's, whose generator can be exchanged


def seed_streams(*words: int) -> None:
    """Seed the global streams of torch, NumPy and Python by these numbers, each of 64 bits."""
    key = 1
    for word in words:
        key = key << 64 | word
    random.seed(key)  # of any length, all of which counts: the two others follow from it
    # Not by `torch.manual_seed`: that would seed the streams of GPUs too, from which dropout draws.
    torch.default_generator.manual_seed(random.getrandbits(64))
    for_numpy = random.getrandbits(32)
    try:
        _GLOBAL._rand.seed(for_numpy)  # `np.random.seed`, which lets any kind of generator pass
    except TypeError:  # a worker's; no other kind can be seeded
        _GLOBAL.set_bit_generator(np.random.MT19937(0))
        _GLOBAL._rand.seed(for_numpy)


class SeededStreams:
    """Contexts in which the global streams are seeded by numbers, and after which they are as they were before.

    After a context within another one the outer one's streams begin again.
    """

    def __init__(self) -> None:
        self._spare = np.random.MT19937()  # to exchange NumPy's generator takes a tenth of copying its state back
        self._mark: int | None = None  # of NumPy's generator, which has no half of a pair
        self._outer: tuple[int, ...] | None = None

    @contextmanager
    def __call__(self, *words: int) -> Iterator[None]:
        """Seed by `words` within."""
        outer, self._outer = self._outer, words
        if outer is None:
            of_torch, of_python = torch.default_generator.get_state(), random.getstate()
            generator = _GLOBAL.get_bit_generator()
            of_numpy = self._half_used(generator)
            _GLOBAL.set_bit_generator(self._spare)
        seed_streams(*words)
        try:
            yield
        finally:
            self._outer = outer
            if outer is not None:
                seed_streams(*outer)
            else:
                torch.default_generator.set_state(of_torch)
                random.setstate(of_python)
                _GLOBAL.set_bit_generator(generator)
                if of_numpy is not None:
                    np.random.set_state(of_numpy)

    def _half_used(self, generator: Any) -> Any:
        # The state, if it has the second of a pair of normal numbers, which an exchange would lose. To ask takes most
        # of a context's time: not again where nothing was drawn since.
        is_usual = type(generator) is np.random.MT19937
        memory = (c_char * 2500).from_address(generator.ctypes.state_address) if is_usual else b""
        if is_usual and (mark := crc32(memory)) == self._mark:
            return None
        state = np.random.get_state(legacy=False)
        self._mark = mark if is_usual and not state["has_gauss"] else None
        return state if state["has_gauss"] else None


class SeededIndex:
    """An index on its way to a worker of a `DataLoader`, which gets the plain one, and seeded streams.

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
    """Return the streams of random numbers that these objects hold, each once, by class and attribute."""
    pairs = [(one, name, value) for one in owners for name, value in getattr(one, "__dict__", {}).items()]
    # `SystemRandom` has no state.
    found = [each for each in pairs if isinstance(each[2], _KINDS) and not isinstance(each[2], random.SystemRandom)]
    once = {id(value): (f"{type(one).__name__}.{name}", value) for one, name, value in found}
    return dict(once.values())


def state_of_stream(stream: Any) -> Any:
    """Return a state that a checkpoint can hold: numbers and tensors."""
    if isinstance(stream, torch.Generator):
        return stream.get_state()
    if isinstance(stream, random.Random):
        return stream.getstate()
    is_old = isinstance(stream, np.random.RandomState)
    state = stream.get_state(legacy=False) if is_old else stream.bit_generator.state
    return apply_to_collection(state, np.ndarray, lambda one: torch.from_numpy(one.copy()))


def restore_stream(stream: Any, state: Any) -> None:
    """Let the stream go on from `state`."""
    if isinstance(stream, torch.Generator):
        stream.set_state(state)
    elif isinstance(stream, random.Random):
        stream.setstate(state)
    else:
        owner = stream if isinstance(stream, np.random.RandomState) else stream.bit_generator
        state = apply_to_collection(state, Tensor, lambda one: one.numpy())
        owner.set_state(state) if owner is stream else setattr(owner, "state", state)
