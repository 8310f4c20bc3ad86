"""Runs each arm on five seeds, resumably: `python -m tests.evidence.local_sgd <folder> [budget in seconds]`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.evidence.local_sgd.report import write_report
from tests.evidence.local_sgd.training import ARMS, train

SEEDS = (1, 2, 3, 4, 5)

# Powers of two. Seed 0 chooses among them by accuracy in validation; the first is tried first.
RATES = {
    ("SGD", "synchronous, 128 images"): (0.25, 0.125, 0.5),
    ("SGD", "synchronous, 1,024 images"): (0.5, 0.25, 1.0),
    ("SGD", "synchronous, 8,192 images"): (1.0, 0.5, 2.0),
    ("orthogonal", "synchronous, 128 images"): (32.0, 16.0, 64.0),
    ("orthogonal", "synchronous, 1,024 images"): (64.0, 32.0, 128.0),
    ("orthogonal", "synchronous, 8,192 images"): (64.0, 32.0, 128.0),
    ("orthogonal", "16 steps of 64, int8, outer step 0.7, 0.9"): (16.0, 8.0, 32.0),
}
# Of local steps, by their images.
RATES_OF_LOCAL = {
    ("SGD", 64): (0.25, 0.125, 0.5),
    ("SGD", 128): (0.5, 0.25, 1.0),
    ("orthogonal", 64): (64.0, 32.0, 128.0),
    ("orthogonal", 128): (128.0, 64.0, 256.0),
}

# What answers most comes first.
FIRST = ("16 steps of 64, int8", "synchronous, 128 images", "4 steps of 64, int4", "synchronous, 8,192 images")


def cells() -> Iterator[tuple[str, str, float, int]]:
    """Yield optimizer, arm, rate and seed in the order of their worth, without a choice of rates."""
    for seed in (0, *SEEDS):
        for arm in (*FIRST, *(one for one in ARMS if one not in FIRST)):
            for kind in ("orthogonal", "SGD"):
                yield kind, arm, rates_of(kind, arm)[0], seed


def rates_of(kind: str, arm: str) -> tuple[float, ...]:
    """Return the rates that are tried."""
    return RATES.get((kind, arm)) or RATES_OF_LOCAL[kind, ARMS[arm].images_per_step]


def main() -> None:
    """Run what is missing: all arms at their first rate, then the other rates, then the seeds of better ones."""
    folder, budget_s = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else float("inf")
    folder.mkdir(parents=True, exist_ok=True)
    path, began_s = folder / "rows.jsonl", time.monotonic()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def run(kind: str, arm: str, lr: float, seed: int) -> None:
        key = {"optimizer": kind, "arm": arm, "lr": lr, "seed": seed}
        if time.monotonic() - began_s > budget_s or any(key.items() <= row.items() for row in rows):
            return
        run_began_s = time.monotonic()
        rows.append(key | train(ARMS[arm], kind, lr, seed) | {"seconds": round(time.monotonic() - run_began_s, 1)})
        with path.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        write_report(folder, rows)

    for cell in cells():
        run(*cell)
    pairs = [(kind, arm) for arm in ARMS for kind in ("orthogonal", "SGD")]
    for kind, arm in pairs:
        for lr in rates_of(kind, arm):
            run(kind, arm, lr, 0)
    for kind, arm in pairs:
        tried = [row for row in rows if (row["optimizer"], row["arm"], row["seed"]) == (kind, arm, 0)]
        for seed in SEEDS if tried else ():
            run(kind, arm, max(tried, key=lambda row: row["val"])["lr"], seed)
    write_report(folder, rows)


if __name__ == "__main__":
    main()
