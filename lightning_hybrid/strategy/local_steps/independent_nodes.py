"""What a strategy holds of nodes that take steps of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel.distributed import _BufferCommHookLocation

from lightning_hybrid.comm import CommEngine, HookState
from lightning_hybrid.placement import broadcast_first_
from lightning_hybrid.strategy.local_steps.node_average import NodeAverage


class OuterStep:
    """The outer step of one run: the last common weights, and a momentum if any, as much memory as the weights each.

        d = mean over nodes of (w - w_n)          w: the last common weights; w_n: those of node n after its local steps
        m <- momentum * m + d
        w <- w - lr * (d + momentum * m)          Nesterov's, as in `torch.optim.SGD`

    With lr 1 and momentum 0 it is the mean, of which a codec then carries only what has moved. Source: Douillard et al.
    2023 (arXiv:2311.08105), "DiLoCo", which takes 0.7 and 0.9.
    """

    def __init__(self, weights: Sequence[Tensor], *, lr: float, momentum: float) -> None:
        self.lr, self.momentum = lr, momentum
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
        self.node_engine, self.group = node_engine, group
        self._hook_state = hook_state
        self.average = NodeAverage(engine)
        self.outer: OuterStep | None = None
        self.ends_in_step = True  # whether a period ends within its last step, or before the batch after it
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
        model._register_buffer_comm_hook(self.group, _broadcast_in_node, _BufferCommHookLocation.PRE_FORWARD)

    def join(self, model: Any, engine: CommEngine) -> None:
        """Train together again, from what all have loaded."""
        if self.is_apart:
            self.is_apart, self.outer, self._hook_state.engine = False, None, engine
            self.has_own_weights = self.has_own_moving_averages = self.has_own_state = False
            del model.buffer_hook


def _broadcast_in_node(group: dist.ProcessGroup, buffers: Mapping[str, Tensor]) -> None:
    broadcast_first_(list(buffers.values()), group)
