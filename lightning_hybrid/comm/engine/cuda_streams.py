"""The stages on CUDA: what lanes.py is on the CPU, by streams and events, not threads. The host waits for nothing.

    network    [all_reduce] ...                     [ring 0]    [ring 1]    [ring 2]
    node                               [reduce 0] [reduce 1] [broadcast 0] [reduce 2] [broadcast 1] [broadcast 2]

``flat`` is one call on one stream. A hierarchy has a stream for what stays in the node and one for what leaves it, and
its pieces follow each other: a piece comes back into the node while the next one is on the network. Both have high
priority, as the few blocks of NCCL's kernels would else queue behind thousands of backward's.

Who has written what before whom is said by events alone:

    ready    recorded where the hook runs         the first stage's stream waits: the gradients are there
    end      of every stage of every piece        the next stage's stream waits, where it is another one
    done     after the last, and ``finish``       the future's own event follows it: whoever waits for it waits for all

The same events, which take times, tell afterwards what happened when, and meanwhile where a bucket is: ``look`` asks
which are through, and never waits for one. It is called before each bucket and each reading of the counts, and four
times a second by the watch, which so notices what hangs. The verdict on the order of buckets comes with the step's last
bucket, and is read when that is seen to be done: one step late. So is a failure: what the device did meanwhile to the
weights is not to be used.

What only two GPUs can show: that NCCL runs both streams' kernels at the same time, and that aborting its communicators
ends them. All else is tested with streams, events and communicators that only keep book.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.futures import Future

from lightning_hybrid.comm.engine.in_flight import Chunk, InFlightBucket
from lightning_hybrid.comm.engine.order_check import ChecksummedCopy
from lightning_hybrid.comm.engine.stages import SHARD_ALIGNMENT, STAGES, Job, Stage, run_stage, stage_scopes
from lightning_hybrid.comm.health.abort import abort_all
from lightning_hybrid.comm.health.consensus import OrderError
from lightning_hybrid.comm.plan import Algorithm
from lightning_hybrid.comm.stats.trace import CommTrace, DeviceTimes
from lightning_hybrid.comm.topology import CommGroups

HIGH_PRIORITY = -1

ABORT_LIMIT_S = 5.0
"""How long a failure waits for communicators to end; they go on ending afterwards."""

MOST_UNTOLD = 64
"""Of buckets whose step does not end: their times are told by so many."""

LOOK_LIMIT_S = 1.0
"""How long the watch waits for a look at the device: a driver that is at a loss must not keep it from answering."""


@dataclass
class _Passage:
    """A stage of a piece on its stream."""

    piece: Chunk
    stage: Stage
    begin: torch.cuda.Event | None
    end: torch.cuda.Event
    num_bytes: int


@dataclass
class _Issued:
    """A flight all of whose work is on the streams; its tensors are let go."""

    flight: InFlightBucket
    ready: torch.cuda.Event
    done: torch.cuda.Event
    passages: list[_Passage] = field(default_factory=list)
    broken_seal: Tensor | None = None  # on the host, valid once ``done`` is


class CudaStreams:
    """The streams of an engine.

    Arguments:
        device: of all tensors.
        groups: of every stage.
        ranks_per_node: of the largest node; pieces are cut so that so many ranks get equal parts.
        trace: told of each step once the device is through with it.
        on_done: called with a flight that the device is through with.
        on_failed: called where a stage raised, or ranks handed over different buckets; returns with the error noted in
            the flight.
        is_alone: no other rank is there to be freed.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        groups: CommGroups,
        ranks_per_node: int,
        trace: CommTrace,
        on_done: Callable[[InFlightBucket], object],
        on_failed: Callable[[Chunk, str, Exception], None],
        is_alone: bool,
    ) -> None:
        self._device = device
        self._groups = groups
        self._step = ranks_per_node * SHARD_ALIGNMENT
        self._trace = trace
        self._on_done = on_done
        self._on_failed = on_failed
        self._is_alone = is_alone
        self._network = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
        self._node: torch.cuda.Stream | None = None
        self._stages: tuple[str, ...] = ()
        self._issued: deque[_Issued] = deque()
        self._landed: list[_Issued] = []
        self._lock = threading.Lock()  # of looks; taken before the engine's, never after it
        self._looking: threading.Thread | None = None
        self._anchor: tuple[torch.cuda.Event, float] | None = None
        self._aborting = threading.Lock()
        self._has_failed = False
        self._stuck: list[str] = []

    def use(self, columns: Mapping[Algorithm, int]) -> None:
        """From now on these algorithms. There is one set of groups: more would only share the streams."""
        self._stages = tuple(stage_scopes(columns))

    def free_unused(self) -> None:
        """Free the communicators of which the algorithms in use have no need. Collective."""
        self._groups.keep(self._stages)

    def cut(self, flight: InFlightBucket, job: Callable[[Tensor], Job], seal: int | None) -> None:
        """Make the pieces of a flight: several only where there are two streams to overlap.

        None is made for the seal: on a device a copy costs less than one message more. All but the last can be shared
        out without padding.
        """
        has_stages = len(STAGES[flight.bucket.algorithm]) > 1
        flight.cut_at(self._step, job, seal=seal, num_pieces=flight.bucket.num_chunks if has_stages else 1)

    def accept(self, flight: InFlightBucket) -> None:
        """Nothing: whoever submits also puts it on the streams."""

    def carry(self, flight: InFlightBucket) -> Future[Tensor]:
        """Put all of a flight on the streams; the future carries a CUDA event. Raises where a stage does."""
        at: list[tuple[Chunk, str]] = [(flight.pieces[0], "order")]
        try:
            return self._issue(flight, at)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            self._on_failed(*at[-1], error)
            raise RuntimeError(flight.error) from flight.cause

    def _issue(self, flight: InFlightBucket, at: list[tuple[Chunk, str]]) -> Future[Tensor]:
        flat, stages = flight.flat, STAGES[flight.bucket.algorithm]
        streams = [self._stream_of(stage) for stage in stages]
        issued = _Issued(flight=flight, ready=self._event(), done=self._event())
        flight.check_before_send()
        issued.ready.record(torch.cuda.current_stream(self._device))
        streams[0].wait_event(issued.ready)
        flat.record_stream(streams[-1])  # the allocator must not give it away before: that stream waits for the others
        with torch.cuda.stream(streams[0]):
            for piece in flight.pieces:
                self._seal(piece)
        ends: dict[Chunk, torch.cuda.Event] = {}
        for piece, index in _in_order(flight.pieces, streams):
            at.append((piece, stages[index].name))
            if index and streams[index] is not streams[index - 1]:
                streams[index].wait_event(ends[piece])  # now, and not before: another piece's stage is between
            passage = self._pass(piece, stages[index], streams[index])
            ends[piece] = passage.end
            if self._groups.of(stages[index].name) is not None:
                issued.passages.append(passage)
        at.append((flight.pieces[-1], "finish"))
        with torch.cuda.stream(streams[-1]):
            broken = flight.pieces[-1].unseal()
            if broken is not None:
                issued.broken_seal = torch.empty((), dtype=broken.dtype, pin_memory=flat.is_cuda)
                issued.broken_seal.copy_(broken, non_blocking=True)
            result = flight.finish(flat)
            result.record_stream(streams[-1])
            issued.done.record(streams[-1])
            future: Future[Tensor] = Future(devices=[self._device])
            future.set_result(result)  # records an event on this stream; whoever waits makes its stream wait for it
        flight.let_go()
        flight.is_issued = True
        self._issued.append(issued)
        if flight.error is not None:  # another rank failed meanwhile
            raise RuntimeError(flight.error) from flight.cause
        return future

    def _stream_of(self, stage: Stage) -> torch.cuda.Stream:
        if stage.scope != "node":
            return self._network
        if self._node is None:
            self._node = torch.cuda.Stream(self._device, priority=HIGH_PRIORITY)
        return self._node

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def _seal(self, piece: Chunk) -> None:
        if piece.seal is not None:
            part = piece.part
            piece.seal_in(ChecksummedCopy(part.numel(), part.dtype, part.device, multiple_of=self._step))

    def _pass(self, piece: Chunk, stage: Stage, stream: torch.cuda.Stream) -> _Passage:
        """Put a stage of a piece on its stream."""
        begin = self._event() if self._trace.keep_events else None
        end, num_bytes = self._event(), piece.part.numel() * piece.part.element_size()
        with torch.cuda.stream(stream):
            if begin is not None:
                begin.record(stream)
            run_stage(stage, piece.job, self._groups)
            end.record(stream)
        return _Passage(piece=piece, stage=stage, begin=begin, end=end, num_bytes=num_bytes)

    # ---- what the device has done ----------------------------------------------------------------------------------

    def look(self, *, places: bool = False) -> None:
        """See which flights the device is through with, and where the oldest other one is. Never waits for it."""
        different = None
        with self._lock:
            try:
                while self._issued and not self._has_failed and self._issued[0].done.query():
                    issued = self._issued.popleft()
                    self._landed.append(issued)
                    if issued.broken_seal is not None and bool(issued.broken_seal):
                        different = issued.flight.pieces[-1]
                    self._on_done(issued.flight)
                    if issued.flight.is_last or len(self._landed) == MOST_UNTOLD:
                        self._tell_times()
                if places and self._issued and not self._has_failed:
                    _place(self._issued[0])
            except RuntimeError:  # of the driver: the host meets it too, and says so
                return
        if different is not None and not self._has_failed:
            self._on_failed(different, "order", OrderError("the order of buckets in the step before was not the same"))

    def look_within_limit(self) -> None:
        """``look``, from a thread of its own, which is left where the driver does not come back."""
        if not self._issued:
            return
        if self._looking is None or not self._looking.is_alive():
            self._looking = threading.Thread(target=self.look, kwargs={"places": True}, name="comm-look", daemon=True)
            self._looking.start()
        self._looking.join(LOOK_LIMIT_S)

    def _tell_times(self) -> None:
        landed, self._landed = self._landed, []
        if not landed:
            return
        first = landed[0].ready
        # From step to step, as an event tells milliseconds in fp32: after an hour 0.25 ms would be its smallest step.
        if self._anchor is None:
            begin_s = self._trace.now_s() - first.elapsed_time(landed[-1].done) / 1e3
        else:
            begin_s = self._anchor[1] + self._anchor[0].elapsed_time(first) / 1e3
        self._anchor = (first, begin_s)

        def at_s(event: torch.cuda.Event) -> float:
            return begin_s + first.elapsed_time(event) / 1e3

        self._trace.replay(
            DeviceTimes(
                bucket=each.flight.bucket,
                traffic=each.flight.traffic,
                is_last=each.flight.is_last,
                ready_s=at_s(each.ready),
                done_s=at_s(each.done),
                stages=[
                    (passage.stage.name, at_s(passage.begin), at_s(passage.end), passage.num_bytes)
                    for passage in each.passages
                    if passage.begin is not None
                ],
            )
            for each in landed
        )

    # ---- the end ---------------------------------------------------------------------------------------------------

    def give_up(self, lost: Sequence[InFlightBucket]) -> None:
        """After a failure: end the communicators, which frees hosts and devices that wait in them. Once."""
        with self._aborting:  # a second thread that fails comes back when the first has done it
            if self._has_failed:
                return
            self._has_failed = True
            if not self._is_alone:
                self._stuck = abort_all(limit_s=ABORT_LIMIT_S)

    def end(self, *, limit_s: Callable[[], float]) -> list[str]:
        """Free the communicators when the device is through with what it was given; what would not end, by name.

        ``limit_s`` is asked again and again: how long, from now on, that may take. After a failure nothing is waited
        for.
        """
        while self._issued and not self._has_failed and limit_s() > 0:
            self.look_within_limit()
            time.sleep(0.001)
        if self._issued and not self._has_failed:
            self.give_up([])
            self._stuck = self._stuck or ["of buckets that the device did not finish"]
        if not self._has_failed:
            self._tell_times()
            self._groups.destroy()
        elif not self._stuck:
            self._groups.forget()
        return self._stuck


def _in_order(pieces: Sequence[Chunk], streams: Sequence[object]) -> Iterator[tuple[Chunk, int]]:
    """Pieces and indices of their stages, in the order of issue: one that comes back to a stream lets another go first.

    >>> [(piece, index) for piece, index in _in_order("ab", ["node", "network", "node"])]
    [('a', 0), ('a', 1), ('b', 0), ('b', 1), ('a', 2), ('b', 2)]
    >>> [(piece, index) for piece, index in _in_order("ab", ["network"])]
    [('a', 0), ('b', 0)]
    """
    is_back = [stream in streams[:index] for index, stream in enumerate(streams)]
    for slot in range(len(pieces) + 1):
        for index, late in enumerate(is_back):
            if 0 <= slot - late < len(pieces):
                yield pieces[slot - late], index


def _place(issued: _Issued) -> None:
    """Where the pieces of a flight are, in the words of lanes.py."""
    if not issued.ready.query():
        issued.flight.pieces[0].place = "waiting for its gradients"
        return
    for piece in issued.flight.pieces:
        stages = [
            passage.stage.name for passage in issued.passages if passage.piece is piece and not passage.end.query()
        ]
        piece.place = f"in stage `{stages[0]}`" if stages else "through"
