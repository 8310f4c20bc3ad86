"""Callback that detects a slow rank or a slow network link that delays all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info

from lightning_hybrid.callbacks.stragglers.gather import HostGather, Hosts, WindowGather
from lightning_hybrid.callbacks.stragglers.measurement import (
    StepMeasurement,
    reason_not_to_measure,
)
from lightning_hybrid.callbacks.stragglers.messages import (
    describe_slow_link,
    describe_slow_rank,
    name_link,
    name_rank,
    straggler_metrics,
)
from lightning_hybrid.callbacks.stragglers.slow_links import SlowLinks
from lightning_hybrid.callbacks.stragglers.slow_ranks import SlowRanks
from lightning_hybrid.callbacks.stragglers.window import RankWindow
from lightning_hybrid.callbacks.training_metrics import is_logged_step
from lightning_hybrid.checks import plain_value, require_share, require_whole
from lightning_hybrid.comm.health.link_rates import LinkRates
from lightning_hybrid.run_status import run_status


class StragglerMonitor(Callback):
    """Callback that warns about a slow rank or a slow link between nodes that delays the other ranks.

        rank 5 on host b is slow: backward takes 1.9 times the median, which costs 21 % of every step

    The warning also names the phase in which the rank is slow: input, forward, backward, optimizer or callbacks.
    Every rank measures its own phases, and how long it waits for other ranks after the last bucket of a backward. The
    slowest rank is the one that waits least, so clocks of different ranks are never compared. All times are medians
    over a window of `every_n_steps` steps. The callback warns about a rank if it costs at least `min_share` of a step
    in `num_windows` consecutive windows. There is one warning for each slow phase of the rank, until the rank recovers.

    The callback warns about a link if no rank is slow, every rank waits, and the link is slower than other links or
    than it was before. Link rates are read from the kernel's counters of TCP connections, which only Linux provides.

    At the end of a window, each rank sends 40 bytes to rank zero. Other steps need no communication. On CUDA, times
    are measured by events. Neither the events nor the gather make the host wait for the device. *Every rank must have
    this callback, with the same `every_n_steps`.*

    The callback needs `strategy="hybrid_allreduce"`. With `LocalSteps`, the ranks within each node are compared.
    Pipelines, elastic runs, and layers that communicate in forward, such as `SyncBatchNorm`, are not supported. In
    these cases the callback measures nothing, and logs this at the start.

    Args:
        every_n_steps: Number of steps in a window.
        min_share: Minimum cost of a slow rank or link, as a fraction of a step, above 0 and at most 1.
        num_windows: Number of consecutive windows in which the cost must be at least `min_share`.

    Attributes:
        messages: Warnings so far, each with its step. Only the first of the compared ranks has any.

    Raises:
        ValueError: A number is not positive, or `min_share` is above 1.
    """

    def __init__(
        self, every_n_steps: int = 50, min_share: float = 0.1, num_windows: int = 4
    ) -> None:
        every_n_steps = plain_value(every_n_steps)
        min_share = plain_value(min_share)
        num_windows = plain_value(num_windows)
        require_whole(
            "every_n_steps",
            every_n_steps,
            "the ranks are compared every `every_n_steps` steps. Set every_n_steps=50",
            unit="steps",
        )
        require_share(
            "min_share",
            min_share,
            "a rank counts as slow if it costs this fraction of the step time. Set min_share=0.1",
        )
        require_whole(
            "num_windows",
            num_windows,
            "a rank is reported if it is slow in this number of consecutive windows. Set num_windows=4",
        )
        self.every_n_steps = every_n_steps
        self.min_share = min_share
        self.num_windows = num_windows
        self.messages: list[tuple[int, str]] = []
        self.num_judged = 0  # number of windows that were evaluated
        self._measurement: StepMeasurement | None = None
        self._comparison: _Comparison | None = None
        self._hosts: Hosts | None = None  # hosts of all ranks
        self._last_step = 0
        self._num_steps = 0  # in this `fit` call
        self._unlogged: dict[str, float] = {}

    # ---- begin and end -----------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the measurement, or log why the run cannot be measured.

        Collective: every rank must call it, in the same order.
        """
        self._end()
        self._last_step = trainer.global_step
        self._num_steps = 0
        status = run_status(trainer)
        is_alone = trainer.world_size < 2 or not dist.is_initialized()
        if is_alone and status.gather_over_hosts is None:
            return
        reason = reason_not_to_measure(trainer, pl_module, status)
        if reason:
            rank_zero_info(f"`StragglerMonitor` measures nothing: {reason}.")
            return
        assert status.comm_trace is not None
        self._hosts = Hosts.of_world()
        self._measurement = StepMeasurement(
            trainer,
            pl_module,
            status.comm_trace,
            pl_module.device,
            LinkRates(self._hosts.node_of_address),
        )
        self._measurement.attach()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the measurement."""
        self._end()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """End the measurement."""
        self._end()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """End the measurement."""
        self._end()

    def _end(self) -> None:
        measurement = self._measurement
        self._measurement = None
        self._comparison = None
        self._unlogged = {}
        if measurement is not None:
            measurement.detach()

    # ---- steps -------------------------------------------------------------------------------

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Record the times of the batch, and compare the ranks at the end of a window."""
        if self._measurement is None:
            return
        is_step = trainer.global_step != self._last_step
        self._last_step = trainer.global_step
        self._measurement.end_batch(is_step=is_step)
        if not is_step:
            return
        self._num_steps += 1
        if self._num_steps % self.every_n_steps == 0:
            self._compare(trainer, pl_module.device)
        if self._unlogged and is_logged_step(trainer):
            pl_module.log_dict(self._unlogged, batch_size=1, rank_zero_only=True)
            self._unlogged = {}

    def _compare(self, trainer: pl.Trainer, device: torch.device) -> None:
        """Gather the measurements of all ranks, and warn about slow ranks and links.

        Collective: every rank must call it, in the same order.
        """
        assert self._measurement is not None
        assert self._hosts is not None
        window = self._measurement.take_window()
        group = run_status(trainer).node_group
        if self._comparison is None or self._comparison.group is not group:
            self._comparison = _Comparison(self, group, self._hosts, device)
        with self._measurement.waiting():
            arrived = self._comparison.gather.gather(window)
        for windows in arrived:
            self._judge(windows, trainer.global_step)

    def _judge(self, windows: Sequence[RankWindow], step: int) -> None:
        """Warn about slow ranks and links in one window of measurements.

        Called on the first of the compared ranks.
        """
        if len(windows) < 2:
            return  # a node with a single rank, with `LocalSteps`
        if min(window.step_s for window in windows) <= 0:
            return  # a device has not completed any step of this window yet
        comparison = self._comparison
        assert comparison is not None
        self.num_judged += 1
        for text in comparison.judge(windows):
            self.messages.append((step, text))
            # `rank_zero_warn` would be silent on other nodes, whose first ranks warn with
            # `LocalSteps`.
            warnings.warn(text, stacklevel=2)
        for text in comparison.take_recovered():
            rank_zero_info(text)
        self._unlogged = straggler_metrics(
            windows, comparison.hosts, list(comparison.slow_ranks.named.values())
        )

    # ---- report ------------------------------------------------------------------------------

    def describe(self) -> str:
        """Return all warnings so far as one line of text.

        >>> StragglerMonitor().describe()
        'not measured'
        """
        if self.messages:
            return "; ".join(f"{text} (step {step})" for step, text in self.messages)
        if not self.num_judged:
            return "not measured"
        return f"none in {self.num_judged} windows of {self.every_n_steps} steps"


class _Comparison:
    """Detector of slow ranks and links within one process group.

    Args:
        monitor: Callback with the thresholds.
        group: Process group of the compared ranks. None means all ranks.
        hosts: Hosts of all ranks.
        device: Device of this rank.
    """

    def __init__(
        self,
        monitor: StragglerMonitor,
        group: dist.ProcessGroup | None,
        hosts: Hosts,
        device: torch.device,
    ) -> None:
        self.group = group
        self.hosts = hosts
        if group is not None:
            self.hosts = hosts.of_ranks(dist.get_process_group_ranks(group))
        self.gather = _gather_of(group, device)
        self.slow_ranks = SlowRanks(min_share=monitor.min_share, num_windows=monitor.num_windows)
        self.slow_links = SlowLinks(
            nodes=self.hosts.nodes,
            min_share=monitor.min_share,
            num_windows=monitor.num_windows,
        )

    def judge(self, windows: Sequence[RankWindow]) -> list[str]:
        """Evaluate a window, and return a warning for each newly detected slow rank or link."""
        texts = []
        for slow_rank in self.slow_ranks.add(windows):
            texts.append(describe_slow_rank(slow_rank, self.hosts))
        slow_link = self.slow_links.add(windows, has_suspect=self.slow_ranks.has_suspect)
        if slow_link is not None:
            texts.append(describe_slow_link(slow_link, self.hosts))
        return texts

    def take_recovered(self) -> list[str]:
        """Return a message for each rank or link that has recovered since the last call."""
        texts = []
        for slow_rank in self.slow_ranks.take_recovered():
            texts.append(f"{name_rank(slow_rank, self.hosts)} is as fast as the others again")
        slow_link = self.slow_links.take_recovered()
        if slow_link is not None:
            texts.append(f"{name_link(slow_link, self.hosts)} is as fast as usual again")
        return texts


def _gather_of(group: dist.ProcessGroup | None, device: torch.device) -> WindowGather:
    if device.type == "cuda":
        from lightning_hybrid.callbacks.stragglers.on_cuda import CudaGather

        return CudaGather(group, device)
    return HostGather(group)
