"""The watchdog of a pipeline: it names the rank that others wait for, with its stage and micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_hybrid.comm.health.diagnosis import RankStatus
from lightning_hybrid.strategy.failures import SetupWatchdog


class StageWatchdog(SetupWatchdog):
    """Watchdog of all ranks of all pipelines, from setup to the end of a run. Collective."""

    _place: str | None = None  # None: in no schedule
    _is_waiting = False

    def note(self, place: str, *, is_waiting: bool = False) -> None:
        """Note where this rank is in its schedule: computing, or waiting for another stage."""
        # Two attributes, read by the watchdog's thread: a mixture of two moments would only word an error less well.
        self._place, self._is_waiting = place, is_waiting

    @contextmanager
    def in_schedule(self) -> Iterator[None]:
        """Mark a schedule; after an error inside, the place stays as it was."""
        self.note("in a schedule", is_waiting=True)
        yield
        self._place = None

    def status(self) -> RankStatus:
        """Return where this rank stands, for the diagnosis of a failure."""
        if self._place is None:
            return super().status()
        return RankStatus(num_submitted=0, order="", place=self._place, is_inside=self._is_waiting)
