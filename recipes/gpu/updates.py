"""Seconds of one optimizer update, of the device and of the host.

One update between two waits would show the larger of them, which for few kernels is Python's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hybrid.optim import LAMB, LARS

LOSS_SCALE = 1024.0
OPTIONS: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}


def sgd_fused(shapes: Sequence[tuple[int, ...]], device: torch.device) -> Callable[[], object]:
    """Make the floor: `torch.optim.SGD(fused=True)`, fp32 weights and gradients. No trust ratio, no half precision."""
    params = _weights(shapes, device)
    for param in params:
        param.grad = torch.randn_like(param)
    return torch.optim.SGD(params, **OPTIONS, fused=True).step


def adamw_fused(shapes: Sequence[tuple[int, ...]], device: torch.device) -> Callable[[], object]:
    """Make LAMB's floor: `torch.optim.AdamW(fused=True)`, fp32 weights and gradients. No trust ratio."""
    params = _weights(shapes, device)
    for param in params:
        param.grad = torch.randn_like(param)
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=OPTIONS["weight_decay"], fused=True).step


def ours(
    rule: type[LARS] | type[LAMB],
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    *,
    fused: bool,
) -> Callable[[], object]:
    """Make `LARS` or `LAMB`: from scaled fp16 gradients to fp32 weights, with the overflow check."""
    params = _weights(shapes, device)
    for param in params:
        param.grad_dtype = None
    many = [param for param in params if param.dim() > 1]
    few = {
        "params": [param for param in params if param.dim() <= 1],
        "trust_ratio": False,
        "weight_decay": 0.0,
    }
    options = {name: value for name, value in OPTIONS.items() if rule is LARS or name != "momentum"}
    optimizer: Any = rule([{"params": many}, few], **options, fused=fused)
    scale = torch.tensor(LOSS_SCALE, device=device)
    for param in params:
        param.grad = torch.randn_like(param).half()

    def step() -> None:
        optimizer.grad_scale = scale
        optimizer.found_inf = None
        optimizer.step()

    return step


ARMS: dict[str, Callable[[Sequence[tuple[int, ...]], torch.device], Callable[[], object]]] = {
    "sgd_fused_fp32": sgd_fused,
    "lars_fused": lambda shapes, device: ours(LARS, shapes, device, fused=True),
    "adamw_fused_fp32": adamw_fused,
    "lamb": lambda shapes, device: ours(LAMB, shapes, device, fused=False),
}


MAX_LAUNCHES = 1000  # a GPU's queue holds about so many; the host waits for room beyond
MAX_CALLS_IN_A_ROW = 20


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def calls_in_a_row(step: Callable[[], object]) -> int:
    """Return how many calls of `step` a GPU's queue holds together, 20 at most. Runs it once.

    Operations of torch are counted, of which none launches much more than one kernel for each list of tensors.

    >>> weights = [torch.zeros(2) for _ in range(100)]
    >>> calls_in_a_row(lambda: [weight.add_(1) for weight in weights]), calls_in_a_row(lambda: weights[0].add_(1))
    (10, 20)
    """
    with _Operations() as operations:
        step()
    return max(1, min(MAX_CALLS_IN_A_ROW, MAX_LAUNCHES // max(1, operations.count)))


MAX_CYCLES_PER_S = 2e9  # clock rate of a GPU
MAX_SLEEP_S = 0.2


def time_one(
    step: Callable[[], object], device: torch.device, *, num_in_a_row: int = 1
) -> tuple[float, float]:
    """Time one step of the device and of the host.

    On CUDA `num_in_a_row` steps are queued behind a kernel that only waits, for longer than the host takes: the device
    then goes through them without a gap. They must be less than a thousand launches, which a GPU's queue holds: see
    `calls_in_a_row`. A step in which the host reads has its waits in both times.
    """
    if device.type != "cuda":
        begin_s = time.perf_counter()
        step()
        seconds = time.perf_counter() - begin_s
        return seconds, seconds
    torch.cuda.synchronize(device)
    begin_s = time.perf_counter()
    step()
    alone_s = time.perf_counter() - begin_s  # so long does the host take, or less
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    # Twice the time of one call for each: the host is then surely ahead of the device.
    sleep_s = min(MAX_SLEEP_S, 0.001 + 2 * num_in_a_row * alone_s)
    torch.cuda._sleep(int(MAX_CYCLES_PER_S * sleep_s))
    begin.record()
    begin_s = time.perf_counter()
    for _ in range(num_in_a_row):
        step()
    host_s = time.perf_counter() - begin_s
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3 / num_in_a_row, host_s / num_in_a_row


FLOOR_BYTES = {"sgd_fused_fp32": 20, "lars_fused": 24, "adamw_fused_fp32": 28, "lamb": 40}
"""Bytes per parameter that the passes of an arm read and write. SGD reads g, w, v and writes w, v. LARS reads half
gradients and w twice, once for norms, and v; it writes w, v. LAMB reads w, m, v once more, and by lists, which are all
that it has on CUDA, more than is counted here."""


def copy_rate(device: torch.device, *, num_bytes: int = 2**28, num_samples: int = 15) -> float:
    """Measure the bytes per second, read and written, of copying a tensor."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.zeros_like(source)
    times_s = [
        time_one(lambda: target.copy_(source), device, num_in_a_row=10)[0]
        for _ in range(num_samples)
    ]
    return 2 * num_bytes / statistics.median(times_s)


def _weights(shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[nn.Parameter]:
    generator = torch.Generator(device).manual_seed(0)
    return [
        nn.Parameter(0.05 * torch.randn(shape, generator=generator, device=device))
        for shape in shapes
    ]
