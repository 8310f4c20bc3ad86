"""One fit of a whole network, by accumulation, on data ranks or in stages: seconds of its steps and its peak memory."""

from __future__ import annotations

import ctypes
import gc
import logging
import re
import time
import warnings
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_hybrid import Comm, HybridAllReduceStrategy, HybridPipelineStrategy
from lightning_hybrid.optim import LARS
from recipes.networks.alexnet import AlexNetBN
from recipes.networks.resnet import ResNet

WARM_UP_STEPS = 1


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A network, and the parts of a step's batch."""

    network: str
    image_size: int
    images_per_microbatch: int
    num_microbatches: int

    @property
    def images_per_step(self) -> int:
        """Images of a step, over all ranks."""
        return self.images_per_microbatch * self.num_microbatches

    def make(self) -> nn.Module:
        """Make the network, with all the parameters that it has in the recipes."""
        if self.network == "resnet50":
            return ResNet(depth=50)
        imagenet = {"stem_kernel": 11, "stem_stride": 4, "stem_padding": 2, "conv2_kernel": 5, "pool_padding": 0}
        return AlexNetBN(num_classes=1000, in_channels=3, image_size=self.image_size, fc_std=0.005, **imagenet)  # type: ignore[arg-type]


# ResNet-50 has the same 25.6 million parameters at every size of picture; AlexNet-BN its 62.4 million at 224 pixels.
SETTINGS = {
    "resnet50": Setting(network="resnet50", image_size=64, images_per_microbatch=4, num_microbatches=8),
    "alexnet_bn": Setting(network="alexnet_bn", image_size=224, images_per_microbatch=2, num_microbatches=8),
}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A way to train it; the arithmetic of a step is the same in all."""

    kind: str  # "accumulation", "data ranks", "1f1b", "gpipe"
    num_ranks: int

    @property
    def name(self) -> str:
        """The arm in words."""
        return self.kind if self.num_ranks == 1 else f"{self.num_ranks} {'' if self.is_data else 'stages, '}{self.kind}"

    @property
    def is_data(self) -> bool:
        """Whether every rank holds the whole network."""
        return self.kind in ("accumulation", "data ranks")

    def trainer_options(self, setting: Setting) -> dict[str, Any]:
        """Return the strategy, and how many batches make a step."""
        if self.is_data:
            strategy: Any = HybridAllReduceStrategy(comm=Comm(tune="off"))
            return {"strategy": strategy, "accumulate_grad_batches": setting.num_microbatches // self.num_ranks}
        schedule, num = self.kind, setting.num_microbatches
        return {"strategy": HybridPipelineStrategy(num_stages=self.num_ranks, num_microbatches=num, schedule=schedule)}


ARMS = [
    Arm(kind="accumulation", num_ranks=1),
    *(Arm(kind=kind, num_ranks=num_ranks) for num_ranks in (2, 4) for kind in ("data ranks", "1f1b", "gpipe")),
]


class Classifier(pl.LightningModule):
    """A network under a cross-entropy and LARS."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = setting.make()
        size = setting.image_size
        self.example_input_array = torch.zeros(setting.images_per_microbatch, 3, size, size)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        images, labels = batch
        return F.cross_entropy(self.net(images.to(next(self.net.parameters()).dtype)).float(), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make LARS."""
        return LARS(self.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-5)


class Images(Dataset[Any]):
    """Images of noise, few of them again and again."""

    def __init__(self, setting: Setting, num_steps: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.images = torch.rand(
            setting.images_per_step, 3, setting.image_size, setting.image_size, generator=generator
        )
        self.length = num_steps * setting.images_per_step

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index % len(self.images)], index % 1000


class StepCensus(pl.Callback):
    """Callback that notes when steps end and, over those that count, the most memory of this process."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.peak_bytes = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Begin to count after the steps that warm up."""
        if trainer.global_step == WARM_UP_STEPS and not self.ends_s:
            reset_peak()
            dist.barrier()
            self.ends_s.append(time.perf_counter())

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Note the end of a step."""
        if trainer.global_step == WARM_UP_STEPS + len(self.ends_s) > WARM_UP_STEPS:
            self.ends_s.append(time.perf_counter())
            self.peak_bytes = status_bytes("VmHWM")


def fit(arm: Arm, setting: Setting, precision: str, num_steps: int) -> tuple[list[float], int]:
    """Fit; return seconds of each step that counts, and the most memory beyond what the process had before."""
    import lightning_hybrid.pipeline.checked_stage  # noqa: F401  what it imports belongs to no arm

    for name in ("lightning.pytorch", "lightning.fabric", "lightning_utilities"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # advice about loaders and logging
    reset_peak()
    before = status_bytes("VmRSS")
    census = StepCensus()
    images_per_batch = setting.images_per_microbatch if arm.is_data else setting.images_per_step
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        precision=precision,  # type: ignore[arg-type]
        max_steps=WARM_UP_STEPS + num_steps,
        callbacks=[census],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arm.trainer_options(setting),
    )
    data = Images(setting, WARM_UP_STEPS + num_steps)
    trainer.fit(Classifier(setting), DataLoader(data, batch_size=images_per_batch))
    times_s = [end_s - begin_s for begin_s, end_s in pairwise(census.ends_s)]
    return times_s, census.peak_bytes - before


def reset_peak() -> None:
    """Give memory that is free back to the system, and let the kernel count this process's peak from now on."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def status_bytes(name: str) -> int:
    """Return an entry of the kernel's account of this process: `VmRSS` now, `VmHWM` its peak."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
