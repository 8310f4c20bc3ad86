"""All-reduce engine of an elastic run, for the ranks of the current view.

A view is the set of hosts that take part in the run at a given time. The engine is closed between two views.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_hybrid.comm.collective_names import is_exchange
from lightning_hybrid.comm.engine.engine import CommEngine
from lightning_hybrid.comm.engine.in_flight import FailureLatch, InFlightBucket
from lightning_hybrid.comm.engine.order_check import BucketOrder
from lightning_hybrid.comm.engine.view_groups import ViewGroups, ViewWatch


class ViewEngine(CommEngine):
    """All-reduce engine whose set of ranks changes when hosts join or leave an elastic run.

    The engine accepts no buckets before the first call of `enter`. Until then, its `topology` is that of the largest
    possible view.
    """

    _view: ViewGroups | None = None

    def _begin(self, compared: Any, **more: Any) -> None:
        if self._view is None:
            self._is_closed = True
            self._compared = compared
            self._latch = FailureLatch(BucketOrder())  # its error is read before the first view
        else:
            super()._begin(compared, **more)

    def _new_watchdog(self, token: str, hosts: list[str], addresses: list[list[str]]) -> Any:
        assert self._view is not None
        return ViewWatch(dist.PrefixStore("watch", self._view.store), self._latch)

    def _record(self, bucket: InFlightBucket) -> int | None:
        # The order does not include collectives within one host, because other hosts need not run them. An example is
        # the collection of state for a checkpoint.
        if is_exchange(bucket.plan.algorithm):
            return None
        return super()._record(bucket)

    def enter(self, view: ViewGroups) -> None:
        """Open the engine for all-reduces over the ranks of a new view.

        Collective: every rank of the view must call it.

        Raises:
            ValueError: Plans differ between ranks. The error is raised on every rank.
            RuntimeError: A rank was lost in the meantime.
        """
        self._view = view
        self.topology = view.of_view
        self._begin(self._compared, group=view.world, groups=view)
        self._is_closed = False

    def wait(self) -> None:
        """Wait until the device has finished all submitted all-reduces.

        On CUDA this is necessary, because a future does not show whether its all-reduce is complete.

        Raises:
            RuntimeError: An all-reduce failed.
        """
        if self._on_cuda:
            torch.cuda.current_stream(self.device).synchronize()
        self.raise_if_failed()

    def cut(self, reason: str) -> None:
        """Fail all buckets in flight with `reason`, and unblock every wait in the view's process groups.

        The method may be called from any thread.
        """
        if not self._is_closed:
            self._latch.trip(reason)
