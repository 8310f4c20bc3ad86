"""Delayed logger output of an elastic run, which only the current global rank zero writes."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Callable, Iterable
from copy import copy
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_hybrid.lightning_names import lightning_types

# If a host is lost, the rows in its loggers' buffers are lost. TensorBoard writes every 120 s, and W&B every 15 s.
KEEP_S = 120.0

_CALLS = ("log_metrics", "log_hyperparams", "log_graph", "save")


class HeldLoggers:
    """Wrapper of the trainer's loggers that delays their output until the hosts have connected.

    Without the delay, a host that joins would open the W&B run of the first host. If the first host is lost, the next
    global rank zero rewrites the rows of the last step and of the last `KEEP_S` seconds.

    Args:
        loggers: Loggers of the trainer, which Lightning has not opened yet.
    """

    def __init__(self, loggers: Iterable[Any]) -> None:
        self._loggers = list(loggers)
        # Held calls other than `log_metrics`.
        self._settings: list[Callable[[], None]] = []
        # Calls of `log_metrics` in the last `KEEP_S` seconds, with their times.
        self._rows: deque[tuple[float, Callable[[], None]]] = deque()
        self._has_met = False
        self._is_first = False
        # Whether this rank has become rank zero and has not yet written the held output.
        self._must_write_held = False
        # Whether another rank has written rows to files that this rank's loggers may open.
        self._was_another_first = False
        for logger in self._loggers:
            for name in _CALLS:
                setattr(logger, name, partial(self._hold, name, getattr(logger, name)))
        self._rank: int = vars(rank_zero_only)["rank"]
        # If the rank is above zero, Lightning does not open loggers before its next barrier.
        vars(rank_zero_only)["rank"] = self._rank + 1
        self._has_raised_rank = True

    def let_lightning_open(self) -> None:
        """Restore the rank in `rank_zero_only`, so that Lightning can open loggers again.

        The strategy calls this method at Lightning's first barrier, which follows the code that opens loggers.
        """
        if self._has_raised_rank:
            self._has_raised_rank = False
            vars(rank_zero_only)["rank"] = self._rank

    def _hold(self, name: str, do: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if name == "log_metrics":  # copied, because users may reuse a dictionary for all rows
            args = tuple(map(copy, args))
            kwargs = {key: copy(value) for key, value in kwargs.items()}
        call = partial(do, *args, **kwargs)
        if name == "log_metrics":
            self._rows.append((monotonic(), call))
        elif not self._has_met or self._must_write_held:
            self._settings.append(call)
        if self._has_met and not self._must_write_held:
            call()

    def meet(self, *, is_first: bool) -> None:
        """Record that a new membership view has begun, and whether this rank is rank zero in the view.

        In the first view, rank zero immediately writes all delayed output. A rank that becomes rank zero later does so
        after its next step.
        """
        self._must_write_held |= is_first and not self._is_first
        self._was_another_first |= not is_first
        self._is_first = is_first
        if not self._has_met:
            self._has_met = True
            self.after_step()

    def after_step(self) -> None:
        """Write all delayed log entries if this rank has become rank zero, and drop old entries.

        Writing opens the loggers, for which other ranks have to wait. The method is called between two steps, so that
        they do not wait within a step.
        """
        if self._must_write_held:
            self._must_write_held = False
            if self._was_another_first:
                for logger in self._loggers:
                    keep_rows_of_csv(logger)
            for call in (*self._settings, *(row for _, row in self._rows)):
                call()
        while self._rows and self._rows[0][0] < monotonic() - KEEP_S:
            self._rows.popleft()

    def end(self) -> None:
        """Restore the original methods of the loggers."""
        self.let_lightning_open()  # the run may have failed before the barrier
        for logger in self._loggers:
            for name in _CALLS:
                vars(logger).pop(name, None)


def keep_rows_of_csv(logger: Any) -> None:
    """Open a `CSVLogger` without deleting the rows that another host has written.

    Lightning's logger deletes an existing file when it is opened. For other loggers, remote files and missing files,
    the function does nothing.
    """
    if not isinstance(logger, lightning_types("pytorch.loggers.CSVLogger")):
        return
    path = Path(logger.log_dir) / "metrics.csv"
    if "://" in str(logger.log_dir) or not path.is_file():
        return
    kept = path.with_name(f"metrics.{uuid4().hex[:8]}.csv")
    path.rename(kept)
    writer = logger.experiment
    with kept.open(newline="") as file:
        # Header of the existing rows.
        writer.metrics_keys = list(csv.DictReader(file).fieldnames or [])
    kept.rename(path)
