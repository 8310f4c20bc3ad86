"""The watchdog of a setup: names dead, stopped, hanging and failed ranks before there is an engine to do it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_hybrid.comm.engine.engine import GIVE_UP_AT
from lightning_hybrid.comm.health import tcp_info
from lightning_hybrid.comm.health.abort import ABORT_LIMIT_S, abort_all
from lightning_hybrid.comm.health.device_waits import DeviceWaits
from lightning_hybrid.comm.health.diagnosis import RankStatus
from lightning_hybrid.comm.health.thread_place import place_of, place_of_error
from lightning_hybrid.comm.health.watchdog import Watchdog, private_store, short
from lightning_hybrid.comm.topology import host_identity

INSIDE, OUTSIDE = "in a collective of Lightning's or torch's", "in no collective"


class SetupWatchdog:
    """Watchdog that names the rank others wait for, before there is an engine or where there is none. Collective.

    `device`: where tensors are; on a GPU waiting is the device's, and a failure aborts its communicators. `timeout`: of
    collectives; a wait of 0.9 of it is a failure on a GPU.
    """

    # Over Gloo a collective that waits for long fails by itself; only then can the cause be named.

    gives_up_on_cpu = False

    def __init__(self, *, device: torch.device, timeout: timedelta | None = None) -> None:
        may_give_up = device.type == "cuda" or self.gives_up_on_cpu
        self._device_waits = DeviceWaits(device) if device.type == "cuda" else None
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._num_inside, self._waited, self._caller = 0, "", threading.get_ident()
        places: list[tuple[str, list[str]]] = [("", [])] * self._world_size
        dist.all_gather_object(places, (host_identity()[0], tcp_info.own_addresses()))
        # A process may fit more than once: each setup has a store of its own.
        count = private_store("lightning_hybrid/setups").add(str(self._rank), 1)
        self._watchdog = Watchdog(
            store=private_store(f"lightning_hybrid/setup/{count}"),
            rank=self._rank,
            world_size=self._world_size,
            watched=self,
            hosts=[host for host, _ in places],
            addresses=[addresses for _, addresses in places],
            give_up_after_s=GIVE_UP_AT * timeout.total_seconds()
            if timeout is not None and may_give_up
            else None,
        )
        self._watchdog.start()

    def __deepcopy__(self, memo: dict[int, Any]) -> SetupWatchdog:
        return self  # its thread is there once, also where user code copies the trainer

    def status(self) -> RankStatus:
        """Return where this rank stands, for the diagnosis of a failure."""
        place, is_inside = place_of(self._caller)
        is_inside = is_inside or self._num_inside > 0 or bool(self._waited)
        place = f"{INSIDE if is_inside else OUTSIDE}, {self._waited or place}"
        return RankStatus(num_submitted=0, order="", place=place, is_inside=is_inside)

    def stalled_s(self) -> float:
        """Return how long the device has been at one thing; 0 on a CPU, where no bucket is in flight."""
        return 0.0 if self._device_waits is None else self._device_waits.stalled_s()

    def trip(self, error: str, cause: BaseException | None = None) -> None:
        """End the waits of a GPU; Gloo's cannot be called off."""
        if self._device_waits is not None:
            abort_all(limit_s=ABORT_LIMIT_S)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark what no rank leaves before all have come: a rank that fails inside has waited for others."""
        self._num_inside += 1
        yield  # no `finally`: after an error inside, the rank still counts as one that waited
        self._num_inside -= 1

    def explain(self, error: BaseException) -> str:
        """Name the cause of a collective that failed here, then `error`; in the same words on every rank."""
        self._waited = place_of_error(error)
        noticed = f"rank {self._rank} failed {self._where()}: {short(error)}"
        return (
            f"{self._watchdog.collect_status(noticed)} Seen here as {type(error).__name__}: {error}"
        )

    def _where(self) -> str:
        return "in a collective that averages no gradients"

    def abort(self, reason: str) -> None:
        """Let the other ranks know why this one ends."""
        self._watchdog.raise_alarm(f"comm: rank {self._rank} gave up: {reason}")

    def leave(self) -> None:
        """End; may be called again."""
        self._watchdog.leave()
