"""Averaging between nodes that train independently, and the outer optimizer step of DiLoCo.

    flat      | tensor 0 | tensor 1 | ...     in fp32, from the leader of each node; zeros from its other ranks
    average   sum over all ranks of flat / number of nodes

The ranks of a node hold the same values, so its leader contributes them and its other ranks contribute zeros. The sum
over ranks is then the sum over nodes, whichever algorithm computes it, and all ranks get the same bits. While one chunk
is being all-reduced, the next is packed.

With `LocalSteps(dtype=...)` weight differences are sent between nodes in that dtype, or through the codec.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel.distributed import _BufferCommHookLocation

from lightning_hybrid.comm import CommEngine, HookState
from lightning_hybrid.comm.codec.block_format import num_blocks_of
from lightning_hybrid.placement import broadcast_first_, flattened, has_gaps

# Number of elements of a chunk. Two chunks are in memory: 32 MiB in fp32.
CHUNK_NUMEL = 1 << 22

_WIDE = (torch.float64, torch.complex128)


class NodeAverage:
    """Average of tensors over nodes, computed with the all-reduce of a communication engine.

    Attributes:
        device: Device on which the engine adds tensors.
    """

    def __init__(self, engine: CommEngine) -> None:
        self.device = engine.device
        self._engine = engine
        self._num_nodes = engine.topology.num_nodes
        self._is_leader = engine.topology.rank == engine.topology.leader
        self._num_coded = 0  # number of blocks given to the codec since `begin_step`

    @property
    def is_narrow(self) -> bool:
        """True if tensors may be sent between nodes in a narrower data type than fp32."""
        return self._engine.dtype_across_nodes is not None

    def begin_step(self, num_steps: int) -> None:
        """Set the number of completed optimizer steps, which seeds the codec's random rounding."""
        self._num_coded = 0
        if self._engine.coder is not None:
            self._engine.coder.begin_step(num_steps)

    @torch.no_grad()
    def average_(self, tensors: Sequence[Tensor], *, is_narrow: bool = False) -> None:
        """Replace tensors by their average over nodes, in place.

        Afterwards all ranks hold the same bits. The average is computed in fp32, or in fp64 for fp64 and complex128
        tensors.

        Collective: every rank must call it, in the same order, with tensors of the same shapes, strides and dtypes.

        Args:
            tensors: Tensors to average.
            is_narrow: Whether tensors that are averaged in fp32 are sent between nodes in `LocalSteps.dtype`.

        Raises:
            RuntimeError: The engine has failed.
        """
        for dtype in (torch.float32, torch.float64):
            is_wide = dtype is torch.float64
            same_width = []
            for tensor in tensors:
                if (tensor.dtype in _WIDE) is is_wide and tensor.numel():
                    same_width.append(tensor)

            # Tensors with gaps in memory are averaged in a contiguous copy.
            with_gaps = [tensor for tensor in same_width if has_gaps(tensor)]
            copies = {id(tensor): tensor.contiguous() for tensor in with_gaps}
            rows = [_row(copies.get(id(tensor), tensor)) for tensor in same_width]
            self._average_rows_(rows, dtype, is_exact=is_wide or not is_narrow)
            for tensor in with_gaps:
                tensor.copy_(copies[id(tensor)])

    def _average_rows_(self, rows: Sequence[Tensor], dtype: torch.dtype, *, is_exact: bool) -> None:
        chunks = row_chunks(rows, CHUNK_NUMEL)
        largest = max((_numel_of(chunk) for chunk in chunks), default=0)
        memory = [torch.empty(largest, dtype=dtype, device=self.device) for _ in chunks[:2]]
        pending: deque[Future[Tensor]] = deque()
        for index, chunk in enumerate(chunks):
            if len(pending) == 2:
                self._wait_for(pending.popleft())  # because its buffer is reused
            flat = memory[index % 2][: _numel_of(chunk)]
            if self._is_leader:
                torch._foreach_copy_(_split_like(flat, chunk), chunk)
            else:
                flat.zero_()

            block_ids = None
            if not is_exact:
                block_ids = self._next_blocks(flat)
            future = self._engine.submit(
                flat,
                bucket_index=index,
                finish=partial(self._store_average, rows=chunk),
                block_ids=block_ids,
                is_in_update=True,
                is_exact=is_exact,
            )
            pending.append(future)
        for future in pending:
            self._wait_for(future)

    def _wait_for(self, future: Future[Tensor]) -> None:
        with self._engine.trace.waiting():
            future.wait()

    def _next_blocks(self, flat: Tensor) -> Tensor | None:
        """Return the indices of the codec blocks in `flat`, counted since the last `begin_step`.

        Returns None if there is no codec.
        """
        if self._engine.coder is None:
            return None
        begin = self._num_coded
        self._num_coded = begin + num_blocks_of(flat.numel())
        return torch.arange(begin, self._num_coded, dtype=torch.int32, device=flat.device)

    @torch.no_grad()
    def _store_average(self, flat: Tensor, *, rows: list[Tensor]) -> Tensor:
        flat.div_(self._num_nodes)
        torch._foreach_copy_(rows, _split_like(flat, rows))
        return flat


class OuterStep:
    """Outer optimizer of DiLoCo, which updates the common weights with optional Nesterov momentum.

        d = mean over nodes of (w - w_n)          w: last common weights; w_n: weights of node n after its local steps
        m <- momentum * m + d
        w <- w - lr * (d + momentum * m)          Nesterov momentum, as in `torch.optim.SGD`

    With lr 1 and momentum 0 the result is the mean of the nodes' weights, of which a codec sends only the differences.
    The common weights and the momentum each need as much memory as the weights. Source: Douillard et al. 2023
    (arXiv:2311.08105), "DiLoCo", which uses 0.7 and 0.9.

    Args:
        weights: Weights in fp32, equal on all nodes.
        lr: Outer learning rate.
        momentum: Outer momentum. 0: there is none.
    """

    def __init__(self, weights: Sequence[Tensor], *, lr: float, momentum: float) -> None:
        self.lr = lr
        self.momentum = momentum
        self._common = [weight.detach().clone() for weight in weights]
        self.momenta: list[Tensor] = []
        if momentum:
            self.momenta = [torch.zeros_like(weight) for weight in self._common]

    @torch.no_grad()
    def differences(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the differences w - w_n between the last common weights and this node's weights."""
        return list(torch._foreach_sub(self._common, list(weights)))

    @torch.no_grad()
    def step_(self, weights: Sequence[Tensor], differences: list[Tensor]) -> None:
        """Update the common weights by one outer optimizer step and copy them into `weights`.

        Args:
            weights: Weights of this node.
            differences: Mean d over nodes, which is overwritten.
        """
        if self.momenta:
            torch._foreach_mul_(self.momenta, self.momentum)
            torch._foreach_add_(self.momenta, differences)
            torch._foreach_add_(differences, self.momenta, alpha=self.momentum)
        torch._foreach_add_(self._common, differences, alpha=-self.lr)
        torch._foreach_copy_(list(weights), self._common)


class IndependentNodes:
    """State of one training run in which nodes train independently between averages.

    Args:
        engine: Engine that all-reduces over all ranks.
        node_engine: Engine that all-reduces over the ranks of the node.
        group: Process group of the ranks of the node.
        hook_state: State of DDP's communication hook, whose engine is replaced by `node_engine`.

    Attributes:
        average: Average over nodes.
        outer: Outer step. None: nodes continue from the mean.
        ends_in_step: Whether nodes average within the last step of a period, and not before the next batch.
        is_independent: Whether nodes currently train independently.
        num_periods: Number of periods that have ended.
        has_own_weights: Whether weights may have diverged between nodes since the last average.
        has_own_moving_averages: Whether moving averages of weights may have diverged.
        has_own_state: Whether optimizer state may have diverged.
    """

    def __init__(
        self,
        *,
        engine: CommEngine,
        node_engine: CommEngine,
        group: dist.ProcessGroup,
        hook_state: HookState,
    ) -> None:
        self.node_engine = node_engine
        self.group = group
        self.average = NodeAverage(engine)
        self.outer: OuterStep | None = None
        self.ends_in_step = True
        self.is_independent = False
        self.num_periods = 0
        self.has_own_weights = False
        self.has_own_moving_averages = False
        self.has_own_state = False
        self._hook_state = hook_state

    def mark_diverged(self) -> None:
        """Record that weights and optimizer state may differ between nodes."""
        self.has_own_weights = True
        self.has_own_moving_averages = True
        self.has_own_state = True

    def separate(self, model: Any) -> None:
        """Average gradients only within each node from now on, so that nodes train independently.

        Args:
            model: Module in `DistributedDataParallel`.
        """
        self.is_independent = True
        self._hook_state.engine = self.node_engine
        # DDP broadcasts buffers from rank zero before each forward. Here each node's leader broadcasts them.
        model._register_buffer_comm_hook(
            self.group, _broadcast_in_node, _BufferCommHookLocation.PRE_FORWARD
        )

    def join(self, model: Any, engine: CommEngine) -> None:
        """Average gradients over all ranks again, after all nodes have loaded the same state.

        Args:
            model: Module in `DistributedDataParallel`.
            engine: Engine that all-reduces over all ranks.
        """
        if not self.is_independent:
            return
        self.is_independent = False
        self.outer = None
        self._hook_state.engine = engine
        self.has_own_weights = False
        self.has_own_moving_averages = False
        self.has_own_state = False
        del model.buffer_hook


def _broadcast_in_node(group: dist.ProcessGroup, buffers: Mapping[str, Tensor]) -> None:
    broadcast_first_(list(buffers.values()), group)


def row_chunks(rows: Sequence[Tensor], numel: int) -> list[list[Tensor]]:
    """Split 1-D tensors into chunks of `numel` elements, the last of which may be smaller.

    >>> [[row.tolist() for row in chunk] for chunk in row_chunks([torch.arange(3), torch.arange(4)], 2)]
    [[[0, 1]], [[2], [0]], [[1, 2]], [[3]]]
    """
    chunks: list[list[Tensor]] = []
    room = 0
    for row in rows:
        begin = 0
        while begin < row.numel():
            if room == 0:
                chunks.append([])
                room = numel
            length = min(room, row.numel() - begin)
            chunks[-1].append(row[begin : begin + length])
            begin += length
            room -= length
    return chunks


def _row(tensor: Tensor) -> Tensor:
    """Flatten a tensor to a 1-D tensor of real numbers, in memory order."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return flattened(tensor, tensor)


def _numel_of(rows: Sequence[Tensor]) -> int:
    return sum(row.numel() for row in rows)


def _split_like(flat: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
    """Split `flat` into consecutive views with the lengths of the given 1-D tensors."""
    return list(flat.split([row.numel() for row in rows]))
