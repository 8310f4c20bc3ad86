"""Benchmark that compares this library's all-reduce algorithms with the backend's all-reduce."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import get_args

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor

from lightning_hybrid.comm import CommEngine, CommPlan, Topology
from lightning_hybrid.comm.plan import Algorithm
from recipes.benchmarks.report import Timing
from recipes.cli.ranges import Count, CountOrZero, NotNegative

BACKEND = "torch"
"""Name of the reference variant, which is the backend's own all-reduce on the default group."""

MAX_CALLS = 1000
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class AllReduceBench:
    """Benchmark of the time per call of several all-reduce algorithms, for a range of tensor sizes and dtypes.

    A sample is a sequence of calls of one variant that takes about `min_sample_s`. Its result is the time per call of
    the slowest rank. Calls follow each other without a barrier, because ranks would leave it at different times. Each
    round takes one sample of every variant, and rounds begin with different variants. Before the first round, each
    variant reduces a tensor of ones, and the result is checked.

    Args:
        algorithms: Names of algorithms. None: `auto` and all algorithms.
        min_bytes, max_bytes, factor: Sizes are `min_bytes * factor**k`, and finally `max_bytes`.
        dtypes: Names of torch dtypes, such as `float16`.
        num_rounds: Number of samples per variant, size and dtype.
        min_sample_s: Approximate duration of a sample in seconds.
        timeout_s: Timeout of every collective in seconds.
    """

    min_bytes: Count
    max_bytes: Count
    factor: int
    dtypes: Sequence[str]
    num_rounds: CountOrZero
    algorithms: Sequence[str] | None = None
    min_sample_s: NotNegative = 0.2
    timeout_s: NotNegative = 300.0

    def __post_init__(self) -> None:
        if not 0 < self.min_bytes <= self.max_bytes or self.factor < 2:
            raise ValueError(
                f"`min_bytes`, `max_bytes`, `factor` (={self.min_bytes}, {self.max_bytes}, "
                f"{self.factor}) must be two positive sizes in ascending order and a whole number "
                "above 1, because each measured size is `factor` times the previous one. Set "
                "allreduce.min_bytes=1024, allreduce.max_bytes=1048576 and allreduce.factor=4, for example."
            )
        for name in self.dtypes:
            if name not in DTYPES:
                raise ValueError(
                    f"`dtypes` (={name}) must contain only the dtypes {', '.join(DTYPES)}. Set "
                    f"allreduce.dtypes=[{DTYPES[0]}], for example."
                )
        for name in self.algorithms or ():
            CommPlan(algorithm=name)  # type: ignore[arg-type]  # raises if the name is unknown

    @property
    def sizes_bytes(self) -> list[int]:
        """Sizes of the tensors in bytes, in ascending order.

        >>> AllReduceBench(min_bytes=1024, max_bytes=9000, factor=4, dtypes=["float32"], num_rounds=7).sizes_bytes
        [1024, 4096, 9000]
        """
        sizes = []
        size = self.min_bytes
        while size < self.max_bytes:
            sizes.append(size)
            size *= self.factor
        return [*sizes, self.max_bytes]

    def run(self, fabric: Fabric, topology: Topology) -> Iterator[Timing]:
        """Measure every combination of dtype and tensor size, and yield one `Timing` per algorithm.

        Collective: every rank must call it.
        """
        with self._arms(fabric, topology) as arms:
            for dtype in self.dtypes:
                for num_bytes in self.sizes_bytes:
                    yield from self._size(fabric, topology, arms, num_bytes, getattr(torch, dtype))

    @contextmanager
    def _arms(
        self, fabric: Fabric, topology: Topology
    ) -> Iterator[dict[str, Callable[[Tensor], object]]]:
        if self.algorithms is None:
            names = ["auto", *get_args(Algorithm)]
        else:
            names = list(self.algorithms)
        engines = {
            name: CommEngine(
                topology=topology,
                plan=CommPlan(algorithm=name),
                timeout=timedelta(seconds=self.timeout_s),
                device=fabric.device,
            )
            for name in names
        }
        try:
            yield {BACKEND: dist.all_reduce} | {
                name: _through(engine) for name, engine in engines.items()
            }
        finally:
            for engine in engines.values():
                engine.close()

    def _size(
        self,
        fabric: Fabric,
        topology: Topology,
        arms: dict[str, Callable[[Tensor], object]],
        num_bytes: int,
        dtype: torch.dtype,
    ) -> Iterator[Timing]:
        num_elements = num_bytes // dtype.itemsize
        for name, arm in arms.items():  # connects the ranks and warms up
            ones = torch.ones(num_elements, dtype=dtype, device=fabric.device)
            arm(ones)
            if not torch.equal(ones, torch.full_like(ones, topology.world_size)):
                raise RuntimeError(
                    f"`{name}` computed a wrong result for an all-reduce of {num_bytes} bytes in "
                    f"{dtype} on rank {topology.rank}. Please report this error as a bug."
                )
        # sums of zeros never overflow
        flat = torch.zeros(num_elements, dtype=dtype, device=fabric.device)
        slowest_s = max(_seconds_per_call(fabric, arm, flat, 1) for arm in arms.values())
        num_calls = max(1, min(MAX_CALLS, int(self.min_sample_s / slowest_s)))
        names = list(arms)
        times_s = {name: list[float]() for name in arms}
        for turn in range(self.num_rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                times_s[name].append(_seconds_per_call(fabric, arms[name], flat, num_calls))
        for name in names:
            yield Timing(
                section="allreduce",
                case=str(dtype).removeprefix("torch."),
                arm=name,
                num_bytes=num_bytes,
                num_nodes=topology.num_nodes,
                times_s=tuple(times_s[name]),
            )


def _through(engine: CommEngine) -> Callable[[Tensor], object]:
    return lambda flat: engine.submit(flat, bucket_index=0, is_last=True).wait()


def _seconds_per_call(
    fabric: Fabric, arm: Callable[[Tensor], object], flat: Tensor, num_calls: int
) -> float:
    """Time `num_calls` all-reduces, and return on every rank the seconds per call of the slowest rank."""
    fabric.barrier()
    synchronize(fabric.device)
    began_s = time.perf_counter()
    for _ in range(num_calls):
        arm(flat)
    synchronize(fabric.device)
    return slowest([(time.perf_counter() - began_s) / num_calls], fabric.device)[0]


def slowest(times_s: Sequence[float], device: torch.device) -> list[float]:
    """Return the elementwise maximum of a list of times over all ranks.

    Collective: every rank must call it.
    """
    times = torch.tensor(times_s, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return [float(time_s) for time_s in times]


def synchronize(device: torch.device) -> None:
    """Wait until a CUDA device has finished its queued work, and do nothing on other devices."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
