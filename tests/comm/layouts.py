"""Layouts of a few ranks over nodes, and data that differs on every rank."""

from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.comm import CommEngine, CommPlan, Topology
from lightning_hybrid.comm.engine.job import Job
from lightning_hybrid.comm.engine.process_groups import CommGroups
from lightning_hybrid.comm.engine.stages import STAGES, run_stage
from lightning_hybrid.comm.plan import Algorithm
from tests.toy import error_of

Nodes = tuple[tuple[int, ...], ...]


def layouts(world_size: int) -> Iterator[Nodes]:
    """Yield every partition of the ranks into nodes: consecutive, interleaved and uneven.

    >>> list(layouts(2))
    [((0, 1),), ((0,), (1,))]
    >>> [len(list(layouts(world_size))) for world_size in (1, 2, 3, 4)]   # Bell numbers
    [1, 2, 5, 15]
    """
    if world_size == 0:
        yield ()
        return
    last = world_size - 1
    for nodes in layouts(last):
        for index, node in enumerate(nodes):
            yield (*nodes[:index], (*node, last), *nodes[index + 1 :])
        yield (*nodes, (last,))


def name(nodes: Nodes) -> str:
    """Return the name of a layout, such as ``01|23``."""
    return "|".join("".join(map(str, node)) for node in nodes)


def is_even(nodes: Nodes) -> bool:
    return len({len(node) for node in nodes}) == 1


def engine_over(
    nodes: Nodes, plan: CommPlan, *, timeout_s: float = 30.0, **options: Any
) -> CommEngine:
    topology = Topology(rank=dist.get_rank() if dist.is_initialized() else 0, nodes=nodes)
    options = {"device": torch.device("cpu"), **options}
    return CommEngine(topology=topology, plan=plan, timeout=timedelta(seconds=timeout_s), **options)


class Bucket:
    def __init__(self, index: int, buffer: Tensor, *parameters: Tensor, is_last: bool) -> None:
        self.index = lambda: index
        self.buffer = lambda: buffer
        self.is_last = lambda: is_last
        self.parameters = lambda: list(parameters)


def error_of_another_order(engine: CommEngine, *, is_known: bool = True) -> str:
    """Return this rank's error when rank 2 submits two buckets of equal size in reverse order.

    With `is_known`, all ranks first submit both orders together, so that no bucket is new.
    """

    def step(order: tuple[int, int]) -> None:
        buckets = [(index, torch.full((40,), 1.0 + index)) for index in order]
        buckets.append((2, torch.ones(8)))
        futures = [engine.submit(flat, bucket_index=i, is_last=i == 2) for i, flat in buckets]
        for future in futures:
            future.wait()

    for order in ((0, 1), (1, 0)) if is_known else ():
        step(order)
    text = error_of(step, (1, 0) if dist.get_rank() == 2 else (0, 1))
    if not text:  # on CUDA, the ranks that came first learn of it from the others
        end_s = monotonic() + 10
        while not engine.failure and monotonic() < end_s:
            sleep(0.02)
        text = error_of(engine.raise_if_failed)
    engine.close()
    return text


def sum_(flat: Tensor, groups: CommGroups, algorithm: Algorithm) -> Tensor:
    job = Job(flat=flat, topology=groups.topology)
    for stage in STAGES[algorithm]:
        run_stage(stage, job, groups.by_stage[stage.name])
    return flat


def integers(rank: int, numel: int, dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    """Return integers in [-8, 8] that differ on every rank. Any sum of four is exact, even in bf16."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-8, 9, (numel,), generator=generator).to(dtype)


@cache
def sum_of_integers(world_size: int, numel: int, dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    """Return the sum over all ranks. It is cached because many tests expect it, so do not change it in place."""
    return sum(integers(rank, numel, torch.float32, seed=seed) for rank in range(world_size)).to(
        dtype
    )


def reals(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(
        numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64
    ).to(dtype)
