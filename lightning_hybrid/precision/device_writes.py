"""Search for writes to half-precision copies on a GPU, whose answer the host reads once it has arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# The search costs one more pass over the copies, so that only a few closings of a window search.
NUM_FIRST_CLOSINGS = 8
EVERY_CLOSINGS = 100

IsReady = Callable[[], bool]


class WriteSearch:
    """Search in some closings of a window for copies that user code has written. The host never waits for it.

    A closing on a GPU takes over writes without knowing whether there are any. The search counts differing elements of
    each copy on the GPU and sends the counts to the host, where a later closing reads them.
    """

    def __init__(self) -> None:
        self._num_closings = 0
        self._names: list[str] = []
        self._counts: list[Tensor] = []
        self._on_host: Tensor | None = None
        self._is_ready: IsReady | None = None

    @property
    def is_on(self) -> bool:
        """True if the current closing searches."""
        is_due = self._num_closings < NUM_FIRST_CLOSINGS or self._num_closings % EVERY_CLOSINGS == 0
        return is_due and self._on_host is None

    def compare(
        self, names: Sequence[str], expected: Sequence[Tensor], bits: Sequence[Tensor]
    ) -> None:
        """Count the elements in which bits of copies differ from the expected bits."""
        for name, expected_bits, copy_bits in zip(names, expected, bits, strict=True):
            self._names.append(name)
            self._counts.append(torch.count_nonzero(expected_bits != copy_bits))

    def end_closing(self) -> None:
        """Send the counts of this closing to the host, if it has searched."""
        self._num_closings += 1
        if self._counts:
            device = self._counts[0].device  # a module may be on several
            counts = torch.stack([count.to(device) for count in self._counts])
            self._on_host, self._is_ready = _sent_to_host(counts)
            self._counts = []

    def take_written(self) -> str | None:
        """Return the name of a parameter whose copy was written, once the answer of a search is here."""
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
    """Return a copy of values on the host, and a function that tells whether it has arrived."""
    if values.device.type != "cuda":
        return values.cpu(), lambda: True
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    on_host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return on_host, arrived.query
