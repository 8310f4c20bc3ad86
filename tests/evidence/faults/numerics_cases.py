"""Faults of numbers, and the promise for each: skipped steps, a warning, or an error that names rank and batch."""

from typing import Any

from tests.evidence.faults.case import FaultCase

SKIPPED, LOST = "40 steps, skipped", "all since the last checkpoint"
FIRST_BAD = ("NonFiniteLossError: ", "on rank RANK first", "rank RANK (host HOST)")
NOTHING_NEW = "nothing"


def cases(num_ranks: int) -> list[FaultCase]:
    """Return all cases, for a world of `num_ranks`."""
    last: dict[str, Any] = {"rank": num_ranks - 1}
    skipped: dict[str, Any] = {**last, "num_steps": 100, "lost": SKIPPED}
    survived: dict[str, Any] = {**last, "is_survived": True, "has_same_weights": False}
    bad_loss = ("EndlessOverflowError: ", "inf or nan on 1 of", "rank RANK (host HOST) in batch")
    everywhere: dict[str, Any] = {"everywhere": True}
    silent: dict[str, Any] = {**survived, **everywhere, "num_steps": 25, "lost": NOTHING_NEW}

    def case(fault: str, kind: str, *names: str, **more: Any) -> FaultCase:
        return FaultCase(
            fault=fault, kind=kind, **({"warns": names} if "is_survived" in more else {"names": names}), **more
        )

    found = []
    for fault, kind, own in (
        ("nan in the loss", "nan_for_good", ()),
        ("inf in an image", "inf_in_images", ("1 of 128 values not finite, in samples 5",)),
        ("nan in a label", "nan_in_labels", ("1 of 32 values not finite, in samples 3",)),
    ):
        fault = f"{fault}, every batch of a rank"
        found.append(case(fault, kind, *bad_loss, own_names=(*bad_loss, *own), **skipped))
        found.append(case(fault, kind, *FIRST_BAD, precision="32-true", num_steps=100, lost=LOST, **last))
    for fault, kind in (("nan in one batch's loss", "nan_once"), ("inf in an image of one batch", "inf_in_one_batch")):
        said = "on rank RANK (host HOST) was inf or nan, the last: batch"
        found.append(case(fault, kind, said, lost="1 step, skipped", **survived))
    return [
        *found,
        case(
            "a label that no class has",
            "label_out_of_range",
            *("comm: rank RANK gave up: IndexError: Target 99 is out of bounds", "on host HOST"),
            own_names=("IndexError: Target 99", "On rank RANK (host HOST), in batch", " to 99."),
            **last,
        ),
        case(
            "a layer overflows",
            "layer_overflows",
            *("EndlessOverflowError: ", "The first layer to put out inf or nan was net.4 (Linear)"),
            **skipped,
            **everywhere,
        ),
        case(
            "every second step overflows: the scale at its floor",
            "overflows_now_and_then",
            *("`loss_scale` (=1) has been at its floor for", "on rank RANK (host HOST) was inf or nan"),
            num_steps=260,
            lost="every second step, skipped",
            **survived,
        ),
        case(
            "all gradients are zero", "zero_gradients", "All gradients are zero, at 3 logged steps in a row", **silent
        ),
        case(
            "a layer dies: its weights move no more",
            "layer_dies",
            *("The gradient of `net.0.weight`", "`net.4.weight`"),
            **silent,
        ),
    ]
