"""Faults of ranks and links, and what is promised of each: an error on every rank, soon, that names the cause; or none.

Steps, phases and ranks are ours. Waits of collectives are limited to ``timeout_s``; an error may take this and what the
roll call and a silent store cost (``ALLOWED_S``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Timer
from typing import Any

from recipes.fault_table import Outcome
from recipes.faults_rank import train
from recipes.faults_world import OneHost, Told

ALLOWED_S = 25.0
"""Beyond the timeout: four words of 5 s that the store leaves unanswered, and as long as a failed engine may close."""

START_S = 60.0
"""For processes to start and the steps before the fault; a case that needs more is ended, and its promise not held."""

LINE = 150


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault, where it is injected, and what is promised.

    ``kind``: a method of ``faults_rank.Inject``. ``host_link``: what ``spoil_link`` is told for the host of ``rank``.
    ``mended_after_s``: when the link is whole again; None: never. ``is_survived``: the run ends, with the very weights
    of an undisturbed one if ``has_same_weights``. Else every rank that can must end in an error that contains each of
    ``names``, in which RANK and HOST stand for the rank's number and its host's name. ``no_answer``: the rank itself
    cannot say anything. ``own_names``: what it says, where that is its own error; None: ``names``. ``everywhere``: the
    fault is on every rank.
    """

    fault: str
    kind: str
    rank: int
    phase: str = "forward"
    step: int = 6
    is_survived: bool = False
    names: tuple[str, ...] = ()
    own_names: tuple[str, ...] | None = None
    no_answer: bool = False
    everywhere: bool = False
    host_link: tuple[tuple[str, float], ...] | None = None
    mended_after_s: float | None = None
    pause_s: float = 0.0
    timeout_s: float = 10.0
    precision: str = "16-true"
    num_steps: int = 12
    lost: str = "the step under way"
    has_same_weights: bool = True

    @property
    def promise(self) -> str:
        """In the table."""
        return (
            "survived, same bits"
            if self.is_survived and self.has_same_weights
            else ("survived, ranks alike" if self.is_survived else "named on every rank")
        )


DEAD = ("rank RANK does not answer", "on host HOST")
GAVE_UP = ("comm: rank RANK gave up: OutOfMemoryError", "on host HOST")
OUT_OF_MEMORY = ("OutOfMemoryError", "rank RANK (host HOST)")


def cases(num_ranks: int) -> list[Case]:
    """All of them, for a world of so many ranks."""
    last = num_ranks - 1
    found = [
        Case(fault="none", kind="nothing", rank=last, is_survived=True, lost="nothing"),
    ]
    for rank in (0, last):
        for phase in ("forward", "backward", "update"):
            dead = DEAD if rank else ("rank 0, or the launcher that keeps it, is dead", "on host HOST")
            found.append(Case(fault="rank dies", kind="dies", rank=rank, phase=phase, names=dead, no_answer=True))
    for phase in ("forward", "backward"):
        found.append(Case(fault="process stops", kind="stops", rank=last, phase=phase, names=DEAD, no_answer=True))
    hung = ("rank RANK stands behind", "on host HOST")
    found += [
        Case(fault="training thread hangs", kind="hangs", rank=last, phase="backward", names=hung, no_answer=True),
        Case(fault="rank lags by 3 s", kind="lags", rank=last, phase="forward", is_survived=True, lost="nothing"),
        Case(fault="rank lags by 3 s", kind="lags", rank=last, phase="backward", is_survived=True, lost="nothing"),
    ]
    for phase in ("forward", "backward", "update"):
        found.append(
            Case(
                fault="out of memory",
                kind="raises",
                rank=last,
                phase=phase,
                names=GAVE_UP,
                own_names=OUT_OF_MEMORY,
            )
        )
    found += [
        Case(
            fault="another plan from the start",
            kind="starts_with_another_plan",
            phase="setup",
            rank=last,
            names=("the plan of communication must be the same", "on rank RANK", "host HOST"),
            lost="nothing",
        ),
        Case(
            fault="bucket plan changes in memory",
            kind="other_plan",
            rank=last,
            names=("rank RANK", "on host HOST"),
            no_answer=True,  # Gloo ends a process that gets more than it asked for
        ),
        Case(
            fault="one bit of a weight flips",
            kind="bit_flips",
            rank=last,
            phase="forward",
            names=("no longer hold the same model", "the fp32 master of `net.4.weight` on rank RANK (host HOST)"),
            lost="steps since the last check, 5",
        ),
    ]
    return found


def cases_of_links(num_ranks: int) -> list[Case]:
    """Those that need links between hosts."""
    last = num_ranks - 1
    cut, lossy = (("loss", 1.0),), (("loss", 0.02),)
    common: dict[str, Any] = {"kind": "nothing", "rank": last, "pause_s": 0.2}
    survived: dict[str, Any] = {**common, "is_survived": True, "lost": "nothing", "timeout_s": 25.0}
    return [
        Case(fault="link cut for 5 s", host_link=cut, mended_after_s=5.0, **survived),
        Case(fault="2 % of frames lost", host_link=lossy, **survived),
        Case(fault="link 20 times slower", host_link=(("mbit_per_s", 5.0),), **survived),
        Case(fault="link cut for good", host_link=cut, names=("comm: ", "on host"), **common),
        Case(
            fault="link 10,000 times slower", host_link=(("mbit_per_s", 0.01),), names=("comm: ", "on host"), **common
        ),
    ]


def run_case(case: Case, world: OneHost, weights: int | None = None) -> tuple[Outcome, int | None]:
    """Inject it; the outcome, and a fingerprint of the weights where they are the same on all ranks.

    ``weights``: of an undisturbed run, to be compared with.
    """
    no_answer = (case.rank,) if case.no_answer else ()
    spec = {name: getattr(case, name) for name in ("kind", "rank", "phase", "step", "pause_s", "timeout_s")}
    spec |= {"precision": case.precision, "num_steps": case.num_steps}
    spec["rank"] = None if case.everywhere else case.rank
    limit_s = START_S + case.timeout_s + ALLOWED_S
    told = world.run(train, spec, limit_s=limit_s, no_answer=no_answer, when_injected=_spoiler(case, world))
    alike = {None if one is None else one["weights"] for one in told.ranks}
    outcome = judge(case, told, host=world.host_name(world.host_of(case.rank)), no_answer=no_answer, weights=weights)
    return outcome, alike.pop() if len(alike) == 1 else None


def judge(case: Case, told: Told, *, host: str, no_answer: Sequence[int] = (), weights: int | None = None) -> Outcome:
    """Whether the promise was held, by what the ranks wrote."""
    living = [(rank, one) for rank, one in enumerate(told.ranks) if rank not in no_answer]
    problems = [f"rank {rank} still ran" for rank in told.still_ran]
    problems += [f"rank {rank} left no word" for rank, one in living if one is None and rank not in told.still_ran]
    errors = {rank: one["error"] for rank, one in living if one is not None and one["error"]}
    seconds = None
    if told.injected_s is None:
        problems.append("the fault was never injected")
    elif errors:
        seconds = max(one["time_s"] for _, one in living if one is not None) - told.injected_s
    if case.is_survived:
        problems += [f"rank {rank}: {error}" for rank, error in errors.items()]
        found = {one["weights"] for _, one in living if one is not None}
        if len(found) > 1:
            problems.append("ranks end with different weights")
        elif case.has_same_weights and weights is not None and found != {weights}:
            problems.append("the weights are not those of an undisturbed run")
    else:
        problems += [f"rank {rank} ended without an error" for rank, one in living if one and not one["error"]]
        for rank, error in errors.items():
            names = case.names if case.own_names is None or rank != case.rank else case.own_names
            asked = [name.replace("RANK", str(case.rank)).replace("HOST", host) for name in names]
            problems += [f"rank {rank} does not say {name!r}: {error}" for name in asked if name not in error]
        if seconds is not None and seconds > case.timeout_s + ALLOWED_S:
            problems.append(f"after {seconds:.0f} s, beyond {case.timeout_s + ALLOWED_S:g}")
    where = f"host {host}" if case.host_link else f"rank {case.rank} of {len(told.ranks)}"
    seen = next(iter(errors.values()), "all ranks end with the same weights")
    return Outcome(
        promise=case.promise,
        fault=case.fault,
        phase=case.phase,
        where="every rank" if case.everywhere else where,
        detected_by="; ".join(problems)[:LINE] if problems else shorten(seen),
        seconds=seconds,
        lost=case.lost,
        is_held=not problems,
    )


def shorten(text: str) -> str:
    """The first ``LINE`` characters of an error, from where it is ours.

    >>> shorten("RuntimeError: [enforce fail] comm: rank 1 does not answer")
    'comm: rank 1 does not answer'
    """
    text = " ".join(text[max(0, text.find("comm: ")) :].split())
    return text if len(text) <= LINE else text[: LINE - 3] + "..."


def _spoiler(case: Case, world: OneHost) -> Callable[[], None] | None:
    if case.host_link is None:
        return None
    host, link = world.host_of(case.rank), dict(case.host_link)

    def spoil() -> None:
        world.spoil_link(host, **link)
        if case.mended_after_s is not None:
            Timer(case.mended_after_s, world.spoil_link, [host]).start()

    return spoil
