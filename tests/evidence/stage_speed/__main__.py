"""Measure whole networks in stages: `python -m tests.evidence.stage_speed FOLDER`, on quiet cores; some minutes.

Every arm has the same images and micro-batches in a step, so its arithmetic is that of accumulation on one rank:

    accumulation       8 micro-batches, one after the other, on one rank
    n data ranks       8 / n micro-batches on each, and one all-reduce of the gradients
    n stages           8 micro-batches through n stages of the network, balanced by operations

Arms take turns in every round, each in fresh processes of one thread. Writes `rows.jsonl` and `README.md`, a record.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.cli.results import MIB, environment
from tests.evidence.stage_speed.fits import ARMS, SETTINGS, Arm, fit
from tests.rank_pool import RankPool

LIMIT_S = 600.0


def main() -> None:
    """Measure, print the tables, write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--networks", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--precisions", nargs="+", default=["32-true"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="that count, in each round")
    asked = parser.parse_args()
    cases = [(network, precision) for network in asked.networks for precision in asked.precisions]
    rows = [row for network, precision in cases for row in measured(network, precision, asked.rounds, asked.steps)]
    asked.folder.mkdir(parents=True, exist_ok=True)
    first = {"about": SETTINGS, "environment": environment()}
    lines = [json.dumps(first, default=asdict), *map(json.dumps, rows)]
    (asked.folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (asked.folder / "README.md").write_text(record(rows, asked.rounds * asked.steps, sys.argv[1:]))
    print(f"written to {asked.folder.resolve()}")


def measured(network: str, precision: str, num_rounds: int, num_steps: int) -> list[dict[str, Any]]:
    """Measure all arms of a network, in turns; return a row for each, and print their table."""
    setting = SETTINGS[network]
    times_s: dict[Arm, list[float]] = {arm: [] for arm in ARMS}
    peaks: dict[Arm, list[list[int]]] = {arm: [] for arm in ARMS}
    for _ in range(num_rounds):
        for arm in ARMS:
            pool = RankPool(num_ranks=arm.num_ranks)
            found = pool.run(fit, arm, setting, precision, num_steps, timeout_s=LIMIT_S)
            pool.close()
            # The slowest rank's: each of them is in the step until all have its gradients.
            times_s[arm] += [max(each) for each in zip(*(of_rank for of_rank, _ in found), strict=True)]
            peaks[arm].append([peak for _, peak in found])
    rows = [
        {
            "network": network,
            "precision": precision,
            "arm": arm.name,
            "kind": arm.kind,
            "num_ranks": arm.num_ranks,
            "images_per_step": setting.images_per_step,
            "times_s": times_s[arm],
            "images_per_s": [setting.images_per_step / each for each in times_s[arm]],
            "peak_bytes_by_rank": [statistics.median(of_rank) for of_rank in zip(*peaks[arm], strict=True)],
        }
        for arm in ARMS
    ]
    print(markdown(rows), end="\n\n", flush=True)
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Write the table of one network in one precision.

    Ratios are of medians, over accumulation alone; those in brackets over data parallelism on as many ranks.
    """
    speed = {(row["kind"], row["num_ranks"]): statistics.median(row["images_per_s"]) for row in rows}
    peak = {(row["kind"], row["num_ranks"]): max(row["peak_bytes_by_rank"]) for row in rows}

    def ratio(of: dict[Any, float], row: dict[str, Any]) -> str:
        own, data = of[row["kind"], row["num_ranks"]], of.get(("data ranks", row["num_ranks"]))
        over_data = f" ({own / data:.2f})" if data and row["kind"] != "data ranks" else ""
        return f"{own / of['accumulation', 1]:.2f}{over_data}"

    lines = [
        f"| {rows[0]['network']}, {rows[0]['precision']} | images/s, median (least to most) | ratio | "
        "peak of each rank in a step, MiB | ratio of the largest |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        speeds, peaks = row["images_per_s"], [f"{each / MIB:,.0f}" for each in row["peak_bytes_by_rank"]]
        spread = f"{statistics.median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})"
        lines.append(f"| {row['arm']} | {spread} | {ratio(speed, row)} | {' '.join(peaks)} | {ratio(peak, row)} |")
    return "\n".join(lines)


def record(rows: Sequence[dict[str, Any]], num_samples: int, words: Sequence[str]) -> str:
    """Write the record's README."""
    about = environment()
    cases = dict.fromkeys((row["network"], row["precision"]) for row in rows)
    tables = [markdown([row for row in rows if (row["network"], row["precision"]) == case]) for case in cases]
    sizes = "; ".join(
        f"{name}: {one.num_microbatches} micro-batches of {one.images_per_microbatch} images of {one.image_size} pixels"
        for name, one in SETTINGS.items()
        if any(row["network"] == name for row in rows)
    )
    num_cores = about["num_cores"]
    head = f"""# Whole networks in stages, against data parallelism and accumulation alone

```console
OMP_NUM_THREADS=1 python -m tests.evidence.stage_speed {shlex.join(words)}
```

* Commit: `{about["commit"]}`
* Versions: Python {about["python"]}, torch {about["torch"]}, Lightning {about["lightning"]}
* Machine: {num_cores} cores, {about["system"]}, {about["device"]}
* Runs: {num_samples} steps of each arm; arms in turns, each time in fresh processes of one thread
* A step: {sizes}; LARS
* Rows: [rows.jsonl](rows.jsonl): a first line with versions, then a line for each arm with every sample

Ratios are of medians, over accumulation on one rank; in brackets over data parallelism on as many ranks. Peak:
the most resident memory of a rank within the steps, beyond what its process had before the fit (median of rounds):
weights, gradients, optimizer state, activations, messages. Ranks share the {num_cores} cores, so that no arm can
be more than {num_cores} times as fast as one rank; M micro-batches on S even stages give at most
M S / (M + S - 1) times.
"""
    return head + "\n" + "\n\n".join(tables) + "\n"


if __name__ == "__main__":
    main()
