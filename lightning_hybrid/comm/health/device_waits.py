"""Detection of a CUDA device that makes no progress for a long time, by polling events.

An NCCL kernel that waits for a failed rank spins forever. It may belong to a bucket's all-reduce, a pipeline stage or a
metric. To detect this, the watchdog's thread records an event after the work that the training thread has launched, and
checks four times a second whether the device has reached the event. If not, the device is still computing or waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

import torch

# Time limit in seconds for a query of the device. A driver that hangs must not block the watchdog.
LOOK_LIMIT_S = 1.0


class DeviceWaits:
    """Detector of hangs of a CUDA device, which polls an event on the current stream.

    Args:
        device: CUDA device. The current stream of the thread that creates the detector is watched.
        also: Function that each query also calls, to check for other work that the device has finished.
    """

    def __init__(self, device: torch.device, *, also: Callable[[], None] = lambda: None) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._also = also
        self._event: torch.cuda.Event | None = None
        self._since_s = 0.0
        self._query_thread: threading.Thread | None = None

    def stalled_s(self) -> float:
        """Poll the device, and return how long it has made no progress, in seconds.

        This is the time since the current event was recorded, if the device has not reached the event.
        The result is 0 if the device has reached all events.
        """
        thread = self._query_thread
        if thread is None or not thread.is_alive():
            thread = threading.Thread(target=self._query, name="comm-look", daemon=True)
            thread.start()
            # Stored only after the thread has started, because two threads may be here at the same time.
            self._query_thread = thread
        # A query that takes longer continues, and the next call waits for it again.
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
        except RuntimeError:  # The training thread gets and reports the driver's error as well.
            return
        self._also()


def is_any_captured() -> bool:
    """Return whether a CUDA graph capture is in progress.

    The function checks the current stream, and the stream of `torch.cuda.graph` in any thread.
    """
    # During a capture, CUDA by default forbids event queries in all threads, and a query would end the capture.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return True
    stream = torch.cuda.graph.default_capture_stream
    if stream is None:
        return False
    # The device is entered first. Otherwise leaving the stream would create a context on this thread's device, which is
    # GPU 0 on every rank.
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
