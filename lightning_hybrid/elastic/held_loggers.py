"""The trainer's loggers in an elastic run: its first rank alone opens and writes them, whichever that is by then."""

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

# What a logger has of rows and has not written yet ends with its host: TensorBoard writes each 120 s, W&B each 15 s.
KEEP_S = 120.0

_CALLS = ("log_metrics", "log_hyperparams", "log_graph", "save")


class HeldLoggers:
    """Loggers whose rows are held until hosts have met.

    Otherwise a host that joins would open the run of W&B that the first host has. Where the first host is lost, the
    next one writes the rows of the last step and of `KEEP_S` again.

    Args:
        loggers: the trainer's, before Lightning opens them.
    """

    def __init__(self, loggers: Iterable[Any]) -> None:
        self._loggers = list(loggers)
        self._settings: list[Callable[[], None]] = []
        self._rows: deque[tuple[float, Callable[[], None]]] = deque()
        self._has_met = False
        self._is_first = False
        self._is_due = False
        self._was_another_first = (
            False  # whose rows stand in files that the loggers of this rank open
        )
        for logger in self._loggers:
            for name in _CALLS:
                setattr(logger, name, partial(self._hold, name, getattr(logger, name)))
        self._rank: int = vars(rank_zero_only)["rank"]
        vars(rank_zero_only)["rank"] = (
            self._rank + 1
        )  # by which Lightning opens none, until its next barrier
        self._is_closed = True

    def let_lightning_open(self) -> None:
        """Give this process its rank back, at Lightning's first barrier: it has passed the place that opens loggers."""
        if self._is_closed:
            self._is_closed = False
            vars(rank_zero_only)["rank"] = self._rank

    def _hold(self, name: str, do: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if name == "log_metrics":  # copies: a user may fill one dictionary again for each row
            args = tuple(map(copy, args))
            kwargs = {key: copy(value) for key, value in kwargs.items()}
        call = partial(do, *args, **kwargs)
        if name == "log_metrics":
            self._rows.append((monotonic(), call))
        elif not self._has_met:
            self._settings.append(call)
        if self._has_met and not self._is_due:
            call()

    def meet(self, *, is_first: bool) -> None:
        """Note that this rank is in a view, and whether it is the first rank, which writes."""
        self._is_due |= is_first and not self._is_first
        self._was_another_first |= not is_first
        self._is_first = is_first
        if not self._has_met:
            self._has_met = True
            self.after_step()

    def after_step(self) -> None:
        """Write what is due, which opens loggers: others wait for that, and no longer for a step."""
        if self._is_due:
            self._is_due = False
            if self._was_another_first:
                for logger in self._loggers:
                    keep_rows_of_csv(logger)
            for call in (*self._settings, *(row for _, row in self._rows)):
                call()
        while self._rows and self._rows[0][0] < monotonic() - KEEP_S:
            self._rows.popleft()

    def end(self) -> None:
        """Give the loggers their methods back."""
        self.let_lightning_open()  # an error may have come before the barrier
        for logger in self._loggers:
            for name in _CALLS:
                vars(logger).pop(name, None)


def keep_rows_of_csv(logger: Any) -> None:
    """Open Lightning's `CSVLogger` with the rows that another host has written: it would delete its file."""
    if not isinstance(logger, lightning_types("pytorch.loggers.CSVLogger")):
        return
    path = Path(logger.log_dir) / "metrics.csv"
    if "://" in str(logger.log_dir) or not path.is_file():
        return
    kept = path.with_name(f"metrics.{uuid4().hex[:8]}.csv")
    path.rename(kept)
    writer = logger.experiment
    with kept.open(newline="") as file:
        writer.metrics_keys = list(
            csv.DictReader(file).fieldnames or []
        )  # the header to which rows are added
    kept.rename(path)
