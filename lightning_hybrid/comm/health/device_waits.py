"""How long the device of this rank has been at what it does, seen by events that nothing waits for.

A kernel of NCCL that waits for a lost rank spins, be it of a bucket's sum, a stage of a pipeline or a metric.
So the watchdog's thread records an event behind what the training thread has launched, and asks four times a second
whether the device is through; while it is not, it computes for long, or waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

import torch

# How long a look at the device may take: a driver that hangs must not keep the watchdog from answering.
LOOK_LIMIT_S = 1.0


class DeviceWaits:
    """Waits of a CUDA device. `also` is called in each look, to see what else it is through with."""

    def __init__(self, device: torch.device, *, also: Callable[[], None] = lambda: None) -> None:
        self._stream = torch.cuda.current_stream(device)  # of the thread that trains
        self._also = also
        self._event: torch.cuda.Event | None = None
        self._since_s = 0.0
        self._looking: threading.Thread | None = None

    def stalled_s(self) -> float:
        """Look; return the age of the event that the device is not through with, 0 where there is none."""
        looking = self._looking
        if looking is None or not looking.is_alive():
            looking = threading.Thread(target=self._look, name="comm-look", daemon=True)
            looking.start()
            self._looking = looking  # once started: two threads may come here at the same time
        looking.join(LOOK_LIMIT_S)  # else it is left alone, and asked again
        return 0.0 if self._event is None else monotonic() - self._since_s

    def _look(self) -> None:
        try:
            if is_any_captured():
                return
            if self._event is None or self._event.query():
                event = torch.cuda.Event()
                self._since_s = monotonic()
                event.record(self._stream)
                self._event = None if event.query() else event
        except RuntimeError:  # of the driver: the host meets it too, and says so
            return
        self._also()


def is_any_captured() -> bool:
    """Return whether the current stream is captured, or that of `torch.cuda.graph`, in any thread."""
    # By default CUDA forbids all threads to ask for an event meanwhile, and ends the capture.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return True
    stream = torch.cuda.graph.default_capture_stream
    if stream is None:
        return False
    # The device first: to leave a stream would make a context on this thread's own device, GPU 0 in each rank.
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
