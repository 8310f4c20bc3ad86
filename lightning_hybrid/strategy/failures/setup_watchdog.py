"""Watchdog that names failed ranks during setup, before the communication engine exists."""

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

INSIDE = "in a collective of Lightning or torch"
OUTSIDE = "in no collective"


class SetupWatchdog:
    """Watchdog that names dead, stopped, hanging or failed ranks before the communication engine exists.

    Collective: every rank must create it, in the same order.

    Args:
        device: The device of the tensors. On a GPU, a failure aborts the communicators on which the device waits.
        timeout: The time limit of collectives. On a GPU, a wait of 90% of this time counts as a failure. If None, a
            wait never counts as a failure.
    """

    # With Gloo, a collective that waits too long fails by itself, and the cause can be named only then.
    gives_up_on_cpu = False

    def __init__(self, *, device: torch.device, timeout: timedelta | None = None) -> None:
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        self._device_waits: DeviceWaits | None = None
        if device.type == "cuda":
            self._device_waits = DeviceWaits(device)
        self._num_waiting_contexts = 0
        self._failed_location = ""
        self._caller = threading.get_ident()  # thread whose location `status` reports
        self._watchdog = self._new_watchdog(device, timeout)
        self._watchdog.start()

    def _new_watchdog(self, device: torch.device, timeout: timedelta | None) -> Watchdog:
        hosts_and_addresses: list[tuple[str, list[str]]] = [("", [])] * self._world_size
        dist.all_gather_object(hosts_and_addresses, (host_identity()[0], tcp_info.own_addresses()))
        # A process may call `Trainer.fit` more than once, so each setup uses a separate store.
        setup_number = private_store("lightning_hybrid/setups").add(str(self._rank), 1)

        give_up_after_s = None
        if timeout is not None and (device.type == "cuda" or self.gives_up_on_cpu):
            give_up_after_s = GIVE_UP_AT * timeout.total_seconds()
        return Watchdog(
            store=private_store(f"lightning_hybrid/setup/{setup_number}"),
            rank=self._rank,
            world_size=self._world_size,
            watched=self,
            hosts=[host for host, _ in hosts_and_addresses],
            addresses=[addresses for _, addresses in hosts_and_addresses],
            give_up_after_s=give_up_after_s,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> SetupWatchdog:
        # The thread must exist only once, even if user code copies the trainer.
        return self

    def status(self) -> RankStatus:
        """Return the status of this rank, such as its location in the code, for failure diagnoses."""
        location, is_inside = place_of(self._caller)
        is_inside = is_inside or self._num_waiting_contexts > 0 or bool(self._failed_location)
        collective = OUTSIDE
        if is_inside:
            collective = INSIDE
        return RankStatus(
            num_submitted=0,
            order="",
            place=f"{collective}, {self._failed_location or location}",
            is_inside=is_inside,
        )

    def stalled_s(self) -> float:
        """Return how long the GPU has made no progress, in seconds, or 0 on a CPU."""
        if self._device_waits is None:
            return 0.0
        return self._device_waits.stalled_s()

    def trip(self, error: str, cause: BaseException | None = None) -> None:
        """Abort the communicators on a GPU, to end pending collectives.

        Waits of Gloo cannot be cancelled.
        """
        if self._device_waits is not None:
            abort_all(limit_s=ABORT_LIMIT_S)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context for code that waits for other ranks, so that diagnoses do not blame this rank.

        A rank that fails inside the section counts as one that waited for other ranks.
        """
        self._num_waiting_contexts += 1
        yield  # There is no `finally`, because after an error in the context the rank still counts as one that waited.
        self._num_waiting_contexts -= 1

    def explain(self, error: BaseException) -> str:
        """Return a message that explains a failed collective by its cause and this rank's own error.

        The diagnosis is the same on every rank.
        """
        self._failed_location = place_of_error(error)
        noticed = f"rank {self._rank} failed {self._where()}: {short(error)}"
        diagnosis = self._watchdog.collect_status(noticed)
        return f"{diagnosis} Seen here as {type(error).__name__}: {error}"

    def _where(self) -> str:
        return "in a collective that averages no gradients"

    def abort(self, reason: str) -> None:
        """Tell the other ranks why this rank is ending."""
        self._watchdog.raise_alarm(f"comm: rank {self._rank} gave up: {reason}")

    def leave(self) -> None:
        """Stop the watchdog. Repeated calls have no effect."""
        self._watchdog.leave()
