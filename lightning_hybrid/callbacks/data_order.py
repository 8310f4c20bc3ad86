"""The settings that decide which rank reads which sample when: they must be the same on all ranks."""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import tree_leaves

NAMES = (
    *("seed", "epoch", "shuffle", "drop_last", "num_replicas", "total_size"),  # torch's DistributedSampler
    *("world_size", "global_batch_size", "num_images", "accumulate_grad_batches"),  # our EpochOrder
    "batch_size",
)


def order_of(loaders: Any) -> dict[str, Any]:
    """Collect what is known of the order of a loader, or of several, and does not depend on the rank.

    These are attributes of the loader, its sampler, its batch sampler's sampler and its order, and lengths.

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
            for name in NAMES:
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
