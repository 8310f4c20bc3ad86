"""Discrete-event simulation of gradient chunks that pass through the stages of an all-reduce.

It models the stage threads of `comm.engine`. Each stage of each column (a set of process groups)
has a thread that processes one chunk at a time in the order of arrival. Chunks take turns over the
columns. Stages that run at the same time share a resource (the inside of a node, or its links to
other nodes) fairly, except that no stage uses more than it can by itself (max-min fair rates, as in
flow-level simulators). All nodes do the same at the same time, so one node represents all nodes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lightning_hybrid.checks import require_number
from lightning_hybrid.planning.model.cost import StageCost


@dataclass(frozen=True, kw_only=True)
class SimulatedChunk:
    """Chunk of a gradient bucket, with the all-reduce stages that it passes through.

    The first stage can start at `ready_s`. Chunks of equal algorithm and column queue for the same threads, one for
    each stage. With `is_serial`, one thread or CUDA stream runs all stages of one chunk before the next chunk.
    """

    bucket: int
    num_bytes: float
    ready_s: float
    algorithm: str
    column: int
    stages: tuple[StageCost, ...]
    is_serial: bool = False


@dataclass(frozen=True, kw_only=True)
class Span:
    """Time interval in which a stage processed a chunk."""

    chunk: SimulatedChunk
    stage: str
    begin_s: float
    end_s: float


@dataclass(eq=False)
class _Task:
    """Processing of one chunk in one stage, with the work that remains.

    `left_s` is the remaining work in seconds at full rate.
    """

    chunk: SimulatedChunk
    index: int
    begin_s: float
    works_from_s: float
    left_s: float
    rate: float = 0.0

    @property
    def stage(self) -> StageCost:
        return self.chunk.stages[self.index]


@dataclass(eq=False)
class _StageThread:
    queue: deque[tuple[SimulatedChunk, int]] = field(default_factory=deque)
    task: _Task | None = None


def simulate_events(chunks: Sequence[SimulatedChunk]) -> list[Span]:
    """Simulate every stage of every chunk, and return the time spans in the order of completion.

    Chunks that are ready at the same time start in the given order.

    Raises:
        ValueError: A time is negative, infinite or NaN.
    """
    for chunk in chunks:
        require_number(
            "ready_s", chunk.ready_s, "a chunk is ready at a finite time after the start"
        )
        for stage in chunk.stages:
            require_number("alone_s", stage.alone_s, "a stage takes a finite time")
    waiting = deque(
        sorted((chunk for chunk in chunks if chunk.stages), key=lambda chunk: chunk.ready_s)
    )
    threads: dict[tuple[str, int, int], _StageThread] = {}
    spans: list[Span] = []
    now_s = 0.0
    # Between two events all rates are constant: compute them, jump to the next begin or end, and subtract the work
    # done.
    while waiting or any(thread.task for thread in threads.values()):
        while waiting and waiting[0].ready_s <= now_s:
            _put(threads, waiting.popleft(), 0, now_s)
        tasks = [thread.task for thread in threads.values() if thread.task]
        at_work = [task for task in tasks if task.works_from_s <= now_s]
        _share_out(at_work)
        next_s = min((_ends_s(task, now_s) for task in tasks), default=math.inf)
        if waiting:
            next_s = min(next_s, waiting[0].ready_s)
        for task in at_work:
            task.left_s -= task.rate * (next_s - now_s)
        now_s = next_s
        for task in tasks:
            # Rates are quotients, so a task that ends now may have a rounding error of work left.
            if task.works_from_s <= now_s and task.left_s <= 1e-12 * max(1.0, now_s):
                spans.append(_finish(threads, task, now_s))
    return spans


def _thread_of(
    threads: dict[tuple[str, int, int], _StageThread], chunk: SimulatedChunk, index: int
) -> _StageThread:
    key = ("", chunk.column, 0) if chunk.is_serial else (chunk.algorithm, chunk.column, index)
    return threads.setdefault(key, _StageThread())


def _put(
    threads: dict[tuple[str, int, int], _StageThread],
    chunk: SimulatedChunk,
    index: int,
    now_s: float,
) -> None:
    thread = _thread_of(threads, chunk, index)
    if chunk.is_serial and index > 0:
        # A stream finishes its current chunk before it starts another.
        thread.queue.appendleft((chunk, index))
    else:
        thread.queue.append((chunk, index))
    if thread.task is None:
        _begin(thread, now_s)


def _begin(thread: _StageThread, now_s: float) -> None:
    chunk, index = thread.queue.popleft()
    stage = chunk.stages[index]
    thread.task = _Task(
        chunk=chunk,
        index=index,
        begin_s=now_s,
        works_from_s=now_s + stage.delay_s,
        left_s=stage.work_s,
    )


def _finish(threads: dict[tuple[str, int, int], _StageThread], task: _Task, now_s: float) -> Span:
    chunk = task.chunk
    index = task.index
    thread = _thread_of(threads, chunk, index)
    thread.task = None
    # Queue the next stage first: a serial chunk stays on its thread before that thread looks at its queue.
    if index + 1 < len(chunk.stages):
        _put(threads, chunk, index + 1, now_s)
    if thread.task is None and thread.queue:
        _begin(thread, now_s)
    return Span(chunk=chunk, stage=task.stage.name, begin_s=task.begin_s, end_s=now_s)


def _ends_s(task: _Task, now_s: float) -> float:
    # During its delay a task has no rate. Its next event is the start of its work.
    if task.works_from_s > now_s:
        return task.works_from_s
    return now_s + (task.left_s / task.rate if task.left_s > 0 else 0.0)


def _share_out(tasks: Iterable[_Task]) -> None:
    # Max-min fair: in the order of their maximum rates, tasks get equal fractions of the remaining rate.
    by_level: dict[str, list[_Task]] = {}
    for task in tasks:
        by_level.setdefault(task.stage.level, []).append(task)
    for together in by_level.values():
        free = 1.0
        for count, task in enumerate(sorted(together, key=lambda task: task.stage.share)):
            task.rate = min(task.stage.share, free / (len(together) - count))
            free -= task.rate
