"""Runs the stages of successive all-reduces at the same time, in one order on every rank.

    submit(bucket 0), submit(bucket 1), ...                                 caller: enqueues and returns
        -> [reduce]     bucket 2        one queue, one thread
        -> [ring]       bucket 1        and one process group                lanes.py
        -> [broadcast]  bucket 0        for every stage and column
        -> finish -> future

Large buckets go in chunks (chunks.py). The plan may change between two submits (``adopt``). What must be alike on all
ranks is checked: the plan when the engine is made, each bucket's contents when they are first seen, the order of
everything once per step (seal.py). What fails on one rank fails on all (watch.py).

On CUDA there are no threads: the same stages are put on side streams in the order of submits (cuda_streams.py).
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
from torch import Tensor
from torch.futures import Future

from lightning_hybrid.comm.engine.cuda_streams import CudaStreams
from lightning_hybrid.comm.engine.in_flight import Chunk, InFlightBucket
from lightning_hybrid.comm.engine.stage_threads import StageThreads
from lightning_hybrid.comm.engine.stages import Job, stage_scopes
from lightning_hybrid.comm.health.consensus import Order, OrderError, compare_plans
from lightning_hybrid.comm.health.diagnosis import IDLE, RankStatus
from lightning_hybrid.comm.health.watchdog import Watchdog, comes_from_others, private_store, short
from lightning_hybrid.comm.plan import BucketPlan, CommPlan
from lightning_hybrid.comm.stats.link_bytes import Traffic, traffic_of
from lightning_hybrid.comm.stats.trace import CommTrace
from lightning_hybrid.comm.topology import CommGroups, Topology

FAILED_CLOSE_LIMIT_S = 5.0
"""After a failure, how long closing waits for stages that may hang until their group's timeout."""

GIVE_UP_AT = 0.9
"""Of the timeout: on CUDA a bucket in flight for longer is a failure, before torch's watchdog makes it its own."""


class CommEngine:
    """Sums flat tensors over all ranks in the background.

    Collective: every rank of WORLD must construct it, in the same order, with the same plan, and submit tensors of the
    same sizes in the same order.

    Arguments:
        topology: seen from this rank.
        plan: chooses the algorithm of each tensor by its bytes, and its chunks.
        timeout: of every collective; a rank that waits longer for the others fails.
        device: where tensors will be. ``cuda``: side streams carry them; else threads do.
        trace: counts what is submitted; None makes one.
        dtype_across_nodes: that in which sums travel between nodes, where it is narrower than the tensor's; inside the
            node they keep their own. None: their own everywhere.

    Warns once, on rank 0, where the plan cannot be followed to the letter on this topology. Raises ``ValueError`` on
    every rank where plan or topology differ between ranks.
    """

    def __init__(
        self,
        *,
        topology: Topology,
        plan: CommPlan,
        timeout: timedelta,
        device: torch.device,
        trace: CommTrace | None = None,
        dtype_across_nodes: torch.dtype | None = None,
    ) -> None:
        self.topology = topology
        self.plan = plan
        self.device = device
        self.trace = CommTrace() if trace is None else trace
        self.dtype_across_nodes = dtype_across_nodes
        self._timeout = timeout
        self._turn = threading.RLock()  # to submit: what is put on streams comes there in the order that is noted
        self._lock = threading.Lock()  # of what follows; held for no word with the store and for nothing that waits
        self._in_flight: dict[InFlightBucket, None] = {}  # in the order of submits
        self._failure: tuple[str, BaseException | None] | None = None
        self._is_closed = False
        self._close_limit_s: float | None = None
        self._buckets: dict[tuple[int, int, torch.dtype], BucketPlan] = {}
        self._traffic: dict[BucketPlan, Traffic] = {}
        self._order = Order()
        fallback = plan.fallback(topology)
        if fallback is not None and topology.rank == 0:
            warnings.warn(fallback, stacklevel=2)
        alone = topology.world_size == 1
        token, hosts, addresses = ("", [], []) if alone else compare_plans(plan, topology, device, dtype_across_nodes)
        self._groups = CommGroups(topology=topology, scopes={}, timeout=timeout, share=self._on_cuda)
        self._carrier = self._make_carrier()
        self.trace.look_first(self._carrier.look)
        self._prepare()
        self._watch: Watchdog | None = None
        if not alone:
            self._watch = Watchdog(
                store=private_store(f"lightning_hybrid/{token}"),
                rank=topology.rank,
                world_size=topology.world_size,
                standing=self._standing,
                stalled_s=self._stalled_s,
                on_failure=lambda error: self._fail_all(error, None),
                hosts=hosts,
                addresses=addresses,
                give_up_after_s=GIVE_UP_AT * timeout.total_seconds() if self._on_cuda else None,
            )

    @property
    def _on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def _make_carrier(self) -> StageThreads | CudaStreams:
        if self._on_cuda:
            return CudaStreams(
                device=self.device,
                groups=self._groups,
                ranks_per_node=max(map(len, self.topology.nodes)),
                trace=self.trace,
                on_done=self._land,
                on_failed=self._fail,
                is_alone=self.topology.world_size == 1,
            )
        return StageThreads(
            groups=self._groups,
            trace=self.trace,
            on_landed=self._land,
            on_failed=self._fail,
            has_failed=lambda: self._failure is not None,
        )

    def _prepare(self) -> None:
        columns = self.plan.columns(self.topology, on_cuda=self._on_cuda)
        self._groups.add(stage_scopes(columns))
        self._carrier.use(columns)

    def prepare(self, plans: Iterable[CommPlan]) -> None:
        """Make the groups that these plans need besides: now, and not when they are adopted. Collective."""
        for plan in plans:
            self._groups.add(stage_scopes(plan.columns(self.topology, on_cuda=self._on_cuda)))

    def adopt(self, plan: CommPlan) -> None:
        """Carry out ``plan`` from the next submit on. Raises ``RuntimeError`` while a thread carries a tensor.

        Collective: every rank must call it between the same two submits, with a plan that the caller has compared.
        """
        with self._lock:
            self._raise_unless_usable()
            if not all(flight.is_issued for flight in self._in_flight):
                raise RuntimeError("a plan can only be changed between two steps, and a bucket is in flight")
            self.plan = plan
            self._buckets.clear()
        self._prepare()

    def free_unused(self) -> None:
        """Free what other plans needed. Collective; only while no rank is in a stage."""
        self._carrier.free_unused()

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
        errors, ``is_last`` marks the end of a step: with it the order of everything so far is compared over ranks.

        Where any stage of any tensor fails on any rank, on every rank the future of every tensor in flight raises one
        ``RuntimeError`` that names rank, bucket, stage, algorithm and cause, and so does every later call of this
        method. So it does where ranks submit different tensors, or die, or come to a halt.

        On CUDA a future only orders streams, and the next call raises: what the device made of the sums that were lost
        must not be used.
        """
        bucket = self.bucket_plan(bucket_index, flat)
        flight = InFlightBucket(flat=flat, bucket=bucket, traffic=self.traffic(bucket), finish=finish, is_last=is_last)
        self._carrier.look()
        with self._turn:
            with self._lock:  # counts, queues and closing see submits in one order
                self._raise_unless_usable()
                self._carrier.cut(flight, self._job, self._note(flight, is_last=is_last))
                self._in_flight[flight] = None
                self._carrier.accept(flight)
            return self._carrier.carry(flight)

    def traffic(self, bucket: BucketPlan) -> Traffic:
        """Bytes on the links of the busiest node for one sum of a bucket."""
        if bucket not in self._traffic:
            narrow = self.dtype_across_nodes
            across = bucket.num_bytes if narrow is None else min(bucket.num_bytes, bucket.numel * narrow.itemsize)
            self._traffic[bucket] = traffic_of(
                bucket.algorithm, self.topology, bucket.num_bytes, num_bytes_across=across
            )
        return self._traffic[bucket]

    def _job(self, flat: Tensor) -> Job:
        dtype_across, by_backend = self.dtype_across_nodes, self._on_cuda
        return Job(flat=flat, topology=self.topology, dtype_across=dtype_across, by_backend=by_backend)

    def bucket_plan(self, index: int, flat: Tensor) -> BucketPlan:
        """What is decided for this tensor; remembered by index, number of elements and dtype."""
        key = (index, flat.numel(), flat.dtype)
        if key not in self._buckets:
            self._buckets[key] = self.plan.bucket(
                index=index,
                numel=flat.numel(),
                dtype=str(flat.dtype).removeprefix("torch."),
                num_bytes=flat.numel() * flat.element_size(),
                topology=self.topology,
                on_cuda=self._on_cuda,
            )
        return self._buckets[key]

    @property
    def buckets(self) -> tuple[BucketPlan, ...]:
        """Every bucket that was handed over so far, by contents."""
        return tuple(sorted(self._buckets.values(), key=lambda bucket: (bucket.index, bucket.numel, bucket.dtype)))

    @property
    def failure(self) -> str:
        """The error of all ranks; empty while there is none."""
        return "" if self._failure is None else self._failure[0]

    def raise_if_failed(self) -> None:
        """Raise it. Never waits: on CUDA what the device has not come to is not known yet."""
        self._carrier.look()
        if self._failure is not None:
            error, cause = self._failure
            raise RuntimeError(error) from cause

    def abort(self, reason: str) -> None:
        """Fail here and on every other rank, with ``reason``, unless failed or closed: for errors of others' here."""
        with self._lock:
            if self._failure is not None or self._is_closed:
                return
        error = f"comm: rank {self.topology.rank} gave up: {reason}"
        self._fail_all(error if self._watch is None else self._watch.raise_alarm(error), None)

    def explain(self, error: BaseException) -> str:
        """What to say of a collective of somebody else's that failed here: which rank is the cause, then ``error``.

        Fails this engine on every rank, as ``abort`` does, but with the verdict of the roll, which all are asked to
        answer. An error that already tells why the engine failed is left as it is.
        """
        if self._failure is None and not self._is_closed:
            noticed = f"rank {self.topology.rank} failed in a collective that averages no gradients: {short(error)}"
            self._fail_all(f"comm: {noticed}." if self._watch is None else self._watch.collect_status(noticed), error)
        told = self.failure
        return str(error) if told in str(error) else f"{told} Seen here as {type(error).__name__}: {error}"

    def close(self) -> None:
        """End the threads and free the groups. May be called again.

        Healthy, it waits for what is in flight. After a failure it waits ``FAILED_CLOSE_LIMIT_S`` for stages to come
        back; one that is still inside a collective then is left there, with its group, and a warning says so. On CUDA
        it then waits for nothing: the failure has aborted all communicators.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        healthy_until_s = time.monotonic() + self._timeout.total_seconds() + FAILED_CLOSE_LIMIT_S

        def limit_s() -> float:
            if self._failure is not None and self._close_limit_s is None:
                self._close_limit_s = time.monotonic() + FAILED_CLOSE_LIMIT_S
            return (healthy_until_s if self._close_limit_s is None else self._close_limit_s) - time.monotonic()

        stuck = self._carrier.end(limit_s=limit_s)
        if self._watch is not None:
            self._watch.leave()
        if stuck:
            warnings.warn(
                f"comm: rank {self.topology.rank} closed while stages {stuck} were still waiting for other ranks: "
                "their process groups are left as they are",
                stacklevel=2,
            )

    # ------------------------------------------------------------------------------------- what must be alike on ranks

    def _note(self, flight: InFlightBucket, *, is_last: bool) -> int | None:
        """Put the flight into the order; returns the seal that it shall carry, None if none."""
        record = self._order.add(flight.bucket, is_last=is_last)
        if self._watch is not None and record is not None:
            flight.check = self._check_of(f"order/{self._order.num_submitted}", record)
        is_sealed = is_last and self.plan.check_order and self.topology.world_size > 1
        return self._order.value if is_sealed else None

    def _check_of(self, key: str, record: str) -> Callable[[], None]:
        """What compares a bucket with those of other ranks before it is sent: sizes that differ kill Gloo."""
        value = f"{record}; all so far: {self._order.value:016x}"

        def check() -> None:
            assert self._watch is not None
            first = self._watch.compare(key, value)
            if first != value:
                raise OrderError(f"this rank hands over {value}, and another {first}")

        return check

    def _standing(self) -> RankStatus:
        with self._lock:
            oldest = next(iter(self._in_flight), None)
            return RankStatus(
                num_submitted=self._order.num_submitted,
                order=f"{self._order.value:016x}",
                place=IDLE if oldest is None else oldest.place,
                recent=tuple(self._order.recent),
                is_inside=oldest is not None and oldest.is_inside,
            )

    def _stalled_s(self) -> float:
        self._carrier.look_within_limit()
        with self._lock:
            oldest = next(iter(self._in_flight), None)
            return 0.0 if oldest is None else time.monotonic() - oldest.began_s

    # ------------------------------------------------------------------------------------------- the end of a flight

    def _land(self, flight: InFlightBucket) -> bool:
        """It is averaged; False where a failure has given it up meanwhile."""
        with self._lock:
            is_there = flight in self._in_flight
            self._in_flight.pop(flight, None)
            return is_there

    def _fail(self, piece: Chunk, stage: str, cause: Exception) -> None:
        """A stage raised: tell everybody, learn who is to blame, and give everything up."""
        noticed = self._explain(piece.flight.bucket, stage, cause)
        if self._watch is None:
            error = f"comm: {noticed}."
        elif isinstance(cause, OrderError) or comes_from_others(cause):
            error = self._watch.collect_status(noticed)
        else:
            error = self._watch.raise_alarm(f"comm: {noticed}.")
        self._fail_all(error, cause)

    def _fail_all(self, error: str, cause: BaseException | None) -> None:
        with self._lock:
            if self._failure is None:
                lost_note = " The gradients of this step are lost, and this engine takes no more."
                self._failure = (error + lost_note, cause)
            lost, self._in_flight = list(self._in_flight), {}
            for flight in lost:
                flight.error, flight.cause = self._failure
        self._carrier.give_up(lost)
        for flight in lost:
            flight.fail(*self._failure)

    def _explain(self, bucket: BucketPlan, stage: str, cause: Exception) -> str:
        what = str(cause) if isinstance(cause, OrderError) else f"{type(cause).__name__}: {cause}"
        return (
            f"rank {self.topology.rank} failed on bucket {bucket.index} in stage `{stage}` of the "
            f"{bucket.algorithm} all-reduce: {what}"
        )

    def _raise_unless_usable(self) -> None:
        if self._failure is not None:
            raise RuntimeError(self._failure[0]) from self._failure[1]
        if self._is_closed:
            raise RuntimeError("the engine is closed: a bucket was handed over after the strategy's teardown")
