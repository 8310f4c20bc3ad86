"""Tensors as stretches of memory, which is all that the fused passes know of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class ContiguousViews:
    """The tensors of one kind for the fused passes: where they are, and stand-ins for those that have gaps.

        load()       before the passes: where the gradients are; stand-ins get the values of their tensors
        unload()     after them: tensors get the values of their stand-ins; autograd and versions know of the writes

    `lists`: parameters, then lists as long or empty: optimizer state, copies. A tensor that does not fill a stretch of
    memory, or does it in another order of its elements than the rest of its place, has a stand-in; so has a gradient in
    another order. That costs copies of them.
    """

    def __init__(self, *lists: Sequence[Tensor]) -> None:
        self.lists = [list(one) for one in lists]
        self.dense = [list(one) for one in lists]
        self.grads: list[Tensor] = []
        self._addresses = addresses(*lists)
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
        """Whether a tensor is no longer where it was when this was built, or a parameter not in that order."""
        return self._addresses != addresses(*self.lists) or self._strides != strides(self.lists[0])

    def load(self, grads: Sequence[Tensor]) -> list[int]:
        """Take the gradients and fill the stand-ins. Returns the addresses of the gradients."""
        for real, dense in self.pairs:
            dense.copy_(real)
        self.grads = list(grads)
        if strides(self.grads) != self._dense_strides:
            for i, (param, grad) in enumerate(zip(self.dense[0], self.grads, strict=True)):
                if grad.stride() != param.stride() and not is_dense((param, grad)):
                    self.grads[i] = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
        return addresses(self.grads)

    def unload(self) -> None:
        """Let the tensors have what was written, and be known as written. Gradients are let go."""
        for real, dense in self.pairs:
            real.copy_(dense)
        torch.autograd.graph.increment_version([tensor for one in self.lists for tensor in one])
        self._versions = self._versions_now()
        self.grads = []

    def changed(self) -> list[int]:
        """The places of parameters that somebody may have written since the last `unload`: `_version` tells.

        A write through `.data` does not show. All of them before the first.
        """
        versions = self._versions_now()
        if versions == self._versions:
            return []
        if self._versions is None:
            return list(range(len(versions)))
        return [i for i, (old, new) in enumerate(zip(self._versions, versions, strict=True)) if old != new]

    def _versions_now(self) -> list[int]:
        return [tensor._version for tensor in self.lists[0]]


def addresses(*lists: Sequence[Tensor]) -> list[int]:
    """Where the tensors are, one list after the other."""
    return [tensor.data_ptr() for one in lists for tensor in one]


def strides(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Of each tensor."""
    return [tensor.stride() for tensor in tensors]


def is_dense(tensors: Iterable[Tensor]) -> bool:
    """Whether each fills a stretch of memory, and all in one order of their elements.

    >>> image = torch.zeros(2, 3, 4, 5)
    >>> is_dense([image, image[:]]), is_dense([image, image.to(memory_format=torch.channels_last)])
    (True, False)
    """
    orders = set()
    for tensor in tensors:
        sides = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
        expected = 1
        for stride, size in sides:
            if stride != expected:
                return False
            expected *= size
        orders.add(tuple(s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1))
    return len(orders) == 1
