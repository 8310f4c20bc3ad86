"""Timing of optimizer updates, measured separately on the device and on the host.

Timing a single update between two synchronizations would give only the larger of both times. With few kernels, that is
the time of Python.
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
    """Return a step of torch's fused SGD on fp32 tensors, whose time is a lower bound for LARS.

    This step computes no trust ratio and does not use half precision.
    """
    params = _weights_with_gradients(shapes, device)
    optimizer = torch.optim.SGD(params, **OPTIONS, fused=True)
    return optimizer.step


def adamw_fused(shapes: Sequence[tuple[int, ...]], device: torch.device) -> Callable[[], object]:
    """Return a step of torch's fused AdamW on fp32 tensors, whose time is a lower bound for LAMB.

    This step computes no trust ratio.
    """
    params = _weights_with_gradients(shapes, device)
    decay = OPTIONS["weight_decay"]
    optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=decay, fused=True)
    return optimizer.step


def ours(
    rule: type[LARS] | type[LAMB],
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    *,
    fused: bool,
) -> Callable[[], object]:
    """Return a function that runs a step of `LARS` or `LAMB` with scaled fp16 gradients and fp32 weights."""
    params = _weights(shapes, device)
    for param in params:
        param.grad_dtype = None
    matrices = [param for param in params if param.dim() > 1]
    vectors = [param for param in params if param.dim() <= 1]
    groups = [
        {"params": matrices},
        {"params": vectors, "trust_ratio": False, "weight_decay": 0.0},
    ]
    options = dict(OPTIONS)
    if rule is LAMB:
        del options["momentum"]  # LAMB has betas instead
    optimizer: Any = rule(groups, **options, fused=fused)
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


MAX_LAUNCHES = 1000  # approximate length of a GPU's launch queue; the host waits if it is full
MAX_CALLS_IN_A_ROW = 20


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if kwargs is None:
            kwargs = {}
        return func(*args, **kwargs)


def calls_in_a_row(step: Callable[[], object]) -> int:
    """Return how many calls of `step` fit into a GPU's launch queue, but at most 20.

    The function runs `step` once and counts torch operations. Each operation launches hardly more than one kernel per
    list of tensors.

    >>> weights = [torch.zeros(2) for _ in range(100)]
    >>> calls_in_a_row(lambda: [weight.add_(1) for weight in weights]), calls_in_a_row(lambda: weights[0].add_(1))
    (10, 20)
    """
    with _Operations() as operations:
        step()
    num_operations = max(1, operations.count)
    num_calls = MAX_LAUNCHES // num_operations
    return max(1, min(MAX_CALLS_IN_A_ROW, num_calls))


MAX_CYCLES_PER_S = 2e9  # upper limit of a GPU's clock rate
MAX_SLEEP_S = 0.2


def time_one(
    step: Callable[[], object], device: torch.device, *, num_in_a_row: int = 1
) -> tuple[float, float]:
    """Return the seconds that one step takes on the device and on the host.

    On CUDA, `num_in_a_row` steps are queued behind a kernel that only waits, for longer than the host needs to enqueue
    the steps. The device then runs them without a gap. The steps must have fewer than a thousand kernel launches, which
    is the capacity of a GPU's queue (see `calls_in_a_row`). If a step synchronizes, both times include that wait.
    """
    if device.type != "cuda":
        begin_s = time.perf_counter()
        step()
        seconds = time.perf_counter() - begin_s
        return seconds, seconds
    torch.cuda.synchronize(device)
    begin_s = time.perf_counter()
    step()
    alone_s = time.perf_counter() - begin_s  # upper limit of the host's time
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    # Twice the time of one call for each, so that the host is certainly ahead of the device.
    sleep_s = min(MAX_SLEEP_S, 0.001 + 2 * num_in_a_row * alone_s)
    torch.cuda._sleep(int(MAX_CYCLES_PER_S * sleep_s))
    begin.record()
    begin_s = time.perf_counter()
    for _ in range(num_in_a_row):
        step()
    host_s = time.perf_counter() - begin_s
    end.record()
    torch.cuda.synchronize(device)
    device_s = begin.elapsed_time(end) / 1e3
    return device_s / num_in_a_row, host_s / num_in_a_row


FLOOR_BYTES = {"sgd_fused_fp32": 20, "lars_fused": 24, "adamw_fused_fp32": 28, "lamb": 40}
"""Bytes per parameter that the update of a variant reads and writes.

SGD reads g, w, v and writes w, v. LARS reads v, and half-precision gradients and w twice, once for the norms. It writes
w, v. LAMB reads w, m, v once more. On CUDA, LAMB works on lists of tensors and moves more bytes than are counted here.
"""


def copy_rate(device: torch.device, *, num_bytes: int = 2**28, num_samples: int = 15) -> float:
    """Measure the memory bandwidth of a tensor copy, in bytes read and written per second."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.zeros_like(source)
    times_s = []
    for _ in range(num_samples):
        device_s, _ = time_one(lambda: target.copy_(source), device, num_in_a_row=10)
        times_s.append(device_s)
    return 2 * num_bytes / statistics.median(times_s)


def _weights(shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[nn.Parameter]:
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for shape in shapes:
        values = 0.05 * torch.randn(shape, generator=generator, device=device)
        params.append(nn.Parameter(values))
    return params


def _weights_with_gradients(
    shapes: Sequence[tuple[int, ...]], device: torch.device
) -> list[nn.Parameter]:
    params = _weights(shapes, device)
    for param in params:
        param.grad = torch.randn_like(param)
    return params
