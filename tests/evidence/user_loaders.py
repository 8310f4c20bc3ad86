"""Loaders of users, stopped and resumed: `python -m tests.evidence.user_loaders ARM WORKERS RANKS > rows.csv`.

ARM: `hybrid_allreduce`, `ddp`, or `stateful`: `ddp` with torchdata's StatefulDataLoader in each place of a DataLoader.
"""

from __future__ import annotations

import csv
import logging
import sys
import tempfile
from typing import Any

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


def main(arm: str, workers: int, ranks: int) -> None:
    """Print one row for each case: the worst of its ranks."""
    writer, pool = csv.writer(sys.stdout), RankPool(num_ranks=ranks)
    for name, kind in user_loaders.KINDS.items():
        if ranks not in kind.ranks or workers not in kind.workers:
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
            said = next((one["said"] for one in cases if "NotExact" in one["said"]), cases[0]["said"])
            words = said.replace("RuntimeError: ", "").replace("\n", " ")[:80]
            writer.writerow([arm, name, workers, ranks, cases[0]["stop"], cases[0]["batches"], images, numbers, words])
        sys.stdout.flush()
    pool.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
