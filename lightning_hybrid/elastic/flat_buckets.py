"""Flat tensors that contain the gradients or the buffers of a module.

The buckets depend only on the parameters, and are used for the first all-reduce in a membership view. DDP's own buckets
cannot be used for it, because DDP rebuilds them after its first backward. A rank that joins has not run a backward yet,
so its buckets would differ from those of the other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

_ALIGNMENT = 16  # bytes, the size of the largest dtype


class FlatBucket:
    """Gradients of several parameters in one flat tensor, with the interface of DDP's `GradBucket`."""

    def __init__(self, index: int, parameters: Sequence[nn.Parameter], *, is_last: bool) -> None:
        self._index = index
        self._parameters = list(parameters)
        self._is_last = is_last
        reals = [_real(parameter) for parameter in parameters]
        numels = [real.numel() for real in reals]
        self._flat = reals[0].new_empty(sum(numels))

        # Each view has the strides of its parameter, as in DDP's buckets.
        self._views: list[Tensor] = []
        for segment, real in zip(self._flat.split(numels), reals, strict=True):
            view = segment.as_strided(real.shape, real.stride(), segment.storage_offset())
            self._views.append(view)

    def fill(self) -> None:
        """Copy the parameters' gradients into the flat tensor."""
        _copy(self._own_gradients(), to=self._views)

    def give_back(self) -> None:
        """Copy the flat tensor back into the parameters' gradients."""
        _copy(self._views, to=self._own_gradients())

    def _own_gradients(self) -> list[Tensor]:
        gradients = []
        for parameter in self._parameters:
            gradient = parameter.grad
            assert gradient is not None  # DDP, without unused parameters, has waited for it
            gradients.append(_real(gradient))
        return gradients

    def buffer(self) -> Tensor:
        """Return the flat tensor of all gradients."""
        return self._flat

    def index(self) -> int:
        """Return the index of this bucket."""
        return self._index

    def is_last(self) -> bool:
        """Return whether this is the last bucket of a step."""
        return self._is_last

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this bucket."""
        return self._parameters

    def gradients(self) -> list[Tensor]:
        """Return the gradients as views of the flat tensor."""
        return self._views


class BufferCopy:
    """Copy of all buffers of a module, of any dtype, in one flat tensor of bytes.

    A new tensor is allocated if shapes or dtypes of the buffers change.
    """

    def __init__(self, module: nn.Module) -> None:
        # Stored, because a search through all submodules takes a long time.
        self._buffer_dicts: list[dict[str, Tensor | None]] = []
        for submodule in module.modules():
            if submodule._buffers:
                self._buffer_dicts.append(submodule._buffers)
        self._layout: list[tuple[torch.Size, torch.dtype]] = []
        self._views: list[Tensor] = []
        self.flat = torch.empty(0, dtype=torch.uint8)

    def take(self) -> None:
        """Copy the module's buffers into the flat tensor."""
        buffers = self._present()
        if buffers:
            _copy(buffers, to=self._views)

    def put_back(self) -> None:
        """Copy the flat tensor back into the module's buffers."""
        buffers = self._present()
        if buffers:
            _copy(self._views, to=buffers)

    def share(self, broadcast: Callable[[Tensor], None], *, is_source: bool) -> None:
        """Broadcast the source rank's module buffers to all ranks, in place.

        Collective if the module has buffers: every rank must call it, in the same order.
        """
        buffers = self._present()
        if not buffers:
            return
        if is_source:
            _copy(buffers, to=self._views)
        broadcast(self.flat)
        if not is_source:
            _copy(self._views, to=buffers)

    def _present(self) -> list[Tensor]:
        """Return the module's buffers, and adapt the flat tensor to them if their layout has changed."""
        buffers = []
        for buffer_dict in self._buffer_dicts:
            for buffer in buffer_dict.values():
                if buffer is not None:
                    buffers.append(buffer)

        layout = [(buffer.shape, buffer.dtype) for buffer in buffers]
        if layout != self._layout:
            self._layout = layout
            self._allocate(buffers)
        return buffers

    def _allocate(self, buffers: list[Tensor]) -> None:
        """Allocate the flat tensor, and create a view of it for each buffer."""
        aligned_sizes = []
        for buffer in buffers:
            num_units = math.ceil(buffer.nbytes / _ALIGNMENT)
            aligned_sizes.append(num_units * _ALIGNMENT)
        device = None
        if buffers:
            device = buffers[0].device
        self.flat = torch.zeros(sum(aligned_sizes), dtype=torch.uint8, device=device)

        self._views = []
        segments = self.flat.split(aligned_sizes)
        for segment, buffer in zip(segments, buffers, strict=True):
            own_bytes = segment[: buffer.nbytes]
            view = own_bytes.view(buffer.dtype)
            self._views.append(view.view(buffer.shape))


@torch.no_grad()
def _copy(tensors: list[Tensor], *, to: list[Tensor]) -> None:
    torch._foreach_copy_(to, tensors)


def flat_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[FlatBucket]:
    """Group parameters in reverse order into buckets of one dtype and at most `bucket_bytes` bytes.

    A larger parameter has its own bucket.
    """
    groups: list[list[nn.Parameter]] = []
    open_groups: dict[torch.dtype, list[nn.Parameter]] = {}  # the group that may grow, by dtype
    for parameter in reversed(parameters):
        group = open_groups.get(parameter.dtype)
        if group is None or _num_bytes(group) + parameter.nbytes > bucket_bytes:
            group = []
            groups.append(group)
            open_groups[parameter.dtype] = group
        group.append(parameter)

    buckets = []
    last_index = len(groups) - 1
    for index, group in enumerate(groups):
        bucket = FlatBucket(index, group, is_last=index == last_index)
        buckets.append(bucket)
    return buckets


def _num_bytes(parameters: Sequence[nn.Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def _real(tensor: Tensor) -> Tensor:
    """Return a view without autograd history, in which each complex number is two real numbers."""
    tensor = tensor.detach()
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor
