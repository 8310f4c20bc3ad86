"""Comparison of all ranks' weights and data order: nothing else in data-parallel training finds a rank that differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

_ORDER_SETTINGS = (
    *(
        "seed",
        "epoch",
        "shuffle",
        "drop_last",
        "num_replicas",
        "total_size",
    ),  # torch's DistributedSampler
    *("world_size", "global_batch_size", "num_images", "accumulate_grad_batches"),  # our EpochOrder
    "batch_size",
)


class DataOrderError(RuntimeError):
    """Different orders of the data on ranks, so that some samples are read twice and others never."""


class ReplicaCheck(Callback):
    """A comparison of all ranks' weights, optimizer state and loss scales, bit for bit, every so many steps.

    It also compares what decides on the order of the data: seed, epoch, number of shares (`order_of`). After a flipped
    bit, code that runs on some ranks only, another library or checkpoint, a rank's gradients belong to other weights.

        c_r = fingerprint of (those of tensors 0, 1, ..., of their names and the order of data)      on rank r
        (a, b) = min over ranks of (c_r, ~c_r)                                               16 bytes; all equal: a = ~b

    Only where they differ are the fingerprints of all tensors exchanged, to say which is the first. The start of
    training, also from a checkpoint, and its end are checked too. Buffers and parameters that DDP ignores are left out.
    Where the ranks of a node share the update, (a, b) are of what all have, and another two for each
    local rank are of its parts: those of equal local rank, one on every node, have the same. While nodes train on their
    own (`LocalSteps`), the ranks of each node are compared.

    *Every rank must have this callback, with the same number.* The host waits for the device at a check, and at no
    other step. Nothing happens with one rank. In an elastic run the ranks of all hosts are compared; a check that a
    change of hosts interrupts is left out, as hosts are compared when they train together again.

    Args:
        every_n_steps: steps from one check to the next. A rank that drifted is found after that many at the latest.

    Raises:
        ValueError: `every_n_steps` is not a whole number above zero.
        ReplicaDriftError: in training, the same on every rank: what differs first, and between which ranks.
        DataOrderError: in training, where the order of the data differs.
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        why = (
            "from a comparison of the ranks to the next: the most steps for which a rank that drifted stays unseen. "
            "Write every_n_steps=100, or leave `ReplicaCheck` out"
        )
        every_n_steps = plain_value(every_n_steps)
        require_whole("every_n_steps", every_n_steps, why, unit="steps")
        self.every_n_steps = every_n_steps
        self._fingerprint: Fingerprint | None = None
        self._checked_step = -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check what training starts from: initial weights, or what each rank read from a checkpoint."""
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
        """Check after every so many steps, once each."""
        if (
            trainer.global_step % self.every_n_steps == 0
            and trainer.global_step != self._checked_step
        ):
            self._check(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the steps since the last check."""
        if trainer.global_step != self._checked_step:
            self._check(trainer)

    def _check(self, trainer: pl.Trainer) -> None:
        before = self._checked_step
        self._checked_step = trainer.global_step
        status = run_status(trainer)
        if status.gather_over_hosts is not None:
            self._check_over_hosts(trainer, status.gather_over_hosts, equal_at=before)
            return
        if trainer.world_size < 2 or not dist.is_initialized():
            return
        assert self._fingerprint is not None
        group = status.replica_group or status.node_group
        (place, num_places) = status.place_in_node
        found = {name: self._fingerprint.of(one) for name, one in tensors_of_replica(trainer)}
        parts = {
            name: one for name, one in found.items() if name.startswith(PART)
        }  # of those of one local rank
        own = {
            name: one for name, one in found.items() if name not in parts
        }  # of what all ranks have
        order = order_of(trainer.train_dataloader)
        # Names are part of the fingerprint: ranks with other tensors, or in another order, must not seem equal.
        words = "\n".join([*own, *(f"{name}: {value}" for name, value in order.items())])
        names = torch.frombuffer(bytearray(words.encode()), dtype=torch.uint8)
        combined = self._fingerprint.combine([*own.values(), Fingerprint(names.device).of(names)])
        # One collective for minimum and maximum of all fingerprints: of complements the minimum is the maximum's.
        least = torch.stack([combined, ~combined])
        if parts:  # of other local ranks' parts this rank says nothing: the largest number there is
            of_places = torch.full(
                (num_places, 2), torch.iinfo(torch.int64).max, device=least.device
            )
            combined = self._fingerprint.combine(list(parts.values()))
            of_places[place] = torch.stack([combined, ~combined])
            least = torch.cat([least, of_places.flatten()])
        dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
        both = least.tolist()
        if any(
            smallest != ~not_largest
            for smallest, not_largest in zip(both[::2], both[1::2], strict=True)
        ):
            raise self._explain(
                own | parts, order, step=trainer.global_step, equal_at=before, group=group
            )

    def _check_over_hosts(
        self, trainer: pl.Trainer, gather: Callable[[Any], list[Any] | None], *, equal_at: int
    ) -> None:
        """Compare the ranks of all hosts of an elastic run, in which hosts are lost and join between two checks.

        A check that a change of hosts interrupts is left out: hosts are compared as they train together again.
        """
        assert self._fingerprint is not None
        own = {
            name: int(self._fingerprint.of(tensor)) for name, tensor in tensors_of_replica(trainer)
        }
        of_ranks = gather((host_identity()[0], own, order_of(trainer.train_dataloader)))
        if of_ranks is None:
            return
        hosts = [host for host, _, _ in of_ranks]
        values = [values_of_rank for _, values_of_rank, _ in of_ranks]
        orders = [order for _, _, order in of_ranks]
        has_other_orders = any(order != orders[0] for order in orders)
        if names_that_differ(values) or has_other_orders:
            raise self._error_of(
                values, orders, hosts, step=trainer.global_step, equal_at=equal_at, numbers=""
            )

    def _explain(
        self,
        own: dict[str, Tensor],
        order: dict[str, Any],
        *,
        step: int,
        equal_at: int,
        group: dist.ProcessGroup | None,
    ) -> RuntimeError:
        # Collective: every rank has seen the difference, and makes the same error of it.
        ranks: list[tuple[str, dict[str, int], dict[str, Any]]] = [
            ("", {}, {})
        ] * dist.get_world_size(group)
        values = dict(
            zip(own, torch.stack([one.cpu() for one in own.values()]).tolist(), strict=True)
        )
        dist.all_gather_object(ranks, (host_identity()[0], values, order), group=group)
        hosts = [host for host, _, _ in ranks]
        values_of = [values for _, values, _ in ranks]
        orders = [order for _, _, order in ranks]
        numbers = (
            ""
            if group is None
            else f" Here ranks {dist.get_process_group_ranks(group)} are numbered from 0."
        )
        return self._error_of(
            values_of, orders, hosts, step=step, equal_at=equal_at, numbers=numbers
        )

    def _error_of(
        self,
        values_of: list[dict[str, int]],
        orders: list[dict[str, Any]],
        hosts: list[str],
        *,
        step: int,
        equal_at: int,
        numbers: str,
    ) -> RuntimeError:
        since = "when training started" if equal_at < 0 else f"between steps {equal_at} and {step}"
        if not names_that_differ(values_of):
            difference = differing(orders)
            return DataOrderError(
                f"The ranks read the data in different orders; seen {since} (`every_n_steps` (={self.every_n_steps})): "
                f"{difference}. Samples are read twice in an epoch and others never. Give every rank the same seed, "
                f"data and options, and call `set_epoch` on all.{places_of([], hosts)}{numbers}"
            )
        cure = (
            "Give every rank the same checkpoint and the same code."
            if equal_at < 0
            else "Look for code that runs on some ranks only, for random numbers that differ between ranks, and for "
            f"faulty memory; resume from a checkpoint written up to step {equal_at}."
        )
        return ReplicaDriftError(
            f"The ranks no longer hold the same model; they parted {since} (`every_n_steps` (={self.every_n_steps})): "
            f"{first_difference(values_of, hosts)}. Their gradients are of different weights, so the averages are of "
            f"no model at all. {cure}{numbers}"
        )


def order_of(loaders: Any) -> dict[str, Any]:
    """Collect what is known of the order of a loader, or of several, and does not depend on the rank.

    >>> from torch.utils.data import DataLoader, DistributedSampler
    >>> sampler = DistributedSampler(range(10), num_replicas=2, rank=1, shuffle=True, seed=7)
    >>> found = order_of(DataLoader(range(10), batch_size=5, sampler=sampler))
    >>> found["seed"], found["num_replicas"], found["number of batches"], found["number of samples"]
    (7, 2, 1, 10)
    """
    several = tree_leaves(loaders)
    found: dict[str, Any] = {}
    for index, loader in enumerate(several):
        where = f" of loader {index}" if len(several) > 1 else ""
        sampler = getattr(loader, "sampler", None)
        inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        for source in (loader, sampler, inner, getattr(loader, "order", None)):
            for name in _ORDER_SETTINGS:
                value = getattr(source, name, None)
                if isinstance(value, bool | int | str):
                    found[f"{name}{where}"] = value
        found[f"number of batches{where}"] = _length(loader)
        found[f"number of samples{where}"] = _length(getattr(loader, "dataset", None))
    return found


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None
