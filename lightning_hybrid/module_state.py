"""Context manager that restores the state of a module, except for its parameters, after user code has run."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_CONTAINERS = (dict, OrderedDict, list, set, deque)


@contextmanager
def put_back(module: nn.Module) -> Iterator[None]:
    """Restore a module's buffers, attributes and random number generators at the end of a `with` block.

    Attributes that are lists, dictionaries, sets or deques get their old entries. Parameters are not restored. State
    inside other objects, or outside the module, such as a file, is not restored either.

    >>> counter = nn.BatchNorm1d(2)
    >>> with put_back(counter):
    ...     _ = counter(torch.rand(3, 2))
    >>> int(counter.num_batches_tracked)
    0
    """
    attributes = []
    values: list[Any] = []
    for submodule in module.modules():
        attributes.append((vars(submodule), dict(vars(submodule))))
        values += vars(submodule).values()

    containers: list[tuple[Any, Any]] = []
    generators = []
    tensors = list(module.buffers())
    for value in values:
        if type(value) in _CONTAINERS:
            containers.append((value, copy.copy(value)))
        elif isinstance(value, torch.Generator):
            generators.append((value, value.get_state()))
        elif isinstance(value, Tensor):
            tensors.append(value)

    saved_tensors = []
    for tensor in tensors:
        if tensor.layout is torch.strided and not tensor.is_meta:
            saved_tensors.append((tensor.detach(), tensor.detach().clone()))
    try:
        yield
    finally:
        for current, saved in (*attributes, *containers):
            current.clear()
            if isinstance(current, list | deque):
                current.extend(saved)
            else:
                current.update(saved)
        for generator, state in generators:
            generator.set_state(state)
        for tensor, value in saved_tensors:
            # An unchanged tensor is skipped, because an expanded tensor cannot be written to.
            if not torch.equal(tensor, value):
                tensor.copy_(value)
