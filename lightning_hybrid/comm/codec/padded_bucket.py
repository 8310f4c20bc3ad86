"""Padded buckets, in which every gradient starts a new block of the codec."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hybrid.comm.codec.block_format import BLOCK, num_blocks_of


@dataclass(frozen=True)
class PartialBlock:
    """Last block of a gradient, if the gradient does not fill it.

    Attributes:
        index: Index of the block in the bucket.
        numel: Number of the gradient's elements in the block. The other elements are padding.
    """

    index: int
    numel: int


class PaddedBucket:
    """Bucket buffer in which each gradient is padded with zeros to a multiple of 256 elements.

    The buffer is reused in each step. Each block has its own scale and noise. With padding, these depend only on the
    gradient and on the block's position in it. Without padding, they would depend on the buckets. But
    DistributedDataParallel uses different buckets in its first step than later, even in a resumed run, and plans split
    buckets differently.

    Args:
        numels: Number of elements of each gradient, in the order of the bucket.
        first_ids: Number of the first block of each gradient.
        dtype: Dtype in which the bucket is summed.
        device: Device of the buffer.

    Attributes:
        numbers: Numbers of the blocks, int64, on the host.
        ids: Numbers of the blocks, int32, on the device.
        partial: Blocks that a gradient does not fill.
    """

    def __init__(
        self,
        numels: Sequence[int],
        first_ids: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        numbers: list[int] = []
        padded_numels: list[int] = []
        self.partial: list[PartialBlock] = []
        for numel, first_id in zip(numels, first_ids, strict=True):
            num_blocks = num_blocks_of(numel)
            padded_numels.append(num_blocks * BLOCK)
            numbers.extend(range(first_id, first_id + num_blocks))
            numel_in_last_block = numel % BLOCK
            if numel_in_last_block != 0:
                last_block = len(numbers) - 1
                self.partial.append(PartialBlock(last_block, numel_in_last_block))
        self.numbers = torch.tensor(numbers, dtype=torch.int64)
        self.ids = self.numbers.to(torch.int32).to(device)

        self._numels = list(numels)
        self._wire = torch.zeros(sum(padded_numels), dtype=dtype, device=device)
        self._gradients: list[Tensor] = []
        self._padding: list[Tensor] = []
        padded_gradients = self._wire.split(padded_numels)
        for padded_gradient, numel in zip(padded_gradients, numels, strict=True):
            self._gradients.append(padded_gradient[:numel])
            self._padding.append(padded_gradient[numel:])

    def load(self, buffer: Tensor, *, before: int) -> Tensor:
        """Copy the bucket, divided by `before`, into the padded buffer and return the padded buffer.

        `buffer` may be modified.
        """
        # The division uses the wider of the two dtypes.
        is_wire_wider = self._wire.element_size() > buffer.element_size()
        if before > 1 and not is_wire_wider:
            buffer.div_(before)

        source = list(buffer.split(self._numels))
        torch._foreach_copy_(self._gradients, source)
        # The previous reduction of rotated blocks left noise in the padding.
        torch._foreach_zero_(self._padding)

        if before > 1 and is_wire_wider:
            self._wire.div_(before)
        return self._wire

    def store(self, _: Tensor, *, buffer: Tensor, after: float) -> Tensor:
        """Divide the reduced gradients by `after`, and copy them without padding into `buffer`.

        Results are rounded once.
        """
        # The division uses the wider of the two dtypes.
        is_wire_wider = self._wire.element_size() > buffer.element_size()
        if after != 1 and is_wire_wider:
            self._wire.div_(after)

        target = list(buffer.split(self._numels))
        torch._foreach_copy_(target, self._gradients)

        if after != 1 and not is_wire_wider:
            buffer.div_(after)
        return buffer


class BlockNumbers:
    """Assignment of consecutive block numbers to the gradients of all parameters.

    Blocks are numbered in the order of `parameters`. Blocks of other parameters follow, in the order in which the
    parameters are first used.

    >>> weight, bias, late_parameter = torch.zeros(3), torch.zeros(300), torch.zeros(1)
    >>> numbers = BlockNumbers([weight, bias])
    >>> numbers.first_of(bias), numbers.first_of(late_parameter)
    (1, 3)
    """

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        self._first: dict[int, int] = {}  # by the `id` of a parameter
        self._num_blocks = 0
        for parameter in parameters:
            self.first_of(parameter)

    @property
    def num_blocks(self) -> int:
        """Total number of blocks of all parameters that have been numbered."""
        return self._num_blocks

    def first_of(self, parameter: Tensor) -> int:
        """Return the number of a parameter's first block.

        The first call for a parameter assigns numbers to its blocks.
        """
        key = id(parameter)
        if key not in self._first:
            self._first[key] = self._num_blocks
            self._num_blocks += num_blocks_of(num_reals(parameter))
        return self._first[key]


def num_reals(parameter: Tensor) -> int:
    """Return the number of real elements of a parameter, counting each complex element twice.

    >>> num_reals(torch.zeros(2, 3)), num_reals(torch.zeros(3, dtype=torch.complex64))
    (6, 6)
    """
    if parameter.is_complex():
        return 2 * parameter.numel()
    return parameter.numel()
