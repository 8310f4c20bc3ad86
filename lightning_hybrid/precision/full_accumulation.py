"""fp32 accumulation of half-precision matrix products on CUDA during a fit."""

from __future__ import annotations

import torch

_FLAGS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


class FullAccumulation:
    """Switch for torch's flags that by default allow cuBLAS to add the parts of a split product in half precision.

    The weight gradient of a large batch is such a product. With a loss scale, its parts can exceed 65,504 even if the
    sum does not, and they would be rounded. The flags are those of the process and exist without CUDA as well.
    """

    def __init__(self) -> None:
        self._disabled: list[str] = []

    def begin(self) -> None:
        """Disable the flags that are enabled."""
        for flag in _FLAGS:
            if getattr(torch.backends.cuda.matmul, flag):
                setattr(torch.backends.cuda.matmul, flag, False)
                self._disabled.append(flag)

    def end(self) -> None:
        """Restore the flags that `begin` has disabled."""
        while self._disabled:
            setattr(torch.backends.cuda.matmul, self._disabled.pop(), True)
