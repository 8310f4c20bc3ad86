"""Averages of the gradients of slices over nodes, while backward goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from lightning_hybrid.comm.adasum.combine import adasum_
from lightning_hybrid.comm.hook import from_wire, split_divisor, to_wire


class SliceGradients:
    """Hooks on slices that make of their gradients what DDP makes of whole ones, before backward returns.

        grad <- (sum over nodes of grad / before) / after          before * after = nodes
        grad <- Adasum over nodes of grad                          inner products are of whole tensors

    A slice's gradient is the average over its node already: of images by the layer's forward, and what else a rank's
    loss says of its slices is of the strength that it has on whole layers. Sums begin as gradients get ready, in one
    order on all ranks, as they run the same layers; backward ends when they have arrived. Nodes get the same bits.

    Args:
        slices: The parameters; those that are frozen are left alone.
        across: The ranks with the same slices, one on each node; None on one node, which has nothing to send.
        comm_dtype: Dtype on the wire; None: the gradients' own.
        averages: Returns whether the backward in progress is the last of its step.
        adasum_in: With Adasum: the ranks that hold the other slices; None: gradients are averaged.
    """

    def __init__(
        self,
        slices: Iterable[nn.Parameter],
        *,
        across: dist.ProcessGroup | None,
        comm_dtype: torch.dtype | None,
        averages: Callable[[], bool],
        adasum_in: dist.ProcessGroup | None = None,
    ) -> None:
        self._across: Any = across
        self._comm_dtype = comm_dtype
        self._averages = averages
        self._adasum_in = adasum_in
        self._under_way: list[tuple[Tensor, Tensor, Any, float]] = []
        trained = [
            parameter for parameter in slices if parameter.requires_grad and across is not None
        ]
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._begin) for parameter in trained
        ]

    @torch.no_grad()
    def _begin(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or not self._averages():
            return
        if not self._under_way:
            Variable._execution_engine.queue_callback(
                self._end
            )  # as DDP and FSDP do: at the end of this backward
        dtype = self._comm_dtype or gradient.dtype
        before, after = split_divisor(
            dist.get_world_size(self._across), is_fp16=dtype is torch.float16
        )
        wire = to_wire(gradient, dtype, before=before)
        work = None if self._adasum_in else dist.all_reduce(wire, group=self._across, async_op=True)
        self._under_way.append((gradient, wire, work, 1 / before if self._adasum_in else after))

    @torch.no_grad()
    def _end(self) -> None:
        under_way = self._under_way
        self._under_way = []
        for gradient, wire, work, after in under_way:
            if work is not None:
                work.wait()
            else:
                adasum_(wire.view(-1), [wire.numel()], self._across, sum_=self._add_up_)
            from_wire(wire, buffer=gradient, after=after)

    def _add_up_(self, table: Tensor, across: dist.ProcessGroup) -> None:
        for group in (across, self._adasum_in):
            dist.all_reduce(table, group=group)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
