"""Discrete events: pieces of buckets on their way through the stages of an all-reduce, beside each other.

What is simulated is what lanes.py does: each stage of each column is a lane that does one piece at a time, in the order
in which pieces came; pieces go round the columns. Stages that work at the same time share a place (the inside of a
node, or its links to others) fairly, except that none takes more than it can fill by itself (max-min fair rates, as in
flow-level simulators). All nodes do the same at the same time, so one node stands for all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lightning_hybrid.planning.cluster import StageCost


@dataclass(frozen=True, kw_only=True)
class SimulatedChunk:
    """Part of a bucket: ``num_bytes`` that go through ``stages`` from ``ready_s`` on.

    ``lane``: pieces of equal lane and column queue for the same threads, one for each stage. ``is_serial``: they queue
    for one thread (or CUDA stream) that does all stages of one piece before the next.
    """

    bucket: int
    num_bytes: float
    ready_s: float
    lane: str
    column: int
    stages: tuple[StageCost, ...]
    is_serial: bool = False


@dataclass(frozen=True, kw_only=True)
class Span:
    """That a stage had a piece from ``begin_s`` to ``end_s``."""

    bucket: int
    lane: str
    stage: str
    column: int
    begin_s: float
    end_s: float
    num_bytes: float


@dataclass(eq=False)
class _Task:
    """A stage at work on a piece; ``left_s``: seconds of work at full rate."""

    piece: SimulatedChunk
    index: int
    begin_s: float
    works_from_s: float
    left_s: float
    rate: float = 0.0

    @property
    def stage(self) -> StageCost:
        return self.piece.stages[self.index]


@dataclass(eq=False)
class _Lane:
    queue: deque[tuple[SimulatedChunk, int]] = field(default_factory=deque)
    task: _Task | None = None


def simulate_events(pieces: Sequence[SimulatedChunk]) -> list[Span]:
    """Every stage of every piece, in the order of their ends. Pieces are taken in the order given.

    >>> stages = tuple(StageCost(name=name, place=place, delay_s=0.0, work_s=1.0) for name, place in
    ...                (("reduce", "inside"), ("ring", "across")))
    >>> two = [SimulatedChunk(bucket=b, num_bytes=1, ready_s=0.0, lane="x", column=0, stages=stages) for b in (0, 1)]
    >>> [(span.bucket, span.stage, span.end_s) for span in simulate_events(two)]
    [(0, 'reduce', 1.0), (1, 'reduce', 2.0), (0, 'ring', 2.0), (1, 'ring', 3.0)]
    """
    waiting = deque(sorted((piece for piece in pieces if piece.stages), key=lambda piece: piece.ready_s))
    lanes: dict[tuple[str, int, int], _Lane] = {}
    spans: list[Span] = []
    now_s = 0.0
    while waiting or any(lane.task for lane in lanes.values()):
        while waiting and waiting[0].ready_s <= now_s:
            _put(lanes, waiting.popleft(), 0, now_s)
        tasks = [lane.task for lane in lanes.values() if lane.task]
        _share_out([task for task in tasks if task.works_from_s <= now_s])
        next_s = min((_ends_s(task, now_s) for task in tasks), default=math.inf)
        if waiting:
            next_s = min(next_s, waiting[0].ready_s)
        for task in tasks:
            if task.works_from_s <= now_s:
                task.left_s -= task.rate * (next_s - now_s)
        now_s = next_s
        for task in tasks:
            if task.works_from_s <= now_s and task.left_s <= 1e-12 * max(1.0, now_s):
                spans.append(_finish(lanes, task, now_s))
    return spans


def _lane(lanes: dict[tuple[str, int, int], _Lane], piece: SimulatedChunk, index: int) -> _Lane:
    key = ("", piece.column, 0) if piece.is_serial else (piece.lane, piece.column, index)
    return lanes.setdefault(key, _Lane())


def _put(lanes: dict[tuple[str, int, int], _Lane], piece: SimulatedChunk, index: int, now_s: float) -> None:
    lane = _lane(lanes, piece, index)
    if piece.is_serial and index > 0:
        lane.queue.appendleft((piece, index))
    else:
        lane.queue.append((piece, index))
    if lane.task is None:
        _begin(lane, now_s)


def _begin(lane: _Lane, now_s: float) -> None:
    piece, index = lane.queue.popleft()
    stage = piece.stages[index]
    lane.task = _Task(piece=piece, index=index, begin_s=now_s, works_from_s=now_s + stage.delay_s, left_s=stage.work_s)


def _finish(lanes: dict[tuple[str, int, int], _Lane], task: _Task, now_s: float) -> Span:
    piece, index = task.piece, task.index
    lane = _lane(lanes, piece, index)
    lane.task = None
    if index + 1 < len(piece.stages):
        _put(lanes, piece, index + 1, now_s)
    if lane.task is None and lane.queue:
        _begin(lane, now_s)
    return Span(
        bucket=piece.bucket,
        lane=piece.lane,
        stage=task.stage.name,
        column=piece.column,
        begin_s=task.begin_s,
        end_s=now_s,
        num_bytes=piece.num_bytes,
    )


def _ends_s(task: _Task, now_s: float) -> float:
    """When a task's delay or its work ends, whichever is next, at the rates of now."""
    if task.works_from_s > now_s:
        return task.works_from_s
    return now_s + (task.left_s / task.rate if task.left_s > 0 else 0.0)


def _share_out(tasks: Iterable[_Task]) -> None:
    """Give each task that works its rate: fair shares of its place, what one cannot fill to the others."""
    by_place: dict[str, list[_Task]] = {}
    for task in tasks:
        by_place.setdefault(task.stage.place, []).append(task)
    for together in by_place.values():
        free = 1.0
        for count, task in enumerate(sorted(together, key=lambda task: task.stage.share)):
            task.rate = min(task.stage.share, free / (len(together) - count))
            free -= task.rate
