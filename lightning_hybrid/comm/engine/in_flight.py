"""A tensor handed over to be summed, and the pieces in which it goes through the stages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.futures import Future

from lightning_hybrid.comm.engine.order_check import ChecksummedCopy
from lightning_hybrid.comm.engine.stages import Job
from lightning_hybrid.comm.plan import KIB, MIB, BucketPlan
from lightning_hybrid.comm.stats.link_bytes import NO_TRAFFIC, Traffic

ALIGNMENT = 16
"""Pieces begin at multiples of this many elements, so that vector instructions find them aligned."""

SEALED_BYTES_LIMIT = 4 * MIB
SEALED_NUMEL = 16 * KIB

_NOTHING = torch.empty(0)

MOST_SIZES_KEPT = 4
"""Sealed copies of so many sizes are kept; before DistributedDataParallel rebuilds its buckets there are two."""


class CopyPool:
    """Those not in use, by size and dtype: a step seals one piece, and most steps the same."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[ChecksummedCopy]] = {}
        self._lock = threading.Lock()

    def take(self, part: Tensor) -> ChecksummedCopy:
        """One for this tensor."""
        with self._lock:
            free = self._free.get((part.numel(), part.dtype))
            if free:
                return free.pop()
        return ChecksummedCopy(part.numel(), part.dtype, part.device)

    def give_back(self, copy: ChecksummedCopy) -> None:
        """It is in use no more. Of other sizes none is kept: there is one sealed piece in a step."""
        key = copy.body.numel(), copy.body.dtype
        with self._lock:
            if key not in self._free and len(self._free) >= MOST_SIZES_KEPT:
                self._free.clear()
            self._free.setdefault(key, []).append(copy)


@dataclass(eq=False)
class Chunk:
    """A part of a tensor on its way through the stages: they see ``job``, whose tensor may have a seal behind it.

    ``is_last``: nothing follows it in this step.
    """

    flight: InFlightBucket
    part: Tensor
    job: Job
    place: str = "waiting for its first stage"
    seal: int | None = None
    is_last: bool = False
    _copy: ChecksummedCopy | None = None

    def open(self, copies: CopyPool) -> None:
        """Before the first stage."""
        if self.seal is not None:
            self.seal_in(copies.take(self.part))

    def seal_in(self, copy: ChecksummedCopy) -> None:
        """The same, in this memory."""
        assert self.seal is not None
        self._copy = copy
        copy.fill(self.part, self.seal)
        self.job.flat = copy.whole

    def unseal(self) -> Tensor | None:
        """After the last: the sum is where it belongs; how broken the seal is, on the device, None where there is none.

        Not 0 where ranks differ.
        """
        if self._copy is None or self.seal is None:
            return None
        self.part.copy_(self._copy.body)
        return self._copy.is_broken(self.seal)

    def close(self, copies: CopyPool) -> bool:
        """The same, waiting for the verdict: whether the seal is broken. Its memory is free again."""
        broken = self.unseal()
        if broken is None or self._copy is None:
            return False
        is_broken = bool(broken)
        copies.give_back(self._copy)
        return is_broken


@dataclass(eq=False)
class InFlightBucket:
    """A tensor in the air: what to do with it, and the future that tells when it is done.

    ``check``: run once, before the first piece is sent. ``is_last``: of its step. ``is_issued``: all of it is on the
    device's streams, where nothing changes its order any more.
    """

    flat: Tensor
    bucket: BucketPlan
    finish: Callable[[Tensor], Tensor]
    traffic: Traffic = NO_TRAFFIC
    check: Callable[[], None] | None = None
    is_last: bool = False
    is_issued: bool = False
    done: Future = field(default_factory=Future)
    future: Future | None = None
    error: str | None = None
    cause: BaseException | None = None
    pieces: list[Chunk] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)
    traced_s: float = 0.0
    _num_open: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def split_into_chunks(self, job: Callable[[Tensor], Job], *, seal: int | None) -> None:
        """Make the pieces. The seal, if any, goes behind the last."""
        parts = split_into_chunks(self.flat, num_pieces=self.bucket.num_chunks)
        if seal is not None and parts[-1].numel() * parts[-1].element_size() > SEALED_BYTES_LIMIT:
            # The sealed piece is copied: one short message more is less than a copy of a long one.
            parts[-1:] = parts[-1].split([parts[-1].numel() - SEALED_NUMEL, SEALED_NUMEL])
        self._make(parts, job, seal)

    def cut_at(self, step: int, job: Callable[[Tensor], Job], *, seal: int | None, num_pieces: int) -> None:
        """Make the pieces, at multiples of ``step`` elements. The seal, if any, goes into the last, with all of it."""
        self._make(split_into_chunks(self.flat, num_pieces=num_pieces, alignment=step), job, seal)

    def _make(self, parts: list[Tensor], job: Callable[[Tensor], Job], seal: int | None) -> None:
        self.pieces = [Chunk(flight=self, part=part, job=job(part)) for part in parts]
        self.pieces[-1].seal = seal
        self.pieces[-1].is_last = self.is_last
        self._num_open = len(self.pieces)

    @property
    def place(self) -> str:
        """Where it is, in words: where one of its pieces is at work, if any, else where one waits."""
        at_work = [piece for piece in self.pieces if piece.place.startswith("in ")]
        waiting = [piece for piece in self.pieces if piece.place.startswith("waiting")]
        piece = (at_work or waiting or self.pieces)[0]
        return f"bucket {self.bucket.index} {piece.place} of the {self.bucket.algorithm} all-reduce"

    @property
    def is_inside(self) -> bool:
        """Whether one of its pieces is in a stage."""
        return any(piece.place.startswith("in ") for piece in self.pieces)

    def let_go(self) -> None:
        """Hold no tensor any more: the device's allocator knows who uses them."""
        for piece in self.pieces:
            piece.part = piece.job.flat = _NOTHING
            piece.job.shard = piece._copy = None
        self.flat, self.finish = _NOTHING, _same

    def check_before_send(self) -> None:
        """Run ``check`` if nobody has; whoever comes meanwhile waits. Raises what it raises, each time."""
        if self.check is not None:
            with self._lock:
                if self.check is not None:
                    self.check()
                    self.check = None

    def land(self) -> bool:
        """One piece more is done; whether it was the last."""
        with self._lock:
            self._num_open -= 1
            return self._num_open == 0

    def result(self, done: Future) -> Tensor:
        """The tensor; raises where the flight failed. Run by ``Future.then``."""
        if self.error is not None:
            raise RuntimeError(self.error) from self.cause
        return done.value()

    def fail(self, error: str, cause: BaseException | None) -> None:
        """Let whoever waits for the future raise; by ``set_exception`` it would reach DDP as a failed cast."""
        self.error, self.cause = error, cause
        self.done.set_result(None)


def _same(flat: Tensor) -> Tensor:
    return flat


def split_into_chunks(flat: Tensor, *, num_pieces: int, alignment: int = ALIGNMENT) -> list[Tensor]:
    """Consecutive views of ``flat`` (1-D): at most ``num_pieces``, at least one, at multiples of ``alignment``.

    Of four or more the first and the last are a quarter of the others: while the first is in its first stage, and the
    last in its last, no other stage has anything to do.

    >>> import torch
    >>> [piece.numel() for piece in split_into_chunks(torch.zeros(100), num_pieces=3)]
    [48, 48, 4]
    >>> [piece.numel() for piece in split_into_chunks(torch.zeros(1600), num_pieces=4)]
    [160, 640, 640, 160]
    >>> [piece.numel() for piece in split_into_chunks(torch.zeros(0), num_pieces=3)]
    [0]
    """
    if not flat.numel():
        return [flat]
    quarters = 4 * num_pieces - 6 if num_pieces >= 4 else num_pieces
    step = -(-flat.numel() // (quarters * alignment)) * alignment
    if num_pieces < 4:
        return list(flat.split(step))
    first, rest = flat[:step], flat[step:]
    middle = -(-max(0, rest.numel() - step) // ((num_pieces - 2) * alignment)) * alignment
    return [first, *(piece for piece in rest.split(max(middle, alignment)) if piece.numel())]
