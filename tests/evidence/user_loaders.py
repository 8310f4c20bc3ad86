"""Loaders of users, stopped and resumed: `python -m tests.evidence.user_loaders ARM WORKERS RANKS [KIND ...]`.

`... cost` prints what a batch costs. ARM: `hybrid_allreduce`, `ddp`, or `stateful`: `ddp` with torchdata's
StatefulDataLoader in each place of a DataLoader.
"""

from __future__ import annotations

import csv
import itertools
import logging
import sys
import tempfile
import time
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from lightning_hybrid.data.exact_loader import exact
from lightning_hybrid.strategy.exact_resume.training_loaders import LoopReader
from tests.data import user_loaders
from tests.rank_pool import RankPool


def on_rank(arm: str, *args: Any) -> list[dict[str, Any]]:
    """Outcomes of a row under an arm."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    plain = user_loaders.DataLoader
    try:
        if arm == "stateful":
            from torchdata.stateful_dataloader import StatefulDataLoader

            user_loaders.DataLoader = StatefulDataLoader  # type: ignore[misc]
        name, workers, folder = args
        return user_loaders.outcomes(name, "ddp" if arm == "stateful" else arm, workers, folder)
    finally:
        user_loaders.DataLoader = plain  # type: ignore[misc]


def main(arm: str, workers: int, ranks: int, names: list[str]) -> None:
    """Print one row for each case: the worst of its ranks."""
    writer, pool = csv.writer(sys.stdout), RankPool(num_ranks=ranks)
    for name, kind in user_loaders.KINDS.items():
        if ranks not in kind.ranks or workers not in kind.workers or (names and name not in names):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = pool.ranks(ranks).run(on_rank, arm, name, workers, folder, timeout_s=300)
            except AssertionError as error:
                print(f"{name}: {str(error)[-300:]}", file=sys.stderr)
                writer.writerow([arm, name, workers, ranks, "all", "", "", "", str(error).splitlines()[-1][:80]])
                continue
        for cases in zip(*found, strict=True):
            images, numbers = (max(one[key] for one in cases) for key in ("images", "numbers"))
            said = next((one["said"] for key in ("NotExact", "") for one in cases if key in one["said"] != ""), "")
            words = said.replace("RuntimeError: ", "").replace("\n", " ")[:80]
            writer.writerow([arm, name, workers, ranks, cases[0]["stop"], cases[0]["batches"], images, numbers, words])
        sys.stdout.flush()
    pool.close()


class Numbers(Dataset):
    """Costs nothing to read."""

    def __len__(self) -> int:
        return 1024 * 300

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class Own(WeightedRandomSampler):
    """Of no known kind."""


def us_per_batch(batches: Any, with_state: bool) -> float:
    """Processor time of this process."""
    begin = time.process_time()
    for _ in islice(batches, 300):
        if with_state:  # as the prefetcher asks for it
            batches.state_dict()
    return (time.process_time() - begin) / 300 * 1e6


def cost() -> None:
    """Print microseconds of a plain loader and of an exact one, in turns; the least of five each."""
    torch.set_num_threads(1)
    of_a_kind: dict[str, Any] = {
        "shuffle": {"shuffle": True},
        "unknown": {"sampler": Own([1.0] * 1024 * 300, 1024 * 300)},
    }
    for (name, options), batch_size, workers in itertools.product(of_a_kind.items(), (256, 1024), (0, 2)):
        plain = DataLoader(Numbers(), batch_size, num_workers=workers, collate_fn=len, **options)
        pairs = [(us_per_batch(plain, False), us_per_batch(exact(plain, LoopReader(0, 1, 3)), True)) for _ in range(5)]
        one, other = (min(times) for times in zip(*pairs, strict=True))
        print(
            f"{name}, batch {batch_size}, {workers} workers: {one:.0f} us, exact {other:.0f} us, +{other - one:.0f} us"
        )


if __name__ == "__main__":
    if sys.argv[1] == "cost":
        cost()
        sys.exit()
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
