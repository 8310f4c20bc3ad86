"""Battery of faults under other options, on 4 ranks as 2 x 2: every end is bounded, and names the rank at fault."""

import random
from collections.abc import Sequence

from tests.evidence.faults.case import FaultCase

# What each rank says of the rank at fault; sums within a node count its ranks from 0, and say so.
SILENT = "rank RANK does not answer | rank PLACE does not answer | the store through which the ranks met"
HUNG = "rank RANK does not come | rank RANK stands behind | rank PLACE does not come | rank PLACE stands behind"
GAVE_UP = "rank RANK gave up: "
FAULTS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (  # name, kind, what others say, and the rank
    ("SIGKILL", "dies", (SILENT,), ()),
    ("SIGSTOP", "stops", (SILENT,), ()),
    ("hang", "hangs", (HUNG, "in `hangs` (inject.py:"), ()),
    ("raises", "raises", (f"{GAVE_UP}OutOfMemoryError",), ("OutOfMemoryError",)),
    ("None for a loss", "returns_none", (GAVE_UP,), ("On rank RANK", "None")),
    ("loader raises", "loader_raises", (f"{GAVE_UP}OSError",), ("OSError: the file of an image is gone",)),
    ("memory", "allocates_too_much", (f"{GAVE_UP}RuntimeError",), ("allocate memory",)),
    ("nan", "nan_for_good", ("EndlessOverflowError", "rank RANK (host HOST) in batch"), ()),
)


def cases(num_ranks: int, modes: Sequence[str]) -> list[FaultCase]:
    """Return the run without a fault, and each fault in each mode; ranks, steps and phases are drawn from the names."""
    found = [FaultCase(fault="none", kind="nothing", rank=0, is_survived=True, lost="nothing")]
    for mode in modes:
        for fault, kind, names, own_names in FAULTS:
            draw = random.Random(f"{mode} {fault}")
            rank, step = draw.randrange(num_ranks), draw.randint(5, 7)
            is_of_loss, no_answer = kind in ("returns_none", "nan_for_good"), kind in ("dies", "stops", "hangs")
            if mode == "pipeline" and is_of_loss:
                rank |= 1  # the last stage has the loss
            if mode == "fabric" and is_of_loss:  # no callback asks the others, and `backward` is the user's call
                names, own_names = (("EndlessOverflowError",), ()) if fault == "nan" else (names, ("None",))
            found.append(
                FaultCase(
                    fault=f"{mode}: {fault}",
                    kind=kind,
                    rank=rank,
                    mode=mode,
                    step=step,
                    phase=draw.choice(("forward", "update", "validation")) if no_answer else "forward",
                    names=names,
                    own_names=own_names or None,
                    no_answer=no_answer,
                    timeout_s=8.0,
                    num_steps=100,
                )
            )
    return found
