"""Copies of checkpoints, which later steps do not change."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_Key = tuple[
    torch.device, int, torch.dtype, torch.Size, tuple[int, ...], bool, bool
]  # of tensors that are one

_ALIGNED_BYTES = 64  # where torch's own allocations begin


def deep_copied(value: Any, *, of_tensor: Callable[[Tensor], Tensor]) -> Any:
    """Copy `value` as `copy.deepcopy`, with `of_tensor(tensor)` for every tensor, wherever in an object it is found.

    Parameters are copied by their own method, which cannot be replaced.

    >>> class Record:
    ...     weight = None
    >>> record = Record()
    >>> record.weight = torch.ones(2)
    >>> deep_copied({"a": record}, of_tensor=torch.zeros_like)["a"].weight
    tensor([0., 0.])
    """
    with _CopiesOfTensors(of_tensor):
        return copy.deepcopy(value)


class _CopiesOfTensors(TorchFunctionMode):
    def __init__(self, of_tensor: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.of_tensor = of_tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (
            self.of_tensor(args[0])
            if func is Tensor.__deepcopy__
            else func(*args, **(kwargs or {}))
        )


class HostCopies:
    """Host memory for a copy of a checkpoint's tensors, reused from one checkpoint to the next.

    All tensors lie in one block, one after the other, and those of CUDA in a second one, which must be page-locked:

        bytes of a block = bytes of its tensors, each rounded up to 64;  where a block is too small, an eighth more

    From CUDA the copies are enqueued after the step in progress: call `wait` before reading them.
    """

    def __init__(self) -> None:
        self._blocks: dict[bool, Tensor] = {}  # by whether it is page-locked
        self._events: list[torch.cuda.Event] = []

    @property
    def num_bytes(self) -> int:
        """Bytes held in host buffers."""
        return sum(block.numel() for block in self._blocks.values())

    def take(self, checkpoint: Any) -> Any:
        """Copy `checkpoint`; later steps do not change the copy, which is valid until the next call.

        All keeps its type. Tensors are on the CPU then, but for parameters, sparse and quantized ones.
        """
        # Two passes: the first finds the tensors, so that the size of a block is known before it is filled; the second
        # puts the copies where the tensors were.
        found: dict[_Key, Tensor] = {}

        def noted(tensor: Tensor) -> Tensor:
            if _has_place(tensor):
                found.setdefault(_key_of(tensor), tensor)  # tied weights stay one tensor
            return tensor

        frame = deep_copied(checkpoint, of_tensor=noted)
        copies: dict[_Key, Tensor] = {}
        for is_locked in (False, True):
            copies |= self._copied(
                {key: tensor for key, tensor in found.items() if tensor.is_cuda is is_locked}
            )
        devices = {each.device for each in found.values() if each.is_cuda}
        self._events = [torch.cuda.current_stream(device).record_event() for device in devices]

        def copied(tensor: Tensor) -> Tensor:
            value = copies.get(_key_of(tensor)) if _has_place(tensor) else None
            if value is None:  # also what an object makes only while it is copied
                value = tensor.detach().clone()
            return (
                value.detach().requires_grad_() if tensor.requires_grad else value
            )  # a file holds that too

        return deep_copied(frame, of_tensor=copied)

    def wait(self) -> None:
        """Wait until the enqueued copies are there."""
        for event in self._events:
            event.synchronize()

    def _copied(self, tensors: dict[_Key, Tensor]) -> dict[_Key, Tensor]:
        """Copy tensors that are all on the CPU, or all on CUDA."""
        if not tensors:
            return {}
        aligned = (
            -(-each.numel() * each.itemsize // _ALIGNED_BYTES) * _ALIGNED_BYTES
            for each in tensors.values()
        )
        ends = list(itertools.accumulate(aligned))
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
            # The device is named, as `torch.set_default_device` would make it a tensor that cannot be pinned.
            block = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=is_locked)
        self._blocks[is_locked] = block
        return block


def _has_place(tensor: Tensor) -> bool:
    """Whether a tensor is bytes in memory; sparse, quantized ones and subclasses are more, empty ones less."""
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
    return is_plain and not tensor.is_quantized and tensor.numel() > 0


def _key_of(tensor: Tensor) -> _Key:
    of_memory = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    # torch marks a conjugate or negative view by a flag only: its memory is that of the tensor it is a view of.
    return *of_memory, tensor.is_conj(), tensor.is_neg()


def _copy_at(block: Tensor, begin: int, tensor: Tensor) -> Tensor:
    # `frombuffer` gives a storage of this part of the block alone: `torch.save` writes the whole storage of a tensor.
    target = torch.frombuffer(block.numpy(), dtype=tensor.dtype, count=tensor.numel(), offset=begin)
    # A tensor on `meta` has no memory: only the strides that torch would choose are wanted.
    target = target.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())
    # A copy from CUDA to page-locked memory copies bytes: the flags of a conjugate or negative view would be lost.
    return target.copy_(tensor.detach().resolve_conj().resolve_neg(), non_blocking=tensor.is_cuda)
