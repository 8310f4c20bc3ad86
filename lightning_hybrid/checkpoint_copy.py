"""A checkpoint as plain data and tensors that no step changes any more."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SCALARS = (bool, int, float, complex, str, bytes)
_CLASSES_OF_HPARAMS = ("hparams_type", "datamodule_hparams_type")  # `CHECKPOINT_HYPER_PARAMS_TYPE`, of both


def as_plain(
    value: Any,
    *,
    of_tensor: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    of_other: Callable[[Any], Any] = lambda other: other,
) -> Any:
    """`value` in new containers, of the kinds that torch loads with `weights_only=True`.

        mappings (OmegaConf's, Lightning's, ...)    -> dict        paths -> str     numbers of numpy -> of Python
        sequences                                   -> list        members of an enumeration -> their value

    OrderedDicts, defaultdicts, Counters and tuples stay what they are. Tensors become `of_tensor(tensor)`, and what is
    none of all these `of_other(value)`.

    >>> import pathlib
    >>> as_plain({"folder": pathlib.PurePosixPath("a/b"), "rate": np.float32(0.5), "sizes": (1, range(2))})
    {'folder': 'a/b', 'rate': 0.5, 'sizes': (1, [0, 1])}
    """
    again = partial(as_plain, of_tensor=of_tensor, of_other=of_other)
    if isinstance(value, Tensor):
        return of_tensor(value)
    if value is None or type(value) in (*_SCALARS, torch.Size):
        return value
    if isinstance(value, Enum):
        return again(value.value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, _SCALARS):  # a subclass, as of str
        return next(kind(value) for kind in _SCALARS if isinstance(value, kind))  # type: ignore[arg-type]
    if isinstance(value, Mapping):
        items = {again(key): again(each) for key, each in value.items() if not _is_a_class(key, each)}
        return _like(value, items)
    if isinstance(value, tuple):
        return tuple(map(again, value))
    if isinstance(value, Set):
        return set(map(again, value))
    if isinstance(value, Sequence) and not isinstance(value, bytearray | memoryview):
        return list(map(again, value))
    return of_other(value)


def _is_a_class(key: Any, value: Any) -> bool:
    """Lightning notes of which class hyper-parameters were; without it they are a dict."""
    return key in _CLASSES_OF_HPARAMS and isinstance(value, type)


def _like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    if type(mapping) is OrderedDict:
        ordered = OrderedDict(items)
        ordered.__dict__.update(mapping.__dict__)  # a state_dict's versions of its modules
        return ordered
    if type(mapping) is defaultdict:
        return defaultdict(mapping.default_factory, items)
    return Counter(items) if type(mapping) is Counter else items


class HostCopies:
    """Memory of the host for copies of a checkpoint's tensors, kept from one checkpoint to the next.

    The n-th tensor of a checkpoint goes where the n-th of the one before was, if shapes and dtypes are the same: fresh
    pages cost a CPU more than the copy. From CUDA the copies are enqueued, behind the step that is under way, into
    page-locked memory: `wait` before reading them.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._events: list[torch.cuda.Event] = []

    def take(self, checkpoint: Any) -> Any:
        """A copy of `checkpoint` that later steps do not change; valid until the next call."""
        copies: list[Tensor] = []
        seen: dict[tuple[Any, ...], Tensor] = {}
        devices: set[torch.device] = set()

        def copied(tensor: Tensor) -> Tensor:
            if tensor.layout is not torch.strided:
                return tensor.detach().clone()
            key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if key not in seen or tensor.numel() == 0:  # tied weights stay one tensor
                target = self._memory_for(len(copies), tensor)
                target.copy_(tensor.detach(), non_blocking=True)
                copies.append(target)
                seen[key] = target
            if tensor.is_cuda:
                devices.add(tensor.device)
            return seen[key]

        plain = as_plain(checkpoint, of_tensor=copied, of_other=copy.deepcopy)
        self._kept = copies
        self._events = [_event_on(device) for device in devices]
        return plain

    def wait(self) -> None:
        """Until what was enqueued is there."""
        for event in self._events:
            event.synchronize()

    def _memory_for(self, index: int, tensor: Tensor) -> Tensor:
        if index < len(self._kept):
            kept = self._kept[index]
            if (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype) and kept.stride() == tensor.stride():
                return kept
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)


def _event_on(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
