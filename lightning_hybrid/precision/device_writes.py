"""Asynchronous detection of user code that modifies half-precision parameters on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# The search costs one more pass over the copies, so it does not run every time that a window closes.
NUM_FIRST_CLOSINGS = 8
EVERY_CLOSINGS = 100

IsReady = Callable[[], bool]


class WriteSearch:
    """Asynchronous detector of half-precision parameters that user code has modified during a step.

    When a window closes on a GPU, writes are copied to the fp32 values, but the host does not know whether there were
    any. On some of these occasions, the detector counts the differing elements of each copy on the GPU and sends the
    counts to the host, where they are read the next time that a window closes. The host never waits for them.
    """

    def __init__(self) -> None:
        self._num_closings = 0
        self._names: list[str] = []
        self._counts: list[Tensor] = []
        self._on_host: Tensor | None = None
        self._is_ready: IsReady | None = None

    @property
    def is_on(self) -> bool:
        """True if the detector will be active when the parameters are next switched back to fp32."""
        is_due = self._num_closings < NUM_FIRST_CLOSINGS or self._num_closings % EVERY_CLOSINGS == 0
        return is_due and self._on_host is None

    def compare(
        self, names: Sequence[str], expected: Sequence[Tensor], bits: Sequence[Tensor]
    ) -> None:
        """Count the elements of each copy whose bits differ from the expected bits."""
        for name, expected_bits, copy_bits in zip(names, expected, bits, strict=True):
            self._names.append(name)
            self._counts.append(torch.count_nonzero(expected_bits != copy_bits))

    def end_closing(self) -> None:
        """Start an asynchronous copy of the collected counts to the host, if there are any."""
        self._num_closings += 1
        if self._counts:
            device = self._counts[0].device  # because a module may be on several devices
            counts = torch.stack([count.to(device) for count in self._counts])
            self._on_host, self._is_ready = _sent_to_host(counts)
            self._counts = []

    def take_written(self) -> str | None:
        """Return the name of a parameter that user code has modified, or None if no such parameter is known.

        The counts from each closing are evaluated once, after they have arrived on the host.
        """
        if self._on_host is None or self._is_ready is None or not self._is_ready():
            return None
        counts = self._on_host.tolist()
        written = [name for name, count in zip(self._names, counts, strict=True) if count]
        self._names = []
        self._on_host = None
        self._is_ready = None
        if not written:
            return None
        return written[0]


def _sent_to_host(values: Tensor) -> tuple[Tensor, IsReady]:
    """Start copying values to the host. Return the copy and a function that tells whether it is complete."""
    if values.device.type != "cuda":
        return values.cpu(), lambda: True
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    on_host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return on_host, arrived.query
