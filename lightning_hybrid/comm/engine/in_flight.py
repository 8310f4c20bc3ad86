"""Buckets in flight with their chunks, and the latch that makes all buckets fail together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

import torch
from torch import Tensor
from torch.futures import Future

from lightning_hybrid.comm.bucket_sizes import ALIGNMENT, chunk_numels
from lightning_hybrid.comm.collective_names import words_of
from lightning_hybrid.comm.engine.job import SHARD_ALIGNMENT, Job
from lightning_hybrid.comm.engine.order_check import BucketOrder, ChecksummedCopy, CopyPool
from lightning_hybrid.comm.health.consensus import OrderError
from lightning_hybrid.comm.health.diagnosis import BEHIND_DEVICE, IDLE, RankStatus
from lightning_hybrid.comm.health.thread_place import place_of
from lightning_hybrid.comm.health.watchdog import STALL_S, Watchdog
from lightning_hybrid.comm.plan import KIB, MIB, BucketPlan
from lightning_hybrid.comm.stats.link_bytes import NO_TRAFFIC, Traffic
from lightning_hybrid.comm.stats.trace import CommTrace

# The last chunk of a step is copied to append the checksum. If it is larger than this, it is split first, so that only
# CHECKSUMMED_NUMEL elements are copied.
CHECKSUMMED_BYTES_LIMIT = 4 * MIB
CHECKSUMMED_NUMEL = 16 * KIB

_NOTHING = torch.empty(0)


@dataclass(eq=False)
class Chunk:
    """Contiguous slice of a bucket that passes through the all-reduce stages independently.

    Args:
        bucket: Bucket that the chunk belongs to.
        part: Elements of the chunk, a view of the bucket.
        job: Job that the stages run, for `part` or for a copy of it with the checksum appended.
        place: Description of the current stage, for error messages.
        checksum: Checksum of the order of buckets to append, or None.
        is_last: Whether this is the last chunk of the step.
    """

    bucket: InFlightBucket
    part: Tensor
    job: Job
    place: str = "waiting for the first stage"
    checksum: int | None = None
    is_last: bool = False
    _copy: ChecksummedCopy | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the chunk in bytes."""
        return self.part.numel() * self.part.element_size()

    def begin(self, watchdog: Watchdog, copies: CopyPool) -> None:
        """Compare the bucket between ranks if it is new, and append the checksum to the chunk."""
        self.bucket.compare_contents(watchdog)
        if self.checksum is not None:
            self._copy = copies.take(self.part, self.checksum)
            self.job.flat = self._copy.whole

    def end(self, copies: CopyPool) -> bool:
        """Verify the checksum after the last stage, and return whether all chunks of the bucket are done.

        Raises:
            OrderError: The checksum shows that ranks submitted different buckets.
        """
        if self._copy is not None and self.checksum is not None:
            self.part.copy_(self._copy.body)
            is_wrong = self._copy.is_wrong(self.checksum)
            copies.give_back(self._copy)
            if is_wrong:
                raise OrderError("the ranks submitted the buckets of this step in different orders")
        return self.bucket.chunk_done()


@dataclass(eq=False)
class InFlightBucket:
    """Bucket whose all-reduce has been submitted, with the future of its sum.

    Args:
        flat: Tensor to reduce.
        plan: Plan of the bucket.
        finish: Function applied to the sum.
        traffic: Bytes on the links of a node.
        adasum_numels: Number of elements of each tensor in `flat`, if Adasum combines them. Such a bucket is not split.
        contents: Store key and text by which ranks compare a new bucket, or None if the bucket is not new.
        contents_of_step: Store key and text by which ranks compare a step, on CUDA, if its last bucket is not new.
        is_last: Whether this is the last bucket of its step.
        is_in_update: True if the bucket holds no gradients and the optimizer step waits for it, None if it holds no
            gradients and the step does not wait, and False if it holds gradients.
        num_owners: Number of ranks if each rank keeps only its own shard, because `two_level` ends before the gather,
            or 0 if every rank gets the whole sum.
        is_coded: Whether a codec encodes the bucket between nodes. If so, the checksum of the order has its own chunk,
            which is not encoded.
        stage: Stage that error messages name while the bucket is enqueued on streams.
        done: Future of the sum.
        error: Error message of all ranks, or None if there was no failure.
        cause: Exception behind the error, if it was raised on this rank.
        chunks: Chunks of the bucket.
        submitted_s: Time of the submission, in seconds of `monotonic`.
        traced_s: Time of the submission, in seconds of the trace's clock.
    """

    flat: Tensor
    plan: BucketPlan
    finish: Callable[[Tensor], Tensor]
    traffic: Traffic = NO_TRAFFIC
    adasum_numels: tuple[int, ...] = ()
    contents: tuple[str, str] | None = None
    contents_of_step: tuple[str, str] | None = None
    is_last: bool = False
    is_in_update: bool | None = False
    num_owners: int = 0
    is_coded: bool = False
    stage: str = "order"
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
        """Split the bucket into chunks, and assign the checksum to the last one.

        Args:
            job: Function that creates the job of a chunk from the chunk's elements.
            num_chunks: Number of chunks.
            checksum: Checksum to append to the last chunk, or None.
            alignment: Chunks begin at multiples of this number of elements.
        """
        if self.num_owners:  # every owner gets complete shards, as the caller has packed them
            alignment = SHARD_ALIGNMENT * self.num_owners
        parts = [self.flat]
        if num_chunks > 1:
            numels = chunk_numels(self.flat.numel(), num_chunks, alignment=alignment)
            parts = list(self.flat.split(numels))

        last_bytes = parts[-1].numel() * self.flat.element_size()
        is_last_long = last_bytes > CHECKSUMMED_BYTES_LIMIT and not self.adasum_numels
        if checksum is not None and self.is_coded:
            # The checksum has its own chunk, which contains no elements of the bucket.
            parts.append(self.flat[self.flat.numel() :])
        elif checksum is not None and is_last_long:
            # The chunk with the checksum is copied. An additional short message takes less time than copying more.
            numel_before = parts[-1].numel() - CHECKSUMMED_NUMEL
            parts[-1:] = parts[-1].split([numel_before, CHECKSUMMED_NUMEL])
        self.chunks = [Chunk(bucket=self, part=part, job=job(part)) for part in parts]
        if self.adasum_numels:
            self.chunks[-1].job.adasum_numels = self.adasum_numels
        self.chunks[-1].checksum = checksum
        self.chunks[-1].is_last = self.is_last
        self._num_open = len(self.chunks)

    @property
    def place(self) -> str:
        """Description of the bucket's current stage, for error messages."""
        # A chunk inside a collective is more relevant for a hang than a chunk that waits behind it.
        inside = [chunk for chunk in self.chunks if chunk.place.startswith("in ")]
        waiting = [chunk for chunk in self.chunks if chunk.place.startswith("waiting")]
        chunk = (inside or waiting or self.chunks)[0]
        return f"bucket {self.plan.index} {chunk.place} of the {words_of(self.plan.algorithm)}"

    @property
    def is_inside(self) -> bool:
        """True if a stage is processing a chunk of the bucket."""
        return any(chunk.place.startswith("in ") for chunk in self.chunks)

    def compare_contents(self, watchdog: Watchdog) -> None:
        """Check once that all ranks submitted the same bucket, if the bucket is new.

        In the meantime, other threads of this rank that process the bucket wait.

        Raises:
            OrderError: Another rank submitted a different bucket.
        """
        # This precedes the first message, because Gloo calls abort() if sizes differ, which ends the process.
        if self.contents is not None:
            with self._lock:
                # Another column's thread may have compared it before this thread got the lock.
                if self.contents is not None:
                    _compare(self.contents, watchdog)
                    self.contents = None

    def compare_step(self, watchdog: Watchdog) -> None:
        """Check that all ranks submitted the same buckets, if this step was selected for comparison.

        Raises:
            OrderError: Another rank submitted different buckets, or the same buckets in a different order.
        """
        # The whole step has been submitted, so no rank waits for this rank during the comparison.
        if self.contents_of_step is not None:
            _compare(self.contents_of_step, watchdog)

    def chunk_done(self) -> bool:
        """Count a chunk as done, and return whether it was the last chunk of the bucket."""
        with self._lock:
            self._num_open -= 1
            return self._num_open == 0

    def complete(self, latch: FailureLatch, trace: CommTrace) -> None:
        """Apply `finish` to the sum and complete the bucket's future, unless the bucket has failed."""
        result = self.finish(self.flat)
        if latch.remove(self):
            trace.end(self.plan, self.traced_s, self.traffic)
            self.done.set_result(result)
            # Chunks and bucket refer to each other. This breaks the cycle, so that gradients are freed at once.
            self.chunks.clear()

    def result(self, done: Future) -> Tensor:
        """Return the value of a completed future, or raise the bucket's error.

        This is a callback for `Future.then`.
        """
        if self.error is not None:
            raise RuntimeError(self.error) from self.cause
        return done.value()

    def fail(self, error: str, cause: BaseException | None) -> None:
        """Complete the bucket's future so that it raises an error."""
        self.error = error
        self.cause = cause
        # `result` raises the error. With `set_exception`, DDP would report a failed cast instead of the error.
        self.done.set_result(None)

    def failed_in(self, stage: str, cause: Exception) -> str:
        """Return the error message for a failure of this rank in a stage of the all-reduce."""
        reason = f"{type(cause).__name__}: {cause}"
        if isinstance(cause, OrderError):
            reason = str(cause)
        return (
            f"rank {self.chunks[0].job.topology.rank} failed on bucket {self.plan.index} in stage `{stage}` of the "
            f"{words_of(self.plan.algorithm)}: {reason}"
        )

    def release_tensors(self) -> None:
        """Drop all references to tensors, once the work of the bucket is queued on the streams."""
        # This is allowed before the device is done, because `record_stream` tells the allocator which streams use the
        # tensors.
        for chunk in self.chunks:
            chunk.part = _NOTHING
            chunk.job.flat = _NOTHING
            chunk.job.shard = None
        self.flat = _NOTHING
        self.finish = _unchanged


def _compare(contents: tuple[str, str], watchdog: Watchdog) -> None:
    key, own_value = contents
    first = watchdog.compare(key, own_value)
    if first != own_value:
        raise OrderError(f"this rank submitted {own_value}, but another rank submitted {first}")


def _unchanged(flat: Tensor) -> Tensor:
    return flat


class FailureLatch:
    """Registry of buckets in flight that makes all of them fail at the first error on any rank.

    Later failures have no effect. The engine, its threads or streams, and the watchdog share one latch, so that they do
    not need callbacks into each other.

    Args:
        order: Order of the submitted buckets.

    Attributes:
        error: Error message of all ranks, or an empty string.
        cause: Exception behind the error, if it was raised on this rank.
        lock: Lock that protects `in_flight`, `error` and the order of submissions. No code waits while holding it.
        look: Function that queries the progress of the device and returns the seconds for which the device has waited.
            Used only on CUDA.
        give_up: Function that ends the communication of failed buckets. `trip` calls it once, without holding the lock.
        in_flight: Buckets in flight, in the order of submission.
        waited: Code location at which a collective of other code failed, because it waited for other ranks.
    """

    def __init__(self, order: BucketOrder) -> None:
        self.error = ""
        self.cause: BaseException | None = None
        self.lock = threading.Lock()
        self.look: Callable[[], float] = lambda: 0.0
        self.give_up: Callable[[Sequence[InFlightBucket]], None] = _nothing
        self.in_flight: dict[InFlightBucket, None] = {}
        self.waited = ""
        self._order = order
        self._caller = threading.get_ident()
        self._device_s = 0.0  # seconds since the device made progress

    def remove(self, bucket: InFlightBucket) -> bool:
        """Remove an averaged bucket from the registry, and return whether it was still in flight."""
        with self.lock:
            is_there = bucket in self.in_flight
            self.in_flight.pop(bucket, None)
            return is_there

    def trip(self, error: str, cause: BaseException | None = None) -> None:
        """Fail every bucket in flight with an error.

        All later calls use the error of the first call.
        """
        with self.lock:
            if not self.error:
                self.error = (
                    f"{error} The gradients of this step are lost, and the communication engine accepts no more "
                    "buckets."
                )
                self.cause = cause
            lost = list(self.in_flight)
            self.in_flight = {}
            # The error is set at once, because another thread may be about to enqueue a bucket on the streams.
            for bucket in lost:
                bucket.error = self.error
                bucket.cause = self.cause
        # The lock must not be held here. On CUDA this waits for communicators to end, and in the meantime other threads
        # need the status.
        self.give_up(lost)
        for bucket in lost:
            bucket.fail(self.error, self.cause)

    def raise_if_tripped(self) -> None:
        """Raise the error shared by all ranks if there was a failure."""
        if self.error:
            raise RuntimeError(self.error) from self.cause

    def status(self) -> RankStatus:
        """Return the communication progress and current activity of this rank, for a diagnosis."""
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
        """Return how long the oldest bucket has been in flight, in seconds.

        If no bucket is in flight, return how long the device has made no progress, or 0 if it makes progress.
        """
        self._device_s = self.look()
        with self.lock:
            oldest = next(iter(self.in_flight), None)
            if oldest is None:
                return self._device_s
            return monotonic() - oldest.submitted_s


def _nothing(*_: object) -> None:
    pass
