"""Interface of the engines that run a fused optimizer step on one group of tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_hybrid.optim.fused.block_sums import BlockSums
from lightning_hybrid.optim.fused.contiguous import ContiguousViews
from lightning_hybrid.optim.fused.option_table import OptionTable
from lightning_hybrid.optim.gradients import GradScaling


class Engine(ABC):
    """Interface of the engines that compute the norms and the update of one group of tensors.

    It is implemented in `cpu.passes` and `cuda.lars`.

    Attributes:
        block_sums: Sums that are all-reduced before an update. None: no tensor is sharded.
    """

    block_sums: BlockSums | None = None
    _views: ContiguousViews
    _add_over_ranks_: Callable[[Tensor], None] | None = None

    def add_shards_with(self, add_up_: Callable[[Tensor], None]) -> None:
        """Set the function that all-reduces the sums of squares of DTensor shards.

        Its argument is a float64 tensor of shape (2, tensors).
        """
        self._add_over_ranks_ = add_up_

    def has_moved(self) -> bool:
        """Return whether a tensor's address or a parameter's memory order has changed."""
        return self._views.have_moved()

    @abstractmethod
    def compute_norms(
        self,
        grads: Sequence[Tensor],
        options: OptionTable,
        scaling: GradScaling,
        needed: Sequence[bool],
    ) -> Tensor:
        """Sum the squares for the norms, and check the gradients for inf and nan.

        Args:
            grads: Gradient of each tensor.
            options: Options of each tensor.
            scaling: Loss scale of the gradients.
            needed: Whether to measure each gradient.

        Returns:
            A 0-dim float32 tensor on the tensors' device, which is 1.0 if a needed gradient is inf or nan, else 0.0. On
            CUDA it is the `found_inf_out` of `scaling`, and is undefined if there is none.
        """

    @abstractmethod
    def write_update(self, options: OptionTable, scaling: GradScaling) -> None:
        """Update the parameters with the gradients and norms of the last `compute_norms` call."""
