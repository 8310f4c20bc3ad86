"""Checks, before training, that the update can be shared: of the nodes, the precision and the optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_hybrid.comm import Topology

# Their step treats each element by itself, so a part of a tensor is as good as the whole.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.Rprop,
)

PRECISIONS = ("16-true", "bf16-true", "32-true")


def refuse_unequal_nodes(topology: Topology) -> None:
    """Check that every node has as many ranks.

    Raises:
        ValueError: with their numbers.
    """
    if topology.ranks_per_node is None:
        sizes = [len(node) for node in topology.nodes]
        held = f"{sizes[0]} and {sizes[1]}" if len(sizes) == 2 else ", ".join(map(str, sizes))
        raise ValueError(
            "`shard_update` (='node') needs nodes of equal size: the parts of a tensor are the same on every node, and "
            f"here nodes hold {held} ranks. Launch equal nodes, or leave `strategy.shard_update` out."
        )


def refuse_precision(precision: Any) -> None:
    """Check that the precision is one whose step can be made on parts.

    Raises:
        ValueError: names it.
    """
    if precision not in PRECISIONS:
        raise ValueError(
            f"`precision` (={precision!r}) and `shard_update` (='node') exclude each other: the update is shared with "
            f"{', '.join(PRECISIONS)}. In place of 16-mixed take 16-true, in place of bf16-mixed bf16-true, or leave "
            "`strategy.shard_update` out."
        )


def refuse_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Check that each step can be made on parts of tensors, and that no parameter has two owners.

    Raises:
        ValueError: names the optimizer.
    """
    owners: dict[int, int] = {}
    for place, optimizer in enumerate(optimizers):
        name = type(optimizer).__name__
        # By the exact type: a subclass may look at norms.
        if type(optimizer) not in ELEMENTWISE and not hasattr(optimizer, "parts"):
            raise ValueError(
                f"`optimizer` (={name}) cannot be shared by `shard_update` (='node'): its step may need whole tensors, "
                "as rules with norms, factors or line searches do, and each rank would have a part. Use LARS, LAMB or "
                f"one of torch's that treat elements one by one ({', '.join(one.__name__ for one in ELEMENTWISE)}), or "
                "leave `strategy.shard_update` out."
            )
        if any(group.get("direction") == "orthogonal" for group in optimizer.param_groups):
            raise ValueError(
                '`direction` (="orthogonal") and `shard_update` (="node") exclude each other: it needs whole matrices. '
                'Use direction="momentum", or leave `strategy.shard_update` out: the ranks of a node then share the '
                "work of it."
            )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (first := owners.setdefault(id(parameter), place)) != place:
                    raise ValueError(
                        f"`configure_optimizers` returned a parameter of shape {tuple(parameter.shape)} in the "
                        f"optimizers {first} and {place}: with `shard_update` (='node') a part of it can stand in one "
                        "of them only. Give each parameter to one optimizer, or leave `strategy.shard_update` out."
                    )
