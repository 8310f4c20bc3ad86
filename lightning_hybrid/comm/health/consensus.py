"""What must be alike on all ranks, and how each keeps book of it: plan, place in the training, order of tensors."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_hybrid.comm.engine.order_check import RollingHash
from lightning_hybrid.comm.health import tcp_info
from lightning_hybrid.comm.health.diagnosis import differing, places_of
from lightning_hybrid.comm.plan import BucketPlan, CommPlan
from lightning_hybrid.comm.topology import Topology, host_identity

NUM_RECENT = 64
"""How many records of buckets a rank remembers, to say where it went another way than others."""


class OrderError(RuntimeError):
    """Ranks handed over different tensors, or in different order."""


class Order:
    """The tensors handed over so far, in order.

    ``value``: hash of all of them. ``recent``: the latest records. A step's beginning is *known* once it was seen.
    """

    def __init__(self) -> None:
        self.num_submitted = 0
        self.recent: deque[str] = deque(maxlen=NUM_RECENT)
        self._all, self._step = RollingHash(), RollingHash()
        self._known: set[int] = set()

    @property
    def value(self) -> int:
        """64 bits that differ where two ranks' orders do."""
        return self._all.value

    def add(self, bucket: BucketPlan, *, is_last: bool) -> str | None:
        """One tensor more; its record where no step began like this before, None where one did.

        >>> bucket = CommPlan().bucket(index=0, numel=4, dtype="float32", num_bytes=16, topology=Topology(rank=0,
        ...     nodes=((0, 1),)))
        >>> order = Order()
        >>> order.add(bucket, is_last=True)
        'bucket 0 (4 x float32, hierarchical x 1), the last'
        >>> order.add(bucket, is_last=True) is None
        True
        """
        record = f"bucket {bucket.index} ({bucket.numel} x {bucket.dtype}, {bucket.algorithm} x {bucket.num_chunks})"
        if is_last:
            record += ", the last"
        self.num_submitted += 1
        self.recent.append(record)
        self._all.add(record)
        self._step.add(record)
        is_new = self._step.value not in self._known
        self._known.add(self._step.value)
        if is_last:
            self._step = RollingHash()
        return record if is_new else None


def hash_of_sources(package: Path) -> str:
    """Twelve digits that differ where a source file of a package does; of the files that are there."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


SOURCES = hash_of_sources(Path(__file__).resolve().parents[2])
"""Of what was imported, some milliseconds ago: files may change while a job runs."""


def software() -> dict[str, str]:
    """What must be one version on all ranks.

    >>> sorted(software())
    ['lightning_hybrid', 'torch']
    """
    return {"torch": torch.__version__, "lightning_hybrid": f"sources {SOURCES}"}


def compare_plans(
    plan: CommPlan, topology: Topology, device: torch.device, dtype_across_nodes: torch.dtype | None = None
) -> tuple[str, list[str], list[list[str]]]:
    """Compare plan and topology over all ranks of WORLD; a word that is the same on all and new each time; hosts.

    And under which addresses others know each rank's host. Versions of the software are compared as well.

    Collective: every rank of WORLD must call it. Raises ``ValueError``, on every rank, that names what differs.
    """
    own = {**json.loads(plan.to_json()), "nodes": topology.nodes, "device": device.type}
    own["dtype_across_nodes"] = str(dtype_across_nodes)
    gathered: list[tuple[dict, dict, str, str, list[str]]] = [({}, {}, "", "", [])] * topology.world_size
    dist.all_gather_object(gathered, (own, software(), uuid.uuid4().hex, host_identity()[0], tcp_info.addresses()))
    hosts = [host for *_, host, _ in gathered]
    if difference := differing([versions for _, versions, *_ in gathered]):
        raise ValueError(
            f"the software must be the same on all ranks: {difference}. Other code rounds otherwise, and the ranks' "
            f"weights part without a word. Install one environment on every host.{places_of([], hosts)}"
        )
    difference = differing([values for values, *_ in gathered])
    if difference:
        raise ValueError(
            f"the plan of communication must be the same on all ranks: {difference}. Give every rank the same "
            f"`strategy` options, from one configuration.{places_of([], hosts)}"
        )
    return gathered[0][2], hosts, [addresses for *_, addresses in gathered]


def max_over_ranks(times_s: Sequence[float], place: str, device: torch.device) -> list[float]:
    """The largest of each time over all ranks of WORLD, all of which must be at the same ``place`` of the training.

    Collective: every rank of WORLD must call it, with as many times. One small all-reduce: places are compared by a
    hash that travels with the times, as the largest of it and of its negative, which are one number where all are
    alike. Raises ``ValueError``, on every rank, that names who is elsewhere.
    """
    digest = hashlib.sha256(place.encode()).digest()
    words = [float(int.from_bytes(digest[at : at + 4], "big")) for at in (0, 4)]  # exact in fp64
    values = torch.tensor([*times_s, *words, *(-word for word in words)], dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    most = values.tolist()
    if most[-4:-2] != [-word for word in most[-2:]]:
        places: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(places, place)
        difference = differing([{"place in the training": each} for each in places])
        raise ValueError(
            f"all ranks must change the plan of communication after the same step: {difference}. Give every rank the "
            "same number of batches and the same `strategy` options, or set `strategy.tune=off`."
        )
    return most[: len(times_s)]
