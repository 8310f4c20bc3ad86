"""Whether every rank is still there, asked while a bucket is under way for long; no failure as long as all answer.

Over Gloo a dead rank's connections break, and the collective says so. A kernel of NCCL that waits for a dead rank on
the same node waits for ever, so somebody has to ask: a rank that has waited for some seconds puts a numbered question
into the store, every watch answers it with where its rank stands, and a rank that leaves it unanswered for
``PATIENCE_S`` is dead, stopped or unreachable. One that is slow (reads data, writes a checkpoint, compiles) answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from lightning_hybrid.comm.health.diagnosis import RankStatus

ASK_AFTER_S = 3.0
"""How long a bucket is under way before anybody asks, and twice as long each time that all have answered."""

PATIENCE_S = 10.0
"""How long a watch may leave a question unanswered: it needs the interpreter's lock, which foreign code may hold."""


class Presence:
    """The questions of one engine, and the answers of one rank.

    Arguments:
        store: keys of this engine.
        ask: runs a word with the store, or raises where the store does not answer.
        standing: where this rank stands now.
        wait: for some seconds; whether the watch is to end.
    """

    def __init__(
        self,
        *,
        store: dist.Store,
        rank: int,
        world_size: int,
        ask: Callable[[Callable[[], Any]], Any],
        standing: Callable[[], RankStatus],
        wait: Callable[[float], bool],
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._ask, self._standing, self._wait = ask, standing, wait
        self._num_answered = 0
        self._num_in_a_row = 0  # questions since this rank is waiting, whoever put them

    def answer(self) -> None:
        """Every question that is new."""
        while self._ask(lambda: self._store.check([f"question/{self._num_answered}"])):
            self._ask(lambda: self._answer(self._num_answered))
            self._num_answered += 1
            self._num_in_a_row += 1

    def _answer(self, number: int) -> None:
        self._store.set(f"answer/{number}/{self._rank}", self._standing().to_json())

    def is_time_to_ask(self, stalled_s: float) -> bool:
        """Whether this rank should ask now: those of low rank do so first, so that with thousands few do."""
        if stalled_s < ASK_AFTER_S:
            self._num_in_a_row = 0
            return False
        return stalled_s >= ASK_AFTER_S * 2**self._num_in_a_row + 0.5 * min(self._rank, 8)

    def roll(self) -> list[RankStatus | None]:
        """Ask, and wait until all have answered, an error is told, or patience is at an end; where all stand."""
        number = self._num_answered
        self._ask(lambda: self._store.set(f"question/{number}", "1"))
        missing, end_s = list(range(self._world_size)), time.monotonic() + PATIENCE_S
        while missing and time.monotonic() < end_s:
            self.answer()  # another rank may have asked as well
            missing = self._ask(partial(self._without_answer, number, missing))
            if missing and (self._ask(lambda: self._store.check(["error"])) or self._wait(0.1)):
                break
        return self._ask(lambda: [self._standing_of(number, rank) for rank in range(self._world_size)])

    def _without_answer(self, number: int, ranks: list[int]) -> list[int]:
        return [rank for rank in ranks if not self._has_answered(number, rank)]

    def _has_answered(self, number: int, rank: int) -> bool:
        return any(self._store.check([key]) for key in self._keys(number, rank))

    def _standing_of(self, number: int, rank: int) -> RankStatus | None:
        for key in self._keys(number, rank):
            if self._store.check([key]):
                return RankStatus.from_json(self._store.get(key).decode())
        return None

    def _keys(self, number: int, rank: int) -> tuple[str, str]:
        return f"answer/{number}/{rank}", f"standing/{rank}"  # the second: what it said as it left
