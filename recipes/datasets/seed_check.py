"""Check of the seed of a data module."""

from __future__ import annotations

from typing import Any

from lightning_hybrid.checks import require_whole


def require_seed(seed: Any) -> None:
    """Raise `ValueError` unless `seed` is an integer of at least 0."""
    require_whole(
        "seed", seed, "random number generators accept no other seeds. Set data.seed=0", least=0
    )
