"""Liveness checks through the store, used when a rank has waited a long time for a bucket.

With Gloo, a dead rank's connections break and the collective raises an error. An NCCL kernel that waits for a dead rank
on the same node waits forever. Therefore a rank that has waited for some seconds writes a numbered question to the
store, and the watchdogs of all ranks answer it, even on slow ranks. A rank that does not answer within `PATIENCE_S` is
dead or unreachable. As long as all ranks answer, nothing fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any

import torch.distributed as dist

from lightning_hybrid.comm.health.diagnosis import RankStatus

# Seconds that a bucket is in flight before a rank asks a question. The time doubles whenever all ranks have answered.
ASK_AFTER_S = 3.0

# Seconds for which a watchdog may leave a question unanswered. It needs the interpreter lock, which other code may hold
# for a long time.
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
    """Wait until every rank has written its status to the store, and return all statuses.

    The function also stops waiting when the store contains an error, when the time limit is exceeded, or when `wait`
    returns True. The status of a rank is then None if it is missing.

    Args:
        store: Store that holds the statuses.
        keys: Keys of each rank's status. The first key that is in the store is read.
        limit_s: Maximum time to wait in seconds.
        ask: Function that runs a request to the store.
        wait: Function that waits for a number of seconds and returns whether to stop.
        meanwhile: Function that is called before each query of the store.
    """

    def without_status(ranks: Sequence[int]) -> list[int]:
        missing = []
        for rank in ranks:
            if _first_key_in(store, keys[rank]) is None:
                missing.append(rank)
        return missing

    def read_statuses() -> list[RankStatus | None]:
        # All keys are looked up before the first status is read.
        keys_in_store = [_first_key_in(store, keys_of_rank) for keys_of_rank in keys]
        statuses: list[RankStatus | None] = []
        for key in keys_in_store:
            if key is None:
                statuses.append(None)
            else:
                statuses.append(RankStatus.from_json(store.get(key).decode()))
        return statuses

    missing = list(range(len(keys)))
    deadline_s = monotonic() + limit_s
    while missing and monotonic() < deadline_s:
        meanwhile()
        missing = ask(partial(without_status, missing))
        if missing and (ask(lambda: store.check(["error"])) or wait(0.1)):
            break
    return ask(read_statuses)


def _first_key_in(store: dist.Store, keys: Sequence[str]) -> str | None:
    for key in keys:
        if store.check([key]):
            return key
    return None


class Presence:
    """Liveness check that asks all ranks for their status and answers the requests of other ranks.

    Args:
        store: Store for questions and answers.
        rank, world_size: Rank in the engine, and number of its ranks.
        ask: Function that runs a request to the store, and raises an error if the store does not answer.
        status: Function that returns the status of this rank.
        wait: Function that waits for a number of seconds and returns whether the watchdog should stop.
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
        # Number of questions by any rank since this rank began to wait.
        self._num_questions_while_waiting = 0

    def answer(self) -> None:
        """Answer all new status requests, by writing this rank's status to the store."""
        while self._ask(lambda: self._store.check([f"question/{self._num_answered}"])):
            self._ask(partial(self._answer, f"answer/{self._num_answered}/{self._rank}"))
            self._num_answered += 1
            self._num_questions_while_waiting += 1  # doubles the time to the next question

    def _answer(self, key: str) -> None:
        self._store.set(key, self._status().to_json())

    def is_time_to_ask(self, stalled_s: float) -> bool:
        """Return whether this rank has waited long enough to ask all ranks for their status.

        Low ranks ask first, so that only a few ranks ask.
        """
        if stalled_s < ASK_AFTER_S:
            self._num_questions_while_waiting = 0
            return False
        delay_of_rank_s = 0.5 * min(self._rank, 8)
        return stalled_s >= ASK_AFTER_S * 2**self._num_questions_while_waiting + delay_of_rank_s

    def ask_all(self) -> list[RankStatus | None]:
        """Ask all ranks for their status, and wait for the answers for up to `PATIENCE_S` seconds."""
        number = self._num_answered
        self._ask(lambda: self._store.set(f"question/{number}", "1"))
        # A rank that has closed its engine does not answer, but its last status is in the store.
        keys = [(f"answer/{number}/{rank}", f"status/{rank}") for rank in range(self._world_size)]
        # This rank continues to answer while it waits, because another rank may have asked at the same time.
        return collect(
            self._store,
            keys,
            limit_s=PATIENCE_S,
            ask=self._ask,
            wait=self._wait,
            meanwhile=self.answer,
        )
