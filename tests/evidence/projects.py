"""The table of methods: `python -m tests.evidence.projects [rows.csv]`, in an environment with the extra `projects`."""

from __future__ import annotations

import csv
import sys
from statistics import median

import torch

from tests.projects.methods import METHODS, NUM_STEPS, distance, runs_of, trained
from tests.rank_pool import RankPool, Ranks
from tests.scenes import Seen, same


def seconds(seen: Seen) -> float:
    """Processor time of rank zero in the steps of a fit."""
    [began], [ended] = (seen.looks[hook] for hook in ("on_train_start", "on_train_end"))
    return ended - began


def rows(ranks: Ranks) -> list[dict[str, object]]:
    trained(ranks, "SimCLR", strategy="ddp")  # what is imported late
    found: list[dict[str, object]] = []
    for name in METHODS:
        runs = runs_of(ranks, name)
        row = {
            "method": name,
            "bits_of_ddp": same(runs["hybrid"].weights, runs["ddp"].weights),
            "distance_fp16": distance(runs["fixed"], runs, name),
            "band_1": distance(runs["shaken_1"], runs, name),
            "band_2": distance(runs["shaken_2"], runs, name),
            "skipped": runs["dynamic"].num_skipped,
            "scale_found": runs["dynamic"].loss_scale,
            "ddp_s": median(seconds(runs[key]) for key in ("ddp", "shaken_1", "shaken_2")),
            "hybrid_s": seconds(runs["hybrid"]),
            "fp16_s": median(seconds(runs[key]) for key in ("fixed", "dynamic")),
        }
        found.append(row)
        print(row, flush=True)
    for whose in ("lightly's", "ours") * 3:
        seen = trained(ranks, "SimCLR", lars=whose, strategy="ddp")
        found.append({"method": f"SimCLR, {whose} LARS", "ddp_s": seconds(seen)})
        print(found[-1], flush=True)
    return found


if __name__ == "__main__":
    pool = RankPool(num_ranks=2)
    table = rows(pool.ranks(2))
    pool.close()
    print(f"torch {torch.__version__}, {NUM_STEPS} steps of two ranks, processor seconds of rank zero")
    if path := dict(enumerate(sys.argv)).get(1):
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(table[0]))
            writer.writeheader()
            writer.writerows(table)
