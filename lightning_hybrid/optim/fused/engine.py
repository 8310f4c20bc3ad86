"""Interface of the engines that do a fused step for one tensor group, on any device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_hybrid.optim.fused.block_sums import BlockSums
from lightning_hybrid.optim.fused.contiguous import ContiguousViews
from lightning_hybrid.optim.fused.option_table import OptionTable
from lightning_hybrid.optim.gradients import GradScaling


class Engine(ABC):
    """Norms and update of one tensor group: `cpu.passes` on the CPU, `cuda.lars` on CUDA.

    Attributes:
        block_sums: Sums that are added over ranks before an update. None: every tensor is whole.
    """

    block_sums: BlockSums | None = None
    _views: ContiguousViews
    _add_over_ranks_: Callable[[Tensor], None] | None = None

    def add_shards_with(self, add_up_: Callable[[Tensor], None]) -> None:
        """Let `add_up_` add the sums of squares of shards, float64 (2, tensors), over ranks before they are used."""
        self._add_over_ranks_ = add_up_

    def has_moved(self) -> bool:
        """Return True if a tensor is no longer at the address that it had when this engine was built."""
        return self._views.have_moved()

    @abstractmethod
    def compute_norms(
        self,
        grads: Sequence[Tensor],
        options: OptionTable,
        scaling: GradScaling,
        needed: Sequence[bool],
    ) -> Tensor:
        """Compute the norms, and return 1.0 if a gradient that is `needed` is inf or nan, else 0.0.

        The result is float32 and 0-dim, on the device of the tensors. On CUDA it is the `found_inf_out` of `scaling`.
        Without a `found_inf_out` its value has no meaning there.
        """

    @abstractmethod
    def write_update(self, options: OptionTable, scaling: GradScaling) -> None:
        """Write the parameters, with the gradients and the norms of the last `compute_norms`."""
