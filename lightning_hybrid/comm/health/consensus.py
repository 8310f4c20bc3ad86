"""What must be equal on all ranks: software, plan and topology."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
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
    gathered: list[tuple[dict, dict, str, str, list[str]]] = [
        ({}, {}, "", "", [])
    ] * topology.world_size
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
