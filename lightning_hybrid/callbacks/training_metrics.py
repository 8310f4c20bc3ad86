"""Callback that logs training metrics to any Lightning logger."""

from __future__ import annotations

import math
import resource
import sys
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
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
    """Callback that logs throughput, communication, data loading, memory and optimizer metrics.

    `lightning_hybrid.callbacks.metrics` lists all metrics, in the groups train, comm, data,
    throughput and memory. Every `log_every_n_steps` steps, values are read from the device and the
    loss is averaged over ranks. Therefore *every rank must have this callback.* Metrics that do not
    apply are omitted, such as trust ratios without LARS or LAMB. Times are measured on rank zero
    between two logged steps, without validation. Throughput assumes equal batch sizes on all ranks.
    It is omitted, with a warning, if the number of samples in a batch is unknown.

    Args:
        skip_steps: Number of initial steps for which no times are logged, because memory is
            allocated and buckets are built during these steps.
        flops_per_image: Number of floating-point operations of forward and backward for one image,
            where a multiply-add counts as two. If None, operations per second are not logged.
        peak_flops_per_s: Peak performance of one rank's device in the precision used, from its data
            sheet. If None, utilization is not logged.
        with_trust_ratios: Whether to log trust ratios. They cost two passes over all weights at
            each logged step.

    Raises:
        ValueError: A number is out of range, or `peak_flops_per_s` is set without
            `flops_per_image`.
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
            "skip_steps",
            skip_steps,
            "no times are logged in this number of initial steps. Set 0 to time all steps",
            least=0,
        )
        why = "the FLOP/s metrics are computed from it. Leave the argument out if its value is unknown"
        if flops_per_image is not None:
            require_positive("flops_per_image", flops_per_image, why)
        if peak_flops_per_s is not None:
            require_positive("peak_flops_per_s", peak_flops_per_s, why)
        if peak_flops_per_s is not None and flops_per_image is None:
            raise ValueError(
                f"`peak_flops_per_s` (={peak_flops_per_s:g}) needs `flops_per_image`, because utilization is "
                "FLOPs per second divided by `peak_flops_per_s`. Set `flops_per_image`, or leave "
                "`peak_flops_per_s` out."
            )
        self.skip_steps = skip_steps
        self.flops_per_image = flops_per_image
        self.peak_flops_per_s = peak_flops_per_s
        self.with_trust_ratios = with_trust_ratios

        self._last_step = 0
        self._num_steps = 0  # since the start of this process
        self._lr: float | Tensor | None = None
        self._momentum: float | None = None
        self._validation_began_s = 0.0
        # Counters since the last logged step.
        self._window_images: int | None = 0  # None if a batch has an unknown number of samples
        self._window_first_step = 0
        self._window_began_s = 0.0
        self._window_validation_s = 0.0
        self._window_is_warm = False
        self._has_warned = False

    def reads_gradients(self, trainer: pl.Trainer) -> bool:
        """Return whether this callback reads `p.grad` after the current step."""
        return self.with_trust_ratios and is_logged_step(trainer, is_next=True)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._last_step = trainer.global_step
        self._num_steps = 0
        trace = run_status(trainer).comm_trace
        if trace is not None:
            trace.measure_devices()
        self._begin_window(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock during validation."""
        self._validation_began_s = perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restart the clock after validation."""
        if not trainer.sanity_checking:
            self._window_validation_s += perf_counter() - self._validation_began_s

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record the learning rate and the momentum of this step.

        At the end of the batch the optimizer already has the values of the next step.
        """
        self._lr = None
        self._momentum = None
        # Without `configure_optimizers`, the optimizer is missing or has no groups.
        for optimizer in trainer.optimizers[:1]:
            for group in optimizer.param_groups[:1]:
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
        """Count images and steps, and log all metrics at logged steps."""
        self._count_images(trainer, batch)
        if trainer.global_step == self._last_step:  # gradients are being accumulated
            return
        self._last_step = trainer.global_step
        self._num_steps += 1
        if is_logged_step(trainer):
            self._log(trainer, pl_module, outputs)
            self._begin_window(trainer)

    def _count_images(self, trainer: pl.Trainer, batch: Any) -> None:
        if self._window_images is None:
            return
        try:
            self._window_images += num_images(batch) * _num_shards(trainer)
        except ValueError:
            self._window_images = None
            if not self._has_warned:
                rank_zero_warn(
                    "`TrainingMetrics` does not log throughput, because the number of samples in a batch of type "
                    f"`{type(batch).__name__}` is unknown. Return a batch with a tensor that has one row per sample "
                    "to log it."
                )
            self._has_warned = True

    def _log(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any) -> None:
        status = run_status(trainer)
        # The counters are reset even if they are not logged, because each window starts from zero.
        comm = CommSummary() if status.comm_trace is None else status.comm_trace.drain()
        # The clock is read first, because the other metrics take time.
        clock_values = self._clock_metrics(trainer, comm, status.link_bytes_per_s)
        values = self._train_metrics(trainer, outputs, status) | comm_report.byte_metrics(comm)
        if self.with_trust_ratios and pl_module.automatic_optimization:
            for optimizer in trainer.optimizers[:1]:
                values |= trust_ratio_metrics(optimizer, status)
        values[m.PEAK_MEMORY_BYTES] = float(peak_memory_bytes(pl_module.device))
        pl_module.log_dict(values | clock_values, batch_size=1)

    def _begin_window(self, trainer: pl.Trainer) -> None:
        self._window_images = 0
        self._window_first_step = self._num_steps
        self._window_validation_s = 0.0
        _take_waits_s(trainer)  # discard waits before the window
        self._window_began_s = perf_counter()
        self._window_is_warm = self._num_steps >= self.skip_steps

    def _train_metrics(
        self, trainer: pl.Trainer, outputs: Any, status: RunStatus
    ) -> dict[str, float]:
        values: dict[str, float] = {}
        if self._lr is not None:
            values[m.TRAIN_LR] = float(self._lr)
        if self._momentum is not None:
            values[m.TRAIN_MOMENTUM] = float(self._momentum)
        # With manual optimization, some or all ranks may return no loss. The loss of a repeated
        # batch does not count. Each rank therefore contributes its loss and its number of losses.
        loss_and_number = torch.zeros(2, device=trainer.strategy.root_device)
        loss = _loss_of(outputs)
        if loss is not None and not status.repeats_batch:
            # Lightning divides the loss of a batch by the number of batches of a step.
            loss_and_number = loss_and_number.new_tensor((0.0, 1.0))
            loss_and_number[0] = loss * trainer.accumulate_grad_batches
        total, num_ranks = trainer.strategy.reduce(loss_and_number, reduce_op="sum")
        if num_ranks:
            values[m.TRAIN_LOSS] = float(total / num_ranks)
        for index, loss_scale in enumerate(status.loss_scales):
            values[m.with_index(m.TRAIN_LOSS_SCALE, index)] = float(loss_scale.value)
        num_skipped_steps = status.num_skipped_steps
        if num_skipped_steps is not None:
            values[m.TRAIN_SKIPPED_STEPS] = float(num_skipped_steps)
        return values

    def _clock_metrics(
        self, trainer: pl.Trainer, comm: CommSummary, link_bytes_per_s: float | None
    ) -> dict[str, float]:
        elapsed_s = perf_counter() - self._window_began_s - self._window_validation_s
        if not self._window_is_warm:
            return {}
        values = self._throughput_metrics(trainer, elapsed_s)
        waits_s = _take_waits_s(trainer)
        if waits_s:
            values[m.DATA_WAIT_S] = sum(waits_s) / (self._num_steps - self._window_first_step)
        return values | comm_report.clock_metrics(
            comm, elapsed_s=elapsed_s, link_bytes_per_s=link_bytes_per_s
        )

    def _throughput_metrics(self, trainer: pl.Trainer, elapsed_s: float) -> dict[str, float]:
        if self._window_images is None:
            return {}
        images_per_s = self._window_images / elapsed_s
        values = {m.IMAGES_PER_S: images_per_s}
        if self.flops_per_image is not None:
            values[m.FLOPS_PER_S] = images_per_s * self.flops_per_image
            if self.peak_flops_per_s is not None:
                num_ranks = run_status(trainer).num_ranks or trainer.world_size
                values[m.MFU] = values[m.FLOPS_PER_S] / (self.peak_flops_per_s * num_ranks)
        return values


def is_logged_step(trainer: Any, *, is_next: bool = False) -> bool:
    """Return whether metrics are logged at the current step or, with `is_next`, at the next one."""
    every = trainer.log_every_n_steps
    return every > 0 and (trainer.global_step + is_next) % every == 0


def num_images(batch: Any) -> int:
    """Return the number of samples in a batch.

    If the tensors of the batch have different lengths, the length of the first tensor is returned.

    >>> num_images({"images": torch.zeros(7, 1, 16, 16), "labels": torch.zeros(7)})
    7
    >>> num_images([["a text", "another"], torch.zeros(2)])
    2
    """
    try:
        return count_rows(batch)
    except ValueError:  # for example, batches of several loaders with different batch sizes
        for leaf in leaves(batch):
            if isinstance(leaf, Tensor) and leaf.dim() > 0:
                return len(leaf)
        raise


def momentum_of(group: dict[str, Any]) -> float | None:
    """Return the momentum or beta1 of a parameter group, or None if it has neither.

    >>> momentum_of({"momentum": 0.9}), momentum_of({"betas": (0.8, 0.999)}), momentum_of({})
    (0.9, 0.8, None)
    """
    if "momentum" in group:
        return group["momentum"]
    if "betas" in group:
        return group["betas"][0]
    return None


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory usage so far, in bytes.

    On a CUDA device this is the memory allocated by torch, and on a CPU the memory of the process.

    >>> 2**20 < peak_memory_bytes(torch.device("cpu")) < 2**43
    True
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # The unit of getrusage differs between systems.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def trust_ratio_metrics(optimizer: Optimizer, status: RunStatus) -> dict[str, float]:
    """Return the minimum, median and maximum trust ratio of each parameter group.

    The function must be called after an optimizer step. If the step was skipped, the result is
    empty.
    """
    if status.has_grad_scaler and getattr(optimizer, "_step_supports_amp_scaling", False):
        # The gradients are still scaled by a factor that the scaler may have changed since then.
        return {}
    values: dict[str, float] = {}
    with status.update_context(optimizer):
        groups = [list(group.values()) for group in trust_ratios(optimizer)]
    for index, group in enumerate(groups):
        if not group:
            continue
        ratios = torch.stack(group)
        statistics = torch.stack([ratios.min(), ratios.median(), ratios.max()]).tolist()
        # After a skipped step, the gradients and therefore the ratios are not finite.
        if all(map(math.isfinite, statistics)):
            for name, value in zip(m.TRUST_RATIOS, statistics, strict=True):
                values[m.with_index(name, index)] = value
    return values


def _loss_of(outputs: Any) -> Tensor | None:
    """Return the loss from the output of a training step, or None if it does not contain a single number.

    With manual optimization, a step may return anything under the name "loss".
    """
    loss = outputs.get("loss") if outputs else None
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.detach().float().reshape(())
    return None


def _num_shards(trainer: pl.Trainer) -> int:
    """Return the number of ranks that read different batches.

    The ranks of a pipeline read the same batches and count once.
    """
    # Single-device strategies have no sampler arguments.
    sampler_kwargs = trainer.distributed_sampler_kwargs
    num_shards = run_status(trainer).num_shards
    if num_shards is not None:
        return num_shards
    if sampler_kwargs:
        return int(sampler_kwargs["num_replicas"])
    return 1


def _take_waits_s(trainer: pl.Trainer) -> list[float]:
    """Return how long the host has waited for each loader since the last call, in seconds.

    Loaders that do not measure the waiting time are left out.
    """
    waits_s = []
    for loader in tree_leaves(trainer.train_dataloader):
        take_wait_s = getattr(loader, "take_wait_s", None)
        if take_wait_s is not None:
            waits_s.append(take_wait_s())
    return waits_s
