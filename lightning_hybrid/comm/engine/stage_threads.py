"""Pipeline of threads and queues that runs the all-reduce stages on the CPU.

Each stage has a queue, a thread and a process group in every column:

    column 0    [reduce] -> [ring] -> [broadcast]          chunks 0, 2, 4, ...
    column 1    [reduce] -> [ring] -> [broadcast]          chunks 1, 3, 5, ...

A stage thread has only one predecessor. Therefore the order of its queue, and of the collectives on its group, is the
order of submission, which is the same on every rank. Columns share nothing, so their relative order does not matter.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.futures import Future

from lightning_hybrid.comm.bucket_sizes import ALIGNMENT
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
    """Worker thread of one all-reduce stage, with its queue of chunks.

    A column is one of several independent pipelines, over which chunks are distributed.

    Args:
        stage: Stage to run.
        column: Column of the stage.
        group_name: Name of the process group.
        is_first: Whether this is the first stage of the algorithm.
        successor: Thread of the next stage.
        num_put: Number of chunks put into the queue. Only one thread writes it, so it needs no lock.
        num_done: Number of chunks done. Only one thread writes it, so it needs no lock.
        is_inside: Whether this thread or its predecessor is in the stage or about to enter it.
        queue: Chunks to process. The item None stops the thread, and then its successor.
        thread: Thread that runs the stage.
    """

    stage: Stage
    column: int
    group_name: str
    is_first: bool = False
    successor: StageThread | None = None
    num_put: int = 0
    num_done: int = 0
    is_inside: bool = False
    queue: queue.SimpleQueue[Chunk | None] = field(default_factory=queue.SimpleQueue)
    thread: threading.Thread | None = None

    @property
    def is_alive(self) -> bool:
        """True if the thread is still running."""
        return self.thread is not None and self.thread.is_alive()

    def put(self, chunk: Chunk) -> None:
        """Put a chunk into the stage's queue.

        Only one thread may call it at a time.
        """
        self.num_put += 1
        self.queue.put(chunk)


class StageThreads:
    """Executor of an engine's all-reduces on the CPU, with a thread for each stage.

    Args:
        groups: Process groups of the stages.
        trace: Trace that counts buckets.
        latch: Buckets in flight and the first failure.
        watchdog: Watchdog that compares new buckets, and reports errors of stages to all ranks.
    """

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
        """Start the stage threads of each algorithm.

        Args:
            columns: Number of sets of process groups for each algorithm. Each set has its own threads.
        """
        for algorithm, num_columns in columns.items():
            self._columns[algorithm] = [
                self._start(algorithm, column) for column in range(num_columns)
            ]
            # The count starts at zero on every rank, because all ranks must put a chunk into the same column.
            self._num_put[algorithm] = 0

    def _start(self, algorithm: Algorithm, column: int) -> list[StageThread]:
        stage_threads = []
        for stage in stages_by_name(algorithm):
            name = group_name(stage, column)
            if self._groups.by_stage[name] is not None:
                stage_threads.append(StageThread(stage=stage, column=column, group_name=name))

        for index, stage_thread in enumerate(stage_threads):
            stage_thread.is_first = index == 0
            if index + 1 < len(stage_threads):
                stage_thread.successor = stage_threads[index + 1]
            # A daemon thread that hangs in a collective does not prevent the process from exiting.
            name = f"comm-{stage_thread.group_name}"
            stage_thread.thread = threading.Thread(
                target=self._serve, args=(stage_thread,), name=name, daemon=True
            )
            stage_thread.thread.start()
        return stage_threads

    def accept(
        self, bucket: InFlightBucket, job: Callable[[Tensor], Job], checksum: int | None
    ) -> None:
        """Split a bucket into chunks, and put them into the queues of the stage threads in turn.

        The method must be called in the order of submission.
        """
        alignment = ALIGNMENT
        if bucket.is_coded:
            alignment = BLOCK
        bucket.split(job, bucket.plan.num_chunks, checksum=checksum, alignment=alignment)
        bucket.traced_s = self._trace.begin(
            num_bytes=bucket.plan.num_bytes,
            is_last=bucket.is_last,
            traffic=bucket.traffic,
            is_in_update=bucket.is_in_update,
        )
        columns = self._columns[bucket.plan.algorithm]
        for chunk in bucket.chunks:
            column = columns[self._num_put[bucket.plan.algorithm] % len(columns)]
            self._num_put[bucket.plan.algorithm] += 1
            if column:  # empty if there is only one rank
                column[0].put(chunk)

    def carry(self, bucket: InFlightBucket) -> Future[Tensor]:
        """Return the future of a bucket that `accept` has queued."""
        # The error is raised in `then`, so that DDP receives our error.
        future = bucket.done.then(bucket.result)
        is_single_rank = not self._columns[bucket.plan.algorithm][0]
        if is_single_rank:
            for chunk in bucket.chunks:
                self._end_chunk(chunk)
        return future

    def _give_up(self, lost: Sequence[InFlightBucket]) -> None:
        # The buckets are only counted, because threads inside a Gloo collective cannot leave it before their groups are
        # destroyed.
        for _ in lost:
            self._trace.end()

    def _serve(self, stage_thread: StageThread) -> None:
        for chunk in iter(stage_thread.queue.get, None):
            self._pass_through(stage_thread, chunk)
            # The chunk is counted after it was passed on, so that equal counts mean that the stage is idle.
            stage_thread.num_done += 1
            del chunk  # a waiting thread must not keep gradients alive
        if stage_thread.successor is not None:
            stage_thread.successor.queue.put(None)

    def _pass_through(self, stage_thread: StageThread, chunk: Chunk) -> None:
        if not self._has_run(stage_thread, chunk):
            return
        successor = stage_thread.successor
        if successor is None:
            chunk.place = "past the last stage"
            self._end_chunk(chunk)
            return
        chunk.place = f"waiting for stage `{successor.stage.name}`"
        # The step waits for its last chunk, and waking another thread takes time. If the next stage is idle, this
        # thread therefore runs it. No other chunk follows in the step, so no other thread runs that stage at the same
        # time.
        is_successor_idle = successor.num_put == successor.num_done
        if chunk.is_last and is_successor_idle:
            self._pass_through(successor, chunk)
        else:
            successor.put(chunk)

    def _has_run(self, stage_thread: StageThread, chunk: Chunk) -> bool:
        """Run a stage unless the engine has failed, and return whether the stage succeeded."""
        # This is set before the check for failures, because the group of an idle stage is freed after a failure.
        stage_thread.is_inside = True
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
            # The frames hold a reference to the group. Other ranks are unblocked when the group is freed.
            traceback.clear_frames(error.__traceback__)
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
        stage = "order"
        try:
            if chunk.end(self._copies):
                stage = "finish"
                chunk.bucket.complete(self._latch, self._trace)
        except Exception as error:
            self._fail(chunk, stage, error)

    def _fail(self, chunk: Chunk, stage: str, error: Exception) -> None:
        self._watchdog.report(chunk.bucket.failed_in(stage, error), error)

    def end(self, *, limit_s: Callable[[], float]) -> list[str]:
        """Stop all threads, destroy their process groups, and return the names of stages that are stuck.

        Without a failure, the threads process all chunks in their queues first.

        Args:
            limit_s: Function that returns the remaining time limit in seconds. It is called repeatedly, because a
                failure shortens the limit.
        """
        stage_threads: list[StageThread] = []
        for columns in self._columns.values():
            for column in columns:
                stage_threads.extend(column)

        for stage_thread in stage_threads:
            if stage_thread.is_first:
                stage_thread.queue.put(None)
        has_ended_all = False
        while limit_s() > 0:
            waiting = next((thread for thread in stage_threads if thread.is_alive), None)
            if waiting is None:
                break
            if self._latch.error:
                if not has_ended_all:  # a predecessor that hangs would never pass on the None
                    for stage_thread in stage_threads:
                        stage_thread.queue.put(None)
                    has_ended_all = True
                # A group is freed as soon as its thread has left it, which unblocks the ranks that wait in it.
                for stage_thread in stage_threads:
                    if not stage_thread.is_alive and not stage_thread.is_inside:
                        self._groups.destroy_stage(stage_thread.group_name)
            if waiting.thread is not None:
                # The wait is short, because after a failure groups have to be freed here.
                waiting.thread.join(0.02)

        stuck = [thread.group_name for thread in stage_threads if thread.is_alive]
        if not stuck:  # a thread that is stuck still needs its group
            self._groups.destroy()
        return stuck
