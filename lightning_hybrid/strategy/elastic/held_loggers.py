"""The trainer's loggers in an elastic run: its first rank alone opens and writes them, whichever that is by then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only

# How long the end of a run waits for loggers that are being opened.
OPEN_LIMIT_S = 60.0

_CALLS = ("log_metrics", "log_hyperparams", "log_graph", "save")


class HeldLoggers:
    """Holds what is logged until hosts have met, and after that the rows since the last step.

    Else a host that joins would open the run of W&B while the first host writes it. Where the first host is lost, the
    next one writes again what that one may not have: some rows are there twice, none is missing.

    Args:
        strategy: before Lightning opens the loggers of its trainer.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy, self._loggers = strategy, list(strategy.lightning_module.trainer.loggers)
        self._settings: list[Callable[[], None]] = []
        self._rows: list[Callable[[], None]] = []
        self._has_met = self._is_first = self._is_due = False
        self._opening: threading.Thread | None = None
        for one in self._loggers:
            for name in _CALLS:
                setattr(one, name, partial(self._hold, name, getattr(one, name)))
        self._rank: int = vars(rank_zero_only)["rank"]
        vars(rank_zero_only)["rank"] = self._rank + 1  # by which Lightning opens none, until its next barrier
        strategy.barrier = self._end_of_opening

    def _end_of_opening(self, *args: Any, **kwargs: Any) -> None:
        del self._strategy.barrier
        vars(rank_zero_only)["rank"] = self._rank
        self._strategy.barrier(*args, **kwargs)

    def _hold(self, name: str, do: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        call = partial(do, *args, **kwargs)
        if name == "log_metrics":
            self._rows.append(call)
        elif not self._has_met:
            self._settings.append(call)
        if self._has_met and not self._is_due:
            call()

    def meet(self, *, is_first: bool) -> None:
        """Note that this rank is in a view; `is_first`: as the one that writes."""
        if is_first and not self._is_first:
            self._is_due = True
            self._opening = threading.Thread(target=self._open, name="open-loggers", daemon=True)
        self._is_first, self._has_met = is_first, True

    def after_step(self) -> None:
        """Write what is due, once the loggers are open: to open a run takes seconds, in which others would wait."""
        if self._opening is not None and self._opening.ident is None:
            self._opening.start()
        if self._opening is None or not self._opening.is_alive():
            self._write()

    def _open(self) -> None:
        for one in self._loggers:
            _ = getattr(one, "experiment", None)

    def _write(self) -> None:
        if self._is_due:
            for call in (*self._settings, *self._rows):
                call()
        self._rows, self._is_due, self._opening = [], False, None

    def end(self) -> None:
        """Write the rest, and give the loggers their methods back."""
        if self._opening is not None and self._opening.ident is not None:
            self._opening.join(OPEN_LIMIT_S)
        self._write()
        for one in self._loggers:
            for name in _CALLS:
                vars(one).pop(name, None)
