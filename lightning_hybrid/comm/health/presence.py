"""Whether every rank is still there, asked while a bucket is in flight for long; no failure as long as all answer.

Over Gloo a dead rank's connections break, and the collective raises. A kernel of NCCL that waits for a dead rank on
the same node waits for ever: so a rank that has waited for some seconds puts a numbered question into the store, and
every watchdog answers it, also that of a slow rank. Without an answer for `PATIENCE_S` a rank is dead or cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any

import torch.distributed as dist

from lightning_hybrid.comm.health.diagnosis import RankStatus

# How long a bucket is in flight before a rank asks, and twice as long each time that all have answered.
ASK_AFTER_S = 3.0

# How long a watchdog may leave a question unanswered: it needs the interpreter's lock, which foreign code may hold.
PATIENCE_S = 10.0

Request = Callable[[], Any]


def collect(
    store: dist.Store,
    keys: Sequence[Sequence[str]],
    *,
    limit_s: float,
    ask: Callable[[Request], Any],
    wait: Callable[[float], bool],
    meanwhile: Callable[[], None] = lambda: None,
) -> list[RankStatus | None]:
    """Read the status of every rank, from the first of its keys that is there; None for one that gave none.

    Waits until all are there, an error is in the store, the limit is over, or `wait` says that it ended.
    """

    def without_status(ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if not any(store.check([key]) for key in keys[rank])]

    def statuses() -> list[RankStatus | None]:
        there = [next((key for key in of_rank if store.check([key])), None) for of_rank in keys]
        return [
            None if key is None else RankStatus.from_json(store.get(key).decode()) for key in there
        ]

    missing = list(range(len(keys)))
    end_s = monotonic() + limit_s
    while missing and monotonic() < end_s:
        meanwhile()
        missing = ask(partial(without_status, missing))
        if missing and (ask(lambda: store.check(["error"])) or wait(0.1)):
            break
    return ask(statuses)


class Presence:
    """The questions of one engine, and the answers of one rank.

    `ask` runs a request to the store, or raises where the store does not answer; `wait` waits for some seconds, and
    returns whether the watchdog is to end.
    """

    def __init__(
        self,
        *,
        store: dist.Store,
        rank: int,
        world_size: int,
        ask: Callable[[Request], Any],
        status: Callable[[], RankStatus],
        wait: Callable[[float], bool],
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._ask = ask
        self._status = status
        self._wait = wait
        self._num_answered = 0
        self._num_in_a_row = 0  # questions since this rank is waiting, of any rank

    def answer(self) -> None:
        """Answer every question that is new."""
        while self._ask(lambda: self._store.check([f"question/{self._num_answered}"])):
            self._ask(partial(self._answer, f"answer/{self._num_answered}/{self._rank}"))
            self._num_answered += 1
            self._num_in_a_row += 1  # doubles the time to the next question

    def _answer(self, key: str) -> None:
        self._store.set(key, self._status().to_json())

    def is_time_to_ask(self, stalled_s: float) -> bool:
        """Return whether this rank should ask now: those of low rank do so first, so that with thousands few do."""
        if stalled_s < ASK_AFTER_S:
            self._num_in_a_row = 0
            return False
        return stalled_s >= ASK_AFTER_S * 2**self._num_in_a_row + 0.5 * min(
            self._rank, 8
        )  # low ranks first

    def ask_all(self) -> list[RankStatus | None]:
        """Ask all ranks for their status, and wait for the answers up to `PATIENCE_S`."""
        number = self._num_answered
        self._ask(lambda: self._store.set(f"question/{number}", "1"))
        # A rank that left has no answer any more, but its last status.
        keys = [(f"answer/{number}/{rank}", f"status/{rank}") for rank in range(self._world_size)]
        # Another rank may have asked as well, so this one answers meanwhile.
        return collect(
            self._store,
            keys,
            limit_s=PATIENCE_S,
            ask=self._ask,
            wait=self._wait,
            meanwhile=self.answer,
        )
