"""The cache of tuned plans: one JSON file for each kind of cluster and set of gradients.

The cache key says how ranks are spread over nodes, device, backend, network, versions and buckets. Its hash is the
file's name, and it is in the file (as `facts`), to be compared when it is read. A file is written under another name
and moved into place, so that no half of one is ever read; a file that cannot be read is named, and otherwise ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_hybrid.atomic_file import atomic_path
from lightning_hybrid.comm.plan import BucketPlan, CommPlan
from lightning_hybrid.comm.topology import Topology
from lightning_hybrid.comm.tuning.change_detector import Baseline

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class CachedPlan:
    """A plan that tuning chose."""

    plan: CommPlan
    ratio: float  # time of a step over that under the plan it began with
    num_steps: int
    baseline: Baseline | None = None  # seconds per step with a bucket in flight; None: the run ended too early


def cache_key(
    topology: Topology, buckets: Iterable[BucketPlan], device: torch.device, *, start: CommPlan, dtype_across: object
) -> dict[str, Any]:
    """Return what must be equal for a plan to be used again; `start`: the plan that tuning would begin with."""
    # Numbers, strings, lists and dictionaries only: it is hashed and compared as JSON.
    return {
        "format": FORMAT,
        "nodes": [list(node) for node in topology.nodes],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "backend": str(dist.get_backend()),
        "network": network_key(),
        "torch": str(torch.__version__),
        "lightning_hybrid": _own_version(),
        "start": start.plan_hash,
        "dtype_across_nodes": str(dtype_across),
        "buckets": [[bucket.numel, bucket.dtype] for bucket in buckets],
    }


def network_key() -> dict[str, Any]:
    """Return this host's interfaces that are up, with their nominal rate in Mbit/s (-1: none), and InfiniBand's.

    >>> "lo" in network_key()
    False
    """
    found: dict[str, Any] = {}
    for folder in sorted(Path("/sys/class/net").glob("*")):
        if folder.name != "lo" and _read(folder / "operstate") in ("up", "unknown"):
            found[folder.name] = int(_read(folder / "speed") or -1)
    for file in sorted(Path("/sys/class/infiniband").glob("*/ports/*/rate")):
        found[f"{file.parts[-4]}/{file.parts[-2]}"] = _read(file)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_ALGO", "NCCL_PROTO"):
        if name in os.environ:
            found[name] = os.environ[name]
    return found


def default_folder() -> Path:
    """Return the folder of the cache by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_hybrid" / "plans"


def path_of(folder: Path, key: Mapping[str, Any]) -> Path:
    """Return the file of a cache key.

    >>> path_of(Path("plans"), {"a": 1}).name == path_of(Path("plans"), {"a": 2}).name
    False
    """
    return folder / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.json"


def write_plan(folder: Path, key: Mapping[str, Any], cached: CachedPlan) -> Path:
    """Write a plan; returns its file.

    Raises:
        OSError: if the folder cannot be written.
    """
    path = path_of(folder, key)
    values = {
        "facts": key,
        "plan": json.loads(cached.plan.to_json()),
        "ratio": cached.ratio,
        "num_steps": cached.num_steps,
        # The keys `facts` and `level` are those of files that are there already.
        "level": None if cached.baseline is None else asdict(cached.baseline),
    }
    folder.mkdir(parents=True, exist_ok=True)
    # Several runs may tune the same case at once, over one home directory.
    with atomic_path(path, has_rivals=True) as part:
        part.write_text(json.dumps(values, indent=2) + "\n")
    return path


def read_plan(folder: Path, key: Mapping[str, Any]) -> CachedPlan | None:
    """Read the plan of this cache key; None where there is none.

    Raises:
        ValueError: naming a file that is there and cannot be used.
    """
    path = path_of(folder, key)
    try:
        values = json.loads(path.read_text())
        if values["facts"] != json.loads(json.dumps(key)):  # as JSON, in which tuples are lists
            raise ValueError("its facts are of another case")
        level = values["level"]
        return CachedPlan(
            plan=CommPlan.from_json(json.dumps(values["plan"])),
            ratio=float(values["ratio"]),
            num_steps=int(values["num_steps"]),
            baseline=None if level is None else Baseline(seconds=float(level["seconds"]), sigma=float(level["sigma"])),
        )
    except FileNotFoundError:  # the usual case: this was never tuned
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"`{path}` holds no plan that can be used ({type(error).__name__}: {error}): it is left alone, and the "
            "plan is tuned again. Remove the file, or set `strategy.tune_cache_dir` to another folder."
        ) from error


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _own_version() -> str:
    try:
        return version("lightning-hybrid")
    except PackageNotFoundError:
        return "unknown"
