"""Switch that makes half-precision matrix products on CUDA accumulate in fp32 during training."""

from __future__ import annotations

import torch

_FLAGS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


class FullAccumulation:
    """Switch that prevents cuBLAS from accumulating half-precision matrix products in half precision.

    By default, torch's flags allow cuBLAS to split a long product and to add the partial sums in half precision. The
    weight gradient of a large batch is such a product. With a loss scale, its partial sums can exceed 65,504 even if
    the total does not, and they would be rounded. The flags apply to the whole process and exist without CUDA as well.
    """

    def __init__(self) -> None:
        self._disabled: list[str] = []

    def begin(self) -> None:
        """Disable torch's flags for reduced-precision accumulation."""
        for flag in _FLAGS:
            if getattr(torch.backends.cuda.matmul, flag):
                setattr(torch.backends.cuda.matmul, flag, False)
                self._disabled.append(flag)

    def end(self) -> None:
        """Restore the flags that `begin` disabled."""
        while self._disabled:
            setattr(torch.backends.cuda.matmul, self._disabled.pop(), True)
