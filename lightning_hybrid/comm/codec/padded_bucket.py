"""A bucket in which every gradient begins a block of its own, so that no block depends on how buckets are made."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_hybrid.comm.codec.block_format import BLOCK, num_blocks_of


class PaddedBucket:
    """Memory for a bucket with zeros behind each gradient, up to a multiple of 256 elements; used again in each step.

    DistributedDataParallel makes other buckets in its first step than later, in a resumed run too, and plans cut them
    otherwise. Scales and noise are those of a block: here they depend on the gradient and the place in it alone.

    Args:
        numels: elements of each gradient, in the order of the bucket.
        first_ids: the number of the first block of each.
        dtype: that in which the bucket is summed; `device`: where.
    """

    def __init__(
        self,
        numels: Sequence[int],
        first_ids: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        counts = [num_blocks_of(numel) for numel in numels]
        numbers = [
            first + index
            for first, count in zip(first_ids, counts, strict=True)
            for index in range(count)
        ]
        self.numbers = torch.tensor(numbers, dtype=torch.int64)  # of the blocks, on the host
        self.ids = self.numbers.to(torch.int32).to(device)
        # Blocks, counted in the bucket, that a gradient does not fill, and how many elements it has in them.
        ends = itertools.accumulate(counts)
        self.partial = [
            (end - 1, numel % BLOCK)
            for end, numel in zip(ends, numels, strict=True)
            if numel % BLOCK
        ]
        self._numels = list(numels)
        self._wire = torch.zeros(sum(counts) * BLOCK, dtype=dtype, device=device)
        rows = self._wire.split([count * BLOCK for count in counts])
        self._gradients = [row[:numel] for row, numel in zip(rows, numels, strict=True)]
        self._padding = [row[numel:] for row, numel in zip(rows, numels, strict=True)]

    def load(self, buffer: Tensor, *, before: int) -> Tensor:
        """Return `buffer / before`, padded, in the dtype of the sum; `buffer` itself may be changed."""
        # The division happens in the wider of both dtypes. A sum of rotated blocks leaves noise in the padding.
        is_wider = self._wire.element_size() > buffer.element_size()
        if before > 1 and not is_wider:
            buffer.div_(before)
        torch._foreach_copy_(self._gradients, list(buffer.split(self._numels)))
        torch._foreach_zero_(self._padding)
        return self._wire.div_(before) if before > 1 and is_wider else self._wire

    def store(self, _: Tensor, *, buffer: Tensor, after: float) -> Tensor:
        """Write the sum by `after` into `buffer`, rounded once: the division happens in the wider of both dtypes."""
        is_wider = self._wire.element_size() > buffer.element_size()
        if after != 1 and is_wider:
            self._wire.div_(after)
        torch._foreach_copy_(list(buffer.split(self._numels)), self._gradients)
        return buffer.div_(after) if after != 1 and not is_wider else buffer


class BlockNumbers:
    """The number of the first block of each parameter's gradient: in the order of `parameters`, and then as they come.

    >>> weight, bias, other = torch.zeros(3), torch.zeros(300), torch.zeros(1)
    >>> numbers = BlockNumbers([weight, bias])
    >>> numbers.first_of(bias), numbers.first_of(other)
    (1, 3)
    """

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        self._first: dict[int, int] = {}  # by `id`
        self._num_blocks = 0
        for parameter in parameters:
            self.first_of(parameter)

    @property
    def num_blocks(self) -> int:
        """Blocks of all parameters that have a number."""
        return self._num_blocks

    def first_of(self, parameter: Tensor) -> int:
        """Return the number of the first block of a parameter, which it gets where it has none."""
        if id(parameter) not in self._first:
            self._first[id(parameter)] = self._num_blocks
            self._num_blocks += num_blocks_of(num_reals(parameter))
        return self._first[id(parameter)]


def num_reals(parameter: Tensor) -> int:
    """Return the elements of a gradient in its bucket: complex ones are pairs of reals there.

    >>> num_reals(torch.zeros(2, 3)), num_reals(torch.zeros(3, dtype=torch.complex64))
    (6, 6)
    """
    return parameter.numel() * (2 if parameter.is_complex() else 1)
