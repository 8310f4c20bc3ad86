"""Runs the stages of successive all-reduces at the same time, in one order on every rank.

    submit(bucket 0), submit(bucket 1), ...                                 caller: enqueues and returns
        -> [reduce]     bucket 2        one queue, one thread
        -> [ring]       bucket 1        and one process group
        -> [broadcast]  bucket 0        for every stage
        -> finish -> future

A stage has one predecessor, so its queue, and with it the order of collectives on its group, is the order of submits
on every rank. Sums of buckets handed over in different order on two ranks would be wrong without any error.

On CUDA there are no threads: the same stages are put on one side stream in the order of submits.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor
from torch.futures import Future

from lightning_hybrid.comm.allreduce import STAGES, Job, Stage, run_stage, stage_scopes
from lightning_hybrid.comm.plan import Algorithm, CommPlan
from lightning_hybrid.comm.topology import CommGroups, Topology
from lightning_hybrid.comm.trace import CommTrace

FAILED_CLOSE_LIMIT_S = 5.0
"""After a failure, how long closing waits for stages that may hang until their group's timeout."""


@dataclass(eq=False)
class _Flight:
    """A submitted tensor: what to do with it, and the future that tells when it is done."""

    job: Job
    bucket_index: int
    algorithm: Algorithm
    finish: Callable[[Tensor], Tensor]
    done: Future = field(default_factory=Future)
    error: RuntimeError | None = None

    def result(self, done: Future) -> Tensor:
        """The tensor; raises where the flight failed. Run by ``Future.then``."""
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error.__cause__
        return done.value()


@dataclass(eq=False)
class _Lane:
    """A stage with its queue and thread. None in the queue ends the thread, and then its successor's."""

    stage: Stage
    successor: _Lane | None
    queue: queue.SimpleQueue[_Flight | None] = field(default_factory=queue.SimpleQueue)
    thread: threading.Thread | None = None


class CommEngine:
    """Sums flat tensors over all ranks in the background.

    Collective: every rank of WORLD must construct it, in the same order, with the same plan, and submit tensors of the
    same sizes in the same order.

    Arguments:
        topology: seen from this rank.
        plan: chooses the algorithm of each tensor by its bytes.
        timeout: of every collective; a rank that waits longer for the others fails.
        device: where tensors will be. ``cuda``: a side stream carries them; else threads do.
        trace: counts what is submitted; None makes one.

    Warns once, on rank 0, where the plan cannot be followed to the letter on this topology.
    """

    def __init__(
        self,
        *,
        topology: Topology,
        plan: CommPlan,
        timeout: timedelta,
        device: torch.device,
        trace: CommTrace | None = None,
    ) -> None:
        self.topology = topology
        self.plan = plan
        self.device = device
        self.trace = CommTrace() if trace is None else trace
        self._timeout = timeout
        self._lock = threading.Lock()
        self._in_flight: set[_Flight] = set()
        self._failure: RuntimeError | None = None
        self._is_closed = False
        fallback = plan.fallback(topology)
        if fallback is not None and topology.rank == 0:
            warnings.warn(fallback, stacklevel=2)
        algorithms = plan.algorithms(topology)
        on_cuda = device.type == "cuda"
        self._groups = CommGroups(topology=topology, scopes=stage_scopes(algorithms), timeout=timeout, share=on_cuda)
        self._stream = torch.cuda.Stream(device) if on_cuda else None
        self._lanes: dict[Algorithm, list[_Lane]] = {} if on_cuda else {name: self._start(name) for name in algorithms}

    def submit(
        self,
        flat: Tensor,
        *,
        bucket_index: int,
        is_last: bool = False,
        finish: Callable[[Tensor], Tensor] = lambda flat: flat,
    ) -> Future[Tensor]:
        """Sum ``flat`` (1-D, contiguous) in place over all ranks, soon; returns at once.

        The future holds ``finish(flat)``, computed where the last stage ran. ``bucket_index`` names the tensor in
        errors, ``is_last`` marks the end of a step in the trace.

        Where any stage of any tensor fails, the future of every tensor in flight raises one ``RuntimeError`` that
        names rank, bucket, stage, algorithm and cause, and so does every later call of this method.
        """
        num_bytes = flat.numel() * flat.element_size()
        flight = _Flight(
            job=Job(flat=flat, topology=self.topology),
            bucket_index=bucket_index,
            algorithm=self.plan.algorithm_for(num_bytes, self.topology),
            finish=finish,
        )
        if self._stream is not None:
            return self._submit_to_stream(flight, self._stream, num_bytes=num_bytes, is_last=is_last)
        future = flight.done.then(flight.result)
        with self._lock:  # counts, queue and closing see submits in one order
            self._raise_unless_usable()
            self.trace.begin(num_bytes=num_bytes, is_last=is_last)
            self._in_flight.add(flight)
            lanes = self._lanes[flight.algorithm]
            if lanes:
                lanes[0].queue.put(flight)
        if not lanes:  # one rank alone
            self._land(flight)
        return future

    def close(self) -> None:
        """End the threads and free the groups. May be called again.

        Healthy, it waits for what is in flight. After a failure it waits ``FAILED_CLOSE_LIMIT_S`` for stages to come
        back; one that is still inside a collective then is left there, with its groups, and a warning says so.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            has_failed = self._failure is not None
        lanes = [lane for of_algorithm in self._lanes.values() for lane in of_algorithm]
        for lane in lanes if has_failed else [of_algorithm[0] for of_algorithm in self._lanes.values() if of_algorithm]:
            lane.queue.put(None)
        limit_s = FAILED_CLOSE_LIMIT_S if has_failed else self._timeout.total_seconds() + FAILED_CLOSE_LIMIT_S
        deadline_s = time.monotonic() + limit_s
        stuck = []
        for lane in lanes:
            assert lane.thread is not None
            lane.thread.join(max(0.0, deadline_s - time.monotonic()))
            if lane.thread.is_alive():
                stuck.append(lane.stage.name)
        if stuck:
            warnings.warn(
                f"comm: rank {self.topology.rank} closed while stages {stuck} were still waiting for other ranks: "
                "their process groups are left as they are",
                stacklevel=2,
            )
        else:
            self._groups.destroy()

    # ------------------------------------------------------------------------------------------------ CPU: threads

    def _start(self, algorithm: Algorithm) -> list[_Lane]:
        """Lanes of an algorithm, first stage first, without the stages in which this rank has nobody to talk to."""
        lanes: list[_Lane] = []
        for stage in reversed(STAGES[algorithm]):
            if self._groups.of(stage.name) is not None:
                lane = _Lane(stage=stage, successor=lanes[0] if lanes else None)
                name = f"comm-{stage.name}"
                lane.thread = threading.Thread(target=self._serve, args=(lane,), name=name, daemon=True)
                lane.thread.start()
                lanes.insert(0, lane)
        return lanes

    def _serve(self, lane: _Lane) -> None:
        for flight in iter(lane.queue.get, None):
            if self._failure is not None:  # it has been told already
                continue
            try:
                run_stage(lane.stage, flight.job, self._groups)
            except Exception as error:
                self._fail(flight, lane.stage.name, error)
                continue
            if lane.successor is None:
                self._land(flight)
            else:
                lane.successor.queue.put(flight)
        if lane.successor is not None:
            lane.successor.queue.put(None)

    def _land(self, flight: _Flight) -> None:
        try:
            result = flight.finish(flight.job.flat)
        except Exception as error:
            self._fail(flight, "finish", error)
            return
        with self._lock:
            if flight not in self._in_flight:  # another stage failed meanwhile
                return
            self._in_flight.remove(flight)
            self.trace.end()
        flight.done.set_result(result)

    def _fail(self, flight: _Flight, stage: str, cause: Exception) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = self._explain(flight, stage, cause)
            lost, self._in_flight = self._in_flight, set()
            for _ in lost:
                self.trace.end()
        for each in lost:
            each.error = self._failure
            each.done.set_result(None)  # set_exception would reach DDP as a failed cast; `_Flight.result` raises

    # ------------------------------------------------------------------------------------------------ CUDA: a stream

    def _submit_to_stream(
        self, flight: _Flight, stream: torch.cuda.Stream, *, num_bytes: int, is_last: bool
    ) -> Future[Tensor]:
        """Put every stage on the side stream; the host waits for nothing, and the future carries a CUDA event."""
        self._raise_unless_usable()
        self.trace.count_untimed(num_bytes=num_bytes, is_last=is_last)
        flat = flight.job.flat
        stage_name = "finish"
        stream.wait_stream(torch.cuda.current_stream(self.device))  # the gradients have been written
        with torch.cuda.stream(stream):
            try:
                flat.record_stream(stream)
                for stage in STAGES[flight.algorithm]:
                    stage_name = stage.name
                    run_stage(stage, flight.job, self._groups)
                stage_name = "finish"
                result = flight.finish(flat)
                result.record_stream(stream)
            except Exception as error:
                self._failure = self._explain(flight, stage_name, error)
                raise self._failure from error
            future: Future[Tensor] = Future(devices=[self.device])
            future.set_result(result)  # records an event on this stream; whoever waits makes its stream wait for it
        return future

    # ------------------------------------------------------------------------------------------------------- errors

    def _raise_unless_usable(self) -> None:
        if self._failure is not None:
            raise RuntimeError(str(self._failure)) from self._failure.__cause__
        if self._is_closed:
            raise RuntimeError("the engine is closed: a bucket was handed over after the strategy's teardown")

    def _explain(self, flight: _Flight, stage: str, cause: Exception) -> RuntimeError:
        error = RuntimeError(
            f"comm: rank {self.topology.rank} failed on bucket {flight.bucket_index} in stage `{stage}` of the "
            f"{flight.algorithm} all-reduce: {type(cause).__name__}: {cause}. The gradients of this step are lost, and "
            "this engine takes no more. Where other ranks report timeouts or closed connections, this one that does "
            "not is the cause; where it does itself, look for the rank that does not."
        )
        error.__cause__ = cause
        return error
