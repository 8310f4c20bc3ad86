"""Buckets in flight, the chunks in which they go through the stages, and the failure that ends them all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

import torch
from torch import Tensor
from torch.futures import Future

from lightning_hybrid.comm.bucket_layout import ALIGNMENT, chunk_numels, words_of
from lightning_hybrid.comm.engine.job import SHARD_ALIGNMENT, Job
from lightning_hybrid.comm.engine.order_check import BucketOrder, ChecksummedCopy, CopyPool
from lightning_hybrid.comm.health.consensus import OrderError
from lightning_hybrid.comm.health.diagnosis import BEHIND_DEVICE, IDLE, RankStatus
from lightning_hybrid.comm.health.thread_place import place_of
from lightning_hybrid.comm.health.watchdog import STALL_S, Watchdog
from lightning_hybrid.comm.plan import KIB, MIB, BucketPlan
from lightning_hybrid.comm.stats.link_bytes import NO_TRAFFIC, Traffic
from lightning_hybrid.comm.stats.trace import CommTrace

# A last chunk above this size is cut, so that only this many elements are copied for the checksum.
CHECKSUMMED_BYTES_LIMIT = 4 * MIB
CHECKSUMMED_NUMEL = 16 * KIB

_NOTHING = torch.empty(0)


@dataclass(eq=False)
class Chunk:
    """A part of a bucket on its way through the stages."""

    bucket: InFlightBucket
    part: Tensor  # a view of the bucket
    job: Job  # what the stages see: the part, or a copy with the checksum behind it
    place: str = "waiting for its first stage"  # where it is now, in words
    checksum: int | None = None
    is_last: bool = False  # nothing follows it in this step
    _copy: ChecksummedCopy | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the part."""
        return self.part.numel() * self.part.element_size()

    def begin(self, watchdog: Watchdog, copies: CopyPool) -> None:
        """Prepare the first stage: compare the bucket with those of other ranks, and add the checksum."""
        self.bucket.compare_contents(watchdog)
        if self.checksum is not None:
            self._copy = copies.take(self.part, self.checksum)
            self.job.flat = self._copy.whole

    def end(self, copies: CopyPool) -> bool:
        """Write the sum to its destination after the last stage. Return whether the bucket has no chunk left.

        Raises:
            OrderError: if the checksum says that ranks submitted different buckets.
        """
        if self._copy is not None and self.checksum is not None:
            self.part.copy_(self._copy.body)
            is_wrong = self._copy.is_wrong(self.checksum)
            copies.give_back(self._copy)  # also after a mismatch: the memory is sound
            if is_wrong:
                raise OrderError("the order of buckets in this step was not the same on all ranks")
        return self.bucket.chunk_done()


@dataclass(eq=False)
class InFlightBucket:
    """A bucket that was submitted, and the future of its sum."""

    flat: Tensor
    plan: BucketPlan
    finish: Callable[[Tensor], Tensor]  # applied to the sum
    traffic: Traffic = NO_TRAFFIC
    adasum_numels: tuple[
        int, ...
    ] = ()  # of its tensors, where they are combined by Adasum, which needs them whole
    contents: tuple[str, str] | None = (
        None  # store key and text by which ranks compare a bucket that is new
    )
    contents_of_step: tuple[str, str] | None = (
        None  # the same of a step that ends with it and is not new; on CUDA
    )
    is_last: bool = False  # of its step
    # No gradients: the optimizer's step waits for it; None: it does not.
    is_in_update: bool | None = False
    num_owners: int = (
        0  # `two_level` stops before the gather: so many ranks have a part each; 0: all have all
    )
    is_coded: bool = (
        False  # between nodes; the checksum of the order then goes in a chunk of its own, as it is
    )
    stage: str = "order"  # in which an error comes while it is put there
    done: Future = field(default_factory=Future)
    error: str | None = None
    cause: BaseException | None = None
    chunks: list[Chunk] = field(default_factory=list)
    submitted_s: float = field(default_factory=monotonic)
    traced_s: float = 0.0
    _num_open: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def split(
        self,
        job: Callable[[Tensor], Job],
        num_chunks: int,
        *,
        checksum: int | None,
        alignment: int = ALIGNMENT,
    ) -> None:
        """Cut the job into chunks. A checksum is appended to the last chunk, which is cut once more if it is long."""
        if self.num_owners:  # whole parts for each, as the caller has packed them
            alignment = SHARD_ALIGNMENT * self.num_owners
        parts = [self.flat]
        if num_chunks > 1:
            parts = list(
                self.flat.split(chunk_numels(self.flat.numel(), num_chunks, alignment=alignment))
            )
        size = (
            0 if self.adasum_numels else parts[-1].numel() * self.flat.element_size()
        )  # Adasum needs it whole
        if self.is_coded and checksum is not None:
            parts.append(self.flat[self.flat.numel() :])
        # The chunk with the checksum is copied: one short message more takes less time than a copy of a long chunk.
        elif checksum is not None and size > CHECKSUMMED_BYTES_LIMIT:
            parts[-1:] = parts[-1].split([parts[-1].numel() - CHECKSUMMED_NUMEL, CHECKSUMMED_NUMEL])
        self.chunks = [Chunk(bucket=self, part=part, job=job(part)) for part in parts]
        if self.adasum_numels:
            self.chunks[-1].job.adasum_numels = self.adasum_numels
        self.chunks[-1].checksum = checksum
        self.chunks[-1].is_last = self.is_last
        self._num_open = len(self.chunks)  # counted down by `chunk_done`

    @property
    def place(self) -> str:
        """The place of the bucket in words: a stage that runs one of its chunks, or else a stage where one waits."""
        # A chunk inside a collective says more of where a rank hangs than one that waits behind it.
        inside = [chunk for chunk in self.chunks if chunk.place.startswith("in ")]
        waiting = [chunk for chunk in self.chunks if chunk.place.startswith("waiting")]
        chunk = (inside or waiting or self.chunks)[0]
        return f"bucket {self.plan.index} {chunk.place} of the {words_of(self.plan.algorithm)}"

    @property
    def is_inside(self) -> bool:
        """True if one of its chunks is in a stage."""
        return any(chunk.place.startswith("in ") for chunk in self.chunks)

    def compare_contents(self, watchdog: Watchdog) -> None:
        """Compare a bucket that is new with those of other ranks, once. Other threads of this rank wait meanwhile.

        Raises:
            OrderError: if another rank submitted something else here.
        """
        # Before the first byte is sent: where sizes differ, Gloo calls abort(), which ends the process.
        if self.contents is not None:
            with self._lock:
                # Asked again under the lock: another column's thread may have compared it meanwhile.
                if self.contents is not None:
                    _compare(self.contents, watchdog)
                    self.contents = None

    def compare_step(self, watchdog: Watchdog) -> None:
        """Compare the order of the step that ends here with that of other ranks, if this is one of the steps for it.

        Raises:
            OrderError: if another rank submitted something else, or in another order.
        """
        # Once all of it is on its way: no rank waits for this one while it reports.
        if self.contents_of_step is not None:
            _compare(self.contents_of_step, watchdog)

    def chunk_done(self) -> bool:
        """Count one chunk as done. Returns whether it was the last."""
        with self._lock:
            self._num_open -= 1
            return self._num_open == 0

    def complete(self, latch: FailureLatch, trace: CommTrace) -> None:
        """Finish the sum and set the future, unless a failure was first and has set it."""
        result = self.finish(self.flat)
        if latch.remove(self):  # else a failure has set the future already
            trace.end(self.plan, self.traced_s, self.traffic)
            self.done.set_result(result)
            self.chunks.clear()  # they refer back: without this the gradients stay until Python looks for cycles

    def result(self, done: Future) -> Tensor:
        """Return the finished sum, or raise if the bucket failed. `Future.then` calls this."""
        if self.error is not None:
            raise RuntimeError(self.error) from self.cause
        return done.value()

    def fail(self, error: str, cause: BaseException | None) -> None:
        """Let the future raise."""
        self.error = error
        self.cause = cause
        # Not `set_exception`: DDP would report a failed cast in place of the error.
        self.done.set_result(None)  # `result` then raises

    def failed_in(self, stage: str, cause: Exception) -> str:
        """Say in words that this rank failed in a stage."""
        reason = str(cause) if isinstance(cause, OrderError) else f"{type(cause).__name__}: {cause}"
        return (
            f"rank {self.chunks[0].job.topology.rank} failed on bucket {self.plan.index} in stage `{stage}` of the "
            f"{words_of(self.plan.algorithm)}: {reason}"
        )

    def release_tensors(self) -> None:
        """Drop all tensors of a bucket whose work is on the streams."""
        # They may go before the device is done: the allocator knows by `record_stream` who still uses them.
        for chunk in self.chunks:
            chunk.part = chunk.job.flat = _NOTHING
            chunk.job.shard = None
        self.flat = _NOTHING
        self.finish = _unchanged


def _compare(contents: tuple[str, str], watchdog: Watchdog) -> None:
    key, own_value = contents
    first = watchdog.compare(key, own_value)
    if first != own_value:
        raise OrderError(f"this rank hands over {own_value}, and another {first}")


def _unchanged(flat: Tensor) -> Tensor:
    return flat


class FailureLatch:
    """Buckets in flight, and the first failure, which ends them all: later ones change nothing.

    Engine, threads or streams, and watchdog share one latch and ask it, so that none of them calls another back.

    Attributes:
        error: that of all ranks; empty while there is none. `cause`: the exception behind it, if it was raised here.
        lock: protects what is in flight, `error` and the order of submits. Nothing that waits runs under it.
        look: sees how far the device is, before that is asked, and for how long it waits; on CUDA only.
        give_up: ends the communication of buckets that a failure has lost. Run once for each `trip`, without the lock.
    """

    def __init__(self, order: BucketOrder) -> None:
        self.error = ""
        self.cause: BaseException | None = None
        self.lock = threading.Lock()
        self.look: Callable[[], float] = lambda: 0.0
        self.give_up: Callable[[Sequence[InFlightBucket]], None] = _nothing
        self.in_flight: dict[InFlightBucket, None] = {}  # in the order of submits
        self.waited = ""  # where a collective of the caller's failed: it waited for others
        self._order = order
        self._caller = threading.get_ident()
        self._device_s = 0.0  # for how long the device has been at one thing

    def remove(self, bucket: InFlightBucket) -> bool:
        """Remove a bucket that is averaged. Return False if a failure came first."""
        with self.lock:
            is_there = bucket in self.in_flight
            self.in_flight.pop(bucket, None)
            return is_there

    def trip(self, error: str, cause: BaseException | None = None) -> None:
        """Fail every bucket in flight with the first error ever given here."""
        with self.lock:
            if not self.error:
                self.error = (
                    error + " The gradients of this step are lost, and this engine takes no more."
                )
                self.cause = cause
            lost = list(self.in_flight)
            self.in_flight = {}
            for (
                bucket
            ) in lost:  # before anything waits: a thread may be about to put one on the streams
                bucket.error = self.error
                bucket.cause = self.cause
        # Without the lock: on CUDA it waits for communicators to end, and other threads ask for the status meanwhile.
        self.give_up(lost)
        for bucket in lost:
            bucket.fail(self.error, self.cause)

    def raise_if_tripped(self) -> None:
        """Raise the error of all ranks, if there is one."""
        if self.error:
            raise RuntimeError(self.error) from self.cause

    def status(self) -> RankStatus:
        """Return where this rank stands, for the diagnosis of a failure."""
        place, is_inside = place_of(self._caller)
        with self.lock:
            oldest = next(iter(self.in_flight), None)
            if oldest is not None:
                place = oldest.place
                is_inside = oldest.is_inside
            elif self._device_s > STALL_S:
                place = BEHIND_DEVICE
                is_inside = True
            else:
                place = f"{IDLE}, {self.waited or place}"
                is_inside = is_inside or bool(self.waited)
            return RankStatus(
                num_submitted=self._order.num_submitted,
                order=f"{self._order.value:016x}",
                place=place,
                recent=tuple(self._order.recent),
                is_inside=is_inside,
            )

    def stalled_s(self) -> float:
        """Return how long the oldest bucket has been in flight, or the device waits outside of one, else 0."""
        self._device_s = self.look()
        with self.lock:
            oldest = next(iter(self.in_flight), None)
            return self._device_s if oldest is None else monotonic() - oldest.submitted_s


def _nothing(*_: object) -> None:
    pass
