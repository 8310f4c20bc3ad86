"""Checks that the loss of a rank depends on parameters, because the other ranks wait for the rank's gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def refuse_loss_without_gradient(loss: Tensor, *, rank: int, world_size: int) -> None:
    """Raise before the backward pass if the loss does not require a gradient.

    Raises:
        RuntimeError: The loss requires no gradient. The error names this rank. The other ranks would wait for its
            gradients.
    """
    if isinstance(loss, Tensor) and not loss.requires_grad:
        raise RuntimeError(
            f"The loss on rank {rank} of {world_size} does not require a gradient, because it does not depend on any "
            "trained parameter, but the other ranks wait for its gradients. Return a loss that depends on the "
            "parameters on every rank, such as `0 * self.net(x).sum()`, or return None on all ranks."
        )


def refuse_loss_without_parameters(loss: Tensor, *, rank: int, world_size: int) -> None:
    """Raise if the autograd graph of a loss reaches no parameter.

    It is called after a backward pass that filled no gradient bucket.

    Raises:
        RuntimeError: The loss depends on no parameter. The error names this rank. The other ranks would wait for its
            gradients.
    """
    if not depends_on_parameter(loss):
        raise RuntimeError(
            f"The loss on rank {rank} of {world_size} does not depend on any trained parameter, but the other ranks "
            "wait for its gradients. For a batch without a loss, return `self.net(x).sum() * 0` or return None on all "
            "ranks."
        )


def depends_on_parameter(loss: Tensor) -> bool:
    """Return whether the autograd graph of a loss reaches, or could reach, a parameter.

    The graph of a custom autograd function is unknown, so such a function counts as reaching a parameter.

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
        # Custom functions such as reentrant checkpoints run their own graph in backward. DDP's sink only passes the
        # loss on.
        is_custom = isinstance(node, torch.autograd.function.BackwardCFunction)
        is_opaque = is_custom and "_DDPSink" not in type(node).__name__
        if is_opaque or isinstance(getattr(node, "variable", None), nn.Parameter):
            return True
        for next_node, _ in node.next_functions:
            if next_node is not None and next_node not in visited:
                visited.add(next_node)
                pending.append(next_node)
    return False
