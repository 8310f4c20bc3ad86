"""Detection of a CUDA device that is busy or waits for long, by events for which no thread waits.

A kernel of NCCL that waits for a failed rank spins, be it for a bucket's all-reduce, a pipeline stage or a metric. So
the watchdog's thread records an event behind the work that the training thread has launched, and asks four times a
second whether the device has passed it. Until then, the device computes for long, or waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

import torch

# Seconds that a query of the device may take: a driver that hangs must not keep the watchdog from answering.
LOOK_LIMIT_S = 1.0


class DeviceWaits:
    """Detector of waits of a CUDA device.

    Args:
        device: CUDA device. Its current stream in the thread that trains is watched.
        also: Function called in each query, to check for other work that the device has finished.
    """

    def __init__(self, device: torch.device, *, also: Callable[[], None] = lambda: None) -> None:
        self._stream = torch.cuda.current_stream(device)  # of the thread that trains
        self._also = also
        self._event: torch.cuda.Event | None = None
        self._since_s = 0.0
        self._query_thread: threading.Thread | None = None

    def stalled_s(self) -> float:
        """Query the device and return the age of the event that it has not passed, or 0 if there is none."""
        thread = self._query_thread
        if thread is None or not thread.is_alive():
            thread = threading.Thread(target=self._query, name="comm-look", daemon=True)
            thread.start()
            # Stored after the start, because two threads may arrive here at the same time.
            self._query_thread = thread
        # A query that takes longer is left running, and is joined again by the next call.
        thread.join(LOOK_LIMIT_S)
        if self._event is None:
            return 0.0
        return monotonic() - self._since_s

    def _query(self) -> None:
        try:
            if is_any_captured():
                return
            if self._event is None or self._event.query():
                event = torch.cuda.Event()
                self._since_s = monotonic()
                event.record(self._stream)
                if event.query():
                    self._event = None
                else:
                    self._event = event
        except RuntimeError:  # An error of the driver: the host gets it as well, and reports it.
            return
        self._also()


def is_any_captured() -> bool:
    """Return whether the current stream, or the stream of `torch.cuda.graph`, is captured in any thread."""
    # During a capture, CUDA by default forbids all threads to query an event, and ends the capture.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return True
    stream = torch.cuda.graph.default_capture_stream
    if stream is None:
        return False
    # The device is entered first: to leave a stream would create a context on this thread's own device, which is GPU 0
    # in each rank.
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
