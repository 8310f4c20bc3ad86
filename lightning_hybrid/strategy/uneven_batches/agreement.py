"""Exchange of the number of samples that each rank contributes to a training batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_hybrid.comm.engine.node_exchange import all_gather
from lightning_hybrid.comm.engine.process_groups import destroy, own_group
from lightning_hybrid.comm.health.abort import end_waits
from lightning_hybrid.comm.health.diagnosis import name_ranks
from lightning_hybrid.lightning_names import lightning_function

_MOVE = "fabric.utilities.apply_func.move_data_to_device"
_NO_LENGTH = -1

END = object()
"""Marker in place of a batch when the loaders of all ranks have ended."""


@dataclass(frozen=True, kw_only=True)
class AgreedBatch:
    """Numbers of samples in one training batch, on this rank and on all ranks together.

    Attributes:
        num_own: Number of samples of this rank. 0: its batch has weight zero.
        num_total: Number of samples of all ranks.
        num_largest: Largest number of samples of one rank.
    """

    num_own: int
    num_total: int
    num_largest: int


class _Announcement(NamedTuple):
    """Message in which a rank describes its next batch to the other ranks."""

    num_samples: int
    has_batch: bool
    has_ended: bool
    can_repeat: bool


class _Announcements:
    """Messages from all ranks about their next batches.

    Args:
        table: int64 tensor of shape [ranks, fields of `_Announcement`].
    """

    def __init__(self, table: Tensor) -> None:
        num_samples, has_batch, has_ended, can_repeat = table.unbind(dim=1)
        self.num_samples = num_samples
        self.has_batch = has_batch.bool()
        self.has_ended = has_ended.bool()
        self.can_repeat = can_repeat.bool()

    @property
    def are_all_over(self) -> bool:
        """True if the loaders of all ranks are exhausted."""
        return bool(self.has_ended.all())

    @property
    def is_skipped(self) -> bool:
        """True if no rank has a batch for this step.

        The loaders have then returned None or ended.
        """
        return not bool(self.has_batch.any())

    @property
    def lacks_batch(self) -> bool:
        """True if a rank has neither a batch nor an earlier batch to repeat."""
        return not bool((self.has_batch | self.can_repeat).all())

    @property
    def first_with_batch(self) -> int:
        """Lowest rank that has a batch."""
        return int(self.has_batch.int().argmax())

    @property
    def ended_ranks(self) -> list[int]:
        """Ranks whose loaders are exhausted."""
        return self.has_ended.nonzero().flatten().tolist()


class BatchAgreement:
    """Exchange of batch sizes between all ranks before each training batch.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        timeout: Time that ranks wait for the batch of another rank.
        device: Device to which a batch of another rank is moved. None: it stays on the host.
        count_samples: Function that returns the number of samples in a batch.

    Attributes:
        agreed: Numbers of samples of batches whose training steps have not begun yet.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        timeout: timedelta,
        device: torch.device | None,
        count_samples: Callable[[Any], int],
    ) -> None:
        self.agreed: deque[AgreedBatch] = deque()
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._device = device
        self._count_samples = count_samples
        self._group: Any = None
        self._latest: Any = None  # batch to repeat
        self._has_logged_end = False

    def begin_epoch(self) -> None:
        """Begin a new epoch, and discard the sizes of batches on which no training step was run.

        It is called when a new pass over the loaders begins.
        """
        self.agreed.clear()

    def longest(self, length: int | None) -> int | None:
        """Return the length of the longest loader of all ranks, or None if a loader has no length.

        Collective: every rank must call it, in the same order.
        """
        own_length = _NO_LENGTH
        if length is not None:
            own_length = length
        lengths = self._gather(torch.tensor([own_length], dtype=torch.int64))
        if int(lengths.min()) == _NO_LENGTH:
            return None
        return int(lengths.max())

    def next_batch(self, batch: Any, *, has_ended: bool) -> Any:
        """Return the batch for this rank's next training step, or `END` once all ranks' loaders are exhausted.

        A rank without a batch gets an earlier one to repeat. Returns None if no rank has a batch for this step.

        Collective: every rank must call it, in the same order.

        Args:
            batch: Next batch of this rank's loader. None: there is none for this step.
            has_ended: Whether this rank's loader has ended.
        """
        num_samples = 0
        if batch is not None:
            num_samples = self._count_samples(batch)
            self._latest = batch
        announcement = _Announcement(
            num_samples=num_samples,
            has_batch=batch is not None,
            has_ended=has_ended,
            can_repeat=self._latest is not None,
        )
        announced = _Announcements(self._gather(torch.tensor(announcement, dtype=torch.int64)))
        if announced.are_all_over:
            return END
        if announced.is_skipped:
            return None

        self._log_end(announced)
        if announced.lacks_batch:
            self._borrow_batch(announced.first_with_batch)
        self.agreed.append(
            AgreedBatch(
                num_own=num_samples,
                num_total=int(announced.num_samples.sum()),
                num_largest=int(announced.num_samples.max()),
            )
        )
        return self._latest

    def _gather(self, values: Tensor) -> Tensor:
        """Gather int64 values from all ranks, as a tensor with one row per rank.

        Collective: every rank must call it, in the same order.
        """
        if self._world_size == 1:
            return values.unsqueeze(0)
        gathered = values.new_empty(self._world_size * len(values))
        all_gather(gathered, values, group=self._host_group())
        return gathered.view(self._world_size, len(values))

    def _host_group(self) -> Any:
        # Gloo exchanges the numbers between hosts, so that no rank waits for its device. A separate group is needed,
        # because gradient buckets or gathered weights may be in flight in others.
        if self._group is None:
            everybody = list(range(self._world_size))
            self._group = own_group(
                [everybody], timeout=self._timeout, desc="uneven batches", backend="gloo"
            )
        return self._group

    def _borrow_batch(self, source: int) -> None:
        """Broadcast one rank's batch to the ranks that have no batch to repeat.

        A rank has none if its loader is empty, or if the run was resumed after the loader's end.

        Collective: every rank must call it, in the same order.
        """
        to_device = lightning_function(_MOVE)
        batches: list[Any] = [None]
        if self._rank == source:
            batches = [to_device(self._latest, torch.device("cpu"))]
        dist.broadcast_object_list(batches, src=source, group=self._host_group())
        if self._latest is None:
            self._latest = batches[0]
            if self._device is not None:
                self._latest = to_device(self._latest, self._device)

    def _log_end(self, announced: _Announcements) -> None:
        """Log which ranks have no batches left, once per training run."""
        ended_ranks = announced.ended_ranks
        if not ended_ranks or self._has_logged_end:
            return
        self._has_logged_end = True
        rank_zero_info(
            f"uneven_batches='join': the training loader of {name_ranks(ended_ranks)} has ended. The epoch continues "
            "with the batches of the other ranks. This message is logged once per training run."
        )

    def close(self, *, has_failed: bool) -> None:
        """Destroy the process group and free the batch to repeat.

        Args:
            has_failed: Whether this rank fails. Ranks that wait for its batch then get an error at once.
        """
        self.agreed.clear()
        self._latest = None
        group = self._group
        self._group = None
        if group is None:
            return
        if has_failed:
            # The traceback of the error may still hold the group, whose connections would stay open.
            end_waits(group)
        destroy(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchAgreement:
        # Copies that user code makes during training, such as one of the trainer, share the process group.
        return self
