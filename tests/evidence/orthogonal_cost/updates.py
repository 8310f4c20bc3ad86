"""Processor time and memory of one update, by rank zero alone and shared among the ranks of a node, in turns."""

from __future__ import annotations

import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from lightning_hybrid.optim import LARS
from lightning_hybrid.optim.orthogonal import is_matrix, num_flops, owners_by_flops, result_dtype
from recipes.benchmarks.gradient_sets import GRADIENT_SETS
from recipes.cli.markdown import markdown_table
from recipes.cli.ranges import Count

ARMS = ("momentum", "orthogonal", "shared")
M_MMAP_THRESHOLD = -3  # of mallopt(3): from this size on a block has a mapping of its own, gone when it is freed
LARGE = 64 * 1024  # bytes
RESET_PEAK = "5"  # of proc(5), clear_refs


@dataclass(frozen=True, kw_only=True)
class UpdateCost:
    """One arm at one network: of each round the rank with the most; `shared` by all ranks, the others by rank zero.

    Attributes:
        cpu_s, wall_s: Processor time of the busiest rank, and time until the last one was through.
        peak_bytes: Memory beyond that before the update; the results, of which an optimizer holds the last, included.
        flops: Of the iterations, of the rank with the most.
        received_bytes: By the rank with the least work of its own.
        is_equal: Whether the weights are to the bit those that rank zero found alone.
    """

    case: str
    arm: str
    num_ranks: int
    cpu_s: tuple[float, ...]
    wall_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    flops: int
    received_bytes: int
    is_equal: bool


def shares(shapes: Sequence[Sequence[int]], num_ranks: int) -> list[tuple[int, int]]:
    """Return for each rank the FLOPs of its iterations and the bytes of their results.

    >>> shares([(64, 64), (512, 512), (64,)], 2)[1]
    (7864320, 8192)
    """
    matrices = [torch.Size(shape) for shape in shapes if is_matrix(torch.empty(shape, device="meta"))]
    itemsize = result_dtype(torch.float32).itemsize
    found = [(0, 0)] * num_ranks
    for shape, owner in zip(matrices, owners_by_flops(matrices, num_ranks), strict=True):
        flops, num_bytes = found[owner]
        found[owner] = (flops + num_flops(shape), num_bytes + itemsize * shape.numel())
    return found


@dataclass(frozen=True, kw_only=True)
class SharedUpdates:
    """Measurement. One thread per rank, Gloo; each round is one update of every arm, from the same weights.

    Args:
        gradients: Names of `recipes.benchmarks.gradient_sets`.
        num_ranks: Numbers of ranks that share an update.
        num_rounds: Rounds, after one update that makes the state.
    """

    gradients: Sequence[str]
    num_ranks: Sequence[Count]
    num_rounds: Count

    def __post_init__(self) -> None:
        for case in self.gradients:
            if case not in GRADIENT_SETS:
                raise ValueError(f"`updates.gradients` (={case}) must be one of {', '.join(GRADIENT_SETS)}.")

    def take(self) -> Iterator[UpdateCost]:
        """Yield rows of all networks and numbers of ranks."""
        for case in self.gradients:
            for num_ranks in self.num_ranks:
                with tempfile.TemporaryDirectory() as folder:
                    mp.start_processes(
                        _rank, args=(num_ranks, case, self.num_rounds, folder), nprocs=num_ranks, start_method="spawn"
                    )
                    found = torch.load(Path(folder) / "found.pt")
                parts = shares(GRADIENT_SETS[case](), num_ranks)
                all_flops, all_bytes = (sum(column) for column in zip(*parts, strict=True))
                flops = {"momentum": 0, "orthogonal": all_flops, "shared": max(part[0] for part in parts)}
                for arm in ARMS:
                    yield UpdateCost(
                        case=case,
                        arm=arm,
                        num_ranks=num_ranks if arm == "shared" else 1,
                        cpu_s=tuple(found[arm, "cpu_s"]),
                        wall_s=tuple(found[arm, "wall_s"]),
                        peak_bytes=tuple(found[arm, "peak_bytes"]),
                        flops=flops[arm],
                        received_bytes=all_bytes - min(part[1] for part in parts) if arm == "shared" else 0,
                        is_equal=found["is_equal"],
                    )


def _rank(rank: int, num_ranks: int, case: str, num_rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE)  # what is freed is seen to be
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", num_ranks), rank=rank, world_size=num_ranks)
    torch.manual_seed(0)  # every rank has the same averaged gradients
    layers = [nn.Parameter(0.02 * torch.randn(shape)) for shape in GRADIENT_SETS[case]()]
    for layer in layers:
        layer.grad = 1e-3 * torch.randn_like(layer)
    optimizer = LARS(layers, lr=1.0, direction="orthogonal", fused=False)
    optimizer.param_groups[0]["direction"] = "momentum"
    optimizer.step()  # makes the state
    found: dict[Any, Any] = {(arm, what): [] for arm in ARMS for what in ("cpu_s", "wall_s", "peak_bytes")}
    found["is_equal"] = True
    for _ in range(num_rounds):
        alone = None
        for arm in ARMS:
            optimizer.param_groups[0]["direction"] = "momentum" if arm == "momentum" else "orthogonal"
            optimizer.work_group = dist.group.WORLD if arm == "shared" else None
            optimizer._orthogonal = {}  # results of the update before
            dist.barrier()
            if arm == "shared":
                costs: list[Any] = [None] * num_ranks
                dist.all_gather_object(costs, _measured(optimizer.step))
            elif rank == 0:
                before = _held(optimizer, layers)
                costs = [_measured(optimizer.step)]
                alone = [layer.detach().clone() for layer in layers]
                _put_back(optimizer, layers, before)
                del before
            if rank == 0:
                for what, most in zip(("cpu_s", "wall_s", "peak_bytes"), zip(*costs, strict=True), strict=True):
                    found[arm, what].append(max(most))
        if alone is not None:
            found["is_equal"] &= all(torch.equal(one, other) for one, other in zip(layers, alone, strict=True))
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.destroy_process_group()


def _held(optimizer: LARS, layers: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(layer.detach().clone(), optimizer.state[layer]["momentum_buffer"].clone()) for layer in layers]


@torch.no_grad()
def _put_back(optimizer: LARS, layers: Sequence[Tensor], held: list[tuple[Tensor, Tensor]]) -> None:
    for layer, (weight, buffer) in zip(layers, held, strict=True):
        layer.copy_(weight)
        optimizer.state[layer]["momentum_buffer"].copy_(buffer)


def _measured(step: Callable[[], object]) -> tuple[float, float, int]:
    """Return processor time and time in seconds, and the most memory that was held beyond that before, in bytes."""
    Path(f"/proc/{os.getpid()}/clear_refs").write_text(RESET_PEAK)
    before = _status("VmRSS")
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    step()
    return time.process_time() - cpu_s, time.perf_counter() - wall_s, _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def markdown(rows: Sequence[UpdateCost]) -> str:
    """Format the costs; `x alone` is the median over rounds of the busiest rank's processor time over rank zero's."""
    header = ["network", "arm", "ranks", "TFLOP", "CPU s", "x alone", "TFLOP x alone", "MiB received", "peak MiB"]
    table = []
    alone: UpdateCost | None = None
    for row in rows:
        alone = row if row.arm == "orthogonal" else alone
        ratio = flop_ratio = ""
        if row.arm == "shared" and alone is not None:
            ratio = f"{statistics.median(a / b for a, b in zip(row.cpu_s, alone.cpu_s, strict=True)):.2f}"
            flop_ratio = f"{row.flops / alone.flops:.2f}"
        sizes = [f"{number / 2**20:.0f}" for number in (row.received_bytes, statistics.median(row.peak_bytes))]
        name = row.arm if row.is_equal else f"{row.arm}, OTHER BITS"
        times = [f"{row.flops / 1e12:.3f}", f"{statistics.median(row.cpu_s):.3g}"]
        table.append([row.case, name, f"{row.num_ranks}", *times, ratio, flop_ratio, *sizes])
    return markdown_table(header, table)
