"""Tensors as contiguous memory, which is all that the fused passes know of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from lightning_hybrid.placement import has_gaps


class ContiguousViews:
    """The tensors of a tensor group as the fused passes read them: addresses, and dense buffers for tensors with gaps.

        load()       before the passes: reads the addresses of gradients, and fills the dense buffers
        unload()     after them: copies the dense buffers back to their tensors

    The passes read a parameter and its state through dense buffers if one of them has gaps, or if they differ in memory
    order. A gradient in another memory order than its parameter is copied, too.

    Args:
        lists: Parameters, then lists of optimizer state that are parallel to them.

    Attributes:
        dense: The lists, with dense buffers in place of the tensors that need one.
    """

    def __init__(self, *lists: Sequence[Tensor]) -> None:
        self.dense: list[list[Tensor]] = [list(tensors) for tensors in lists]
        self.grads: list[Tensor] = []
        self._lists: list[list[Tensor]] = [list(tensors) for tensors in lists]
        self._addresses = data_ptrs(*lists)
        self._buffered: list[tuple[Tensor, Tensor]] = []  # each a tensor and its dense buffer
        for index, (param, *states) in enumerate(zip(*lists, strict=True)):
            # The passes read a parameter and its state by one index.
            if not is_dense([param, *states]):
                self._add_buffers(index)
        self._strides = strides(self._lists[0])
        self._dense_strides = strides(self.dense[0])

    def _add_buffers(self, index: int) -> None:
        for tensors in self.dense:
            tensor = tensors[index]
            tensors[index] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            self._buffered.append((tensor, tensors[index]))

    def have_moved(self) -> bool:
        """Return whether a tensor has another address than when this was built, or a parameter another memory order."""
        return self._addresses != data_ptrs(*self._lists) or self._strides != strides(
            self._lists[0]
        )

    def load(self, grads: Sequence[Tensor]) -> list[int]:
        """Keep the gradients, fill the dense buffers and return the addresses of the gradients."""
        for tensor, buffer in self._buffered:
            buffer.copy_(tensor)
        self.grads = list(grads)
        # Nearly always all strides are equal: one comparison of two lists, and no look at single tensors.
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
    return [tensor.data_ptr() for one in lists for tensor in one]


def strides(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Return the strides of each tensor."""
    return [tensor.stride() for tensor in tensors]


def is_dense(tensors: Collection[Tensor]) -> bool:
    """Whether no tensor has gaps in memory, and all have their elements in the same order.

    >>> image = torch.zeros(2, 3, 4, 5)
    >>> is_dense([image, image[:]]), is_dense([image, image.to(memory_format=torch.channels_last)])
    (True, False)
    """
    # Dimensions of size 1 are left out: their stride means nothing, and differs between a weight and its gradient.
    orders = {
        tuple(s for n, s in zip(one.shape, one.stride(), strict=True) if n > 1) for one in tensors
    }
    return len(orders) == 1 and not any(map(has_gaps, tensors))
