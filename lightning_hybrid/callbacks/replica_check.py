"""Callback that checks that all ranks have the same weights, optimizer state and data order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_hybrid.checks import plain_value, require_whole
from lightning_hybrid.comm.health.diagnosis import differing, places_of
from lightning_hybrid.comm.health.replica_difference import (
    PART,
    ReplicaDriftError,
    first_difference,
    names_that_differ,
)
from lightning_hybrid.comm.health.tensor_hash import Fingerprint
from lightning_hybrid.comm.topology import host_identity
from lightning_hybrid.run_status import run_status, tensors_of_replica

# Settings that are attributes of torch's `DistributedSampler`, of our `EpochOrder`, or of any loader.
_SAMPLER_SETTINGS = ("seed", "epoch", "shuffle", "drop_last", "num_replicas", "total_size")
_EPOCH_ORDER_SETTINGS = (
    "world_size",
    "global_batch_size",
    "num_images",
    "accumulate_grad_batches",
)
_ORDER_SETTINGS = (*_SAMPLER_SETTINGS, *_EPOCH_ORDER_SETTINGS, "batch_size")


class DataOrderError(RuntimeError):
    """Error raised when ranks disagree on the order of the training data.

    In such an epoch, some samples are read twice and others are never read.
    """


class _RankState(NamedTuple):
    """Tensor fingerprints and data-order settings of one rank."""

    host: str
    fingerprints: dict[str, int]  # by tensor name
    order: dict[str, Any]


class ReplicaCheck(Callback):
    """Callback that regularly checks that weights and optimizer state are identical on all ranks.

    All bits are compared. The check also covers the loss scales. If one data order is divided among
    the ranks, it covers the settings of this order: seed, epoch and number of shards (`order_of`).
    Ranks can diverge after a bit flip, if some code runs only on some ranks, or if ranks load
    different libraries or checkpoints.

        c_r = fingerprint of (fingerprints of tensors 0, 1, ..., tensor names, data order)           on rank r
        (a, b) = min over ranks of (c_r, ~c_r)                                               16 bytes; all equal: a = ~b

    Only if the ranks differ do they exchange the fingerprints of all tensors, to find the first
    difference. The check also runs at the start of training, including when training resumes from a
    checkpoint, and at the end. Buffers, and parameters that DDP ignores, are not checked.

    If the ranks of a node share the optimizer update, (a, b) covers only the tensors that all ranks
    hold. An additional pair for each local rank covers its shards, which are held by the ranks with
    this local rank on all nodes. If nodes train independently (`LocalSteps`), the ranks within each
    node are compared. In an elastic run, the ranks of all hosts are compared. If the set of hosts
    changes during a check, the check is skipped, because hosts are compared when they train
    together again.

    *Every rank must have this callback, with the same `every_n_steps`.* The host waits for the
    device only at a check. With a single rank, nothing is checked.

    Args:
        every_n_steps: Number of steps between two checks. A rank that has diverged is found after
            at most this number of steps.

    Raises:
        ValueError: `every_n_steps` is not a positive integer.
        ReplicaDriftError: During training, on every rank, if tensors differ. The error names the
            first tensor that differs, and the ranks.
        DataOrderError: During training, if the data order differs.
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        why = "the ranks are compared every `every_n_steps` steps. Set every_n_steps=100, or remove `ReplicaCheck`"
        every_n_steps = plain_value(every_n_steps)
        require_whole("every_n_steps", every_n_steps, why, unit="steps")
        self.every_n_steps = every_n_steps
        self._fingerprint: Fingerprint | None = None
        self._checked_step = -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the ranks at the start of training, including when a run is resumed."""
        self._fingerprint = Fingerprint(pl_module.device)
        self._checked_step = -1
        self._check(trainer)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Compare the ranks every `every_n_steps` optimizer steps."""
        is_due = trainer.global_step % self.every_n_steps == 0
        if is_due and trainer.global_step != self._checked_step:
            self._check(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the ranks at the end of training, unless the last step was already checked."""
        if trainer.global_step != self._checked_step:
            self._check(trainer)

    def _check(self, trainer: pl.Trainer) -> None:
        """Raise an error on every rank if the state of any two ranks differs.

        Collective: every rank must call it, in the same order.
        """
        last_checked_step = self._checked_step
        self._checked_step = trainer.global_step
        status = run_status(trainer)
        if status.gather_over_hosts is not None:
            self._check_over_hosts(trainer, status.gather_over_hosts, last_checked_step)
            return
        if trainer.world_size < 2 or not dist.is_initialized():
            return
        assert self._fingerprint is not None
        group = status.replica_group or status.node_group

        parts = {}  # shards that the ranks with the same local rank hold in common
        replicated = {}  # tensors that all ranks hold
        for name, tensor in tensors_of_replica(trainer):
            fingerprint = self._fingerprint.of(tensor)
            if name.startswith(PART):
                parts[name] = fingerprint
            else:
                replicated[name] = fingerprint
        order = _order_of_run(trainer)

        combined = self._combine_with_names(replicated, order)
        # The maximum is the complement of the minimum of all complements, so one collective finds
        # both the minimum and the maximum.
        bounds = torch.stack([combined, ~combined])
        if parts:
            local_rank, num_local_ranks = status.place_in_node
            combined_parts = self._fingerprint.combine(list(parts.values()))
            # The largest integer has no effect on a minimum, so this rank does not contribute to
            # the bounds of other local ranks.
            part_bounds = torch.full(
                (num_local_ranks, 2), torch.iinfo(torch.int64).max, device=bounds.device
            )
            part_bounds[local_rank] = torch.stack([combined_parts, ~combined_parts])
            bounds = torch.cat([bounds, part_bounds.flatten()])
        dist.all_reduce(bounds, dist.ReduceOp.MIN, group=group)

        numbers = bounds.tolist()
        for smallest, complement_of_largest in zip(numbers[::2], numbers[1::2], strict=True):
            if smallest != ~complement_of_largest:
                states = self._gather_states(replicated | parts, order, group)
                raise self._error(states, trainer.global_step, last_checked_step, group)

    def _combine_with_names(self, fingerprints: dict[str, Tensor], order: dict[str, Any]) -> Tensor:
        """Combine the fingerprints of tensors, their names and the data order into one fingerprint.

        Names are included so that ranks get different fingerprints if they hold different tensors,
        or hold them in a different order.
        """
        assert self._fingerprint is not None
        lines = [*fingerprints]
        for name, value in order.items():
            lines.append(f"{name}: {value}")
        text = torch.frombuffer(bytearray("\n".join(lines).encode()), dtype=torch.uint8)
        text_fingerprint = Fingerprint(text.device).of(text)
        return self._fingerprint.combine([*fingerprints.values(), text_fingerprint])

    def _check_over_hosts(
        self,
        trainer: pl.Trainer,
        gather: Callable[[Any], list[Any] | None],
        last_checked_step: int,
    ) -> None:
        """Compare the weights and optimizer states of the ranks of all hosts in an elastic run.

        Args:
            trainer: The trainer.
            gather: Collective that returns the values of all ranks, or None if the set of hosts
                changes in the meantime.
            last_checked_step: Step of the last check.
        """
        assert self._fingerprint is not None
        fingerprints = {}
        for name, tensor in tensors_of_replica(trainer):
            fingerprints[name] = int(self._fingerprint.of(tensor))
        order = _order_of_run(trainer)
        gathered = gather((host_identity()[0], fingerprints, order))
        if gathered is None:
            return

        states = [_RankState(*state) for state in gathered]
        has_other_orders = any(state.order != states[0].order for state in states)
        if names_that_differ([state.fingerprints for state in states]) or has_other_orders:
            raise self._error(states, trainer.global_step, last_checked_step)

    def _gather_states(
        self,
        fingerprints: dict[str, Tensor],
        order: dict[str, Any],
        group: dist.ProcessGroup | None,
    ) -> list[_RankState]:
        """Gather the fingerprints and data-order settings of all ranks.

        Collective: every rank of `group` (None: WORLD) must call it. Every rank does, because every
        rank has seen the difference in the result of the all-reduce.
        """
        on_host = torch.stack([fingerprint.cpu() for fingerprint in fingerprints.values()])
        numbers = dict(zip(fingerprints, on_host.tolist(), strict=True))
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, (host_identity()[0], numbers, order), group=group)
        return [_RankState(*state) for state in gathered]

    def _error(
        self,
        states: list[_RankState],
        step: int,
        last_checked_step: int,
        group: dist.ProcessGroup | None = None,
    ) -> RuntimeError:
        """Create an error that names the first difference and has the same text on every rank."""
        hosts = [state.host for state in states]
        fingerprints = [state.fingerprints for state in states]
        numbering = ""
        if group is not None:
            ranks = dist.get_process_group_ranks(group)
            numbering = f" In this message, ranks {ranks} are numbered from 0."

        is_start = last_checked_step < 0
        since = f"between steps {last_checked_step} and {step}"
        if is_start:
            since = "when training started"
        if not names_that_differ(fingerprints):
            difference = differing([state.order for state in states])
            return DataOrderError(
                f"The ranks read the data in different orders, which was detected {since} (with "
                f"every_n_steps={self.every_n_steps}): {difference}. Some samples would be read twice in an epoch and "
                "others never. Use the same seed, data and options on every rank, and call `set_epoch` on all "
                f"ranks.{places_of([], hosts)}{numbering}"
            )

        if is_start:
            cure = "Give every rank the same checkpoint and the same code."
        else:
            cure = (
                "Look for code that runs on some ranks only, for random numbers that differ between ranks, and for "
                f"faulty memory. Then resume from a checkpoint written at or before step {last_checked_step}."
            )
        return ReplicaDriftError(
            f"The ranks no longer have the same weights. They diverged {since} (with "
            f"every_n_steps={self.every_n_steps}): {first_difference(fingerprints, hosts)}. Averages of their "
            f"gradients are meaningless, because the ranks compute gradients for different weights. {cure}{numbering}"
        )


def _order_of_run(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the data-order settings of the training loaders, or no settings if each rank may have its own data."""
    if run_status(trainer).has_uneven_batches:
        return {}
    return order_of(trainer.train_dataloader)


def order_of(loaders: Any) -> dict[str, Any]:
    """Return the settings of loaders that determine the data order and must agree on all ranks.

    Only loaders that divide one order among the ranks have such settings. Any other loader may have
    its own data or its own seed on each rank.

    >>> from torch.utils.data import DataLoader, DistributedSampler
    >>> sampler = DistributedSampler(range(10), num_replicas=2, rank=1, shuffle=True, seed=7)
    >>> order = order_of(DataLoader(range(10), batch_size=5, sampler=sampler))
    >>> order["seed"], order["num_replicas"], order["number of batches"], order["number of samples"]
    (7, 2, 1, 10)
    >>> order_of(DataLoader(range(10), batch_size=5))
    {}
    """
    all_loaders = tree_leaves(loaders)
    order: dict[str, Any] = {}
    for index, loader in enumerate(all_loaders):
        suffix = f" of loader {index}" if len(all_loaders) > 1 else ""
        batch_sampler = getattr(loader, "batch_sampler", None)
        sources = (
            loader,
            getattr(loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
            getattr(loader, "order", None),
        )
        if not any(_divides_order(source) for source in sources):
            continue
        for source in sources:
            for name in _ORDER_SETTINGS:
                value = getattr(source, name, None)
                if isinstance(value, bool | int | str):
                    order[f"{name}{suffix}"] = value
        order[f"number of batches{suffix}"] = _length(loader)
        order[f"number of samples{suffix}"] = _length(getattr(loader, "dataset", None))
    return order


def _divides_order(source: Any) -> bool:
    """Return whether a sampler or an `EpochOrder` divides one order of samples among several ranks.

    Objects are recognized by their attributes, because a loader with exact resume has a wrapper of
    the `DistributedSampler`.
    """
    num_shards = getattr(source, "num_replicas", None)
    if hasattr(source, "global_batch_size"):
        num_shards = getattr(source, "world_size", None)
    return isinstance(num_shards, int) and num_shards > 1


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None
