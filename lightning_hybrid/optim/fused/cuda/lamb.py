"""The launches of the fused LAMB on CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_hybrid.optim.fused.contiguous import data_ptrs
from lightning_hybrid.optim.fused.cuda import lamb_kernels
from lightning_hybrid.optim.fused.cuda.lars import KernelEngine, current, table_of
from lightning_hybrid.optim.fused.option_table import OptionTable
from lightning_hybrid.optim.grad_scaling import GradScaling
from lightning_hybrid.placement import Part


class KernelLamb(KernelEngine):
    """The step of LAMB; `states` are both moments and the step counts.

        norms()     `kernels.norms`, if a gradient is needed
        moments()   `count`, `moments`
        update()    `rates`, `lamb_update`

    Has run in Triton's interpreter, and on no GPU yet.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        copies: Sequence[Tensor],
        grad_dtype: torch.dtype,
        *,
        chunk: int = 4096,
        parts: Sequence[Part | None] = (),
    ) -> None:
        *moments, self._steps = states
        sizes = {"num_numbers": lamb_kernels.NUM_LAMB, "chunk": chunk}
        super().__init__(params, moments, copies, grad_dtype, parts=parts, **sizes)
        # The counts have one element each, whatever the parameter's size: they need a table of their own.
        self._step_places = data_ptrs(self._steps)
        self._step_addresses = table_of(self._step_places, torch.int64, params[0].device)
        self._rates = torch.zeros(len(params), dtype=torch.float64, device=params[0].device)

    def has_moved(self) -> bool:
        """Whether a tensor is no longer at the address it had when this was built."""
        return super().has_moved() or self._step_places != data_ptrs(self._steps)

    def norms(
        self, grads: Sequence[Tensor], options: OptionTable, scaling: GradScaling, needed: Sequence[bool]
    ) -> Tensor:
        """Compute the squares of gradients, and whether one is inf or nan; see `step.Engine`."""
        with current(self._device):
            self._load(grads)
            # LAMB needs no norm of gradients by itself; 0 says that none was found to be inf or nan.
            if not any(needed):
                return self._zero
            return self._norms(options, scaling, is_joint=False, has_weight_sums=True)

    def grad_squares(self) -> Tensor:
        """Sum the squares of all gradients, scaled as they are: float64, 0-dim."""
        self._add_up()
        return self._added[1].sum(dtype=torch.float64)

    def moments(self, options: OptionTable, scaling: GradScaling) -> None:
        """Count the step, take the gradients into both moments, and sum the squares of weights and updates."""
        found_inf = self._zero if scaling.found_inf is None else scaling.found_inf
        inverse_scale = self._one if scaling.inverse_scale is None else scaling.inverse_scale
        weights, firsts, seconds, _ = self._pointers
        num_tensors, num_chunks = self._counts
        with current(self._device):
            lamb_kernels.count[(num_tensors,)](
                self._step_addresses, options.table, inverse_scale, found_inf, self._numbers, num_tensors
            )
            if self._grid[0]:
                lamb_kernels.moments[self._grid](
                    *(weights, self._grad_pointers, firsts, seconds, *self._chunks),
                    *(self._numbers, found_inf, self._sums, num_chunks),
                    **self._common,
                    **self._of_grads,
                )

    def update(self, options: OptionTable, scaling: GradScaling) -> None:
        """Write the step; see `step.Engine`."""
        with current(self._device):
            self._add_up()
            if self._grid[0]:
                self._update(options, self._zero if scaling.found_inf is None else scaling.found_inf)
            torch.autograd.graph.increment_version(self._steps)
            self._views.unload()

    def _update(self, options: OptionTable, found_inf: Tensor) -> None:
        weights, firsts, seconds, copies = self._pointers
        lamb_kernels.rates[self._added_counts[:1]](
            self._added, self._first_chunk, options.table, options["lr"], self._rates, *self._added_counts
        )
        lamb_kernels.lamb_update[self._grid](
            *(weights, firsts, seconds, copies, *self._chunks),
            *(self._numbers, self._rates, found_inf),
            COPY=self._copy,
            HAS_COPY=self._are_masters,
            **self._common,
        )
