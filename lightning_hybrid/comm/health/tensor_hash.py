"""Fingerprints of tensors: 64 bits that differ where a single bit of the memory does, computed on the device.

A tensor's bytes are read as 32-bit integers s, and summed with fixed random odd 64-bit weights m, in rows of 2**14:

    h = sum_i m_i s_i  mod 2**64            then the same over the rows' sums, until one number is left

One element that differs always shows: its difference is below 2**32 and its weight odd, so the product is not 0 mod
2**64. Any other difference stays unseen with a probability of at most 2**-32 per level (two for 20 million elements):
with 2**t the largest power of two in all differences, t < 32, the sum is one of 2**(63 - t) values, each as likely. The
weights depend on the place, so exchanged elements show as well. (Carter and Wegman 1979, "Universal classes of hash
functions"; the multilinear form is that of Lemire and Kaser 2014, arXiv:1202.4961, who keep the upper 32 bits.)
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_ROW = 1 << 14
# The products of so many rows stay in cache: 2 MiB on a CPU; 16 MiB on a GPU, where a launch costs more.
_BLOCK_ROWS = 16
_BLOCK_ROWS_ON_CUDA = 128
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Fingerprint:
    """Fingerprints of tensors, computed where they are and combined on one device; it holds 128 KiB per level.

    Equal weights everywhere: results may be compared between processes and machines of the same byte order.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._weights: dict[tuple[int, torch.device], Tensor] = {}

    @torch.no_grad()
    def of(self, tensor: Tensor) -> Tensor:
        """Return the fingerprint of a dense tensor's bytes: 0-dim int64, on the tensor's device, without a wait."""
        # Elements count in the order of memory, so two tensors must have the same strides to be comparable. Shape and
        # dtype are no part of it: the caller compares names, which say what a tensor is. A nan is what its bits are.
        # Integers, and not a sum of floats: additions round, and differences of opposite sign cancel.
        sums = _integers(tensor)
        level = 0
        while level == 0 or sums.numel() > 1:
            sums = self._rows(
                sums if level == 0 else sums.view(torch.int32),
                self._weights_of(level, tensor.device),
            )
            level += 1
        return sums[0]

    def combine(self, fingerprints: list[Tensor]) -> Tensor:
        """Combine several fingerprints, in order, into one: int64, 0-dim."""
        return self.of(
            torch.stack([one.to(self.device, non_blocking=True) for one in fingerprints])
        )

    def _rows(self, values: Tensor, weights: Tensor) -> Tensor:
        whole = values.numel() // _ROW * _ROW
        rows = values[:whole].view(-1, _ROW)
        rest = values[whole:]
        block_rows = _BLOCK_ROWS if values.device.type == "cpu" else _BLOCK_ROWS_ON_CUDA
        blocks = (
            rows.split(block_rows) if whole else ()
        )  # torch 2.11 cannot trace the split of no rows
        sums = [(block * weights).sum(1) for block in blocks]
        if rest.numel() or not sums:
            sums.append((rest * weights[: rest.numel()]).sum().view(1))
        return torch.cat(sums) if len(sums) > 1 else sums[0]

    def _weights_of(self, level: int, device: torch.device) -> Tensor:
        if (level, device) not in self._weights:
            # Fixed seeds: every process and machine has the same weights.
            drawn = np.random.default_rng([1202, 4961, level]).integers(
                0, 2**64, _ROW, dtype=np.uint64
            )
            odd = (drawn | np.uint64(1)).view(np.int64)
            self._weights[level, device] = torch.from_numpy(odd).to(device)
        return self._weights[level, device]


def _integers(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_contiguous():
        flat = tensor.view(-1)
    elif tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        flat = tensor.as_strided(
            (tensor.numel(),), (1,), 0
        )  # another order of dimensions, such as channels_last
    else:
        flat = tensor.contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % 4:
        flat = flat.clone()  # integers of 32 bits cannot begin there
    # The widest integers that the bytes make whole numbers of.
    size = 4 if flat.numel() * flat.element_size() % 4 == 0 else flat.element_size()
    return flat.view(_INTEGERS[size])
