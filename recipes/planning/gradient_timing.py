"""Times at which a network's gradients get ready on one device, for `recipes/simulate.py profile=...`.

python -m recipes.planning.gradient_timing model=resnet50 batch_size_per_rank=64 hydra.run.dir=profile
python recipes/simulate.py profile=profile/profile.json num_nodes=256
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import hydra
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn

from lightning_hybrid.planning.workload import StepWorkload
from recipes.cli import config_check, launch
from recipes.cli.ranges import Count, CountOrZero
from recipes.cli.results import environment, write_json

launch.register_resolvers()

KEYS: dict[str, Any] = {
    "batch_size_per_rank": Count,
    "image_shape": list[Count],
    "num_classes": Count,
    "device": str | None,
    "dtype": Literal["float16", "bfloat16", "float32"],
    "num_warmup": CountOrZero,
    "num_steps": Count,
    "model": nn.Module,
    "run_dir": str,
}


def time_gradients(
    model: nn.Module, images: Tensor, labels: Tensor, *, dtype: torch.dtype, num_steps: int, num_warmup: int
) -> StepWorkload:
    """Return medians of forward and of the times between gradients, on the device of `images`; no optimizer.

    On CUDA the device's own clock is read, by events: the host waits for nothing within a step.
    """
    on_cuda = images.is_cuda
    stamps: list[tuple[int, float | torch.cuda.Event]] = []

    def stamp(numel: int) -> None:
        if on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            stamps.append((numel, event))
        else:
            stamps.append((numel, time.perf_counter()))

    # A hook on each parameter gives the order in which gradients get ready, which the layers alone do not tell.
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda tensor: stamp(tensor.numel()))
        for parameter in model.parameters()
    ]
    steps: list[list[float]] = []
    numels: list[int] = []
    for step in range(num_warmup + num_steps):
        model.zero_grad(set_to_none=True)
        stamps.clear()
        stamp(0)
        with torch.autocast(images.device.type, dtype=dtype, enabled=dtype is not torch.float32):
            loss = F.cross_entropy(model(images).float(), labels)
        stamp(0)
        loss.backward()
        if on_cuda:
            torch.cuda.synchronize()
        if step >= num_warmup:
            times = [when for _, when in stamps]
            steps.append([_seconds(begin, end) for begin, end in itertools.pairwise(times)])
            numels = [numel for numel, _ in stamps[2:]]
    for hook in hooks:
        hook.remove()
    forward_s, *between_s = (statistics.median(column) for column in zip(*steps, strict=True))
    return StepWorkload(forward_s=forward_s, gradients=tuple(zip(numels, between_s, strict=True)))


def _seconds(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    return begin.elapsed_time(end) / 1e3


@hydra.main(version_base="1.3", config_path="../../conf", config_name="planning/gradient_timing")
def main(cfg: DictConfig) -> None:
    """Measure; write `profile.json`."""
    with launch.short_errors():
        config_check.check(cfg, KEYS)
        device = launch.device_of(cfg.device)
        model = instantiate(cfg.model).to(device).train()
        images = torch.randn(cfg.batch_size_per_rank, *cfg.image_shape, device=device)
        labels = torch.randint(cfg.num_classes, (cfg.batch_size_per_rank,), device=device)
        dtype = getattr(torch, cfg.dtype)
    work = time_gradients(model, images, labels, dtype=dtype, num_steps=cfg.num_steps, num_warmup=cfg.num_warmup)
    folder = Path(cfg.run_dir)
    content = {"work": asdict(work), "batch_size_per_rank": cfg.batch_size_per_rank} | environment()
    write_json(folder / "profile.json", content)
    print(f"step {work.alone_s:.4g} s, backward {work.backward_s:.4g} s; written to {folder / 'profile.json'}")


if __name__ == "__main__":
    main()
