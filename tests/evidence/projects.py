"""Tables of other people's projects, in an environment with the extra `projects`.

python -m tests.evidence.projects methods rows.csv     lightly's eight methods, on two ranks
python -m tests.evidence.projects updates rows.csv     its LARS and ours on the tensors of ResNet-50
"""

from __future__ import annotations

import csv
import sys
from statistics import median
from time import process_time
from typing import Any

import torch
from lightly.utils.lars import LARS as TheirLARS

from lightning_hybrid.optim import LARS
from tests.projects.methods import METHODS, distance, runs_of, trained
from tests.rank_pool import RankPool
from tests.scenes import Seen, same

Row = dict[str, Any]


def seconds(seen: Seen) -> float:
    """Processor time of rank zero in the steps of a fit."""
    [began], [ended] = (seen.looks[hook] for hook in ("on_train_start", "on_train_end"))
    return ended - began


def methods() -> list[Row]:
    pool = RankPool(num_ranks=2)
    ranks, found = pool.ranks(2), []
    trained(ranks, "SimCLR", strategy="ddp")  # what is imported late
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
    pool.close()
    return found


def updates(num_rounds: int = 7, num_steps: int = 3) -> list[Row]:
    """Processor seconds of an update of 25.6 million parameters, the three in turns."""
    from torchvision.models import resnet50

    weights = list(resnet50().parameters())
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    common = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-6}
    as_theirs = {"momentum_form": "lr_outside", "eps": 1e-8}
    optimizers = {
        "lightly's": TheirLARS(weights, **common),
        "ours": LARS(weights, **common, **as_theirs),
        "ours, fused": LARS(weights, **common, **as_theirs, fused=True),
    }
    for each in optimizers.values():
        each.step()  # makes its state
    found = []
    for _ in range(num_rounds):
        for whose, each in optimizers.items():
            began = process_time()
            for _ in range(num_steps):
                each.step()
            found.append({"whose": whose, "seconds": (process_time() - began) / num_steps})
    return found


if __name__ == "__main__":
    table = {"methods": methods, "updates": updates}[sys.argv[1]]()
    with open(sys.argv[2], "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(table)
