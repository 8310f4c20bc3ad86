"""The threads of the stages: for each a queue, a thread and a process group, in columns.

    column 0    [reduce] -> [ring] -> [broadcast]          chunks 0, 2, 4, ...
    column 1    [reduce] -> [ring] -> [broadcast]          chunks 1, 3, 5, ...

A stage thread has one predecessor, so its queue, and with it the order of collectives on its group, is the order in
which chunks were put in: the same on every rank. Columns share nothing, so their order to each other does not matter.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.futures import Future

from lightning_hybrid.comm.bucket_layout import ALIGNMENT
from lightning_hybrid.comm.codec.block_format import BLOCK
from lightning_hybrid.comm.engine.in_flight import Chunk, FailureLatch, InFlightBucket
from lightning_hybrid.comm.engine.job import Job
from lightning_hybrid.comm.engine.order_check import CopyPool
from lightning_hybrid.comm.engine.process_groups import CommGroups
from lightning_hybrid.comm.engine.stages import Stage, group_name, run_stage, stages_by_name
from lightning_hybrid.comm.health.watchdog import Watchdog
from lightning_hybrid.comm.plan import Algorithm
from lightning_hybrid.comm.stats.trace import CommTrace


@dataclass(eq=False)
class StageThread:
    """One stage in one column, and the thread that runs it."""

    stage: Stage
    column: int
    group_name: str
    is_first: bool = False
    successor: StageThread | None = None
    num_put: int = 0  # this and the next have one writer each, so they need no lock
    num_done: int = 0
    is_inside: bool = (
        False  # some thread, its own or its predecessor's, is in this stage, or about to be
    )
    # None ends the thread, and then its successor.
    queue: queue.SimpleQueue[Chunk | None] = field(default_factory=queue.SimpleQueue)
    thread: threading.Thread | None = None

    @property
    def is_alive(self) -> bool:
        """True until the thread has ended."""
        return self.thread is not None and self.thread.is_alive()

    def put(self, chunk: Chunk) -> None:
        """Put a chunk into the queue. Only one thread at a time may call it."""
        self.num_put += 1
        self.queue.put(chunk)


class StageThreads:
    """All stage threads of an engine. `watchdog` compares new buckets, and reports what a stage raises to all ranks."""

    def __init__(
        self, *, groups: CommGroups, trace: CommTrace, latch: FailureLatch, watchdog: Watchdog
    ) -> None:
        self._groups = groups
        self._copies = CopyPool()
        self._trace = trace
        self._latch = latch
        self._watchdog = watchdog
        self._num_put: dict[Algorithm, int] = {}
        self._columns: dict[Algorithm, list[list[StageThread]]] = {}
        latch.give_up = self._give_up

    def use(self, columns: Mapping[Algorithm, int]) -> None:
        """Start the threads of this many columns of each algorithm."""
        for algorithm, num_columns in columns.items():
            self._columns[algorithm] = [
                self._start(algorithm, column) for column in range(num_columns)
            ]
            # From zero on every rank: the round robin over columns must be the same everywhere.
            self._num_put[algorithm] = 0

    def _start(self, algorithm: Algorithm, column: int) -> list[StageThread]:
        stage_threads = [
            StageThread(stage=stage, column=column, group_name=group_name(stage, column))
            for stage in stages_by_name(algorithm)
            if self._groups.by_stage[group_name(stage, column)] is not None
        ]
        for index, stage_thread in enumerate(stage_threads):
            stage_thread.is_first = index == 0
            stage_thread.successor = (
                stage_threads[index + 1] if index + 1 < len(stage_threads) else None
            )
            # A daemon: a thread that hangs in a collective must not keep the process from ending.
            name = f"comm-{stage_thread.group_name}"
            stage_thread.thread = threading.Thread(
                target=self._serve, args=(stage_thread,), name=name, daemon=True
            )
            stage_thread.thread.start()
        return stage_threads

    def accept(
        self, bucket: InFlightBucket, job: Callable[[Tensor], Job], checksum: int | None
    ) -> None:
        """Cut a bucket into chunks, and queue them, round the columns. Called in the order of submits."""
        bucket.split(
            job,
            bucket.plan.num_chunks,
            checksum=checksum,
            alignment=BLOCK if bucket.is_coded else ALIGNMENT,
        )
        bucket.traced_s = self._trace.begin(
            num_bytes=bucket.plan.num_bytes,
            is_last=bucket.is_last,
            traffic=bucket.traffic,
            is_in_update=bucket.is_in_update,
        )
        columns = self._columns[bucket.plan.algorithm]
        for chunk in bucket.chunks:
            column = columns[
                self._num_put[bucket.plan.algorithm] % len(columns)
            ]  # round robin, the same on every rank
            self._num_put[bucket.plan.algorithm] += 1
            if column:  # empty where this rank is alone
                column[0].put(chunk)

    def carry(self, bucket: InFlightBucket) -> Future[Tensor]:
        """Return the future of a bucket that was accepted."""
        future = bucket.done.then(bucket.result)  # raises there, so that DDP sees our error
        if not self._columns[bucket.plan.algorithm][0]:  # one rank alone
            for chunk in bucket.chunks:
                self._end_chunk(chunk)
        return future

    def _give_up(self, lost: Sequence[InFlightBucket]) -> None:
        # Only counted: threads inside a collective of Gloo's stay there until their groups end.
        for _ in lost:
            self._trace.end()

    def _serve(self, stage_thread: StageThread) -> None:
        for chunk in iter(stage_thread.queue.get, None):
            self._pass_through(stage_thread, chunk)
            stage_thread.num_done += (
                1  # after the chunk was handed on: "idle" means empty and at rest
            )
            del chunk  # a thread that waits keeps no gradients alive
        if stage_thread.successor is not None:
            stage_thread.successor.queue.put(None)

    def _pass_through(self, stage_thread: StageThread, chunk: Chunk) -> None:
        if not self._has_run(stage_thread, chunk):
            return
        successor = stage_thread.successor
        if successor is None:
            chunk.place = "through"
            self._end_chunk(chunk)
            return
        chunk.place = f"waiting for stage `{successor.stage.name}`"
        # Equal counts: the next stage is idle. Nothing follows this chunk in its step, so no other thread runs that
        # stage meanwhile. The step waits for this chunk, and waking another thread takes time.
        if chunk.is_last and successor.num_put == successor.num_done:
            self._pass_through(successor, chunk)
        else:
            successor.put(chunk)

    def _has_run(self, stage_thread: StageThread, chunk: Chunk) -> bool:
        """Run a stage. Returns False where it failed, or something else did before."""
        stage_thread.is_inside = (
            True  # set before the look at failures: after one the group of an idle stage is freed
        )
        if self._latch.error:
            stage_thread.is_inside = False
            return False
        stage = stage_thread.stage
        began_s = 0.0
        chunk.place = f"in stage `{stage.name}`"
        if self._trace.keep_events:
            began_s = self._trace.now_s()
        try:
            if stage_thread.is_first:
                chunk.begin(self._watchdog, self._copies)
            run_stage(stage, chunk.job, self._groups.by_stage[stage_thread.group_name])
        except Exception as error:
            traceback.clear_frames(
                error.__traceback__
            )  # they hold the group, whose end sets other ranks free
            self._fail(chunk, stage.name, error)
            return False
        finally:
            stage_thread.is_inside = False
            if self._trace.keep_events:
                self._trace.stage(
                    chunk.bucket.plan, stage.name, stage_thread.column, began_s, chunk.num_bytes
                )
        return True

    def _end_chunk(self, chunk: Chunk) -> None:
        at = "order"
        try:
            if chunk.end(self._copies):
                at = "finish"
                chunk.bucket.complete(self._latch, self._trace)
        except Exception as error:
            self._fail(chunk, at, error)

    def _fail(self, chunk: Chunk, stage: str, error: Exception) -> None:
        self._watchdog.report(chunk.bucket.failed_in(stage, error), error)

    def end(self, *, limit_s: Callable[[], float]) -> list[str]:
        """End the threads after what they were given, and free their groups. Returns the stages that would not end.

        `limit_s` is asked again and again: how long, from now on, a stage may still be waited for.
        """
        found = [
            stage_thread
            for columns in self._columns.values()
            for column in columns
            for stage_thread in column
        ]
        for stage_thread in found:
            if stage_thread.is_first:
                stage_thread.queue.put(None)
        has_ended_all = False
        while any(stage_thread.is_alive for stage_thread in found) and limit_s() > 0:
            if self._latch.error:
                if not has_ended_all:  # a predecessor that hangs would never pass the None on
                    for stage_thread in found:
                        stage_thread.queue.put(None)
                    has_ended_all = True
                # A group is freed as soon as its thread is out of it: that lets ranks go that wait there for this one.
                for stage_thread in found:
                    if not stage_thread.is_alive and not stage_thread.is_inside:
                        self._groups.destroy_stage(stage_thread.group_name)
            waiting = next((stage_thread for stage_thread in found if stage_thread.is_alive), None)
            if waiting is not None and waiting.thread is not None:
                # Short waits, as a failure may come meanwhile and then groups have to be freed here.
                waiting.thread.join(0.02)
        stuck = [
            stage_thread.group_name for stage_thread in found if stage_thread.is_alive
        ]  # their groups must outlive them
        if not stuck:
            self._groups.destroy()
        return stuck
