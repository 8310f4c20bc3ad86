"""The threads of the stages: for each a queue, a thread and a process group, in columns.

    column 0    [reduce] -> [ring] -> [broadcast]          pieces 0, 2, 4, ...
    column 1    [reduce] -> [ring] -> [broadcast]          pieces 1, 3, 5, ...

A lane has one predecessor, so its queue, and with it the order of collectives on its group, is the order in which
pieces were put in: the same on every rank. Columns share nothing, so their order to each other does not matter.

A thread that has done its stage on the last piece of a step, after which nothing comes to it, does the next stage too
where that stands idle: the step waits for this piece, and waking another thread takes time.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.futures import Future

from lightning_hybrid.comm.engine.in_flight import Chunk, CopyPool, InFlightBucket
from lightning_hybrid.comm.engine.stages import STAGES, Job, Stage, group_name, run_stage
from lightning_hybrid.comm.health.consensus import OrderError
from lightning_hybrid.comm.plan import Algorithm
from lightning_hybrid.comm.stats.trace import CommTrace
from lightning_hybrid.comm.topology import CommGroups


@dataclass(eq=False)
class StageThread:
    """None in the queue ends the thread, and then its successor's. The counts of pieces have one writer each.

    ``is_inside``: some thread, its own or its predecessor's, is in this stage, or about to be.
    """

    stage: Stage
    column: int
    is_first: bool = False
    successor: StageThread | None = None
    num_put: int = 0
    num_done: int = 0
    is_inside: bool = False
    queue: queue.SimpleQueue[Chunk | None] = field(default_factory=queue.SimpleQueue)
    thread: threading.Thread | None = None

    def put(self, piece: Chunk) -> None:
        """Called by one thread at a time."""
        self.num_put += 1
        self.queue.put(piece)


class StageThreads:
    """All lanes of an engine.

    Arguments:
        groups: of every stage and column.
        trace: told when each flight and stage begins and ends.
        on_landed, on_failed: called from a lane's thread, when a flight is averaged or where a stage of a piece raised.
        has_failed: whether pieces are to be dropped.
    """

    def __init__(
        self,
        *,
        groups: CommGroups,
        trace: CommTrace,
        on_landed: Callable[[InFlightBucket], bool],
        on_failed: Callable[[Chunk, str, Exception], None],
        has_failed: Callable[[], bool],
    ) -> None:
        self._groups = groups
        self._copies = CopyPool()
        self._trace = trace
        self._on_landed = on_landed
        self._on_failed = on_failed
        self._has_failed = has_failed
        self._num_put: dict[Algorithm, int] = {}
        self._num_columns: dict[Algorithm, int] = {}
        self._columns: dict[Algorithm, list[list[StageThread]]] = {}

    def use(self, columns: Mapping[Algorithm, int]) -> None:
        """From now on each algorithm has so many columns; lanes that are missing are started, others stand idle.

        Only while no piece is under way, and at the same place of the order on every rank. A stage in which this rank
        has nobody to talk to has no lane.
        """
        for algorithm, num_columns in columns.items():
            of_algorithm = self._columns.setdefault(algorithm, [])
            of_algorithm += [self._start(algorithm, column) for column in range(len(of_algorithm), num_columns)]
        self._num_columns, self._num_put = dict(columns), dict.fromkeys(columns, 0)

    def free_unused(self) -> None:
        """End the lanes that stand idle since the last ``use``, and free their groups.

        Only while no piece is under way on any rank.
        """
        for algorithm, of_algorithm in self._columns.items():
            num_used = self._num_columns.get(algorithm, 0)
            for column in range(num_used, len(of_algorithm)):
                for lane in of_algorithm[column]:
                    if lane.is_first:
                        lane.queue.put(None)
                    if lane.thread is not None:
                        lane.thread.join()
                for stage in STAGES[algorithm]:  # also those in which this rank has no lane: all forget alike
                    self._groups.forget_stage(group_name(stage, column))
            del of_algorithm[num_used:]

    def _start(self, algorithm: Algorithm, column: int) -> list[StageThread]:
        lanes = [
            StageThread(stage=stage, column=column)
            for stage in STAGES[algorithm]
            if self._groups.of(group_name(stage, column)) is not None
        ]
        for index, lane in enumerate(lanes):
            lane.is_first, lane.successor = index == 0, lanes[index + 1] if index + 1 < len(lanes) else None
            name = f"comm-{group_name(lane.stage, column)}"
            lane.thread = threading.Thread(target=self._serve, args=(lane,), name=name, daemon=True)
            lane.thread.start()
        return lanes

    def cut(self, flight: InFlightBucket, job: Callable[[Tensor], Job], seal: int | None) -> None:
        """Make the pieces of a flight."""
        flight.split_into_chunks(job, seal=seal)

    def accept(self, flight: InFlightBucket) -> None:
        """Send the pieces of a flight on their way, round the columns. Called in the order of submits."""
        flight.future = flight.done.then(flight.result)
        flight.traced_s = self._trace.begin(
            num_bytes=flight.bucket.num_bytes, is_last=flight.is_last, traffic=flight.traffic
        )
        for piece in flight.pieces:
            if lanes := self._next_column(flight.bucket.algorithm):
                lanes[0].put(piece)

    def _next_column(self, algorithm: Algorithm) -> list[StageThread]:
        """Its lanes: none where this rank has nobody to talk to."""
        columns = self._columns[algorithm][: self._num_columns[algorithm]]
        self._num_put[algorithm] += 1
        return columns[(self._num_put[algorithm] - 1) % len(columns)]

    def carry(self, flight: InFlightBucket) -> Future[Tensor]:
        """The future of a flight that was accepted."""
        if not self._columns[flight.bucket.algorithm][0]:  # one rank alone
            for piece in flight.pieces:
                self._land(piece)
        assert flight.future is not None
        return flight.future

    def look(self) -> None:
        """Nothing: threads tell by themselves."""

    look_within_limit = look

    def give_up(self, lost: Sequence[InFlightBucket]) -> None:
        """Count what a failure ended. Waits of Gloo's cannot be called off."""
        for _ in lost:
            self._trace.end()

    def _serve(self, lane: StageThread) -> None:
        for piece in iter(lane.queue.get, None):
            self._pass_through(lane, piece)
            lane.num_done += 1
            del piece  # a lane that waits keeps no gradients alive
        if lane.successor is not None:
            lane.successor.queue.put(None)

    def _pass_through(self, lane: StageThread, piece: Chunk) -> None:
        """Do this stage, and see to the next."""
        if not self._has_run(lane, piece):
            return
        if lane.successor is None:
            piece.place = "through"
            self._land(piece)
            return
        piece.place = f"waiting for stage `{lane.successor.stage.name}`"
        if piece.is_last and lane.successor.num_put == lane.successor.num_done:
            self._pass_through(lane.successor, piece)
        else:
            lane.successor.put(piece)

    def _land(self, piece: Chunk) -> None:
        """A piece is through; with the last one its flight is."""
        flight, place = piece.flight, "order"
        try:
            if piece.close(self._copies):
                raise OrderError("the order of buckets in this step was not the same on all ranks")
            if not flight.land():
                return
            place = "finish"
            result = flight.finish(flight.flat)
        except Exception as error:
            self._on_failed(piece, place, error)
            return
        if self._on_landed(flight):  # else another stage failed meanwhile
            self._trace.end(flight.bucket, flight.traced_s, flight.traffic)
            flight.done.set_result(result)

    def _has_run(self, lane: StageThread, piece: Chunk) -> bool:
        lane.is_inside = True  # before the look at failures: afterwards the group may be freed if nobody is inside
        if self._has_failed():  # it has been told already
            lane.is_inside = False
            return False
        piece.place = f"in stage `{lane.stage.name}`"
        began_s = self._trace.now_s()
        try:
            if lane.is_first:
                piece.flight.check_before_send()
                piece.open(self._copies)
            run_stage(lane.stage, piece.job, self._groups, column=lane.column)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold the group, whose end sets other ranks free
            self._on_failed(piece, lane.stage.name, error)
            return False
        finally:
            lane.is_inside = False
            num_bytes = piece.part.numel() * piece.part.element_size()
            self._trace.stage(piece.flight.bucket, lane.stage.name, lane.column, began_s, num_bytes)
        return True

    def end(self, *, limit_s: Callable[[], float]) -> list[str]:
        """End the threads after what they were given, and free their groups; the lanes that would not end.

        ``limit_s`` is asked again and again: how long, from now on, a stage may still be waited for. After a failure
        each lane frees its group as soon as it is out of it, which lets ranks go that wait there for this one.
        """
        lanes = [lane for columns in self._columns.values() for column in columns for lane in column]
        for lane in lanes:
            if lane.is_first:
                lane.queue.put(None)
        told_all = False
        while any(self._is_alive(lane) for lane in lanes) and limit_s() > 0:
            if self._has_failed():
                if not told_all:  # a predecessor that hangs would never tell
                    for lane in lanes:
                        lane.queue.put(None)
                    told_all = True
                for lane in lanes:
                    if not self._is_alive(lane) and not lane.is_inside:
                        self._groups.destroy_stage(group_name(lane.stage, lane.column))
            waiting = next((lane for lane in lanes if self._is_alive(lane)), None)
            if waiting is not None and waiting.thread is not None:
                waiting.thread.join(0.02)
        stuck = [lane for lane in lanes if self._is_alive(lane)]
        if not stuck:
            self._groups.destroy()
        return [group_name(lane.stage, lane.column) for lane in stuck]

    def _is_alive(self, lane: StageThread) -> bool:
        return lane.thread is not None and lane.thread.is_alive()
