"""Memory addresses of tensors for fused optimizer steps, with dense copies of non-dense tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from lightning_hybrid.placement import has_gaps


class ContiguousViews:
    """Dense views or copies of a group of tensors, which fused steps access by memory address.

        load()       before the passes: reads the addresses of gradients, and fills the dense buffers
        unload()     after the passes: copies the dense buffers back to their tensors

    If a parameter or its state has gaps, or if they differ in memory order, the passes use dense buffers for them. A
    gradient whose memory order differs from that of its parameter is copied as well.

    Args:
        lists: Parameters, followed by lists with the state of each parameter.

    Attributes:
        dense: The same lists, with dense buffers in place of tensors that need one.
        grads: Gradients of the current step, in the memory order of their parameters.
    """

    def __init__(self, *lists: Sequence[Tensor]) -> None:
        self.dense: list[list[Tensor]] = [list(tensors) for tensors in lists]
        self.grads: list[Tensor] = []
        self._lists: list[list[Tensor]] = [list(tensors) for tensors in lists]
        self._addresses = data_ptrs(*lists)
        self._buffered: list[tuple[Tensor, Tensor]] = []  # pairs of a tensor and its dense buffer

        for index, param_and_states in enumerate(zip(*lists, strict=True)):
            # The passes use the same index for a parameter and its state.
            if not is_dense(param_and_states):
                self._add_buffers(index)
        self._strides = strides(self._lists[0])
        self._dense_strides = strides(self.dense[0])

    def _add_buffers(self, index: int) -> None:
        for tensors in self.dense:
            tensor = tensors[index]
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            tensors[index] = buffer
            self._buffered.append((tensor, buffer))

    def have_moved(self) -> bool:
        """Return whether the address of a tensor or the memory order of a parameter has changed."""
        if self._addresses != data_ptrs(*self._lists):
            return True
        return self._strides != strides(self._lists[0])

    def load(self, grads: Sequence[Tensor]) -> list[int]:
        """Store the gradients, fill the dense buffers, and return the addresses of the gradients."""
        for tensor, buffer in self._buffered:
            buffer.copy_(tensor)
        self.grads = list(grads)

        # Strides are nearly always equal, so that this comparison of two lists is enough.
        if strides(self.grads) != self._dense_strides:
            for index, (param, grad) in enumerate(zip(self.dense[0], self.grads, strict=True)):
                if grad.stride() != param.stride() and not is_dense((param, grad)):
                    self.grads[index] = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
        return data_ptrs(self.grads)

    def unload(self) -> None:
        """Copy the dense buffers to their tensors, increase the version counters, and release the gradients."""
        for tensor, buffer in self._buffered:
            tensor.copy_(buffer)
        # torch does not notice writes by address. Without new versions, backward would silently use a changed weight.
        for tensors in self._lists:
            torch.autograd.graph.increment_version(tensors)
        self.grads = []


def data_ptrs(*lists: Sequence[Tensor]) -> list[int]:
    """Return the memory addresses of all tensors in the given lists."""
    addresses: list[int] = []
    for tensors in lists:
        addresses.extend([tensor.data_ptr() for tensor in tensors])
    return addresses


def strides(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Return the strides of each tensor."""
    return [tensor.stride() for tensor in tensors]


def is_dense(tensors: Collection[Tensor]) -> bool:
    """Return whether all tensors have the same memory order, and none has gaps.

    >>> image = torch.zeros(2, 3, 4, 5)
    >>> is_dense([image, image[:]]), is_dense([image, image.to(memory_format=torch.channels_last)])
    (True, False)
    """
    memory_orders = {_memory_order(tensor) for tensor in tensors}
    return len(memory_orders) == 1 and not any(map(has_gaps, tensors))


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of dimensions with more than one element.

    The strides of other dimensions may differ between a weight and its gradient.
    """
    order = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1:
            order.append(stride)
    return tuple(order)
