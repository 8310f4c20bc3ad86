"""Finds ranks whose weights, or order of the data, are not the others': nothing else in data-parallel training does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_hybrid.callbacks.data_order import order_of
from lightning_hybrid.callbacks.tensor_hash import Fingerprint
from lightning_hybrid.checks import require_whole
from lightning_hybrid.comm.health.diagnosis import differing, name_ranks, places_of
from lightning_hybrid.comm.topology import host_identity


class ReplicaDriftError(RuntimeError):
    """Ranks of one model hold different weights, masters or optimizer state."""


class DataOrderError(RuntimeError):
    """Ranks read the data in different orders, so some samples are read twice and others never."""


class ReplicaCheck(Callback):
    """Compare all ranks' weights, masters, optimizer state and loss scales, bit for bit, every so many steps.

    And what decides on the order of the data: seed, epoch, number of shares (``data_order.py``).

    Data-parallel training averages gradients and trusts that every rank makes the same step with them. A bit that
    flips in one rank's memory, code that runs on some ranks only, a host with another library or another checkpoint:
    from then on that rank's gradients belong to other weights, and nobody is told.

        c_r = fingerprint of (those of tensors 0, 1, ..., of their names and the order of data)      on rank r
        (a, b) = min over ranks of (c_r, ~c_r)                                               16 bytes; all alike: a = ~b

    Only where they differ are the fingerprints of all tensors exchanged, to say which is the first. Checked are also
    the first step, or what a checkpoint left on each rank, and the end of training. Buffers are left out: the running
    statistics of BatchNorm are each rank's own until the next forward. So are parameters that
    ``DistributedDataParallel`` was told to ignore.

    *Every rank must have this callback, with the same number.* The host waits for the device at a check, and at no
    other step. Nothing happens with one rank.

    Args:
        every_n_steps: Steps from one check to the next. A rank that drifted is found after that many at the latest.

    Raises:
        ValueError: `every_n_steps` is not a whole number above zero.
        ReplicaDriftError: In training, on every rank alike: what differs first, and between which ranks.
        DataOrderError: The same, where the order of the data differs.
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        why = (
            "from a comparison of the ranks to the next: the most steps for which a rank that drifted stays unseen. "
            "Set callbacks.replicas.every_n_steps=100, or leave the check out with ~callbacks.replicas"
        )
        require_whole("every_n_steps", every_n_steps, why, unit="steps")
        self.every_n_steps = every_n_steps
        self._fingerprint: Fingerprint | None = None
        self._checked_step = -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What training starts from: initial weights, or what each rank read from a checkpoint."""
        self._fingerprint = Fingerprint(pl_module.device)
        self._checked_step = -1
        self._check(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Check after every so many steps, once each."""
        if trainer.global_step % self.every_n_steps == 0 and trainer.global_step != self._checked_step:
            self._check(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The steps since the last check."""
        if trainer.global_step != self._checked_step:
            self._check(trainer)

    def _check(self, trainer: pl.Trainer) -> None:
        before, self._checked_step = self._checked_step, trainer.global_step
        if trainer.world_size < 2 or not dist.is_initialized():
            return
        assert self._fingerprint is not None
        own = {name: self._fingerprint.of(tensor) for name, tensor in tensors_of_replica(trainer)}
        order = order_of(trainer.train_dataloader)
        words = "\n".join([*own, *(f"{name}: {value}" for name, value in order.items())])
        names = torch.frombuffer(bytearray(words.encode()), dtype=torch.uint8)
        combined = self._fingerprint.combine([*own.values(), Fingerprint(names.device).of(names)])
        least = torch.stack([combined, ~combined])
        dist.all_reduce(least, dist.ReduceOp.MIN)
        smallest, not_largest = least.tolist()
        if smallest != ~not_largest:
            raise self._explain(own, order, step=trainer.global_step, alike_at=before)

    def _explain(self, own: dict[str, Tensor], order: dict[str, Any], *, step: int, alike_at: int) -> RuntimeError:
        """Collective, on every rank alike: the error."""
        told: list[tuple[str, dict[str, int], dict[str, Any]]] = [("", {}, {})] * dist.get_world_size()
        values = dict(zip(own, torch.stack([one.cpu() for one in own.values()]).tolist(), strict=True))
        dist.all_gather_object(told, (host_identity()[0], values, order))
        hosts, values_of = [host for host, _, _ in told], [values for _, values, _ in told]
        since = "when training started" if alike_at < 0 else f"between steps {alike_at} and {step}"
        if all(values == values_of[0] for values in values_of):
            difference = differing([order for _, _, order in told])
            return DataOrderError(
                f"The ranks read the data in different orders; seen {since} (`every_n_steps` (={self.every_n_steps})): "
                f"{difference}. Samples are read twice in an epoch and others never. Give every rank the same seed, "
                f"data and options, and call `set_epoch` on all.{places_of([], hosts)}"
            )
        cure = (
            "Give every rank the same checkpoint and the same code."
            if alike_at < 0
            else "Look for code that runs on some ranks only, for random numbers that differ between ranks, and for "
            f"faulty memory; resume from a checkpoint written up to step {alike_at}."
        )
        return ReplicaDriftError(
            f"The ranks no longer hold the same model; they parted {since} (`every_n_steps` (={self.every_n_steps})): "
            f"{first_difference(values_of, hosts)}. Their gradients are of different weights, so the averages are of "
            f"no model at all. {cure}"
        )


def tensors_of_replica(trainer: pl.Trainer) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that all ranks must hold alike, with its name; those of one parameter after another.

    For each parameter itself, its fp32 master, its optimizer state; then loss scales and counts of skipped steps.
    """
    module = trainer.strategy.lightning_module
    assert module is not None
    plugin = trainer.precision_plugin
    masters = getattr(plugin, "masters", None)
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for name, parameter in module.named_parameters():
        if name in ignored:
            continue
        yield f"`{name}`", parameter
        if masters is not None and (twin := masters.pair_of(parameter)) is not None:
            yield f"the fp32 master of `{name}`", twin.master
        for optimizer in trainer.optimizers:
            for kind, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"`{kind}` of the optimizer for `{name}`", value
    for index, record in enumerate(getattr(plugin, "records", ())):
        if record.loss_scale is not None:
            yield f"loss scale {index}", record.loss_scale.scale
            yield f"number of skipped steps {index}", record.num_skipped


def first_difference(values_of: Sequence[dict[str, int]], hosts: Sequence[str]) -> str:
    """The first name whose values are not the same on all ranks, and who holds which.

    >>> print(first_difference([{"`a`": 1, "`b`": 2}, {"`a`": 1, "`b`": 3}, {"`a`": 1, "`b`": 2}], ["x", "y", "x"]))
    `b` on rank 1 (host y) is not that of ranks 0, 2 (host x); 1 of 2 tensors differ, the last is `b`
    """
    names = list(dict.fromkeys(name for values in values_of for name in values))
    differing = [name for name in names if len({values.get(name) for values in values_of}) > 1]
    by_value: dict[int | None, list[int]] = {}
    for rank, values in enumerate(values_of):
        by_value.setdefault(values.get(differing[0]), []).append(rank)
    (_, most), *others = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[1]))
    few = [f"{name_ranks(ranks)} ({_hosts_of(ranks, hosts)})" for _, ranks in others]
    absent = ", which some do not have," if None in by_value else ""
    return (
        f"{differing[0]}{absent} on {' and on '.join(few[:4])} is not that of {name_ranks(most)} "
        f"({_hosts_of(most, hosts)}); {len(differing)} of {len(names)} tensors differ, the last is {differing[-1]}"
    )


def _hosts_of(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ("host " if len(names) == 1 else "hosts ") + ", ".join(names[:3]) + more
