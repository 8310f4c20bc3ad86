"""Progress of the training loop's iteration over a loader with exact resume."""

from __future__ import annotations

from collections import deque
from typing import Any

from lightning_hybrid.data.place import Place


class TrainingPass:
    """Progress of one pass of the training loop over a loader.

    Args:
        place: Position at which the iteration begins.

    Attributes:
        batches_done: Number of finished batches in the cycle.
        is_exhausted: Whether the iteration has ended.
        expects_batch: Whether another batch must follow, because the sampler has index lists left.
        matches_index_lists: Whether each batch belongs to one index list.
        checksum: Checksum of the index lists up to the last batch, or None if batches do not match index lists.
        pending_checksums: Checksums of index lists whose batches the workers have not returned yet.
        expected: Number of batches at which the interrupted run was saved, and its checksum there.
        stream_states: States of an iterable data set, by number of finished batches.
        own_streams: States of the samplers' random number generators at the beginning of the iteration.
        sampler_epochs: Epochs of the samplers at the beginning of the iteration.
        dataset_epoch: Epoch of the data set at the beginning of the iteration.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.batches_done = place.batches
        self.is_exhausted = False
        self.expects_batch = False
        self.matches_index_lists = True
        self.checksum: int | None = 0
        self.pending_checksums: deque[int] = deque()
        self.expected: tuple[int, int | None] | None = None
        self.stream_states: dict[int, Any] = {}
        self.own_streams: list[Any] = []
        self.sampler_epochs: list[int | None] = []
        self.dataset_epoch: int | None = None
