"""A user's own `DataLoader` resumes with the images that were left and the random numbers of their transforms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_hybrid import HybridAllReduceStrategy, HybridPipelineStrategy
from tests import toy
from tests.data import user_loaders
from tests.data.user_loaders import KINDS, Images, Kind, Saves, after, fit, of, outcomes
from tests.rank_pool import RankError

pytestmark = pytest.mark.filterwarnings("ignore")
HYBRID = "hybrid_allreduce"
GRID = [
    pytest.param(name, workers, ranks, id=f"{name}-{workers} workers-{ranks} ranks")
    for name, kind in KINDS.items()
    for workers in kind.workers
    for ranks in kind.ranks
]


def wrong(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cases in which something differs, or is refused, without a reason that the kind gives."""
    reason = KINDS[cases[0]["kind"]].is_refused
    return [
        one
        for one in cases
        if (one["images"] or one["numbers"] or "NotExactError" in one["said"])
        and not (reason and reason in one["said"])
    ]


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("name", "workers", "ranks"), GRID)
def test_what_is_left_is_read_or_refused_by_name(rank_pool, tmp_path, name, workers, ranks):
    """Five stops of each row: an epoch's end, both sides of it, and within the first, second and last epoch."""
    found = rank_pool.ranks(ranks).run(outcomes, name, HYBRID, workers, str(tmp_path), timeout_s=300)
    assert [wrong(cases) for cases in found] == [[]] * ranks


def test_the_grid_has_three_hundred_cases():
    assert len(GRID) * len(user_loaders.STOPS) >= 300
    assert any(kind.is_refused for kind in KINDS.values())
