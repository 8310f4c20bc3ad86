"""Verification that all ranks have the same software versions, communication plan and topology."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_hybrid.comm.health import tcp_info
from lightning_hybrid.comm.health.diagnosis import differing, places_of
from lightning_hybrid.comm.plan import CommPlan
from lightning_hybrid.comm.topology import Topology, host_identity


class OrderError(RuntimeError):
    """Error raised when ranks submit different tensors to the all-reduce, or in a different order."""


def hash_of_sources(package: Path) -> str:
    """Return a hash of a package's Python source files, as twelve hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        relative_path = str(path.relative_to(package))
        digest.update(relative_path.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


# Computed at import, because files may change while a job runs.
SOURCES = hash_of_sources(Path(__file__).resolve().parents[2])


def software() -> dict[str, str]:
    """Return the versions of torch and of this package, which must be equal on all ranks.

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
    """Raise if ranks of a group have different software versions, communication plans or topologies.

    Collective: every rank of the group must call it, in the same order.

    Args:
        plan: Communication plan of this rank.
        topology: Topology, from the perspective of this rank.
        device: Device of the gradients. Its type is compared.
        across_nodes: Dtype or codec of reductions between nodes.
        group: Process group. None means WORLD.
        compared: Further values to compare, by name.

    Returns:
        A new token that is equal on all ranks, the host of every rank, and the addresses by which other hosts know each
        host.

    Raises:
        ValueError: Software, plan or topology differ. The error is raised on every rank and names the differences.
    """
    # Only builtin types are sent, because ranks with different versions of this package must be able to unpickle them.
    setup = {
        "plan": _compared_values(plan, topology, device, across_nodes, compared),
        "versions": software(),
        "token": uuid.uuid4().hex,
        "host": host_identity()[0],
        "addresses": tcp_info.own_addresses(),
    }
    setups: list[dict[str, Any]] = [{}] * topology.world_size
    dist.all_gather_object(setups, setup, group=group)

    hosts = [rank_setup["host"] for rank_setup in setups]
    _check_equal(setups, hosts)
    return setups[0]["token"], hosts, [rank_setup["addresses"] for rank_setup in setups]


def _compared_values(
    plan: CommPlan,
    topology: Topology,
    device: torch.device,
    across_nodes: object,
    compared: Mapping[str, object] | None,
) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(plan.to_json())
    values["nodes"] = topology.nodes
    values["device"] = device.type
    values["dtype_across_nodes"] = str(across_nodes)
    if compared is not None:
        values.update(compared)
    return values


def _check_equal(setups: Sequence[dict[str, Any]], hosts: Sequence[str]) -> None:
    difference = differing([setup["versions"] for setup in setups])
    if difference:
        raise ValueError(
            f"The software must be the same on all ranks: {difference}. Different versions can round differently, "
            "which would make the weights of the ranks diverge silently. Install the same environment on every "
            f"host.{places_of([], hosts)}"
        )
    difference = differing([setup["plan"] for setup in setups])
    if difference:
        raise ValueError(
            f"The communication plan must be the same on all ranks: {difference}. Use the same `strategy` options on "
            f"every rank, from one configuration.{places_of([], hosts)}"
        )
