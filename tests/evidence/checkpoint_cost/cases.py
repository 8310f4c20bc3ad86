"""Wait of a step for a checkpoint, slowdown of steps while it is written, and the sum of both."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn

from lightning_hybrid import DurableCheckpointIO
from recipes.cli.markdown import markdown_table


class NoCheckpointIO(TorchCheckpointIO):
    """Plugin that writes nothing: what is measured with it is the noise."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Do nothing."""


WAYS: dict[str, Callable[[], CheckpointIO]] = {
    "none": NoCheckpointIO,
    "Lightning's `TorchCheckpointIO`": TorchCheckpointIO,
    "Lightning's `AsyncCheckpointIO`": lambda: AsyncCheckpointIO(TorchCheckpointIO()),
    "ours, `in_background=False`": DurableCheckpointIO,
    "ours, `in_background=True`": lambda: DurableCheckpointIO(in_background=True),
}
MAX_WAIT_S = 60.0
AFTER_S = 0.3
"""Our choice: what follows the rename is a second sync of the directory."""


def training_state(model: nn.Module) -> dict[str, Any]:
    """Return weights, and SGD's momentum for each, as in a checkpoint of a training run."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "global_step": 1}


def num_bytes_of(checkpoint: dict[str, Any]) -> int:
    """Count the bytes of its tensors.

    >>> num_bytes_of(training_state(nn.Linear(2, 1)))
    24
    """
    tensors = [*checkpoint["state_dict"].values()]
    for state in checkpoint["optimizer_states"][0]["state"].values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def samples(checkpoint: dict[str, Any], folder: Path, *, num_repeats: int) -> dict[str, list[dict[str, float]]]:
    """Measure what a checkpoint costs, for each way.

        stall_s       the call
        durable_s     until the file is there
        slowdown      of the steps in between
        lost_s        the call and all steps after it, less what as many steps take without a checkpoint
        lost_cpu_s    the same in processor time of the whole process

    In turns, after one round that does not count: the first copy into fresh memory is slower, and so is the first file.
    """
    ways = {name: make() for name, make in WAYS.items()}
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for repeat in range(num_repeats + 1):
        for name, io in ways.items():
            shutil.rmtree(folder, ignore_errors=True)
            sample = _sample(io, checkpoint, folder / "last.ckpt")
            if repeat > 0:
                taken[name].append(sample)
    for io in ways.values():
        io.teardown()
    shutil.rmtree(folder, ignore_errors=True)
    return taken


def _sample(io: CheckpointIO, checkpoint: dict[str, Any], path: Path) -> dict[str, float]:
    """Measure one way; steps are counted for `AFTER_S` longer than the file takes, as the thread works on."""
    alone_s, alone_cpu_s = (statistics.median(column) for column in zip(*(_step_s() for _ in range(40)), strict=True))
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    io.save_checkpoint(checkpoint, path)
    stall_s = time.perf_counter() - begin_s
    writes, durable_s, beside_s, num_steps = not isinstance(io, NoCheckpointIO), stall_s, [], 0
    while (passed_s := time.perf_counter() - begin_s) < durable_s + AFTER_S:
        if writes and not path.exists() and passed_s < MAX_WAIT_S:
            durable_s = passed_s
        step_s, _ = _step_s()
        num_steps += 1
        if durable_s == passed_s:
            beside_s.append(step_s)
    return {
        "stall_s": stall_s,
        "durable_s": durable_s,
        "slowdown": statistics.mean(beside_s) / alone_s if beside_s else 1.0,
        "lost_s": time.perf_counter() - begin_s - num_steps * alone_s,
        "lost_cpu_s": time.process_time() - begin_cpu_s - num_steps * alone_cpu_s,
        "step_s": alone_s,
    }


_ONE, _OTHER = torch.randn(512, 512), torch.randn(512, 512)


def _step_s() -> tuple[float, float]:
    """Run the arithmetic of a small step; return seconds by the clock, and of the processor."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(4):
        torch.mm(_ONE, _OTHER)
    return time.perf_counter() - begin_s, time.process_time() - begin_cpu_s


def markdown(taken: dict[str, list[dict[str, float]]], num_bytes: int) -> str:
    """Format medians and ranges.

    >>> sample = {"stall_s": 0.1, "durable_s": 1, "slowdown": 1.5, "lost_s": 0.2, "lost_cpu_s": 0.3, "step_s": 0.01}
    >>> " ".join(markdown({"a": [sample]}, 2**20).splitlines()[-1].split())
    '| a | 100 (100 - 100) | 1000 (1000 - 1000) | 1.50 (1.50 - 1.50) | 200 (200 - 200) | 300 (300 - 300) |'
    """
    columns = {
        "step waits, ms": ("stall_s", 1e3, 0),
        "until the file is there, ms": ("durable_s", 1e3, 0),
        "steps beside it": ("slowdown", 1.0, 2),
        "training lost, ms": ("lost_s", 1e3, 0),
        "processor time lost, ms": ("lost_cpu_s", 1e3, 0),
    }
    rows = []
    for name, of_name in taken.items():
        cells = [name]
        for key, factor, digits in columns.values():
            values = [sample[key] * factor for sample in of_name]
            middle, low, high = (
                f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))
            )
            cells.append(f"{middle} ({low} - {high})")
        rows.append(cells)
    return markdown_table((f"writing {num_bytes / 2**20:.0f} MiB", *columns), rows)
