"""How long a step waits for a checkpoint, and how much slower steps are while one is written."""

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
from recipes.table import markdown_table

WAYS: dict[str, Callable[[], CheckpointIO]] = {
    "Lightning's `TorchCheckpointIO`": TorchCheckpointIO,
    "Lightning's `AsyncCheckpointIO`": lambda: AsyncCheckpointIO(TorchCheckpointIO()),
    "ours, `in_background=False`": DurableCheckpointIO,
    "ours, `in_background=True`": lambda: DurableCheckpointIO(in_background=True),
}
MAX_WAIT_S = 60.0


def state_of(model: nn.Module) -> dict[str, Any]:
    """Weights, and SGD's momentum for each: what a checkpoint of a training run is made of."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "global_step": 1}


def num_bytes_of(checkpoint: dict[str, Any]) -> int:
    """Of its tensors.

    >>> num_bytes_of(state_of(nn.Linear(2, 1)))
    24
    """
    tensors = [*checkpoint["state_dict"].values()]
    for state in checkpoint["optimizer_states"][0]["state"].values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def samples(checkpoint: dict[str, Any], folder: Path, *, num_repeats: int) -> dict[str, list[dict[str, float]]]:
    """For each way: `stall_s` of the call, `durable_s` until the file is there, `slowdown` of steps in between.

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
    shutil.rmtree(folder)
    return taken


def _sample(io: CheckpointIO, checkpoint: dict[str, Any], path: Path) -> dict[str, float]:
    alone_s = statistics.median(_step_s() for _ in range(10))
    start_s = time.perf_counter()
    io.save_checkpoint(checkpoint, path)
    stall_s = time.perf_counter() - start_s
    beside_s: list[float] = []
    while not path.exists() and time.perf_counter() - start_s < MAX_WAIT_S:
        beside_s.append(_step_s())
    durable_s = time.perf_counter() - start_s
    time.sleep(0.2)  # what follows the rename
    slowdown = statistics.mean(beside_s) / alone_s if beside_s else 1.0
    return {"stall_s": stall_s, "durable_s": durable_s, "slowdown": slowdown, "step_s": alone_s}


_ONE, _OTHER = torch.randn(512, 512), torch.randn(512, 512)


def _step_s() -> float:
    """The arithmetic of a small step."""
    start_s = time.perf_counter()
    for _ in range(4):
        torch.mm(_ONE, _OTHER)
    return time.perf_counter() - start_s


def markdown(taken: dict[str, list[dict[str, float]]], num_bytes: int) -> str:
    """Medians and ranges.

    >>> sample = {"stall_s": 0.1, "durable_s": 1, "slowdown": 1.5, "step_s": 0.01}
    >>> " ".join(markdown({"a": [sample]}, 2**20).splitlines()[-1].split())
    '| a | 100 (100 - 100) | 1000 (1000 - 1000) | 1.50 (1.50 - 1.50) |'
    """
    header = (
        f"writing {num_bytes / 2**20:.0f} MiB",
        "step waits, ms",
        "until the file is there, ms",
        "steps beside it",
    )
    rows = []
    for name, of_name in taken.items():
        cells = [name]
        for key, factor, digits in (("stall_s", 1e3, 0), ("durable_s", 1e3, 0), ("slowdown", 1.0, 2)):
            values = [sample[key] * factor for sample in of_name]
            middle, low, high = (
                f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))
            )
            cells.append(f"{middle} ({low} - {high})")
        rows.append(cells)
    return markdown_table(header, rows)
