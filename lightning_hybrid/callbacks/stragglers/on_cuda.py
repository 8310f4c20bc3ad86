"""Clock and gather on CUDA, where the host never waits for the device."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.callbacks.stragglers.gather import first_rank_of, windows_of
from lightning_hybrid.callbacks.stragglers.window import NUM_FIGURES, RankWindow


class CudaClock:
    """Clock of a device: events on its current stream.

    A phase ends when the device gets there, not when the host does. If the host is late, for
    example because it waits for data, the device gets there late as well.

    Args:
        device: Device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self._device)
        event.record(stream)
        return event

    def is_readable(self, stamp: torch.cuda.Event) -> bool:
        """Return whether the device has passed the event."""
        return stamp.query()

    def seconds(
        self,
        begin: torch.cuda.Event,
        end: torch.cuda.Event,
    ) -> float:
        """Return the time between two events that the device has passed."""
        milliseconds = begin.elapsed_time(end)
        return milliseconds / 1e3


@dataclass
class _Arrival:
    """Page-locked figures of all ranks, and the event behind their copy."""

    figures: Tensor
    event: torch.cuda.Event


class CudaGather:
    """Gather over the device's network, which is read in one of the next windows.

    Args:
        group: Ranks that are compared. None: all ranks.
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
        """Send this rank's window, and return earlier ones that have arrived on the first rank."""
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
