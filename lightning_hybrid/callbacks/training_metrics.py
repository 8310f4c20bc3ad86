"""Metrics of training to any Lightning logger."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_hybrid.batch_rows import count_rows, leaves
from lightning_hybrid.callbacks import comm_report
from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.checks import plain_value, require_positive, require_whole
from lightning_hybrid.comm.stats.summary import CommSummary
from lightning_hybrid.optim.diagnostics import trust_ratios
from lightning_hybrid.run_status import RunStatus, run_status


class TrainingMetrics(Callback):
    """Logging of what `lightning_hybrid.callbacks.metrics` lists under train, comm, data, throughput and memory.

    At every `log_every_n_steps`-th step, and at no other, it reads values from the device and averages the loss over
    ranks: *every rank must have this callback.* What is missing is not logged, as trust ratios without LARS or LAMB.
    Times are rank zero's, between two logged steps, less validation. They need batches of equal size on all ranks.

    Args:
        skip_steps: a time that begins before this many steps of this process is not logged: memory is being
            allocated, buckets are being built.
        flops_per_image: floating-point operations of forward and backward for one image, a multiply-add being two;
            None: operations per second are not logged.
        peak_flops_per_s: what one rank's device can do in the precision used, by its data sheet; None: no utilisation.
        with_trust_ratios: whether to log them: they cost two passes over all weights at each logged step.

    Raises:
        ValueError: a number that is not above zero; a peak without operations per image.
    """

    def __init__(
        self,
        skip_steps: int = 10,
        flops_per_image: float | None = None,
        peak_flops_per_s: float | None = None,
        with_trust_ratios: bool = True,
    ) -> None:
        skip_steps = plain_value(skip_steps)
        flops_per_image = plain_value(flops_per_image)
        peak_flops_per_s = plain_value(peak_flops_per_s)
        require_whole(
            "skip_steps", skip_steps, "steps are counted; 0 leaves none out of the clock", least=0
        )
        for name, value in (
            ("flops_per_image", flops_per_image),
            ("peak_flops_per_s", peak_flops_per_s),
        ):
            if value is not None:
                require_positive(
                    name, value, "utilisation is a quotient. Leave it out where it is not known"
                )
        if peak_flops_per_s is not None and flops_per_image is None:
            raise ValueError(
                f"`peak_flops_per_s` (={peak_flops_per_s:g}) needs `flops_per_image`: utilisation is operations per "
                "second by this peak. Give `flops_per_image`, or leave `peak_flops_per_s` out."
            )
        self.skip_steps = skip_steps
        self.flops_per_image = flops_per_image
        self.peak_flops_per_s = peak_flops_per_s
        self.with_trust_ratios = with_trust_ratios

    def reads_gradients(self, trainer: pl.Trainer) -> bool:
        """Return whether `p.grad` is read after the step in progress."""
        return self.with_trust_ratios and is_logged_step(trainer, is_next=True)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._last_step = trainer.global_step
        self._num_steps = 0  # by this process
        trace = run_status(trainer).comm_trace
        if trace is not None:
            trace.measure_devices()
        self._begin_window(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock."""
        self._pause_began_s = perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock again."""
        if not trainer.sanity_checking:
            self._paused_s += perf_counter() - self._pause_began_s

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note learning rate and momentum: at the end of the batch they are already the next one's."""
        group = trainer.optimizers[0].param_groups[0]
        self._lr = group["lr"]
        self._momentum = momentum_of(group)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count; at a logged step, read and log."""
        # The ranks of a pipeline read the same batch.
        shares = trainer.distributed_sampler_kwargs  # None: a strategy of one device
        num_shards = run_status(trainer).num_shards
        if num_shards is None:
            num_shards = shares["num_replicas"] if shares else 1
        self._window_images += num_images(batch) * num_shards
        if trainer.global_step == self._last_step:  # accumulating gradients
            return
        self._last_step = trainer.global_step
        self._num_steps += 1
        if not is_logged_step(trainer):
            return
        status = run_status(trainer)
        # Also where it is not logged: each window has its own.
        comm = CommSummary() if status.comm_trace is None else status.comm_trace.drain()
        clock = self._clock_metrics(
            trainer, comm, status.link_bytes_per_s
        )  # first: what follows takes time
        values = self._train_metrics(trainer, outputs, status) | comm_report.byte_metrics(comm)
        if self.with_trust_ratios and pl_module.automatic_optimization:
            values |= trust_ratio_metrics(trainer.optimizers[0], status)
        values[m.PEAK_MEMORY_BYTES] = float(peak_memory_bytes(pl_module.device))
        pl_module.log_dict(values | clock, batch_size=1)
        self._begin_window(trainer)

    def _begin_window(self, trainer: pl.Trainer) -> None:
        self._window_images = 0
        self._window_first_step = self._num_steps
        self._paused_s = 0.0
        for take_wait_s in _waits(trainer):
            take_wait_s()  # what was waited until now belongs to no window
        self._window_began_s = perf_counter()
        self._window_is_warm = self._num_steps >= self.skip_steps

    def _train_metrics(
        self, trainer: pl.Trainer, outputs: Any, status: RunStatus
    ) -> dict[str, float]:
        values = {m.TRAIN_LR: float(self._lr)}
        if self._momentum is not None:
            values[m.TRAIN_MOMENTUM] = float(self._momentum)
        # Manual optimization need not return a loss, on all ranks or on some: each adds what it has, and says so.
        both = torch.zeros(2, device=trainer.strategy.root_device)
        if outputs and "loss" in outputs:
            # Lightning divides the loss of a batch by the number of batches of a step
            both = both.new_tensor((0.0, 1.0))
            both[0] = outputs["loss"].float() * trainer.accumulate_grad_batches
        total, num_ranks = trainer.strategy.reduce(both, reduce_op="sum")
        if num_ranks:
            values[m.TRAIN_LOSS] = float(total / num_ranks)
        for index, loss_scale in enumerate(status.loss_scales):
            values[m.with_index(m.TRAIN_LOSS_SCALE, index)] = float(loss_scale.value)
        if (num_skipped_steps := status.num_skipped_steps) is not None:
            values[m.TRAIN_SKIPPED_STEPS] = float(num_skipped_steps)
        return values

    def _clock_metrics(
        self, trainer: pl.Trainer, comm: CommSummary, link_bytes_per_s: float | None
    ) -> dict[str, float]:
        elapsed_s = perf_counter() - self._window_began_s - self._paused_s
        if not self._window_is_warm:
            return {}
        images_per_s = self._window_images / elapsed_s
        values = {m.IMAGES_PER_S: images_per_s}
        if waits_s := [take_wait_s() for take_wait_s in _waits(trainer)]:
            values[m.DATA_WAIT_S] = sum(waits_s) / (self._num_steps - self._window_first_step)
        if self.flops_per_image is not None:
            values[m.FLOPS_PER_S] = images_per_s * self.flops_per_image
            if self.peak_flops_per_s is not None:
                num_ranks = run_status(trainer).num_ranks or trainer.world_size
                values[m.MFU] = values[m.FLOPS_PER_S] / (self.peak_flops_per_s * num_ranks)
        return values | comm_report.clock_metrics(
            comm, elapsed_s=elapsed_s, link_bytes_per_s=link_bytes_per_s
        )


def is_logged_step(trainer: Any, *, is_next: bool = False) -> bool:
    """Return whether the step just made, or the next one, is one at which training is logged."""
    every = trainer.log_every_n_steps
    return every > 0 and (trainer.global_step + is_next) % every == 0


def num_images(batch: Any) -> int:
    """Return the number of samples in a batch, or the length of its first tensor if its columns have several lengths.

    >>> num_images({"images": torch.zeros(7, 1, 16, 16), "labels": torch.zeros(7)})
    7
    >>> num_images([["a text", "another"], torch.zeros(2)])
    2
    """
    try:
        return count_rows(batch)
    except ValueError:  # as of several loaders, whose batches have sizes of their own
        for leaf in leaves(batch):
            if isinstance(leaf, Tensor) and leaf.dim() > 0:
                return len(leaf)
        raise


def momentum_of(group: dict[str, Any]) -> float | None:
    """Return the momentum of a parameter group, or the first of its betas; None where it has neither.

    >>> momentum_of({"momentum": 0.9}), momentum_of({"betas": (0.8, 0.999)}), momentum_of({})
    (0.9, 0.8, None)
    """
    return group.get("momentum", group.get("betas", (None,))[0])


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak of memory so far: of torch's tensors on a CUDA device; else of this whole process.

    >>> 2**20 < peak_memory_bytes(torch.device("cpu")) < 2**43
    True
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # as getrusage has it
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def trust_ratio_metrics(optimizer: Optimizer, status: RunStatus) -> dict[str, float]:
    """Return least, median and largest trust ratio of each group after a step; nothing after a skipped one."""
    if status.has_grad_scaler and getattr(optimizer, "_step_supports_amp_scaling", False):
        return {}  # gradients are still scaled, by a factor that the scaler may have changed since
    values = dict[str, float]()
    with status.update_context(optimizer):
        groups = [list(group.values()) for group in trust_ratios(optimizer)]
    for index, group in enumerate(groups):
        if not group:
            continue
        ratios = torch.stack(group)
        found = torch.stack([ratios.min(), ratios.median(), ratios.max()]).tolist()
        # After a skipped step the gradients, and so the ratios, are not finite.
        if all(map(math.isfinite, found)):
            values |= {
                m.with_index(name, index): one
                for name, one in zip(m.TRUST_RATIOS, found, strict=True)
            }
    return values


def _waits(trainer: pl.Trainer) -> Iterator[Callable[[], float]]:
    for loader in tree_leaves(trainer.train_dataloader):
        if (take_wait_s := getattr(loader, "take_wait_s", None)) is not None:
            yield take_wait_s
