"""What the fused step asks of an engine, on every device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_hybrid.optim.fused.block_sums import BlockSums
from lightning_hybrid.optim.fused.contiguous import ContiguousViews
from lightning_hybrid.optim.fused.option_table import OptionTable
from lightning_hybrid.optim.gradients import GradScaling


class Engine(ABC):
    """Norms and update of one tensor group: `cpu.passes` on the CPU, `cuda.lars` on CUDA."""

    block_sums: BlockSums | None = (
        None  # what is added over ranks before an update; None: no tensor is a part
    )
    _views: ContiguousViews
    _add_over_ranks_: Callable[[Tensor], None] | None = None

    def share(self, add_up_: Callable[[Tensor], None]) -> None:
        """Have the sums of squares of shards, float64 (2, tensors), added over ranks before they are used."""
        self._add_over_ranks_ = add_up_

    def has_moved(self) -> bool:
        """Whether a tensor is no longer at the address it had when this was built."""
        return self._views.have_moved()

    @abstractmethod
    def norms(
        self,
        grads: Sequence[Tensor],
        options: OptionTable,
        scaling: GradScaling,
        needed: Sequence[bool],
    ) -> Tensor:
        """Compute the norms; return 1.0 if a gradient that is `needed` is inf or nan, else 0.0.

        The result is float32 and 0-dim, on the device: the `found_inf_out` of `scaling`, or without one meaningless.
        """

    @abstractmethod
    def update(self, options: OptionTable, scaling: GradScaling) -> None:
        """Write the parameters, with the gradients and the norms of the last `norms`."""
