"""Benchmark of complete Lightning training steps with several strategies and gradient shapes."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_hybrid import Comm, HybridAllReduceStrategy, Mean
from lightning_hybrid.comm import Topology
from lightning_hybrid.comm.codec.block_format import message_bytes
from recipes.benchmarks.allreduce import slowest, synchronize
from recipes.benchmarks.baselines import CompressedDDPStrategy, SilentStrategy
from recipes.benchmarks.gradient_sets import GRADIENT_SETS, WITH_ARITHMETIC, GradientSet, numel
from recipes.benchmarks.report import Timing
from recipes.cli.ranges import Count, CountOrZero, NotNegative

STOCK = "ddp"
COMPRESSED = "fp16_compress"


@dataclass(frozen=True, kw_only=True)
class StrategyArm:
    """Benchmark variant whose name selects a Lightning strategy and a precision.

    `ddp`: Lightning's DDP in fp32. `fp16_compress`: DDP with torch's fp16 compression hook. `auto` or the name of an
    algorithm: the hybrid all-reduce with `precision="16-true"`. The suffix `_fp32` selects fp32, `_int8` and `_int4`
    select the codec of gradients between nodes, and `_shared` selects an update that is sharded within a node.
    `is_silent`: gradients are not averaged.

    >>> [StrategyArm(name=name).precision for name in ("two_level", "auto_fp32", "auto_int8", "fp16_compress")]
    ['16-true', '32-true', '16-true', '32-true']
    >>> [StrategyArm(name=name).wire_bytes(1024) for name in ("fp16_compress", "auto_int8", "auto_int4")]
    [2048, 1032, 520]
    """

    name: str
    bucket_bytes: int | None = None
    timeout_s: float = 300.0
    is_silent: bool = False

    @property
    def precision(self) -> Any:
        """Value of the `Trainer` argument `precision`."""
        if self.name in (STOCK, COMPRESSED) or self.name.endswith("_fp32"):
            return "32-true"
        return "16-true"

    @property
    def codec(self) -> str | None:
        """Codec that compresses gradients between nodes, or None for uncompressed gradients."""
        suffix = self.name.rpartition("_")[2]
        if suffix in ("int8", "int4"):
            return suffix
        return None

    def wire_bytes(self, numel: int) -> int:
        """Return the size in bytes of `numel` gradient elements in a message between nodes."""
        if self.codec is not None:
            return message_bytes(numel, int(self.codec.removeprefix("int")))
        return numel * (4 if self.precision == "32-true" and self.name != COMPRESSED else 2)

    def strategy(self) -> DDPStrategy:
        """Create the Lightning strategy that this variant selects."""
        timeout = timedelta(seconds=self.timeout_s)
        if self.name == STOCK:
            return DDPStrategy(timeout=timeout)
        if self.name == COMPRESSED:
            return CompressedDDPStrategy(timeout=timeout)
        algorithm: Any = (
            self.name.removesuffix("_fp32").removesuffix(f"_{self.codec}").removesuffix("_shared")
        )
        if self.is_silent:
            ours: type[HybridAllReduceStrategy] = SilentStrategy
        else:
            ours = HybridAllReduceStrategy
        comm = Comm(algorithm=algorithm, bucket_bytes=self.bucket_bytes)
        shard_update: Any = "node" if self.name.endswith("_shared") else "off"
        return ours(Mean(dtype=self.codec), shard_update=shard_update, comm=comm, timeout=timeout)


class StepClock(Callback):
    """Callback that records the end time of each step."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Wait until the device has finished the step, and record the time."""
        synchronize(trainer.strategy.root_device)
        self.ends_s.append(time.perf_counter())


@dataclass(frozen=True, kw_only=True)
class StepBench:
    """Benchmark of complete training steps, each timed from the end of the previous step.

    Each round is one `Trainer.fit` of every variant. The first steps of a run are not counted, because DDP rebuilds the
    buckets after the first step.

    Args:
        trainer: Function that creates a `Trainer` for this world from the other arguments.
        gradients: Names of `recipes.benchmarks.gradient_sets`.
        arms: Names of variants, see `StrategyArm`.
        num_rounds, num_steps: Number of training runs per variant, and number of counted steps per run.
        num_warmup_steps: Number of initial steps per run that are not counted, at least 2.
        bucket_bytes: Bucket size of the hybrid variants. None: the library's default.
        optimizer: `sgd`, the cheapest one, or `lars`, fused.
        overlap: Hybrid variant that is also run with a backward as long as its communication, or None.
    """

    trainer: Callable[..., pl.Trainer]
    gradients: Sequence[str]
    arms: Sequence[str]
    num_rounds: CountOrZero
    num_steps: Count
    num_warmup_steps: int = 3
    bucket_bytes: Count | None = None
    optimizer: Literal["sgd", "lars"] = "sgd"
    overlap: str | None = None
    timeout_s: NotNegative = 300.0

    def __post_init__(self) -> None:
        for name in self.gradients:
            if name not in GRADIENT_SETS:
                raise ValueError(
                    f"`gradients` (={name}) must contain only these names: {', '.join(GRADIENT_SETS)}. Remove "
                    f"{name} from steps.gradients."
                )
        for key, name in [
            *(("arms", arm) for arm in self.arms),
            ("overlap", self.overlap or STOCK),
        ]:
            try:
                self._arm(name).strategy()
            except ValueError as error:
                raise ValueError(
                    f"`steps.{key}` (={name!r}) is not a known variant. {error}"
                ) from error
        if self.overlap in (STOCK, COMPRESSED):
            raise ValueError(
                f"`overlap` (={self.overlap}) must be auto or the name of an all-reduce algorithm of "
                "`hybrid_allreduce`. Set overlap=auto, for example."
            )
        if self.overlap is not None and (computed := WITH_ARITHMETIC.intersection(self.gradients)):
            raise ValueError(
                f"`overlap` (={self.overlap}) and `gradients` (={min(computed)}) cannot be combined, "
                "because `overlap` needs a backward pass that takes as long as the communication, but the "
                "arithmetic of this gradient set determines how long it takes. Remove the gradient set, or set "
                "steps.overlap=null."
            )
        if self.num_warmup_steps < 2:
            raise ValueError(
                f"`num_warmup_steps` (={self.num_warmup_steps}) must be at least 2, because "
                "DistributedDataParallel rebuilds its buckets after the first step. Set "
                "steps.num_warmup_steps=3."
            )

    def run(self, fabric: Fabric, topology: Topology) -> Iterator[Timing]:
        """Measure every gradient set, and yield one `Timing` per strategy.

        Collective: every rank must call it.
        """
        fit = partial(self._fit, fabric)
        for gradients in self.gradients:
            times_s = {name: list[float]() for name in self.arms}
            for _ in range(self.num_rounds):
                for name in self.arms:
                    times_s[name] += fit(gradients, self._arm(name), backward_s=0.0)
            for name in self.arms:
                yield self._row("step", gradients, name, topology, times_s[name])
            if self.overlap is not None:
                yield from self._overlap(fit, gradients, self.overlap, topology)

    def _overlap(
        self, fit: Callable[..., list[float]], gradients: str, name: str, topology: Topology
    ) -> Iterator[Timing]:
        """Measure how much communication overlaps with backward, by timing steps with and without each of the two.

        Yields the four timings that `hidden_share` needs. The backward pass sleeps for as long as the communication
        takes.
        """
        arm = self._arm(name)
        silent = replace(arm, is_silent=True)
        with_s, without_s = (
            statistics.median(fit(gradients, arm_name, backward_s=0.0))
            for arm_name in (arm, silent)
        )
        # A backward that lasts as long as the communication could hide all of it.
        backward_s = max(0.0, with_s - without_s)
        cases = [(arm, 0.0), (silent, 0.0), (arm, backward_s), (silent, backward_s)]
        times_s: list[list[float]] = [[] for _ in cases]
        for _ in range(self.num_rounds):
            for (arm_name, wait_s), samples in zip(cases, times_s, strict=True):
                samples += fit(gradients, arm_name, backward_s=wait_s)
        for (arm_name, wait_s), samples in zip(cases, times_s, strict=True):
            words = f"{name}{', silent' * arm_name.is_silent}{f', backward of {wait_s:.3f} s' * bool(wait_s)}"
            yield self._row("overlap", gradients, words, topology, samples, wait_s)

    def _arm(self, name: str) -> StrategyArm:
        return StrategyArm(name=name, bucket_bytes=self.bucket_bytes, timeout_s=self.timeout_s)

    def _fit(
        self, fabric: Fabric, gradients: str, arm: StrategyArm, *, backward_s: float
    ) -> list[float]:
        """Train one variant, and return the duration of each counted step on the slowest rank."""
        clock = StepClock()
        module = GradientSet(
            GRADIENT_SETS[gradients](),
            backward_s=backward_s,
            optimizer=self.optimizer,
            has_arithmetic=gradients in WITH_ARITHMETIC,
        )
        trainer = self.trainer(
            strategy=arm.strategy(),
            precision=arm.precision,
            max_steps=self.num_warmup_steps + self.num_steps,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        steps = torch.zeros(self.num_warmup_steps + self.num_steps, 1)
        trainer.fit(module, DataLoader(steps, batch_size=1))  # type: ignore[arg-type]
        # Trainer and module refer to each other, so only the garbage collector frees their memory for the next fit.
        del trainer, module
        gc.collect()
        # A step lasts from the end of the previous step to its own end, so overlapping work counts once.
        counted = clock.ends_s[self.num_warmup_steps - 1 :]
        return slowest([end - begin for begin, end in itertools.pairwise(counted)], fabric.device)

    def _row(
        self,
        section: str,
        gradients: str,
        arm: str,
        topology: Topology,
        times_s: Sequence[float],
        backward_s: float = 0.0,
    ) -> Timing:
        name = arm.partition(",")[0]
        return Timing(
            section=section,
            case=gradients,
            arm=arm,
            num_bytes=StrategyArm(name=name).wire_bytes(numel(GRADIENT_SETS[gradients]())),
            num_nodes=topology.num_nodes,
            times_s=tuple(times_s),
            backward_s=backward_s,
        )
