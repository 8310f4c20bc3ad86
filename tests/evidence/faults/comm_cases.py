"""Faults of ranks and links, each with a promise: either the run survives, or every rank names the cause."""

from typing import Any

from tests.evidence.faults.case import FaultCase
from tests.evidence.faults.inject import OF_A_SUM, PHASES

DEAD = ("rank RANK does not answer", "on host HOST")
STORE = (
    "the rendezvous store does not answer: rank 0, or the launcher that runs the store",
    "on host HOST",
)
GAVE_UP = ("comm: rank RANK gave up: OutOfMemoryError", "on host HOST")
FAILED_IN_STAGE = ("rank RANK failed on bucket 0 in stage `", "OutOfMemoryError", "on host HOST")
OUT_OF_MEMORY = ("OutOfMemoryError", "rank RANK (host HOST)")
HUNG = ("rank RANK is behind", "on host HOST")
HUNG_ELSEWHERE = ("rank RANK ", "Look there for a hang", "ank RANK is on host HOST")
OVER = ("end of fit", "teardown")
"""Phases after the last collective: the others need the rank no more, and end as if nothing had happened."""


def kinds_of_rank(num_ranks: int, ranks_per_host: int) -> list[int]:
    """Return a rank of each kind: 0 with the store, another rank of its host, another host's leader, and the last.

    >>> kinds_of_rank(4, 2), kinds_of_rank(2, 2), kinds_of_rank(16, 8)
    ([0, 1, 2, 3], [0, 1], [0, 1, 8, 15])
    """
    ranks = {0, 1, ranks_per_host, num_ranks - 1}
    return sorted(rank for rank in ranks if rank < num_ranks)


def cases(num_ranks: int, ranks_per_host: int) -> list[FaultCase]:
    """Return all cases for a world of `num_ranks`. The first is the run without a fault."""
    last = num_ranks - 1
    results = [FaultCase(fault="none", kind="nothing", rank=last, is_survived=True, lost="nothing")]
    for phase in PHASES:
        for rank in kinds_of_rank(num_ranks, ranks_per_host):
            results.append(_gone("rank dies", "dies", rank, phase))
            results.append(_gone("process stops", "stops", rank, phase))
    for phase in PHASES:
        for rank in (0, last):
            results.append(_gone("thread hangs", "hangs", rank, phase))
    common: dict[str, Any] = {"rank": last}
    for phase in ("forward", "backward", OF_A_SUM[1], "validation", "between epochs"):
        results.append(
            FaultCase(
                fault="rank lags by 3 s",
                kind="lags",
                phase=phase,
                is_survived=True,
                lost="nothing",
                **common,
            )
        )
    for phase in (
        "setup",
        "forward",
        "backward",
        OF_A_SUM[0],
        "update",
        "validation",
        "between epochs",
    ):
        results.append(_out_of_memory(last, phase))
    results += [
        FaultCase(
            fault="another plan from the start",
            kind="has_another_plan",
            phase="setup",
            names=("The communication plan must be the same", "on rank RANK", "host HOST"),
            lost="nothing",
            **common,
        ),
        FaultCase(
            fault="bucket plan changes in memory",
            kind="other_plan",
            names=("rank RANK", "on host HOST"),
            no_answer=True,  # Gloo ends a process that receives more than it requested
            **common,
        ),
    ]
    return results


def _out_of_memory(rank: int, phase: str) -> FaultCase:
    """Return the case of a rank that runs out of memory."""
    names: dict[str, Any] = {"names": GAVE_UP, "own_names": OUT_OF_MEMORY}
    if phase in OF_A_SUM:
        names = {"names": FAILED_IN_STAGE}
    return FaultCase(fault="out of memory", kind="raises", rank=rank, phase=phase, **names)


def _gone(fault: str, kind: str, rank: int, phase: str) -> FaultCase:
    """Return the case of a rank that no longer answers."""
    common: dict[str, Any] = {
        "fault": fault,
        "kind": kind,
        "rank": rank,
        "phase": phase,
        "no_answer": True,
    }
    if phase in OVER:
        return FaultCase(is_survived=True, lost="nothing", **common)
    if kind == "hangs":
        names = HUNG_ELSEWHERE if phase in ("setup", *OF_A_SUM) else HUNG
    else:
        names = DEAD if rank else STORE
    return FaultCase(names=names, **common)


def cases_of_links(num_ranks: int) -> list[FaultCase]:
    """Return the cases that need links between hosts."""
    last = num_ranks - 1
    cut = (("loss", 1.0),)
    lossy = (("loss", 0.02),)
    common: dict[str, Any] = {"kind": "nothing", "rank": last, "pause_s": 0.2}
    where = ("on bucket", "in stage `", "on host")
    survived: dict[str, Any] = {**common, "is_survived": True, "lost": "nothing", "timeout_s": 25.0}
    return [
        FaultCase(fault="link cut for 5 s", host_link=cut, mended_after_s=5.0, **survived),
        FaultCase(fault="2 % of frames lost", host_link=lossy, **survived),
        FaultCase(fault="link 20 times slower", host_link=(("mbit_per_s", 5.0),), **survived),
        FaultCase(
            fault="link cut for good",
            host_link=cut,
            names=("has sent nothing for", "its link is down", *where),
            **common,
        ),
        FaultCase(
            fault="link 10,000 times slower",
            host_link=(("mbit_per_s", 0.01),),
            names=("link", *where),
            # Both sides may be named: whether anything was heard in time differs from run to run.
            never_says=("dead",),
            **common,
        ),
    ]
