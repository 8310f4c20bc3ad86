"""Copies of checkpoints, as plain data and tensors that later steps do not change."""

from __future__ import annotations

import copy
import itertools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

_Key = tuple[torch.device, int, torch.dtype, torch.Size, tuple[int, ...], bool, bool]  # of tensors that are one

_ALIGNED_BYTES = 64  # where torch's own allocations begin
_SCALARS = (bool, int, float, complex, str, bytes)
_CLASSES_OF_HPARAMS = ("hparams_type", "datamodule_hparams_type")  # `CHECKPOINT_HYPER_PARAMS_TYPE`, of both


def as_plain(
    value: Any,
    *,
    of_tensor: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    of_other: Callable[[Any], Any] = lambda other: other,
) -> Any:
    """Copy `value` into new containers of types that torch loads with `weights_only=True`.

        mappings (OmegaConf's, Lightning's, ...)    -> dict        paths -> str     numbers of numpy -> of Python
        sequences                                   -> list        members of an enumeration -> their value

    OrderedDicts, defaultdicts, Counters and tuples stay what they are. Tensors become `of_tensor(tensor)`, all other
    values `of_other(value)`.

    >>> import pathlib
    >>> as_plain({"folder": pathlib.PurePosixPath("a/b"), "rate": np.float32(0.5), "sizes": (1, range(2))})
    {'folder': 'a/b', 'rate': 0.5, 'sizes': (1, [0, 1])}
    """
    again = partial(as_plain, of_tensor=of_tensor, of_other=of_other)
    if isinstance(value, Tensor):
        return of_tensor(value)
    if value is None or type(value) in (*_SCALARS, torch.Size):
        return value
    # These two before the scalars: a member of IntEnum is an int, a float64 of numpy is a float.
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
    """Whether this is Lightning's note of the class of hyper-parameters; without it they are a dict."""
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
    """Host memory for a copy of a checkpoint's tensors, reused from one checkpoint to the next.

    All tensors lie in one block, one after the other, and those of CUDA in a second one, which must be page-locked:

        bytes of a block = bytes of its tensors, each rounded up to 64;  where a block is too small, an eighth more

    From CUDA the copies are enqueued after the step in progress: call `wait` before reading them.

    >>> host = HostCopies()
    >>> weights = torch.ones(2, 3)
    >>> copy = host.take({"weights": weights, "tied": weights, "step": 1})
    >>> weights.zero_().sum(), copy["weights"].sum(), copy["tied"] is copy["weights"], host.num_bytes
    (tensor(0.), tensor(6.), True, 64)
    """

    def __init__(self) -> None:
        self._blocks: dict[bool, Tensor] = {}  # by whether it is page-locked
        self._events: list[torch.cuda.Event] = []

    @property
    def num_bytes(self) -> int:
        """Bytes held in host buffers."""
        return sum(block.numel() for block in self._blocks.values())

    def take(self, checkpoint: Any) -> Any:
        """Copy `checkpoint`; later steps do not change the copy, which is valid until the next call."""
        # Two passes: the first finds the tensors, so that the size of a block is known before it is filled; the second
        # puts the copies where the tensors were.
        found: dict[_Key, Tensor] = {}

        def noted(tensor: Tensor) -> Tensor:
            if _has_place(tensor):
                found.setdefault(_key_of(tensor), tensor)  # tied weights stay one tensor
            return tensor

        plain = as_plain(checkpoint, of_tensor=noted, of_other=copy.deepcopy)
        copies: dict[_Key, Tensor] = {}
        for is_locked in (False, True):
            copies |= self._copied({key: tensor for key, tensor in found.items() if tensor.is_cuda is is_locked})
        self._events = [_event_on(device) for device in {each.device for each in found.values() if each.is_cuda}]
        return as_plain(
            plain,
            of_tensor=lambda tensor: copies[_key_of(tensor)] if _has_place(tensor) else tensor.detach().clone(),
        )

    def wait(self) -> None:
        """Wait until the enqueued copies are there."""
        for event in self._events:
            event.synchronize()

    def _copied(self, tensors: dict[_Key, Tensor]) -> dict[_Key, Tensor]:
        """Copy tensors that are all on the CPU, or all on CUDA."""
        if not tensors:
            return {}
        ends = list(itertools.accumulate(_room_for(tensor) for tensor in tensors.values()))
        block = self._block_of(ends[-1], is_locked=next(iter(tensors.values())).is_cuda)
        return {
            key: _copy_at(block, begin, tensor)
            for (key, tensor), begin in zip(tensors.items(), [0, *ends[:-1]], strict=True)
        }

    def _block_of(self, num_bytes: int, *, is_locked: bool) -> Tensor:
        # One block is used again for tensors of any shape: fresh pages cost a CPU more than the copy. torch rounds
        # page-locked memory up to a power of two.
        block = self._blocks.pop(is_locked, None)
        if block is None or block.numel() < num_bytes:
            size = num_bytes if block is None else num_bytes + num_bytes // 8
            block = None  # frees the old block before the larger one is allocated
            block = torch.empty(size, dtype=torch.uint8, pin_memory=is_locked)
        self._blocks[is_locked] = block
        return block


def _has_place(tensor: Tensor) -> bool:
    """Whether a tensor is bytes in memory; sparse and quantized tensors are more, those of no elements less."""
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.numel() > 0


def _key_of(tensor: Tensor) -> _Key:
    of_memory = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    # torch marks a conjugate or negative view by a flag only: its memory is that of the tensor it is a view of.
    return *of_memory, tensor.is_conj(), tensor.is_neg()


def _room_for(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.itemsize // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _copy_at(block: Tensor, begin: int, tensor: Tensor) -> Tensor:
    # `frombuffer` gives a storage of this part of the block alone: `torch.save` writes the whole storage of a tensor.
    target = torch.frombuffer(block.numpy(), dtype=tensor.dtype, count=tensor.numel(), offset=begin)
    # A tensor on `meta` has no memory: only the strides that torch would choose are wanted.
    target = target.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())
    # A copy from CUDA to page-locked memory copies bytes: the flags of a conjugate or negative view would be lost.
    return target.copy_(tensor.detach().resolve_conj().resolve_neg(), non_blocking=tensor.is_cuda)


def _event_on(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
