"""Faults that no rank notices by itself: one rank holds another model, or reads other data, than it should."""

from __future__ import annotations

from typing import Any

from tests.evidence.faults.case import FaultCase

CHECKED_EVERY = "steps since the last check, 5"
PARTED = "no longer hold the same model; they parted"


def cases(num_ranks: int) -> list[FaultCase]:
    """Return all cases, for a world of `num_ranks`."""
    last: dict[str, Any] = {"rank": num_ranks - 1}
    setup: dict[str, Any] = {**last, "phase": "setup", "lost": "nothing"}
    drift = (PARTED, "between steps 5 and 10", "on rank RANK (host HOST)")
    return [
        FaultCase(fault="another seed of the weights", kind="has_another_seed", is_survived=True, **setup),
        FaultCase(
            fault="another network",
            kind="has_another_network",
            names=(
                "comm: rank RANK gave up: ",
                "appears not to match sizes of the same param in process 0",
                "on host HOST",
            ),
            own_names=("appears not to match sizes of the same param in process 0", "On rank RANK (host HOST)"),
            **setup,
        ),
        FaultCase(
            fault="another version of the software",
            kind="has_another_version",
            names=("the software must be the same on all ranks: `torch` is", "2.5.0' on rank RANK", "on host HOST"),
            **setup,
        ),
        FaultCase(
            fault="another checkpoint",
            kind="loads_another_checkpoint",
            names=(PARTED, "when training started", "`net.4.weight` on rank RANK (host HOST)"),
            step=0,
            **setup,
        ),
        FaultCase(
            fault="another order of the data",
            kind="has_another_order",
            names=(
                "different orders; seen when training started",
                "`seed` is 0 on ranks",
                "1 on rank RANK",
                "host HOST",
            ),
            **setup,
        ),
        FaultCase(
            fault="another order of the data from the next epoch on",
            kind="reseeds_the_data",
            names=("different orders; seen between steps 5 and 10", "1 on rank RANK", "host HOST"),
            lost=CHECKED_EVERY,
            **last,
        ),
        FaultCase(
            fault="one bit of a master weight flips",
            kind="master_bit_flips",
            names=(*drift, "the fp32 master of `net.4.weight`"),
            lost=CHECKED_EVERY,
            **last,
        ),
        FaultCase(
            fault="one bit of the momentum flips",
            kind="momentum_bit_flips",
            names=(*drift, "`net.4.weight`"),
            lost=CHECKED_EVERY,
            **last,
        ),
        FaultCase(
            fault="one bit of a weight flips",
            kind="half_bit_flips",
            precision="32-true",
            names=(*drift, "`net.4.weight`"),
            lost=CHECKED_EVERY,
            **last,
        ),
        FaultCase(
            fault="one bit of an fp16 copy flips",
            kind="half_bit_flips",
            is_survived=True,
            has_same_weights=False,
            lost="one step is that of a weight off by this bit, on all ranks alike",
            **last,
        ),
        FaultCase(
            fault="a layer's weights are overwritten",
            kind="layer_overflows",
            names=(*drift, "`net.4.weight`"),
            lost=CHECKED_EVERY,
            num_steps=100,
            **last,
        ),
    ]
