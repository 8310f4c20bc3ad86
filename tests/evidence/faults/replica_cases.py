"""Faults that no rank notices by itself: one rank holds another model, or reads other data, than it should."""

from typing import Any

from tests.evidence.faults.case import FaultCase

CHECKED_EVERY = "steps since the last check, 5"
PARTED = "no longer hold the same model; they parted"


def cases(num_ranks: int) -> list[FaultCase]:
    """Return all cases, for a world of `num_ranks`."""
    last: dict[str, Any] = {"rank": num_ranks - 1}
    setup: dict[str, Any] = {**last, "phase": "setup", "lost": "nothing"}
    drift = (PARTED, "between steps 5 and 10", "on rank RANK (host HOST)")
    checked: dict[str, Any] = {**last, "lost": CHECKED_EVERY}

    def case(fault: str, kind: str, *names: str, **more: Any) -> FaultCase:
        return FaultCase(fault=fault, kind=kind, names=names, **more)

    sizes, other_order = "appears not to match sizes of the same param in process 0", "different orders; seen"
    return [
        case("another seed of the weights", "has_another_seed", is_survived=True, **setup),
        case(
            "another network",
            "has_another_network",
            *("comm: rank RANK gave up: ", sizes, "on host HOST"),
            own_names=(sizes, "On rank RANK (host HOST)"),
            **setup,
        ),
        case(
            "another version of the software",
            "has_another_version",
            *("the software must be the same on all ranks: `torch` is", "2.5.0' on rank RANK", "on host HOST"),
            **setup,
        ),
        case(
            "another checkpoint",
            "loads_another_checkpoint",
            *(PARTED, "when training started", "`net.4.weight` on rank RANK (host HOST)"),
            step=0,
            **setup,
        ),
        case(
            "another order of the data",
            "has_another_order",
            *(f"{other_order} when training started", "`seed` is 0 on ranks", "1 on rank RANK", "host HOST"),
            **setup,
        ),
        case(
            "another order of the data from the next epoch on",
            "reseeds_the_data",
            *(f"{other_order} between steps 5 and 10", "1 on rank RANK", "host HOST"),
            **checked,
        ),
        case(
            "one bit of a master weight flips",
            "master_bit_flips",
            *(*drift, "the fp32 master of `net.4.weight`"),
            **checked,
        ),
        case("one bit of the momentum flips", "momentum_bit_flips", *drift, "`net.4.weight`", **checked),
        case("one bit of a weight flips", "half_bit_flips", *drift, "`net.4.weight`", precision="32-true", **checked),
        case(
            "one bit of an fp16 copy flips",
            "half_bit_flips",
            is_survived=True,
            has_same_weights=False,
            lost="one step is that of a weight off by this bit, on all ranks alike",
            **last,
        ),
        case(
            "a layer's weights are overwritten", "layer_overflows", *drift, "`net.4.weight`", num_steps=100, **checked
        ),
    ]
