"""Search for the modules and random number generators that a module's code can reach."""

from __future__ import annotations

import functools
import random
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_hybrid.data.random_streams import restore_stream, state_of_stream

_STREAM_TYPES = (
    torch.Generator,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    random.Random,
)
_LEAF_TYPES = frozenset({int, float, bool, str, bytes, type(None), torch.Tensor, nn.Parameter})
_MAX_ENTRIES = 1000
"""Maximum size of a container that is searched for generators and modules. A memory bank has more entries."""
_MAX_DEPTH = 3
"""Maximum depth of the search through attributes of attributes of a module."""
_FOREIGN_PACKAGES = frozenset(
    {"torch", "lightning", "lightning_fabric", "pytorch_lightning", "numpy", "builtins"}
)
"""Packages whose objects are not searched, because a Trainer refers to all objects of a run."""


@dataclass(frozen=True)
class ModuleContents:
    """Modules and random number generators that a module's code can reach through attributes.

    Attributes:
        modules: The module itself, its submodules, and modules in lists or plain objects, such as a teacher that should
            not be part of checkpoints.
        streams: Random number generators of torch, NumPy and Python.
    """

    modules: list[nn.Module]
    streams: list[Any]

    @classmethod
    def of(cls, module: nn.Module) -> ModuleContents:
        """Find the modules and random number generators that a module can reach through attributes."""
        contents = cls([], [])
        seen: set[int] = set()
        stack: list[tuple[Any, int]] = [(module, 0)]
        while stack:
            value, depth = stack.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, _STREAM_TYPES):
                if not isinstance(value, random.SystemRandom):  # it has no state
                    contents.streams.append(value)
                continue
            if isinstance(value, nn.Module):
                contents.modules.append(value)
                depth = 0
            for neighbor in reversed(_neighbors(value, depth)):
                # This covers most attributes of modules.
                is_empty = type(neighbor) in (dict, OrderedDict) and not neighbor
                if not is_empty and type(neighbor) not in _LEAF_TYPES:
                    stack.append((neighbor, depth + 1))
        return contents


def _neighbors(value: Any, depth: int) -> list[Any]:
    """Return the entries of a container, or the attributes of a module or plain object."""
    if isinstance(value, nn.Module):
        return [*value.children(), *vars(value).values()]
    if isinstance(value, dict | list | tuple | set | frozenset | deque):
        if len(value) > _MAX_ENTRIES:
            return []
        return list(value.values()) if isinstance(value, dict) else list(value)
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__]
    is_plain_object = hasattr(value, "__dict__") and not isinstance(
        value, type | types.ModuleType | types.FunctionType
    )
    if (
        is_plain_object
        and depth <= _MAX_DEPTH
        and type(value).__module__.split(".")[0] not in _FOREIGN_PACKAGES
    ):
        return list(vars(value).values())
    return []


# ---- random numbers --------------------------------------------------------------------------------------------------


class RandomStreams:
    """Random number generators that a module's code may use, whose states can be saved and restored.

    Args:
        contents: Modules and generators that the module can reach.
        devices: Devices on which the module computes. Each GPU has its own generator.
    """

    def __init__(self, contents: ModuleContents, devices: Iterable[torch.device]) -> None:
        global_streams: list[Any] = [torch.default_generator, random._inst, np.random.mtrand._rand]
        if torch.cuda.is_initialized():
            indices = {device.index or 0 for device in devices if device.type == "cuda"}
            global_streams += [torch.cuda.default_generators[index] for index in sorted(indices)]
        self._streams = global_streams + contents.streams

    def states(self) -> list[Any]:
        """Return the current state of each random number generator."""
        states = []
        for stream in self._streams:
            if isinstance(stream, np.random.BitGenerator):
                states.append(stream.state)
            else:
                states.append(state_of_stream(stream))
        return states

    @contextmanager
    def at(self, states: list[Any]) -> Iterator[None]:
        """Temporarily set all generators to earlier states, and restore their current states on exit."""
        current_states = self.states()
        self._restore(states)
        try:
            yield
        finally:
            self._restore(current_states)

    def _restore(self, states: list[Any]) -> None:
        for stream, state in zip(self._streams, states, strict=True):
            if isinstance(stream, np.random.BitGenerator):
                stream.state = state
            else:
                restore_stream(stream, state)
