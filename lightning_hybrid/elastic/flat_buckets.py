"""Flat tensors that hold the gradients or the buffers of a module.

The buckets depend only on the parameters, and are used for the first all-reduce in a membership view. DDP's own buckets
cannot be used for it, because DDP rebuilds them after its first backward. A rank that joins has not run a backward yet,
so its buckets would differ from those of the other ranks.
"""

from __future__ import annotations

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
        self._flat = reals[0].new_empty(sum(parameter.numel() for parameter in reals))
        parts = self._flat.split([parameter.numel() for parameter in reals])
        self._views = [
            part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
            for part, parameter in zip(parts, reals, strict=True)
        ]

    def fill(self) -> None:
        """Copy the parameters' gradients into the flat tensor."""
        torch._foreach_copy_(
            self._views, [_real(_gradient_of(parameter)) for parameter in self._parameters]
        )

    def give_back(self) -> None:
        """Copy the flat tensor back into the parameters' gradients."""
        torch._foreach_copy_(
            [_real(_gradient_of(parameter)) for parameter in self._parameters], self._views
        )

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
        # Stored, because a search through all submodules takes long.
        self._owners = [submodule._buffers for submodule in module.modules() if submodule._buffers]
        self._layout: list[tuple[torch.Size, torch.dtype]] = []
        self._views: list[Tensor] = []
        self.flat = torch.empty(0, dtype=torch.uint8)

    def take(self) -> None:
        """Copy the module's buffers into the flat tensor."""
        if buffers := self._present():
            _copy(buffers, to=self._views)

    def put_back(self) -> None:
        """Copy the flat tensor back into the module's buffers."""
        if buffers := self._present():
            _copy(self._views, to=buffers)

    def share(self, broadcast: Callable[[Tensor], None], *, is_source: bool) -> None:
        """Broadcast the source rank's module buffers to all ranks, in place.

        Collective if the module has buffers: every rank must call it, in the same order.
        """
        if buffers := self._present():
            if is_source:
                _copy(buffers, to=self._views)
            broadcast(self.flat)
            if not is_source:
                _copy(self._views, to=buffers)

    def _present(self) -> list[Tensor]:
        present = [
            buffer for some in self._owners for buffer in some.values() if buffer is not None
        ]
        if (layout := [(buffer.shape, buffer.dtype) for buffer in present]) != self._layout:
            self._layout = layout
            sizes = [-(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT for buffer in present]
            self.flat = torch.zeros(
                sum(sizes), dtype=torch.uint8, device=present[0].device if present else None
            )
            self._views = [
                part[: buffer.nbytes].view(buffer.dtype).view(buffer.shape)
                for part, buffer in zip(self.flat.split(sizes), present, strict=True)
            ]
        return present


@torch.no_grad()
def _copy(tensors: list[Tensor], *, to: list[Tensor]) -> None:
    torch._foreach_copy_(to, tensors)


def flat_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[FlatBucket]:
    """Group parameters in reverse order into buckets of one dtype and at most `bucket_bytes` bytes.

    A larger parameter has its own bucket.
    """
    groups: list[list[nn.Parameter]] = []
    open_ones: dict[torch.dtype, int] = {}  # index of the group that may still grow, by dtype
    for parameter in reversed(parameters):
        group_index = open_ones.get(parameter.dtype)
        if (
            group_index is None
            or sum(member.nbytes for member in groups[group_index]) + parameter.nbytes
            > bucket_bytes
        ):
            group_index = open_ones[parameter.dtype] = len(groups)
            groups.append([])
        groups[group_index].append(parameter)
    return [
        FlatBucket(index, group, is_last=index == len(groups) - 1)
        for index, group in enumerate(groups)
    ]


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None  # DDP, without unused parameters, has waited for it
    return parameter.grad
