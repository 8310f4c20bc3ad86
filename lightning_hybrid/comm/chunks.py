"""A tensor handed over to be summed, and the pieces in which it goes through the stages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor
from torch.futures import Future

from lightning_hybrid.comm.allreduce import Job
from lightning_hybrid.comm.plan import KIB, MIB, BucketPlan
from lightning_hybrid.comm.seal import attach_seal, broken_seal

ALIGNMENT = 16
"""Pieces begin at multiples of this many elements, so that vector instructions find them aligned."""

SEALED_BYTES_LIMIT = 4 * MIB
SEALED_NUMEL = 16 * KIB


@dataclass(eq=False)
class Piece:
    """A part of a tensor on its way through the stages: they see ``job``, whose tensor may have a seal behind it."""

    flight: Flight
    part: Tensor
    job: Job
    place: str = "waiting for its first stage"
    seal: int | None = None

    def open(self) -> None:
        """Before the first stage."""
        if self.seal is not None:
            self.job.flat = attach_seal(self.part, self.seal)

    def close(self) -> Tensor | None:
        """After the last: the sum is where it belongs; returns whether the seal is broken, None if there is none."""
        if self.seal is None:
            return None
        self.part.copy_(self.job.flat[: self.part.numel()])
        return broken_seal(self.job.flat, self.seal)


@dataclass(eq=False)
class Flight:
    """A tensor in the air: what to do with it, and the future that tells when it is done.

    ``check``: run once, before the first piece is sent.
    """

    flat: Tensor
    bucket: BucketPlan
    finish: Callable[[Tensor], Tensor]
    check: Callable[[], None] | None = None
    done: Future = field(default_factory=Future)
    error: str | None = None
    cause: BaseException | None = None
    pieces: list[Piece] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)
    _num_open: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def cut(self, job: Callable[[Tensor], Job], *, seal: int | None) -> None:
        """Make the pieces. The seal, if any, goes behind the last."""
        parts = cut(self.flat, num_pieces=self.bucket.num_chunks)
        if seal is not None and parts[-1].numel() * parts[-1].element_size() > SEALED_BYTES_LIMIT:
            # The sealed piece is copied: one short message more is less than a copy of a long one.
            parts[-1:] = parts[-1].split([parts[-1].numel() - SEALED_NUMEL, SEALED_NUMEL])
        self.pieces = [Piece(flight=self, part=part, job=job(part)) for part in parts]
        self.pieces[-1].seal = seal
        self._num_open = len(self.pieces)

    def admit(self) -> None:
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


def cut(flat: Tensor, *, num_pieces: int) -> list[Tensor]:
    """Consecutive views of ``flat`` (1-D): at most ``num_pieces``, at least one, alike but for the last.

    >>> import torch
    >>> [piece.numel() for piece in cut(torch.zeros(100), num_pieces=3)]
    [48, 48, 4]
    >>> [piece.numel() for piece in cut(torch.zeros(0), num_pieces=3)]
    [0]
    """
    numel = -(-flat.numel() // num_pieces)
    numel = -(-numel // ALIGNMENT) * ALIGNMENT
    return list(flat.split(numel)) if flat.numel() else [flat]
