"""64-bit fingerprints of tensors, computed on the tensor's device.

A tensor's bytes are read as 32-bit integers s, and summed with fixed random odd 64-bit weights m, in rows of 2**14:

    h = sum_i m_i s_i  mod 2**64            repeated for the sums of the rows, until one number is left

A single element that differs is always detected, because its difference is below 2**32 and its weight is odd, so that
their product is not 0 mod 2**64. Any other difference is missed with a probability of at most 2**-32 per level (two
levels for 20 million elements). The reason is that the sum takes one of 2**(63 - t) values with equal probability, if
2**t with t < 32 is the largest power of two that divides all differences. The weights depend on the position, so
swapped elements are detected as well.

Sources: Carter and Wegman 1979 ("Universal classes of hash functions"). The multilinear form is from Lemire and Kaser
2014 (arXiv:1202.4961), who keep the upper 32 bits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_ROW = 1 << 14  # number of integers in a row
# Number of rows whose products are computed at a time. On a CPU their 2 MiB stay in the cache. On a GPU they take
# 16 MiB, because each launch costs time.
_BLOCK_ROWS = 16
_BLOCK_ROWS_ON_CUDA = 128
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by size in bytes


class Fingerprint:
    """Hash function that computes a 64-bit fingerprint of a tensor on its device.

    The weights are the same everywhere, so fingerprints can be compared between processes, and between machines of the
    same byte order. The weights take 128 KiB for each level and device.

    Args:
        device: Device on which fingerprints are combined.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._weights: dict[tuple[int, torch.device], Tensor] = {}

    @torch.no_grad()
    def of(self, tensor: Tensor) -> Tensor:
        """Return the fingerprint of a dense tensor as a 0-dim int64 tensor on the same device.

        The host does not wait for the device. Elements are hashed in memory order, so two tensors are comparable only
        if their strides are equal. Shape and dtype are not hashed. A nan is hashed by its bits.
        """
        # Integers are summed, because floating-point sums are rounded and differences of opposite sign could cancel.
        integers = _integers(tensor)
        level = 0
        sums = self._sum_rows(integers, level)
        while sums.numel() > 1:
            level += 1
            halves_of_sums = sums.view(torch.int32)
            sums = self._sum_rows(halves_of_sums, level)
        return sums[0]

    def combine(self, fingerprints: list[Tensor]) -> Tensor:
        """Combine a list of fingerprints into one fingerprint that depends on their order."""
        moved = []
        for fingerprint in fingerprints:
            moved.append(fingerprint.to(self.device, non_blocking=True))
        return self.of(torch.stack(moved))

    def _sum_rows(self, values: Tensor, level: int) -> Tensor:
        """Return the weighted sum of each row of `_ROW` integers, with the weights of a level.

        The last row may be shorter.
        """
        device = values.device
        weights = self._weights_of(level, device)
        num_full_rows = values.numel() // _ROW
        numel_in_full_rows = num_full_rows * _ROW
        full_rows = values[:numel_in_full_rows].view(-1, _ROW)
        last_row = values[numel_in_full_rows:]
        block_rows = _BLOCK_ROWS_ON_CUDA
        if device.type == "cpu":
            block_rows = _BLOCK_ROWS

        sums = []
        if num_full_rows > 0:  # torch 2.11 cannot trace the split of an empty tensor.
            for block in full_rows.split(block_rows):
                sums_of_block = (block * weights).sum(1)
                sums.append(sums_of_block)
        if last_row.numel() > 0 or not sums:
            first_weights = weights[: last_row.numel()]
            weighted = last_row * first_weights
            sums.append(weighted.sum().view(1))

        if len(sums) == 1:
            return sums[0]
        return torch.cat(sums)

    def _weights_of(self, level: int, device: torch.device) -> Tensor:
        key = (level, device)
        if key not in self._weights:
            # Fixed seeds give every process and machine the same weights.
            generator = np.random.default_rng([1202, 4961, level])
            random_integers = generator.integers(0, 2**64, _ROW, dtype=np.uint64)
            odd_integers = random_integers | np.uint64(1)
            # torch multiplies int64 modulo 2**64, which gives the same bits as for unsigned integers.
            weights = torch.from_numpy(odd_integers.view(np.int64))
            self._weights[key] = weights.to(device)
        return self._weights[key]


def _integers(tensor: Tensor) -> Tensor:
    """Reinterpret a tensor's bytes as a flat tensor of integers, of 32 bits if possible."""
    flat = _in_memory_order(tensor.detach())
    itemsize = flat.element_size()
    first_byte = flat.storage_offset() * itemsize
    if first_byte % 4 != 0:
        flat = flat.clone()  # a view as 32-bit integers cannot begin at this address

    width = itemsize
    num_bytes = flat.numel() * itemsize
    if num_bytes % 4 == 0:
        width = 4
    return flat.view(_INTEGERS[width])


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as a 1-D tensor, in memory order if the tensor has no gaps."""
    numel = tensor.numel()
    if tensor.is_contiguous():
        # `view(-1)` would keep the stride of a single element, such as 2 in `tensor[::2]`.
        return tensor.as_strided((numel,), (1,))

    num_bytes = numel * tensor.element_size()
    if tensor.untyped_storage().nbytes() == num_bytes:
        # The dimensions are in another order, as in channels_last.
        return tensor.as_strided((numel,), (1,), 0)
    return tensor.contiguous().view(-1)
