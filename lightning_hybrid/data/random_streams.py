"""Utilities for seeding, saving and restoring random number generators."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ctypes import c_char
from functools import partial
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any
from zlib import crc32

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

_STREAM_TYPES = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_GLOBAL_NUMPY: Any = np.random.mtrand  # module whose bit generator can be replaced

# Objects of these packages are not searched for generators, because a trainer refers to all objects of a fit.
_UNSEARCHED_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_hybrid")
_MAX_SEARCHED = 5000  # maximum number of objects
_MAX_CONTAINER = 100  # longer lists and dictionaries contain samples, not transforms


def seed_streams(*words: int) -> None:
    """Seed the global random number generators of torch, NumPy and Python with 64-bit integers."""
    key = 1
    for word in words:
        key = key << 64 | word
    # Python's generator uses all bits of seeds of any length. The other two generators are seeded from it.
    random.seed(key)
    # `torch.manual_seed` would also seed the generators of GPUs, which dropout uses.
    torch.default_generator.manual_seed(random.getrandbits(64))
    numpy_seed = random.getrandbits(32)
    try:
        # This is the function that `np.random.seed` calls. Unlike `np.random.seed`, it does not silently accept any
        # kind of bit generator.
        _GLOBAL_NUMPY._rand.seed(numpy_seed)
    except TypeError:
        # A `DataLoader` worker may have replaced the bit generator with a kind that cannot be seeded.
        _GLOBAL_NUMPY.set_bit_generator(np.random.MT19937(0))
        _GLOBAL_NUMPY._rand.seed(numpy_seed)


class SeededStreams:
    """Context manager that seeds the global random number generators, and restores them on exit.

    Contexts can be nested. After an inner context, the generators are seeded again for the outer context.
    """

    def __init__(self) -> None:
        # Replacing NumPy's bit generator takes a tenth of the time of restoring its state.
        self._spare = np.random.MT19937()
        # Checksum of NumPy's bit generator at the last time when NumPy's state did not cache the second number of a
        # pair of normal samples.
        self._checksum_without_half: int | None = None
        self._outer: tuple[int, ...] | None = None

    @contextmanager
    def __call__(self, *words: int) -> Iterator[None]:
        """Return a context in which the global random number generators are seeded with `words`."""
        outer = self._outer
        self._outer = words
        if outer is None:
            torch_state = torch.default_generator.get_state()
            python_state = random.getstate()
            bit_generator = _GLOBAL_NUMPY.get_bit_generator()
            numpy_state = self._state_with_half(bit_generator)
            _GLOBAL_NUMPY.set_bit_generator(self._spare)
        seed_streams(*words)
        try:
            yield
        finally:
            self._outer = outer
            if outer is not None:
                seed_streams(*outer)
            else:
                torch.default_generator.set_state(torch_state)
                random.setstate(python_state)
                _GLOBAL_NUMPY.set_bit_generator(bit_generator)
                if numpy_state is not None:
                    np.random.set_state(numpy_state)

    def _state_with_half(self, bit_generator: Any) -> Any:
        """Return NumPy's random state if it caches a normal sample, otherwise None.

        NumPy generates normal samples in pairs and caches the second one, which would be lost if only the bit generator
        were replaced. Reading the state takes most of a context's time, so it is not read again if no random number was
        drawn since the last time.
        """
        checksum = None
        if type(bit_generator) is np.random.MT19937:
            memory = (c_char * 2500).from_address(bit_generator.ctypes.state_address)
            checksum = crc32(memory)
            if checksum == self._checksum_without_half:
                return None

        state = np.random.get_state(legacy=False)
        if state["has_gauss"]:
            self._checksum_without_half = None
            return state
        self._checksum_without_half = checksum
        return None


class SeededIndex:
    """Index list that seeds the random number generators of a `DataLoader` worker when unpickled.

    Unpickling returns the plain index list. It happens in the worker's main thread, immediately before the worker reads
    the batch.

    Args:
        index: Index list.
        words: Numbers that seed the global random number generators.
    """

    def __init__(self, index: Any, words: tuple[int, ...]) -> None:
        self._index = index
        self._words = words

    def __reduce__(self) -> tuple[Any, ...]:
        return _seeded_index, (self._index, self._words)


def _seeded_index(index: Any, words: tuple[int, ...]) -> Any:
    seed_streams(*words)
    return index


def is_stream(value: object) -> bool:
    """Return whether a value is a random number generator, but not a global generator."""
    if not isinstance(value, _STREAM_TYPES) or isinstance(value, random.SystemRandom):
        return False
    global_streams = (torch.default_generator, _GLOBAL_NUMPY._rand, getattr(random, "_inst", None))
    return all(value is not stream for stream in global_streams)


def streams_of(owners: Iterable[object]) -> list[Any]:
    """Return the distinct random number generators among the attributes of objects."""
    streams: dict[int, Any] = {}
    for owner in owners:
        for value in getattr(owner, "__dict__", {}).values():
            if is_stream(value):
                streams[id(value)] = value
    return list(streams.values())


def stream_names(*roots: object) -> list[str]:
    """Search objects at any depth for random number generators, and return the generators' names.

    A name consists of a class and an attribute, or is the name of a function. The search follows attributes, short
    containers, `functools.partial`, bound methods and closure variables. For example, it finds the generator of a
    transform in a `Compose`, in the data set of a `Subset`, or in a `collate_fn`.
    """
    names: list[str] = []
    seen: set[int] = set()
    waiting: deque[tuple[str, object]] = deque(("", root) for root in roots)
    while waiting and len(seen) < _MAX_SEARCHED:
        name, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_stream(value):
            names.append(name)
        else:
            waiting.extend(_parts_of(name, value))
    return names


def _parts_of(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield (name, object) pairs of all objects that a value contains or refers to."""
    if isinstance(value, str | bytes | int | float | Tensor | np.ndarray | type | ModuleType):
        return
    if isinstance(value, dict):
        if len(value) <= _MAX_CONTAINER:
            yield from ((name, part) for part in value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        if len(value) <= _MAX_CONTAINER:
            yield from ((name, part) for part in value)
    elif isinstance(value, partial):
        yield from ((name, part) for part in (value.func, value.args, value.keywords))
    elif isinstance(value, MethodType | BuiltinMethodType):
        yield name, value.__self__
    elif isinstance(value, FunctionType):
        yield from _parts_of_function(value)
    elif type(value).__module__.partition(".")[0] not in _UNSEARCHED_PACKAGES:
        for attribute, part in getattr(value, "__dict__", {}).items():
            yield f"{type(value).__name__}.{attribute}", part


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, object]]:
    name = function.__qualname__
    yield name, function.__defaults__
    yield name, function.__kwdefaults__
    for cell in function.__closure__ or ():
        try:
            yield name, cell.cell_contents
        except ValueError:  # the closure variable has no value yet
            continue


def state_of_stream(stream: Any) -> Any:
    """Return the state of a random number generator in a form that checkpoints can store."""
    if isinstance(stream, torch.Generator):
        return stream.get_state()
    if isinstance(stream, random.Random):
        return stream.getstate()
    if isinstance(stream, np.random.RandomState):
        state: Any = stream.get_state(legacy=False)
    else:
        state = stream.bit_generator.state
    return apply_to_collection(state, np.ndarray, lambda array: torch.from_numpy(array.copy()))


def restore_stream(stream: Any, state: Any) -> None:
    """Restore a random number generator to a state that `state_of_stream` returned."""
    if isinstance(stream, torch.Generator):
        stream.set_state(state)
        return
    if isinstance(stream, random.Random):
        stream.setstate(state)
        return
    state = apply_to_collection(state, Tensor, lambda tensor: tensor.numpy())
    if isinstance(stream, np.random.RandomState):
        stream.set_state(state)
    else:
        stream.bit_generator.state = state
