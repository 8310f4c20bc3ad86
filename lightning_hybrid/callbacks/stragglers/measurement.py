"""Measurement of the phases of one rank's training steps.

The strategy reports some phases to its trace. Hooks on Lightning's training loop add the others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_hybrid.callbacks.stragglers.window import RankWindow
from lightning_hybrid.comm.health.link_rates import LinkRates
from lightning_hybrid.comm.stats.phases import HostClock, Phase, PhaseClock, StepPhases, StepTimes
from lightning_hybrid.comm.stats.trace import CommTrace
from lightning_hybrid.run_status import RunStatus


def reason_not_to_measure(trainer: pl.Trainer, module: nn.Module, status: RunStatus) -> str:
    """Explain why ranks cannot be compared in this run, or return an empty string if they can."""
    if status.comm_trace is None:
        return (
            "it needs the bucket timings of strategy='hybrid_allreduce', but the run uses another "
            "strategy"
        )
    if status.gather_over_hosts is not None:
        return "in an elastic run ranks have different numbers of batches in a step"
    if not isinstance(trainer.strategy.model, DistributedDataParallel):
        return "the stages of a pipeline wait for one another in the middle of forward and backward"
    for name, layer in module.named_modules():
        is_spread = getattr(layer, "node_slices", ()) or getattr(layer, "spans_all_ranks", False)
        if is_spread or isinstance(layer, nn.SyncBatchNorm):
            return f"layer `{name}` waits for other ranks in the middle of forward and backward"
    return ""


class StepMeasurement:
    """Timer for the phases of this rank's steps, which runs from `attach` to `detach`.

    Args:
        trainer: The trainer.
        module: The user's module.
        trace: Trace to which the strategy reports the phases.
        device: Device of this rank.
        links: Bandwidth meter of this rank's links.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: nn.Module,
        trace: CommTrace,
        device: torch.device,
        links: LinkRates,
    ) -> None:
        self._loop: Any = trainer.fit_loop.epoch_loop
        self._module = module
        self._trace = trace
        self._links = links
        self._phases = StepPhases(_clock_of(device))
        self._steps: list[StepTimes] = []
        self._num_steps = 0  # in this window, including steps that the device has not finished
        self._forward_hook: RemovableHandle | None = None
        self._phase_before_fetch = Phase.CALLBACKS
        # Functions that replace methods of Lightning's loop, by name.
        self._replaced: dict[str, Callable[[], None]] = {}

    # ---- begin and end -----------------------------------------------------------------------

    def attach(self) -> None:
        """Install the hooks that measure the phases."""
        self._trace.phases = self._phases
        self._forward_hook = self._module.register_forward_pre_hook(self._on_forward)
        self._replace("_on_before_fetch", self._before_fetch)
        self._replace("_on_after_fetch", self._after_fetch)
        # `StopOnSignal` may have replaced this method. It records its own waiting time.
        if "_broadcast_sigterm_tensor" not in vars(self._loop):
            self._replace("_broadcast_sigterm_tensor", self._before_batch)

    def detach(self) -> None:
        """Remove the hooks that `attach` installed."""
        if self._forward_hook is None:
            return
        self._forward_hook.remove()
        self._forward_hook = None
        self._trace.phases = None
        for name, function in self._replaced.items():
            if vars(self._loop).get(name) is function:
                delattr(self._loop, name)
        self._replaced.clear()

    def _replace(self, name: str, around: Callable[[Callable[[], None]], None]) -> None:
        """Replace a method of the training loop with a wrapper that receives the original method."""
        original = getattr(self._loop, name)

        def replaced() -> None:
            around(original)

        self._replaced[name] = replaced
        setattr(self._loop, name, replaced)

    # ---- marks of the loop -------------------------------------------------------------------

    def _before_batch(self, broadcast: Callable[[], None]) -> None:
        with self._trace.waiting():  # all ranks wait for rank zero before every batch
            broadcast()

    def _before_fetch(self, start_profiler: Callable[[], None]) -> None:
        self._phase_before_fetch = self._phases.current
        self._trace.enter(Phase.INPUT)
        start_profiler()

    def _after_fetch(self, stop_profiler: Callable[[], None]) -> None:
        stop_profiler()
        # A batch is fetched during forward only if `training_step` has the argument
        # `dataloader_iter`.
        if self._phase_before_fetch is Phase.FORWARD:
            self._trace.enter(Phase.FORWARD)

    def _on_forward(self, module: nn.Module, args: Any) -> None:
        # DDP has just waited for rank zero's buffers. In later calls of this hook, which come from
        # `self(...)` in a step, the phase is not WAIT.
        if self._phases.current is Phase.WAIT:
            self._trace.enter(Phase.FORWARD)

    # ---- steps and windows -------------------------------------------------------------------

    def end_batch(self, *, is_step: bool) -> None:
        """Mark the end of a batch and, if `is_step` is True, the end of the optimizer step."""
        self._trace.enter(Phase.CALLBACKS)
        if is_step:
            self._num_steps += 1
            self._phases.end_step()
            self._steps += self._phases.take_steps()

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context manager that counts the time inside it as waiting for other ranks."""
        return self._trace.waiting()

    def take_window(self) -> RankWindow:
        """Return the median times of the steps since the last call.

        Steps that the device has not finished yet are included in a later window.
        """
        link = self._links.take_slowest(self._num_steps)
        steps = self._steps
        self._steps = []
        self._num_steps = 0
        return RankWindow.of_steps(steps, link)


def _clock_of(device: torch.device) -> PhaseClock:
    if device.type == "cuda":
        from lightning_hybrid.callbacks.stragglers.on_cuda import CudaClock

        return CudaClock(device)
    return HostClock()
