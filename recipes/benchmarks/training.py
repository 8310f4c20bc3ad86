"""Images per second of ResNet training: LARS in `16-true` against Lightning's `16-mixed` with torch's fused SGD."""

from __future__ import annotations

import itertools
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_hybrid.optim import LARS, param_groups
from recipes.cli.ranges import Count, CountOrZero
from recipes.networks.resnet import ResNet

NUM_CLASSES = 1000


@dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """Images per second of one arm at one batch, a sample for each round."""

    batch_size: int
    arm: str
    images_per_s: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of the samples."""
        return statistics.median(self.images_per_s)


def fused_sgd(net: nn.Module) -> torch.optim.Optimizer:
    """Make `torch.optim.SGD(fused=True)`, biases and normalisation without decay."""
    groups = param_groups(net, weight_decay=1e-4)
    plain = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups]
    return torch.optim.SGD(plain, lr=1e-3, momentum=0.9, fused=True)


def fused_lars(net: nn.Module) -> torch.optim.Optimizer:
    """Make `LARS(fused=True)`, biases and normalisation without decay and trust ratio."""
    return LARS(param_groups(net, weight_decay=1e-4), lr=1e-3, momentum=0.9, fused=True)


ARMS: dict[str, tuple[str, str, Callable[[nn.Module], torch.optim.Optimizer]]] = {
    "mixed_sgd": ("ddp", "16-mixed", fused_sgd),
    "ours_sgd": ("hybrid_allreduce", "16-true", fused_sgd),
    "ours_lars": ("hybrid_allreduce", "16-true", fused_lars),
}
"""Strategy, precision and optimizer of each arm."""


@dataclass(frozen=True, kw_only=True)
class TrainingBench:
    """Benchmark of `Trainer.fit` on one device, on images in its memory. Arms take turns in rounds.

    Args:
        arms: Names of `ARMS`; the first is the reference.
        batch_sizes: Images per step; None: 256, 512, 1024 and 2048 on a GPU, 8 on a CPU.
        image_size: Pixels of a side; None: 224 on a GPU, 64 on a CPU.
        depth: Depth of the ResNet.
        compile: Whether the network is compiled; None: on a GPU.
        channels_last: Memory format of network and images.
        num_steps: Steps of a sample.
        num_warmup_steps: Steps of each fit before them, not counted.
        num_rounds: Samples of each arm.
    """

    arms: Sequence[str]
    batch_sizes: Sequence[int] | None = None
    image_size: Count | None = None
    depth: Count = 50
    compile: bool | None = None
    channels_last: bool = True
    num_steps: Count = 20
    num_warmup_steps: CountOrZero = 5
    num_rounds: CountOrZero = 5

    def __post_init__(self) -> None:
        for name in self.arms:
            if name not in ARMS:
                raise ValueError(f"`training.arms` (={name}) must be one of {', '.join(ARMS)}: no other is there.")

    def run(self, device: torch.device) -> Iterator[TrainingRow]:
        """Yield rows of all batch sizes."""
        on_gpu = device.type == "cuda"
        for batch_size in self.batch_sizes or ([256, 512, 1024, 2048] if on_gpu else [8]):
            modules = {name: self._module(name, on_gpu=on_gpu) for name in self.arms}
            batch = self._batch(batch_size, device, image_size=self.image_size or (224 if on_gpu else 64))
            rates: dict[str, list[float]] = {name: [] for name in self.arms}
            for _ in range(self.num_rounds):
                for name, module in modules.items():
                    rates[name].append(batch_size / self._step_s(name, module, batch, device))
            for name, samples in rates.items():
                yield TrainingRow(batch_size=batch_size, arm=name, images_per_s=tuple(samples))

    def _module(self, arm: str, *, on_gpu: bool) -> TrainedNet:
        torch.manual_seed(0)
        net: nn.Module = ResNet(depth=self.depth, num_classes=NUM_CLASSES)
        if self.channels_last:
            net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload,unused-ignore]
        if on_gpu if self.compile is None else self.compile:
            net.compile()
        return TrainedNet(net, ARMS[arm][2])

    def _batch(self, batch_size: int, device: torch.device, *, image_size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(device).manual_seed(0)
        images = torch.randn(batch_size, 3, image_size, image_size, generator=generator, device=device)
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return images, torch.randint(NUM_CLASSES, (batch_size,), generator=generator, device=device)

    def _step_s(self, arm: str, module: TrainedNet, batch: tuple[Tensor, Tensor], device: torch.device) -> float:
        """Return the mean seconds of a step over the counted steps of one fit."""
        strategy, precision, _ = ARMS[arm]
        clock = FitClock(begin=self.num_warmup_steps, end=self.num_warmup_steps + self.num_steps)
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # lines about devices for every fit
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")  # advice about workers and short runs
            warnings.filterwarnings("ignore", message=".*without using a `DistributedSampler`.*")
            trainer = pl.Trainer(
                accelerator="gpu" if device.type == "cuda" else "cpu",
                devices=1,
                strategy=strategy,
                precision=precision,  # type: ignore[arg-type]
                max_steps=clock.end,
                callbacks=[clock],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
            )
            trainer.fit(module, SameBatch(batch, clock.end))
        return clock.seconds / self.num_steps


class SameBatch:
    """Loader of one batch, many times: nothing is loaded."""

    def __init__(self, batch: tuple[Tensor, Tensor], num_batches: int) -> None:
        self._batch, self._num_batches = batch, num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return itertools.repeat(self._batch, self._num_batches)


class TrainedNet(pl.LightningModule):
    """Module that trains a network with the optimizer that `make` makes for it."""

    def __init__(self, net: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.net, self._make = net, make

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the cross entropy."""
        images, labels = batch
        return F.cross_entropy(self.net(images).float(), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make the optimizer."""
        return self._make(self.net)


class FitClock(Callback):
    """Callback that times from the start of one step to the end of another; both wait for the device."""

    def __init__(self, *, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        self.seconds = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock before the first step that counts."""
        if batch_idx == self.begin:
            self.seconds = -self._now(module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop the clock after the last step."""
        if batch_idx == self.end - 1:
            self.seconds += self._now(module)

    @staticmethod
    def _now(module: pl.LightningModule) -> float:
        if module.device.type == "cuda":
            torch.cuda.synchronize(module.device)
        return time.perf_counter()


HEADER = ("batch", "arm", "images per second", "least to most", "x reference, median of rounds")


def markdown(rows: Sequence[TrainingRow]) -> str:
    """Format a table; rates over those of the batch's first arm in the same round.

    >>> rows = [TrainingRow(batch_size=8, arm=arm, images_per_s=s) for arm, s in (("a", (2.0, 4.0)), ("b", (3.0, 6.0)))]
    >>> print(markdown(rows).splitlines()[-1])
    | 8 | b | 4.5 | 3.0 to 6.0 | 1.50 |
    """
    lines = [HEADER, ("---",) * len(HEADER)]
    for row in rows:
        reference = next(one for one in rows if one.batch_size == row.batch_size)
        ratios = [mine / theirs for mine, theirs in zip(row.images_per_s, reference.images_per_s, strict=True)]
        spread = f"{min(row.images_per_s):.1f} to {max(row.images_per_s):.1f}"
        lines.append((str(row.batch_size), row.arm, f"{row.median:.1f}", spread, f"{statistics.median(ratios):.2f}"))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
