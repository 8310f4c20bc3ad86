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


class KernelLamb(KernelEngine):
    """The step of LAMB; `states` are both moments and the step counts.

        norms()     `kernels.norms`, if a gradient is needed
        update()    `count`, `moments`, `rates`, `lamb_update`

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
    ) -> None:
        *moments, self._steps = states
        super().__init__(params, moments, copies, grad_dtype, num_numbers=lamb_kernels.NUM_LAMB, chunk=chunk)
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
        if self.add_up_ is not None:
            return self._sums_of_wholes(self.add_up_)[1].sum()
        return self._sums[1].sum(dtype=torch.float64)

    def update(self, options: OptionTable, scaling: GradScaling) -> None:
        """Write the step; see `step.Engine`."""
        with current(self._device):
            self._update(options, scaling)
            torch.autograd.graph.increment_version(self._steps)
            self._views.unload()

    def _update(self, options: OptionTable, scaling: GradScaling) -> None:
        found_inf = self._zero if scaling.found_inf is None else scaling.found_inf
        inverse_scale = self._one if scaling.inverse_scale is None else scaling.inverse_scale
        weights, firsts, seconds, copies = self._pointers
        per_tensor, (num_tensors, num_chunks) = self._counts[:1], self._counts
        lamb_kernels.count[per_tensor](
            self._step_addresses, options.table, inverse_scale, found_inf, self._numbers, num_tensors
        )
        if self._grid[0]:
            lamb_kernels.moments[self._grid](
                *(weights, self._grad_pointers, firsts, seconds, *self._chunks),
                *(self._numbers, found_inf, self._sums, num_chunks),
                **self._common,
                **self._of_grads,
            )
        self._add_up()
        if self._grid[0]:
            lamb_kernels.rates[per_tensor](
                self._sums, self._first_chunk, options.table, options["lr"], self._rates, num_tensors, num_chunks
            )
            lamb_kernels.lamb_update[self._grid](
                *(weights, firsts, seconds, copies, *self._chunks),
                *(self._numbers, self._rates, found_inf),
                COPY=self._copy,
                HAS_COPY=self._are_masters,
                **self._common,
            )
