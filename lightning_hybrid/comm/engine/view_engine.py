"""An engine whose ranks change: it sums over those of a view, and between two views it is closed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_hybrid.comm.bucket_layout import is_exchange
from lightning_hybrid.comm.engine.engine import CommEngine
from lightning_hybrid.comm.engine.in_flight import FailureLatch, InFlightBucket
from lightning_hybrid.comm.engine.order_check import BucketOrder
from lightning_hybrid.comm.engine.view_groups import ViewGroups, ViewWatch


class ViewEngine(CommEngine):
    """A `CommEngine` that takes nothing until `enter`. Its `topology` is the largest that may come until then."""

    _view: ViewGroups | None = None

    def _begin(self, compared: Any, **more: Any) -> None:
        if self._view is None:
            self._is_closed = True
            self._compared = compared
            self._latch = FailureLatch(BucketOrder())  # errors of before are asked for
        else:
            super()._begin(compared, **more)

    def _new_watchdog(self, token: str, hosts: list[str], addresses: list[list[str]]) -> Any:
        assert self._view is not None
        return ViewWatch(dist.PrefixStore("watch", self._view.store), self._latch)

    def _record(self, bucket: InFlightBucket) -> int | None:
        # What a host exchanges within itself, as for a checkpoint, others need not do: it has no place in their order.
        return None if is_exchange(bucket.plan.algorithm) else super()._record(bucket)

    def enter(self, view: ViewGroups) -> None:
        """Open the engine for the ranks of a view, which sum from now on.

        Collective: every rank of the view must call it.

        Raises:
            ValueError: on every rank, if plans differ.
            RuntimeError: a rank is lost meanwhile.
        """
        self._view = view
        self.topology = view.of_view
        self._begin(self._compared, group=view.world, groups=view)
        self._is_closed = False

    def wait(self) -> None:
        """Wait until the device has the sums so far: on CUDA futures do not say whether these are whole.

        Raises:
            RuntimeError: they are not.
        """
        if self._on_cuda:
            torch.cuda.current_stream(self.device).synchronize()
        self.raise_if_failed()

    def cut(self, reason: str) -> None:
        """End what is in flight, for `reason`, and every wait in the groups of the view.

        May be called from any thread.
        """
        if not self._is_closed:
            self._latch.trip(reason)
