"""Host-memory copies of checkpoints, which do not change while training continues."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ALIGNED_BYTES = 64  # alignment of torch's own allocations


@dataclass(frozen=True)
class _Key:
    """Key that identifies a tensor's memory and view. Tensors with equal keys share one copy.

    Conjugate and negative views share memory with their base tensor and differ from it only by their flags.
    """

    device: torch.device
    address: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    is_conjugate: bool
    is_negative: bool


def deep_copied(value: Any, *, of_tensor: Callable[[Tensor], Tensor]) -> Any:
    """Deep-copy an object, with each tensor replaced by the result of `of_tensor(tensor)`.

    Tensors are replaced at any depth, except parameters, which are copied by their own method.

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
    """Torch function mode that replaces `Tensor.__deepcopy__` with a given function."""

    def __init__(self, of_tensor: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.of_tensor = of_tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return self.of_tensor(args[0])
        if kwargs is None:
            kwargs = {}
        return func(*args, **kwargs)


class HostCopies:
    """Reusable host memory that holds copies of a checkpoint's tensors.

    Copies of CPU tensors are stored one after the other in a block of memory. Copies of CUDA tensors are stored in a
    second block, which is page-locked:

        bytes of a block = bytes of its tensors, each rounded up to a multiple of 64

    If a block is too small, a new block with 1/8 more bytes than needed replaces it. Copies from CUDA are enqueued
    after the current step. Call `wait` before you read them.
    """

    def __init__(self) -> None:
        self._blocks: dict[bool, Tensor] = {}  # the key says whether the block is page-locked
        self._events: list[torch.cuda.Event] = []

    @property
    def num_bytes(self) -> int:
        """Total size of the host memory blocks, in bytes."""
        return sum(block.numel() for block in self._blocks.values())

    def take(self, checkpoint: Any) -> Any:
        """Copy a checkpoint to host memory and return the copy, which is valid until the next call.

        Later training steps do not change the copy, but copies from CUDA are complete only after `wait`. All values
        keep their types. Tensors are copied to the CPU, except parameters, sparse tensors and quantized tensors, which
        are cloned on their devices.
        """
        # The first pass collects the tensors, so that the size of a block is known before it is filled. The second pass
        # replaces the tensors by their copies.
        tensors: dict[_Key, Tensor] = {}

        def collect(tensor: Tensor) -> Tensor:
            if _is_plain_memory(tensor):
                tensors.setdefault(_key_of(tensor), tensor)  # tied weights are copied once
            return tensor

        frame = deep_copied(checkpoint, of_tensor=collect)
        copies = self._copy_all(tensors)

        def replace(tensor: Tensor) -> Tensor:
            host_copy = None
            if _is_plain_memory(tensor):
                host_copy = copies.get(_key_of(tensor))
            if host_copy is None:
                # For example, a tensor that an object creates only while it is copied.
                host_copy = tensor.detach().clone()
            if tensor.requires_grad:  # checkpoint files store this flag
                return host_copy.detach().requires_grad_()
            return host_copy

        return deep_copied(frame, of_tensor=replace)

    def wait(self) -> None:
        """Wait until all copies from CUDA devices are complete."""
        for event in self._events:
            event.synchronize()

    def _copy_all(self, tensors: dict[_Key, Tensor]) -> dict[_Key, Tensor]:
        on_cpu: dict[_Key, Tensor] = {}
        on_cuda: dict[_Key, Tensor] = {}
        for key, tensor in tensors.items():
            if tensor.is_cuda:
                on_cuda[key] = tensor
            else:
                on_cpu[key] = tensor

        copies: dict[_Key, Tensor] = {}
        if on_cpu:
            copies |= self._copy_into_block(on_cpu, is_locked=False)
        if on_cuda:
            copies |= self._copy_into_block(on_cuda, is_locked=True)

        devices = {tensor.device for tensor in on_cuda.values()}
        self._events = []
        for device in devices:
            stream = torch.cuda.current_stream(device)
            self._events.append(stream.record_event())
        return copies

    def _copy_into_block(
        self, tensors: dict[_Key, Tensor], *, is_locked: bool
    ) -> dict[_Key, Tensor]:
        """Copy tensors one after the other into a block of memory, and return their copies."""
        begins = {}
        num_bytes = 0
        for key, tensor in tensors.items():
            begins[key] = num_bytes
            size = tensor.numel() * tensor.itemsize
            num_aligned = math.ceil(size / _ALIGNED_BYTES)
            num_bytes += num_aligned * _ALIGNED_BYTES

        block = self._block_of(num_bytes, is_locked=is_locked)
        copies = {}
        for key, tensor in tensors.items():
            copies[key] = _copy_at(block, begins[key], tensor)
        return copies

    def _block_of(self, num_bytes: int, *, is_locked: bool) -> Tensor:
        # The block is reused for tensors of any shape, because allocating new memory pages takes longer than copying.
        # torch rounds page-locked memory up to a power of two.
        block = self._blocks.pop(is_locked, None)
        if block is None or block.numel() < num_bytes:
            size = num_bytes
            if block is not None:
                size += num_bytes // 8
            block = None  # frees the old block before the larger one is allocated
            # The device is explicit, because `torch.set_default_device` may select a device without pinned memory.
            block = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=is_locked)
        self._blocks[is_locked] = block
        return block


def _is_plain_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is a non-empty, strided, unquantized instance of `Tensor` itself."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return False
    return not tensor.is_quantized and tensor.numel() > 0


def _key_of(tensor: Tensor) -> _Key:
    return _Key(
        device=tensor.device,
        address=tensor.data_ptr(),
        dtype=tensor.dtype,
        shape=tensor.shape,
        strides=tensor.stride(),
        is_conjugate=tensor.is_conj(),
        is_negative=tensor.is_neg(),
    )


def _copy_at(block: Tensor, begin: int, tensor: Tensor) -> Tensor:
    """Copy a tensor into a block of memory, and return the copy.

    Args:
        block: Host memory, uint8.
        begin: Index of the copy's first byte in the block.
        tensor: Tensor to copy.
    """
    # `frombuffer` creates a storage of only this range. This matters because `torch.save` writes whole storages.
    memory = block.numpy()
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=begin)
    # The tensor on `meta` has no memory and only provides the strides that torch would choose.
    strides = torch.empty_like(tensor, device="meta").stride()
    target = flat.as_strided(tensor.shape, strides)
    # A copy from CUDA to page-locked memory copies only bytes. Conjugate and negative views would lose their flags.
    source = tensor.detach().resolve_conj().resolve_neg()
    return target.copy_(source, non_blocking=tensor.is_cuda)
