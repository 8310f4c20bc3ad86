"""Seconds of one optimizer update, by implementation, at the parameter shapes of known networks.

On CUDA there are two times: the device's, of updates that are all queued before the first begins, and the host's. One
update between two waits would show the larger of them, which for few kernels is Python's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.checks import require_whole
from lightning_hybrid.optim import LAMB, LARS
from recipes.benchmarks.gradient_sets import GRADIENT_SETS, numel
from recipes.cli.markdown import markdown_table

LOSS_SCALE = 1024.0
OPTIONS: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}


@dataclass(frozen=True, kw_only=True)
class UpdateRow:
    """Times of one arm at one network; `num_params` elements, `num_tensors` of them.

    `host_times_s`, on CUDA: until the host was through with the call.
    """

    case: str
    arm: str
    num_params: int
    num_tensors: int
    times_s: tuple[float, ...]
    host_times_s: tuple[float, ...] = ()

    @property
    def median_s(self) -> float:
        """Median of the samples."""
        return statistics.median(self.times_s)


def sgd_fused(shapes: Sequence[tuple[int, ...]], device: torch.device) -> Callable[[], object]:
    """Make the floor: `torch.optim.SGD(fused=True)`, fp32 weights and gradients; no trust ratio, no half precision."""
    params = _weights(shapes, device)
    for param in params:
        param.grad = torch.randn_like(param)
    return torch.optim.SGD(params, **OPTIONS, fused=True).step


def adamw_fused(shapes: Sequence[tuple[int, ...]], device: torch.device) -> Callable[[], object]:
    """Make LAMB's floor: `torch.optim.AdamW(fused=True)`, fp32 weights and gradients; no trust ratio."""
    params = _weights(shapes, device)
    for param in params:
        param.grad = torch.randn_like(param)
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=OPTIONS["weight_decay"], fused=True).step


def chain(shapes: Sequence[tuple[int, ...]], device: torch.device) -> Callable[[], object]:
    """Make the usual chain: float16 gradients to float32, unscale, check, a foreach LARS, copy back to float16."""
    params = _weights(shapes, device)
    halves, grads = _halves(params)
    buffers = [torch.zeros_like(param) for param in params]
    inverse_scale = torch.tensor(1 / LOSS_SCALE, device=device)
    wide = [torch.empty_like(param) for param in params]

    @torch.no_grad()
    def step() -> None:
        torch._foreach_copy_(wide, grads)
        found_inf = torch.zeros((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(wide, found_inf, inverse_scale)
        if found_inf.item() == 0:
            _foreach_lars(params, wide, buffers)
        torch._foreach_copy_(halves, [param.detach() for param in params])

    return step


def ours(
    rule: type[LARS] | type[LAMB],
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    *,
    fused: bool,
    **changes: Any,
) -> Callable[[], object]:
    """Make `LARS` or `LAMB`: from scaled fp16 gradients to fp32 masters and fp16 copies, with the overflow check."""
    params = _weights(shapes, device)
    for param in params:
        param.grad_dtype = None
    halves, grads = _halves(params)
    many = [param for param in params if param.dim() > 1]
    few = {"params": [param for param in params if param.dim() <= 1], "trust_ratio": False, "weight_decay": 0.0}
    options = {name: value for name, value in OPTIONS.items() if rule is LARS or name != "momentum"}
    optimizer: Any = rule([{"params": many}, few], **options, **changes, fused=fused)
    optimizer.copies = dict(zip(params, halves, strict=True))
    scale = torch.tensor(LOSS_SCALE, device=device)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad

    def step() -> None:
        optimizer.grad_scale, optimizer.found_inf = scale, None
        optimizer.step()

    return step


ARMS: dict[str, Callable[[Sequence[tuple[int, ...]], torch.device], Callable[[], object]]] = {
    "sgd_fused_fp32": sgd_fused,
    "chain": chain,
    "lars": lambda shapes, device: ours(LARS, shapes, device, fused=False),
    "lars_fused": lambda shapes, device: ours(LARS, shapes, device, fused=True),
    "lars_orthogonal": lambda shapes, device: ours(LARS, shapes, device, fused=False, direction="orthogonal"),
    "adamw_fused_fp32": adamw_fused,
    "lamb": lambda shapes, device: ours(LAMB, shapes, device, fused=False),
    "lamb_fused": lambda shapes, device: ours(LAMB, shapes, device, fused=True),
}


@dataclass(frozen=True, kw_only=True)
class UpdateBench:
    """Benchmark of updates. Arms take turns: each round is one update of every arm.

    Args:
        gradients: Names of `recipes.benchmarks.gradient_sets`.
        arms: Names of `ARMS`; the first is the reference.
        num_rounds, num_warmup: Rounds counted, and rounds before them (compilation, first touch of memory).
    """

    gradients: Sequence[str]
    arms: Sequence[str]
    num_rounds: int
    num_warmup: int = 5

    def __post_init__(self) -> None:
        # Not by the types of `config_check`: the check of a GPU imports this module where hydra may be missing.
        for name in ("num_rounds", "num_warmup"):
            require_whole(name, getattr(self, name), f"rounds are counted. Set updates.{name}=5", least=0)
        for key, names, known in (("gradients", self.gradients, GRADIENT_SETS), ("arms", self.arms, ARMS)):
            for name in names:
                if name not in known:
                    choices = ", ".join(known)
                    raise ValueError(f"`updates.{key}` (={name}) must be one of {choices}: no other is there.")

    def run(self, device: torch.device) -> Iterator[UpdateRow]:
        """Yield rows of all networks."""
        for case in self.gradients:
            shapes = GRADIENT_SETS[case]()
            steps = {name: ARMS[name](shapes, device) for name in self.arms}
            samples: dict[str, list[tuple[float, float]]] = {name: [] for name in self.arms}
            for _ in range(self.num_warmup + self.num_rounds):
                for name, step in steps.items():
                    samples[name].append(time_one(step, device, num_in_a_row=10 if "fused" in name else 1))
            for name, found in samples.items():
                counted = found[self.num_warmup :]
                yield UpdateRow(
                    case=case,
                    arm=name,
                    num_params=numel(shapes),
                    num_tensors=len(shapes),
                    times_s=tuple(seconds for seconds, _ in counted),
                    host_times_s=tuple(host_s for _, host_s in counted) if device.type == "cuda" else (),
                )


MAX_CYCLES_PER_S = 2e9  # clock rate of a GPU
MAX_SLEEP_S = 0.2


def time_one(step: Callable[[], object], device: torch.device, *, num_in_a_row: int = 1) -> tuple[float, float]:
    """Time one step of the device and of the host.

    On CUDA `num_in_a_row` steps are queued behind a kernel that only waits, for longer than the host takes: the device
    then goes through them without a gap. They must be less than a thousand launches, which a GPU's queue holds. A step
    in which the host reads has its waits in both times.
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
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
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


HEADER = ("case", "arm", "median ms", "min ms", "quartiles ms", "x reference", "median of ratios", "host ms")


def markdown(rows: Sequence[UpdateRow]) -> str:
    """Format a table. `x reference`: medians over the case's first arm; then the median of the rounds' ratios.

    `host ms`: the median of the host's, where the device's are counted apart.
    """
    lines = []
    for row in rows:
        reference = next(one for one in rows if one.case == row.case)
        low, _, high = statistics.quantiles(row.times_s, n=4)
        ratios = [mine / theirs for mine, theirs in zip(row.times_s, reference.times_s, strict=True)]
        lines.append(
            (
                f"{row.case} ({row.num_params:,} in {row.num_tensors})",
                row.arm,
                f"{1e3 * row.median_s:.2f}",
                f"{1e3 * min(row.times_s):.2f}",
                f"{1e3 * low:.2f} to {1e3 * high:.2f}",
                f"{row.median_s / reference.median_s:.2f}",
                f"{statistics.median(ratios):.2f}",
                f"{1e3 * statistics.median(row.host_times_s):.2f}" if row.host_times_s else "",
            )
        )
    return markdown_table(HEADER, lines)


FLOOR_BYTES = {"sgd_fused_fp32": 20, "lars_fused": 22, "adamw_fused_fp32": 28, "lamb": 42, "lamb_fused": 42}
"""Bytes per parameter that the passes of an arm read and write. SGD reads g, w, v and writes w, v. LARS reads half
gradients twice, once for norms, and w, v; it writes w, v and the half copy. LAMB reads w, m, v once more, and by
lists, which are all that it has on CUDA, more than is counted here."""


def copy_rate(device: torch.device, *, num_bytes: int = 2**28, num_samples: int = 15) -> float:
    """Measure the bytes per second, read and written, of copying a tensor."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.zeros_like(source)
    times_s = [time_one(lambda: target.copy_(source), device, num_in_a_row=10)[0] for _ in range(num_samples)]
    return 2 * num_bytes / statistics.median(times_s)


def floor_markdown(rows: Sequence[UpdateRow], bytes_per_s: float) -> str:
    """Format how many times as long an arm takes as copying its bytes would.

    >>> row = UpdateRow(case="x", arm="lars_fused", num_params=10**6, num_tensors=1, times_s=(0.004, 0.0044, 0.005))
    >>> print(floor_markdown([row], 1e10).splitlines()[-1])
    | x | lars_fused | 22 | 2.20 | 2.00 |
    """
    lines = [("case", "arm", "bytes per parameter", f"ms at {bytes_per_s / 1e9:.1f} GB/s", "x that"), ("---",) * 5]
    for row in rows:
        if row.arm in FLOOR_BYTES:
            floor_s = FLOOR_BYTES[row.arm] * row.num_params / bytes_per_s
            ratio = f"{row.median_s / floor_s:.2f}"
            lines.append((row.case, row.arm, str(FLOOR_BYTES[row.arm]), f"{1e3 * floor_s:.2f}", ratio))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _weights(shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[nn.Parameter]:
    generator = torch.Generator(device).manual_seed(0)
    return [nn.Parameter(0.05 * torch.randn(shape, generator=generator, device=device)) for shape in shapes]


def _halves(params: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return [param.detach().half() for param in params], [torch.randn_like(param).half() for param in params]


def _foreach_lars(params: Sequence[Tensor], grads: list[Tensor], buffers: list[Tensor]) -> None:
    """Return the lists of operations of a public foreach LARS ("lr_outside", "sum"): 60 bytes per parameter."""
    decay, eta = OPTIONS["weight_decay"], 0.001
    params = [param.detach() for param in params]
    weight_norms, grad_norms = torch._foreach_norm(params), torch._foreach_norm(grads)
    ratios = [eta * w / (g + decay * w) for w, g in zip(weight_norms, grad_norms, strict=True)]
    updates = torch._foreach_add(grads, params, alpha=decay)
    torch._foreach_mul_(updates, ratios)
    torch._foreach_mul_(buffers, OPTIONS["momentum"])
    torch._foreach_add_(buffers, updates)
    torch._foreach_add_(params, buffers, alpha=-OPTIONS["lr"])
