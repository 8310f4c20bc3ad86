"""Nodes that take steps of their own: their averages, the outer step, and what a strategy holds of them.

    flat      | tensor 0 | tensor 1 | ...     in fp32, of the leader of each node; zeros of its other ranks
    average   sum over all ranks of flat / number of nodes

The ranks of a node hold the same, so its leader gives it and the others add nothing: the sum is that over nodes, by
whatever algorithm carries it, and all ranks get the same bits. While one chunk is on its way the next is packed.

With `LocalSteps(dtype=...)` what is asked for travels narrower between nodes: in that dtype, or through the codec.
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

# Elements of a chunk, of which two are in memory: 32 MiB in fp32.
CHUNK_NUMEL = 1 << 22

_WIDE = (torch.float64, torch.complex128)


class NodeAverage:
    """Averages over the nodes of an engine."""

    def __init__(self, engine: CommEngine) -> None:
        self._engine = engine
        self.device = engine.device
        self._num_nodes = engine.topology.num_nodes
        self._is_leader = engine.topology.rank == engine.topology.leader
        self._num_coded = 0  # blocks since `begin_step`

    @property
    def is_narrow(self) -> bool:
        """Whether something can travel narrower between nodes."""
        return self._engine.dtype_across_nodes is not None

    def begin_step(self, num_steps: int) -> None:
        """Set the number of optimizer steps so far, of which a codec's noise is a function."""
        self._num_coded = 0
        if self._engine.coder is not None:
            self._engine.coder.begin_step(num_steps)

    @torch.no_grad()
    def average_(self, tensors: Sequence[Tensor], *, is_narrow: bool = False) -> None:
        """Replace tensors by their average over nodes, which is taken in fp32, or in fp64 of such tensors.

        `is_narrow`: in fp32 it travels between nodes in `LocalSteps.dtype`.

        Collective: every rank must call it, with tensors of the same shapes, strides and dtypes in the same order. In
        place; afterwards all ranks hold the same bits. Raises the engine's errors.
        """
        for dtype in (torch.float32, torch.float64):
            is_wide = dtype is torch.float64
            some = [one for one in tensors if (one.dtype in _WIDE) is is_wide and one.numel()]
            with_gaps = [one for one in some if has_gaps(one)]
            compact = {id(one): one.contiguous() for one in with_gaps}
            rows = [_row(compact.get(id(one), one)) for one in some]
            self._average_rows_(rows, dtype, is_exact=is_wide or not is_narrow)
            for one in with_gaps:
                one.copy_(compact[id(one)])

    def _average_rows_(self, rows: Sequence[Tensor], dtype: torch.dtype, *, is_exact: bool) -> None:
        chunks = row_chunks(rows, CHUNK_NUMEL)
        largest = max((sum(map(torch.numel, chunk)) for chunk in chunks), default=0)
        memory = [torch.empty(largest, dtype=dtype, device=self._engine.device) for _ in chunks[:2]]
        under_way: deque[Future[Tensor]] = deque()
        for index, chunk in enumerate(chunks):
            if len(under_way) == 2:
                under_way.popleft().wait()  # its memory is used again
            flat = memory[index % 2][: sum(map(torch.numel, chunk))]
            if self._is_leader:
                torch._foreach_copy_(_parts(flat, chunk), chunk)
            else:
                flat.zero_()
            under_way.append(
                self._engine.submit(
                    flat,
                    bucket_index=index,
                    finish=partial(self._put, rows=chunk),
                    block_ids=None if is_exact else self._next_blocks(flat),
                    is_in_update=True,
                    is_exact=is_exact,
                )
            )
        for future in under_way:
            future.wait()

    def _next_blocks(self, flat: Tensor) -> Tensor | None:
        if self._engine.coder is None:
            return None
        begin = self._num_coded
        self._num_coded = self._num_coded + num_blocks_of(flat.numel())
        return torch.arange(begin, self._num_coded, dtype=torch.int32, device=flat.device)

    @torch.no_grad()
    def _put(self, flat: Tensor, *, rows: list[Tensor]) -> Tensor:
        flat.div_(self._num_nodes)
        torch._foreach_copy_(rows, _parts(flat, rows))
        return flat


class OuterStep:
    """The outer step of one run: the last common weights, and a momentum if any, as much memory as the weights each.

        d = mean over nodes of (w - w_n)          w: the last common weights; w_n: those of node n after its local steps
        m <- momentum * m + d
        w <- w - lr * (d + momentum * m)          Nesterov's, as in `torch.optim.SGD`

    With lr 1 and momentum 0 it is the mean, of which a codec then carries only what has moved. Source: Douillard et al.
    2023 (arXiv:2311.08105), "DiLoCo", which takes 0.7 and 0.9.
    """

    def __init__(self, weights: Sequence[Tensor], *, lr: float, momentum: float) -> None:
        self.lr = lr
        self.momentum = momentum
        self._common = [weight.detach().clone() for weight in weights]
        self.momenta = [torch.zeros_like(weight) for weight in self._common] if momentum else []

    @torch.no_grad()
    def moved(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return w - w_n."""
        return list(torch._foreach_sub(self._common, list(weights)))

    @torch.no_grad()
    def step_(self, weights: Sequence[Tensor], moved: list[Tensor]) -> None:
        """Write the next common weights into `weights`. `moved`: the mean d, which is overwritten."""
        if self.momenta:
            torch._foreach_mul_(self.momenta, self.momentum)
            torch._foreach_add_(self.momenta, moved)
            torch._foreach_add_(moved, self.momenta, alpha=self.momentum)
        torch._foreach_add_(self._common, moved, alpha=-self.lr)
        torch._foreach_copy_(list(weights), self._common)


class IndependentNodes:
    """The nodes of one fit: whether they train on their own, what each has, and its average.

    Args:
        engine: sums over all ranks. `node_engine`: over those of the node, which have `group` too.
        hook_state: of DDP's hook, whose engine is changed.
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
        self._hook_state = hook_state
        self.average = NodeAverage(engine)
        self.outer: OuterStep | None = None
        self.ends_in_step = (
            True  # whether a period ends within its last step, or before the batch after it
        )
        self.is_apart = False  # whether nodes take steps on their own now
        self.num_periods = 0  # that have ended
        self.versions: list[int] = []  # of frozen parameters, as all nodes have them
        self.has_own_weights = False  # whether there was one since weights were averaged
        self.has_own_moving_averages = False  # the same of moving averages of weights
        self.has_own_state = False  # and of optimizer state

    def note_step(self) -> None:
        """Note that weights and state are about to be each node's own, or are."""
        self.has_own_weights = self.has_own_moving_averages = self.has_own_state = True

    def part(self, model: Any) -> None:
        """Let nodes take steps on their own from now on."""
        self.is_apart = True
        self._hook_state.engine = self.node_engine
        # DDP's broadcast of buffers from rank zero before each forward, as one from each node's leader.
        model._register_buffer_comm_hook(
            self.group, _broadcast_in_node, _BufferCommHookLocation.PRE_FORWARD
        )

    def join(self, model: Any, engine: CommEngine) -> None:
        """Train together again, from what all have loaded."""
        if self.is_apart:
            self.is_apart = False
            self.outer = None
            self._hook_state.engine = engine
            self.has_own_weights = self.has_own_moving_averages = self.has_own_state = False
            del model.buffer_hook


def _broadcast_in_node(group: dist.ProcessGroup, buffers: Mapping[str, Tensor]) -> None:
    broadcast_first_(list(buffers.values()), group)


def row_chunks(rows: Sequence[Tensor], numel: int) -> list[list[Tensor]]:
    """Cut rows into chunks of `numel` elements, the last of fewer.

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
            step = min(room, row.numel() - begin)
            chunks[-1].append(row[begin : begin + step])
            begin = begin + step
            room = room - step
    return chunks


def _row(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return flattened(real, real)


def _parts(flat: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
    return list(flat.split([row.numel() for row in rows]))
