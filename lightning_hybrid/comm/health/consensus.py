"""What must be equal on all ranks: software, plan, topology, and the place in the training."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_hybrid.comm.health import tcp_info
from lightning_hybrid.comm.health.diagnosis import differing, places_of
from lightning_hybrid.comm.plan import CommPlan
from lightning_hybrid.comm.topology import Topology, host_identity


class OrderError(RuntimeError):
    """An error where ranks submit different tensors, or submit them in different order."""


def hash_of_sources(package: Path) -> str:
    """Return twelve digits that differ where a source file of a package does; of the files that are there."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


# Hash of what was imported, some milliseconds ago: files may change while a job runs.
SOURCES = hash_of_sources(Path(__file__).resolve().parents[2])


def software() -> dict[str, str]:
    """Return the versions that must be equal on all ranks.

    >>> sorted(software())
    ['lightning_hybrid', 'torch']
    """
    return {"torch": torch.__version__, "lightning_hybrid": f"sources {SOURCES}"}


def compare_plans(
    plan: CommPlan,
    topology: Topology,
    device: torch.device,
    across_nodes: object = None,
    group: dist.ProcessGroup | None = None,
    compared: Mapping[str, object] | None = None,
) -> tuple[str, list[str], list[list[str]]]:
    """Compare software, plan and topology over all ranks of a group (None: WORLD). Collective: all must call it.

    Returns:
        A token that is the same on all ranks and new each time, the host of every rank, and the addresses under which
        others know it.

    Raises:
        ValueError: on every rank, naming what differs.
    """
    own = {**json.loads(plan.to_json()), "nodes": topology.nodes, "device": device.type}
    own["dtype_across_nodes"] = str(across_nodes)  # a dtype, or a codec
    own |= compared or {}
    gathered: list[tuple[dict, dict, str, str, list[str]]] = [({}, {}, "", "", [])] * topology.world_size
    values = (own, software(), uuid.uuid4().hex, host_identity()[0], tcp_info.own_addresses())
    dist.all_gather_object(gathered, values, group=group)
    hosts = [host for *_, host, _ in gathered]
    if difference := differing([versions for _, versions, *_ in gathered]):
        raise ValueError(
            f"the software must be the same on all ranks: {difference}. Other code rounds otherwise, and the ranks' "
            f"weights part without a word. Install one environment on every host.{places_of([], hosts)}"
        )
    if difference := differing([values for values, *_ in gathered]):
        raise ValueError(
            f"the plan of communication must be the same on all ranks: {difference}. Give every rank the same "
            f"`strategy` options, from one configuration.{places_of([], hosts)}"
        )
    return gathered[0][2], hosts, [addresses for *_, addresses in gathered]


def max_over_ranks(times_s: Sequence[float], place: str, device: torch.device) -> list[float]:
    """Return the largest of each time over all ranks of WORLD, which must be at the same `place` of the training.

    Collective: every rank of WORLD must call it, with as many times.

    Raises:
        ValueError: on every rank, naming who is elsewhere.
    """
    digest = hashlib.sha256(place.encode()).digest()
    # One small all-reduce: places are compared by a hash that travels with the times, as the largest of it and of its
    # negative, which are one number where all are equal.
    words = [float(int.from_bytes(digest[at : at + 4], "big")) for at in (0, 4)]  # exact in fp64
    values = torch.tensor([*times_s, *words, *(-word for word in words)], dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    most = values.tolist()  # the largest of word and of -word are opposite only where all words are equal
    if most[-4:-2] != [-word for word in most[-2:]]:  # max(word) != min(word): some rank is elsewhere
        places: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(places, place)
        difference = differing([{"place in the training": each} for each in places])
        raise ValueError(
            f"all ranks must change the plan of communication after the same step: {difference}. Give every rank the "
            "same number of batches and the same `strategy` options, or write comm=Comm(tune='off')."
        )
    return most[: len(times_s)]
