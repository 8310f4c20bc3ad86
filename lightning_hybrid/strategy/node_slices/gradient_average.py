"""Averaging of the gradients of sliced layers between nodes, during the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from lightning_hybrid.comm.adasum.combine import adasum_
from lightning_hybrid.comm.hook import from_wire, split_divisor, to_wire


@dataclass(frozen=True, kw_only=True, eq=False)
class _PendingGradient:
    """Gradient whose average over nodes is still being computed.

    Attributes:
        gradient: Gradient of this rank, which receives the average.
        wire: Copy of the gradient in the dtype on the wire.
        work: Handle of the all-reduce. None: Adasum combines the gradients when backward ends.
        divisor: Number by which `wire` is divided at the end.
    """

    gradient: Tensor
    wire: Tensor
    work: Any
    divisor: float


class SliceGradients:
    """Gradient hooks that average each slice's gradient across nodes during backward, as DDP does.

        grad <- (sum over nodes of grad / before) / after          before * after = nodes
        grad <- Adasum over nodes of grad                          inner products of full tensors

    The gradient of a slice is already the average over its node. Contributions of the samples are averaged within the
    layer, and other terms of a rank's loss have the same strength as on full layers. Each all-reduce starts as soon as
    its gradient is ready. All ranks run the same layers, so their all-reduces have the same order. Backward returns
    after the last one has arrived. All nodes get the same bits.

    Args:
        slices: Parameters that are slices. Gradients of frozen ones are not averaged.
        across: Process group of the ranks with the same slices, one on each node. None: there is one node, and nothing
            is sent.
        comm_dtype: Dtype on the wire. None: the dtype of the gradients.
        is_last_backward: Function that returns whether the current backward pass is the last one of its step.
        adasum_group: With Adasum, the process group of the ranks that hold the other slices. None: gradients are
            averaged.
    """

    def __init__(
        self,
        slices: Iterable[nn.Parameter],
        *,
        across: dist.ProcessGroup | None,
        comm_dtype: torch.dtype | None,
        is_last_backward: Callable[[], bool],
        adasum_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._across: Any = across
        self._comm_dtype = comm_dtype
        self._is_last_backward = is_last_backward
        self._adasum_group = adasum_group
        self._pending: list[_PendingGradient] = []
        self._handles: list[Any] = []
        for parameter in slices:
            if parameter.requires_grad and across is not None:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._start))

    @torch.no_grad()
    def _start(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or not self._is_last_backward():
            return
        if not self._pending:
            # The callback runs at the end of this backward, as in DDP and FSDP.
            Variable._execution_engine.queue_callback(self._finish)

        dtype = self._comm_dtype or gradient.dtype
        num_nodes = dist.get_world_size(self._across)
        before, after = split_divisor(num_nodes, is_fp16=dtype is torch.float16)
        wire = to_wire(gradient, dtype, before=before)
        if self._adasum_group:
            work = None
            divisor = 1 / before  # undoes `before`, because Adasum is not a sum
        else:
            work = dist.all_reduce(wire, group=self._across, async_op=True)
            divisor = after
        self._pending.append(
            _PendingGradient(gradient=gradient, wire=wire, work=work, divisor=divisor)
        )

    @torch.no_grad()
    def _finish(self) -> None:
        all_pending = self._pending
        self._pending = []
        for pending in all_pending:
            wire = pending.wire
            if pending.work is not None:
                pending.work.wait()
            else:
                adasum_(wire.view(-1), [wire.numel()], self._across, sum_=self._add_up_)
            from_wire(wire, buffer=pending.gradient, after=pending.divisor)

    def _add_up_(self, table: Tensor, across: dist.ProcessGroup) -> None:
        """All-reduce inner products in place, first over nodes and then over the slices of a node."""
        for group in (across, self._adasum_group):
            dist.all_reduce(table, group=group)

    def remove(self) -> None:
        """Remove the gradient hooks."""
        for handle in self._handles:
            handle.remove()
