"""Progress of one iteration of the training loop over a loader that resumes exactly."""

from __future__ import annotations

from collections import deque
from typing import Any

from lightning_hybrid.data.place import Place


class TrainingPass:
    """Progress of one iteration of the training loop.

    Args:
        place: Where it begins.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.batches_done = place.batches
        self.is_exhausted = False
        # The sampler has index lists left, so that a first batch must come.
        self.expects_batch = False
        # One batch comes for each index list.
        self.matches_index_lists = True
        # Of index lists up to the last batch; None once batches no longer match index lists.
        self.checksum: int | None = 0
        # Of index lists whose batches are still in the workers.
        self.pending_checksums: deque[int] = deque()
        # Number of batches, and the checksum that the interrupted run had there.
        self.expected: tuple[int, int | None] | None = None
        # States of a stream, by number of batches.
        self.stream_states: dict[int, Any] = {}
        # The streams and epochs of samplers when the iteration began.
        self.own_streams: list[Any] = []
        self.sampler_epochs: list[int | None] = []
        self.dataset_epoch: int | None = None
