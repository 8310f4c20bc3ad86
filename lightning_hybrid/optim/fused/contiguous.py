"""Memory addresses of tensors for fused optimizer steps, with dense copies of non-dense tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from lightning_hybrid.placement import has_gaps


class _DenseBuffer:
    """Dense buffer through which the passes access a tensor.

    Args:
        tensor: Parameter, or state of a parameter.

    Attributes:
        values: Dense tensor of the same shape, dtype and device.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.values = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    def fill(self) -> None:
        """Copy the tensor into the buffer."""
        self.values.copy_(self._tensor)

    def write_back(self) -> None:
        """Copy the buffer back into the tensor."""
        self._tensor.copy_(self.values)


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
        self.dense = [list(tensors) for tensors in lists]
        self.grads: list[Tensor] = []
        self._lists = [list(tensors) for tensors in lists]
        self._params = self._lists[0]
        self._buffers: list[_DenseBuffer] = []

        for index, param_and_states in enumerate(zip(*lists, strict=True)):
            # The passes use the same index for a parameter and its state.
            if not is_dense(param_and_states):
                self._add_buffers(index)
        self._dense_params = self.dense[0]

        self._addresses = data_ptrs(*lists)
        self._strides = strides(self._params)
        self._dense_strides = strides(self._dense_params)

    def _add_buffers(self, index: int) -> None:
        """Replace a parameter and its state in `dense` with dense buffers."""
        for tensors in self.dense:
            buffer = _DenseBuffer(tensors[index])
            self._buffers.append(buffer)
            tensors[index] = buffer.values

    def have_moved(self) -> bool:
        """Return whether the address of a tensor or the memory order of a parameter has changed."""
        if self._addresses != data_ptrs(*self._lists):
            return True
        return self._strides != strides(self._params)

    def load(self, grads: Sequence[Tensor]) -> list[int]:
        """Set the current gradients and fill the dense buffers, and return the addresses of the gradients."""
        for buffer in self._buffers:
            buffer.fill()

        # Strides are nearly always equal, so that this comparison of two lists is enough.
        self.grads = list(grads)
        if strides(self.grads) != self._dense_strides:
            self.grads = []
            for param, grad in zip(self._dense_params, grads, strict=True):
                self.grads.append(_in_memory_order_of(param, grad))
        return data_ptrs(self.grads)

    def unload(self) -> None:
        """Copy the dense buffers to their tensors, increase the version counters, and release the gradients."""
        for buffer in self._buffers:
            buffer.write_back()
        # torch does not notice writes by address. Without new versions, backward would silently use a changed weight.
        for tensors in self._lists:
            torch.autograd.graph.increment_version(tensors)
        self.grads = []


def _in_memory_order_of(param: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient, copied if its memory order differs from that of its parameter."""
    if grad.stride() == param.stride() or is_dense((param, grad)):
        return grad
    ordered_grad = torch.empty_like(param, dtype=grad.dtype)
    return ordered_grad.copy_(grad)


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
    """Return whether all tensors have the same memory order and no gaps in memory.

    >>> image = torch.zeros(2, 3, 4, 5)
    >>> is_dense([image, image[:]]), is_dense([image, image.to(memory_format=torch.channels_last)])
    (True, False)
    """
    memory_orders = {_memory_order(tensor) for tensor in tensors}
    if len(memory_orders) != 1:
        return False
    return not any(has_gaps(tensor) for tensor in tensors)


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of dimensions with more than one element.

    The strides of other dimensions may differ between a weight and its gradient.
    """
    memory_order = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1:
            memory_order.append(stride)
    return tuple(memory_order)
