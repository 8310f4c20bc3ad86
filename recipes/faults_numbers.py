"""Faults of numbers, and what is promised of each: a skipped step, or an error that says which rank and batch."""

from __future__ import annotations

from recipes.faults_comm import Case


def cases(num_ranks: int) -> list[Case]:
    """All of them, for a world of so many ranks."""
    last = num_ranks - 1
    bad_loss = ("EndlessOverflowError: ", "inf or nan on 1 of", "rank RANK (host HOST) in batch")
    return [
        Case(
            fault="nan in one batch's loss",
            kind="nan_once",
            rank=last,
            is_survived=True,
            has_same_weights=False,
            lost="1 step, skipped",
        ),
        Case(
            fault="nan in every loss of a rank",
            kind="nan_for_good",
            rank=last,
            num_steps=100,
            names=bad_loss,
            lost="40 steps, skipped",
        ),
        Case(
            fault="nan in every loss of a rank",
            kind="nan_for_good",
            rank=last,
            precision="32-true",
            num_steps=100,
            names=("NonFiniteLossError: ", "on rank RANK first", "rank RANK (host HOST)"),
            lost="all since the last checkpoint",
        ),
        Case(
            fault="a layer overflows",
            kind="layer_overflows",
            rank=last,
            everywhere=True,
            num_steps=100,
            names=("EndlessOverflowError: ", "The first layer to put out inf or nan was net.4 (Linear)"),
            lost="40 steps, skipped",
        ),
        Case(
            fault="a layer overflows on one rank",
            kind="layer_overflows",
            rank=last,
            num_steps=100,
            names=("no longer hold the same model", "`net.4.weight` on rank RANK (host HOST)"),
            lost="steps since the last check, 5",
        ),
    ]
