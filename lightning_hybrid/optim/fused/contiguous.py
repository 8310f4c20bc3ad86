"""Tensors as contiguous memory, which is all that the fused passes know of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from lightning_hybrid.placement import has_gaps


class ContiguousViews:
    """The tensors of a tensor group as the fused passes read them: addresses, and stand-ins for tensors with gaps.

        load()       before the passes: reads the addresses of gradients; copies tensors to their stand-ins
        unload()     after them: copies stand-ins to their tensors

    A tensor needs a stand-in if it has gaps, or another memory order than its parameter's state and copy; so does a
    gradient in another order. Stand-ins cost copies.

    Args:
        lists: Parameters, then lists that are as long or empty: optimizer state, copies.
    """

    def __init__(self, *lists: Sequence[Tensor]) -> None:
        self.lists = [list(one) for one in lists]
        self.dense = [list(one) for one in lists]
        self.grads: list[Tensor] = []
        self._addresses = data_ptrs(*lists)
        # A parameter, its state and its copy are read by one index: if one of them has gaps, all get a stand-in.
        together = zip(*(one for one in self.lists if one), strict=True)
        scattered = [i for i, some in enumerate(together) if not is_dense(some)]
        for one in self.dense:
            for i in scattered if one else ():
                one[i] = torch.empty(one[i].shape, dtype=one[i].dtype, device=one[i].device)
        self.pairs = [(one[i], dense[i]) for one, dense in zip(self.lists, self.dense, strict=True)
                      for i in scattered if one]  # fmt: skip
        self._strides, self._dense_strides = strides(self.lists[0]), strides(self.dense[0])
        self._versions: list[int] | None = None

    def have_moved(self) -> bool:
        """Whether a tensor has another address than when this was built, or a parameter another memory order."""
        return self._addresses != data_ptrs(*self.lists) or self._strides != strides(self.lists[0])

    def load(self, grads: Sequence[Tensor]) -> list[int]:
        """Take the gradients, fill the stand-ins and return the addresses of the gradients."""
        for real, dense in self.pairs:
            dense.copy_(real)
        self.grads = list(grads)
        # Nearly always all strides are equal: one comparison of two lists, and no look at single tensors.
        if strides(self.grads) != self._dense_strides:
            for i, (param, grad) in enumerate(zip(self.dense[0], self.grads, strict=True)):
                if grad.stride() != param.stride() and not is_dense((param, grad)):
                    self.grads[i] = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
        return data_ptrs(self.grads)

    def unload(self) -> None:
        """Copy stand-ins to their tensors, raise the tensors' version counters, and drop the gradients."""
        for real, dense in self.pairs:
            real.copy_(dense)
        # torch does not see writes by address: without this, backward would use a changed weight without an error.
        torch.autograd.graph.increment_version([tensor for one in self.lists for tensor in one])
        self._versions = self._versions_now()
        self.grads = []

    def changed(self) -> list[int]:
        """Return the indices of parameters whose version rose since the last `unload`; before the first, all indices.

        A write through `.data` does not raise a version, and is not seen.
        """
        versions = self._versions_now()
        if versions == self._versions:
            return []
        if self._versions is None:
            return list(range(len(versions)))
        return [i for i, (old, new) in enumerate(zip(self._versions, versions, strict=True)) if old != new]

    def _versions_now(self) -> list[int]:
        return [tensor._version for tensor in self.lists[0]]


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
    orders = {tuple(s for n, s in zip(one.shape, one.stride(), strict=True) if n > 1) for one in tensors}
    return len(orders) == 1 and not any(map(has_gaps, tensors))
