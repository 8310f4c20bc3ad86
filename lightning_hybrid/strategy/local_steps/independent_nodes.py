"""What a strategy holds of nodes that take steps of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel.distributed import _BufferCommHookLocation

from lightning_hybrid.comm import CommEngine, HookState
from lightning_hybrid.placement import broadcast_first_
from lightning_hybrid.strategy.local_steps.node_average import NodeAverage
from lightning_hybrid.strategy.local_steps.outer_step import OuterStep
from lightning_hybrid.strategy.options import LocalSteps


class IndependentNodes:
    """The nodes of one fit: whether they train on their own, what each has, and its average.

    Args:
        steps: when they average.
        engine: sums over all ranks. `node_engine`: over those of the node, which have `group` too.
        hook_state: of DDP's hook, whose engine is changed.
    """

    def __init__(
        self,
        steps: LocalSteps,
        *,
        engine: CommEngine,
        node_engine: CommEngine,
        group: dist.ProcessGroup,
        hook_state: HookState,
    ) -> None:
        self.steps, self.node_engine, self.group = steps, node_engine, group
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
