"""Checks that the loss of a rank has gradients, which the other ranks wait for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def refuse_loss_without_gradient(loss: Tensor, *, rank: int, world_size: int) -> None:
    """Check before a backward that the loss requires a gradient.

    Raises:
        RuntimeError: It does not. The error names the rank, whose gradients the others would wait for.
    """
    if isinstance(loss, Tensor) and not loss.requires_grad:
        raise RuntimeError(
            f"The loss on rank {rank} of {world_size} does not require a gradient, because it depends on "
            "no trained parameter of this rank. The other ranks wait for its gradients. Return a loss "
            "that depends on the parameters on every rank, such as `0 * self.net(x).sum()`, or return "
            "None on all ranks."
        )


def refuse_loss_without_parameters(loss: Tensor, *, rank: int, world_size: int) -> None:
    """Check after a backward that filled no bucket that the loss depends on a parameter.

    Raises:
        RuntimeError: It does not. The error names the rank, whose gradients the others would wait for.
    """
    if not depends_on_parameter(loss):
        raise RuntimeError(
            f"The loss on rank {rank} of {world_size} depends on no trained parameter of this rank. The "
            "other ranks wait for its gradients. For a batch without a loss, return `self.net(x).sum() * "
            "0` or return None on all ranks."
        )


def depends_on_parameter(loss: Tensor) -> bool:
    """Return whether the graph of a loss reaches a parameter, or a custom function that may reach one.

    >>> net = nn.Linear(2, 1)
    >>> depends_on_parameter(net(torch.ones(2)).sum())
    True
    >>> depends_on_parameter(torch.zeros(2, requires_grad=True).sum())
    False
    """
    if loss.grad_fn is None:
        return isinstance(loss, nn.Parameter)
    pending: list[Any] = [loss.grad_fn]
    visited = set(pending)
    while pending:
        node = pending.pop()
        # Reentrant checkpoints and the like run a graph of their own in backward. DDP's sink passes the loss through.
        is_custom = isinstance(node, torch.autograd.function.BackwardCFunction)
        is_opaque = is_custom and "_DDPSink" not in type(node).__name__
        if is_opaque or isinstance(getattr(node, "variable", None), nn.Parameter):
            return True
        for next_node, _ in node.next_functions:
            if next_node is not None and next_node not in visited:
                visited.add(next_node)
                pending.append(next_node)
    return False
