"""Process groups of the ranks of a node: made by all ranks together, and ended in one way."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from lightning_hybrid.comm import Topology
from lightning_hybrid.comm.engine.process_groups import own_group
from lightning_hybrid.comm.health.abort import destroy, forget


def new_node_group(topology: Topology, *, timeout: timedelta | None, desc: str) -> dist.ProcessGroup:
    """Make a group for each node, and return that of this rank's. Collective: every rank must call it."""
    group: dist.ProcessGroup = own_group(topology.nodes, timeout=timeout, desc=desc)
    return group


def end_group(group: dist.ProcessGroup, *, is_aborted: bool) -> None:
    """Free a group, unless the default group is gone; nothing is waited for where a failure has aborted it."""
    # On CUDA a failure aborts all communicators.
    (forget if is_aborted else destroy)(group)
