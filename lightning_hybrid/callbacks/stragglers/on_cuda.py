"""CUDA implementations of the clock and of the gather that never block the host."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.callbacks.stragglers.gather import first_rank_of, windows_of
from lightning_hybrid.callbacks.stragglers.window import NUM_FIGURES, RankWindow


class CudaClock:
    """Clock that records CUDA events on the current stream of a device.

    A phase ends when the device reaches the event, not when the host records the event. If the host
    is late, for example because it waits for data, the device also reaches the event late.

    Args:
        device: Device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> torch.cuda.Event:
        """Record a CUDA event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self._device)
        event.record(stream)
        return event

    def is_readable(self, stamp: torch.cuda.Event) -> bool:
        """Return whether the device has reached a recorded event, so that its time can be read."""
        return stamp.query()

    def seconds(
        self,
        begin: torch.cuda.Event,
        end: torch.cuda.Event,
    ) -> float:
        """Return the time in seconds between two events that the device has reached."""
        milliseconds = begin.elapsed_time(end)
        return milliseconds / 1e3


@dataclass
class _Arrival:
    """Step times of all ranks in page-locked memory, with an event that marks the end of the copy."""

    figures: Tensor
    event: torch.cuda.Event


class CudaGather:
    """Gather of CUDA tensors to the first rank of a group, without waiting for the result.

    The host reads the result in a later window, once it has arrived.

    Args:
        group: Process group of the compared ranks. None means all ranks.
        device: Device of this rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._group = group
        self._device = device
        self._is_first = dist.get_rank(group) == 0
        self._first_rank = first_rank_of(group)
        self._pending: deque[_Arrival] = deque()

    def gather(
        self,
        window: RankWindow,
    ) -> list[list[RankWindow]]:
        """Send this rank's step times to the first rank, and return the windows received so far."""
        # A copy from page-locked memory does not make the host wait.
        figures = torch.empty(NUM_FIGURES, pin_memory=True)
        figures.copy_(torch.tensor(window.to_figures()))
        sent = torch.empty(NUM_FIGURES, device=self._device)
        sent.copy_(figures, non_blocking=True)

        received = None
        rows = None
        if self._is_first:
            num_ranks = dist.get_world_size(self._group)
            received = torch.empty(num_ranks, NUM_FIGURES, device=self._device)
            rows = list(received)
        dist.gather(
            sent,
            rows,
            dst=self._first_rank,
            group=self._group,
        )
        if received is not None:
            self._copy_to_host(received)
        return self._take_arrived()

    def _copy_to_host(self, received: Tensor) -> None:
        figures = torch.empty(received.shape, pin_memory=True)
        figures.copy_(received, non_blocking=True)
        event = torch.cuda.Event()
        stream = torch.cuda.current_stream(self._device)
        event.record(stream)
        self._pending.append(_Arrival(figures, event))

    def _take_arrived(self) -> list[list[RankWindow]]:
        arrived = []
        while self._pending:
            if not self._pending[0].event.query():
                break
            arrival = self._pending.popleft()
            rows = list(arrival.figures)
            arrived.append(windows_of(rows))
        return arrived
