"""fp32 accumulation of half-precision matrix products on CUDA, while a fit lasts."""

from __future__ import annotations

import torch

_FLAGS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


class FullAccumulation:
    """Switch of torch's flags that allow cuBLAS to add the parts of a split product in half precision, its default."""

    def __init__(self) -> None:
        self._forbidden: list[str] = []

    # A weight gradient of a large batch is such a product. Under a loss scale its parts can exceed 65,504 where the sum
    # does not, and they are rounded as well. The flags belong to the process, with or without CUDA.
    def begin(self) -> None:
        """Turn off the flags that the user has left on."""
        for flag in _FLAGS:
            if getattr(torch.backends.cuda.matmul, flag):
                setattr(torch.backends.cuda.matmul, flag, False)
                self._forbidden.append(flag)

    def end(self) -> None:
        """Turn these flags on again."""
        while self._forbidden:
            setattr(torch.backends.cuda.matmul, self._forbidden.pop(), True)
