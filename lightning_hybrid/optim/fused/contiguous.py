"""Tensors as contiguous memory: the addresses that the fused passes read, and dense buffers where memory has gaps."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from lightning_hybrid.placement import has_gaps


class ContiguousViews:
    """The tensors of a tensor group as the fused passes read them: addresses, and dense buffers for tensors with gaps.

        load()       before the passes: reads the addresses of gradients, and fills the dense buffers
        unload()     after the passes: copies the dense buffers back to their tensors

    The passes read a parameter and its state through dense buffers if a tensor has gaps, or if the tensors differ in
    memory order. A gradient in another memory order than its parameter is copied, too.

    Args:
        lists: Parameters, then lists of optimizer state that are parallel to them.

    Attributes:
        dense: The lists, with dense buffers in place of the tensors that need one.
        grads: The gradients of the step in progress, in the memory order of their parameters.
    """

    def __init__(self, *lists: Sequence[Tensor]) -> None:
        self.dense: list[list[Tensor]] = [list(tensors) for tensors in lists]
        self.grads: list[Tensor] = []
        self._lists: list[list[Tensor]] = [list(tensors) for tensors in lists]
        self._addresses = data_ptrs(*lists)
        self._buffered: list[tuple[Tensor, Tensor]] = []  # pairs of a tensor and its dense buffer

        for index, param_and_states in enumerate(zip(*lists, strict=True)):
            # The passes read a parameter and its state by one index.
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
        """Return True if a tensor has a new address, or a parameter a new memory order, since construction."""
        if self._addresses != data_ptrs(*self._lists):
            return True
        return self._strides != strides(self._lists[0])

    def load(self, grads: Sequence[Tensor]) -> list[int]:
        """Keep the gradients, fill the dense buffers and return the addresses of the gradients."""
        for tensor, buffer in self._buffered:
            buffer.copy_(tensor)
        self.grads = list(grads)

        # Nearly always all strides are equal. Then one comparison of two lists is enough.
        if strides(self.grads) != self._dense_strides:
            for index, (param, grad) in enumerate(zip(self.dense[0], self.grads, strict=True)):
                if grad.stride() != param.stride() and not is_dense((param, grad)):
                    self.grads[index] = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
        return data_ptrs(self.grads)

    def unload(self) -> None:
        """Copy the dense buffers back, raise the tensors' version counters, and drop the gradients."""
        for tensor, buffer in self._buffered:
            tensor.copy_(buffer)
        # torch does not see writes by address: without this, backward would use a changed weight without an error.
        for tensors in self._lists:
            torch.autograd.graph.increment_version(tensors)
        self.grads = []


def data_ptrs(*lists: Sequence[Tensor]) -> list[int]:
    """Return the address of each tensor, one list after the other."""
    addresses: list[int] = []
    for tensors in lists:
        addresses.extend([tensor.data_ptr() for tensor in tensors])
    return addresses


def strides(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Return the strides of each tensor."""
    return [tensor.stride() for tensor in tensors]


def is_dense(tensors: Collection[Tensor]) -> bool:
    """Return True if no tensor has gaps in memory, and all have their elements in the same order.

    >>> image = torch.zeros(2, 3, 4, 5)
    >>> is_dense([image, image[:]]), is_dense([image, image.to(memory_format=torch.channels_last)])
    (True, False)
    """
    memory_orders = {_memory_order(tensor) for tensor in tensors}
    return len(memory_orders) == 1 and not any(map(has_gaps, tensors))


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides without those of dimensions of size 1, which differ between a weight and its gradient."""
    order = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1:
            order.append(stride)
    return tuple(order)
