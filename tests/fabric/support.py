"""Fabrics of a test on its ranks, which are torn down at the end of the test."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.fabric import Fabric

FABRICS: list[Fabric] = []


def fabric_of(precision: str = "16-true", strategy: Any = "hybrid_allreduce") -> Fabric:
    world_size = 1
    if dist.is_initialized():
        world_size = dist.get_world_size()
    fabric = Fabric(strategy=strategy, precision=precision, accelerator="cpu", devices=world_size)
    fabric.launch()
    FABRICS.append(fabric)
    return fabric


def play(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function on this rank, and tear down the Fabrics that it created."""
    try:
        return function(*arguments)
    finally:
        while FABRICS:
            FABRICS.pop().strategy.teardown()
