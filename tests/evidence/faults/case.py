"""Description of a fault: where it is injected, what is promised, how it is run, and how the outcome is judged.

Steps, phases and ranks are our choice. Collectives time out after `timeout_s`. An error may take this time, plus the
time for collecting the status and for a silent store (`ALLOWED_S`).
"""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Timer
from typing import Any

from tests.evidence.faults.rank import train_rank
from tests.evidence.faults.table import FaultOutcome
from tests.evidence.faults.world import OneHost, RunOutcome

ALLOWED_S = 25.0
"""Time beyond the timeout: four questions of 5 s that the store leaves unanswered, and the close of a failed engine."""

START_S = 60.0
"""Time for processes to start and the steps before the fault; a case that needs more is ended, and fails."""

MOST_TRIES = 2
"""Runs of a case that never came to its fault, as on a machine so busy that the ranks did not meet in time."""

LINE = 150


@dataclass(frozen=True, kw_only=True)
class FaultCase:
    """Fault, the place where it is injected, and the promise.

    `kind`: a method of `inject.Inject`. `host_link`: arguments of `spoil_link` for the host of `rank`.
    `mended_after_s`: seconds until the link is restored, or None for never. `is_survived`: the run ends with the
    weights of an undisturbed run. Otherwise every rank that can answer must end in an error that contains each of
    `names` and none of `never_says`. In `names`, RANK and HOST stand for the rank's number and its host's name.
    `no_answer`: the rank itself cannot answer. `own_names`: names in its own error, or None to use `names`.
    """

    fault: str
    kind: str
    rank: int
    phase: str = "forward"
    step: int = 6
    is_survived: bool = False
    names: tuple[str, ...] = ()
    never_says: tuple[str, ...] = ()
    own_names: tuple[str, ...] | None = None
    no_answer: bool = False
    host_link: tuple[tuple[str, float], ...] | None = None
    mended_after_s: float | None = None
    pause_s: float = 0.0
    timeout_s: float = 10.0
    num_steps: int = 12
    lost: str = "the step under way"

    @property
    def promise(self) -> str:
        """Promise, as worded in the table."""
        if not self.is_survived:
            return "named on every rank"
        if self.no_answer:
            return "the others end, same bits"
        return "survived, same bits"


def run_cases(
    cases: Sequence[FaultCase],
    worlds: Sequence[OneHost],
    *,
    comm_dtype_across_nodes: str | None = None,
) -> Generator[FaultOutcome]:
    """Run every case once, in as many worlds at the same time as given. Yield outcomes in the order of `cases`.

    The first case must be the run without a fault, with whose weights the others are compared.
    `comm_dtype_across_nodes` is the option of the strategy in every case.
    """
    free: SimpleQueue[OneHost] = SimpleQueue()
    for world in worlds:
        free.put(world)
    undisturbed, *faults = cases
    dtype = comm_dtype_across_nodes
    outcome, weights = run_case(undisturbed, worlds[0], dtype_between_nodes=dtype)
    yield outcome

    def run(case: FaultCase) -> FaultOutcome:
        world = free.get()
        try:
            return run_case(case, world, weights, dtype_between_nodes=dtype)[0]
        finally:
            free.put(world)

    pool = ThreadPoolExecutor(len(worlds))
    try:
        for future in [pool.submit(run, case) for case in faults]:
            yield future.result()
    finally:
        # If interrupted, wait for the running cases, so that no rank is left behind.
        pool.shutdown(cancel_futures=True)


def run_case(
    case: FaultCase,
    world: OneHost,
    weights: int | None = None,
    *,
    dtype_between_nodes: str | None = None,
) -> tuple[FaultOutcome, int | None]:
    """Inject the fault. Return the outcome, and a hash of the weights if they are equal on all ranks.

    `weights`: hash of an undisturbed run to compare with. `dtype_between_nodes`: option of the strategy.
    """
    no_answer = (case.rank,) if case.no_answer else ()
    spec = {
        "kind": case.kind,
        "rank": case.rank,
        "phase": case.phase,
        "step": case.step,
        "pause_s": case.pause_s,
        "timeout_s": case.timeout_s,
        "num_steps": case.num_steps,
        "dtype_between_nodes": dtype_between_nodes,
    }
    # A rank that takes longer hangs, which itself breaks the promise.
    limit_s = START_S + case.timeout_s + ALLOWED_S
    for _ in range(MOST_TRIES):
        run = world.run(
            train_rank,
            spec,
            limit_s=limit_s,
            no_answer=no_answer,
            when_injected=_spoiler(case, world),
        )
        if run.injected_s is not None:
            break
    hashes = {None if rank is None else rank["weights"] for rank in run.ranks}
    outcome = fault_outcome(
        case,
        run,
        host=world.host_name(world.host_of(case.rank)),
        no_answer=no_answer,
        weights=weights,
    )
    return outcome, hashes.pop() if len(hashes) == 1 else None


def fault_outcome(
    case: FaultCase,
    run: RunOutcome,
    *,
    host: str,
    no_answer: Sequence[int] = (),
    weights: int | None = None,
) -> FaultOutcome:
    """Judge from the ranks' results whether the promise was kept."""
    problems = [f"rank {rank} still ran" for rank in run.still_ran]
    words = {}
    for rank, word in enumerate(run.ranks):
        if word is not None and rank not in no_answer:
            words[rank] = word
        elif rank not in no_answer:
            problems.append(f"rank {rank} left no word")
    errors = [word["error"] for word in words.values() if word["error"]]
    seconds = None
    if run.injected_s is None:
        problems.append("the fault was never injected")
    elif errors:
        seconds = max(word["time_s"] for word in words.values()) - run.injected_s

    if case.is_survived:
        problems += _not_survived(case, words, weights)
    else:
        problems += _not_named(case, words, host)
        if seconds is not None and seconds > case.timeout_s + ALLOWED_S:
            problems.append(f"after {seconds:.0f} s, beyond {case.timeout_s + ALLOWED_S:g}")

    where = f"rank {case.rank} of {len(run.ranks)}"
    if case.host_link:
        where = f"host {host}"
    detected_by = "all ranks end with the same weights"
    if problems:
        detected_by = "; ".join(problems)[:LINE]
    elif errors:
        detected_by = shorten(errors[0])
    return FaultOutcome(
        promise=case.promise,
        fault=case.fault,
        phase=case.phase,
        where=where,
        detected_by=detected_by,
        seconds=seconds,
        lost=case.lost,
        is_held=not problems,
    )


def _not_survived(
    case: FaultCase, words: dict[int, dict[str, Any]], weights: int | None
) -> list[str]:
    """List the problems if every rank that can answer should have ended as without a fault."""
    problems = [f"rank {rank}: {word['error']}" for rank, word in words.items() if word["error"]]
    problems += [
        f"rank {rank} made {word['num_steps']} of {case.num_steps} steps"
        for rank, word in words.items()
        if not word["error"] and word["num_steps"] != case.num_steps
    ]
    end_weights = {word["weights"] for word in words.values()}
    if len(end_weights) > 1:
        problems.append("ranks end with different weights")
    elif weights is not None and end_weights != {weights}:
        problems.append("the weights are not those of an undisturbed run")
    return problems


def _not_named(case: FaultCase, words: dict[int, dict[str, Any]], host: str) -> list[str]:
    """List the problems if every rank that can answer should have ended in an error that names the cause."""
    problems = []
    for rank, word in words.items():
        error = word["error"]
        if not error:
            problems.append(f"rank {rank} ended without an error")
            continue
        if case.own_names is None or rank != case.rank:
            names = case.names
        else:
            names = case.own_names
        for name in names:
            filled = _filled(name, case, host)
            if filled not in error:
                problems.append(f"rank {rank} does not say {filled!r}: {error}")
        for name in case.never_says:
            filled = _filled(name, case, host)
            if filled in error:
                problems.append(f"rank {rank} says {filled!r}, which is not so: {error}")
    return problems


def _filled(name: str, case: FaultCase, host: str) -> str:
    return name.replace("RANK", str(case.rank)).replace("HOST", host)


def shorten(text: str) -> str:
    """Return the first `LINE` characters of an error, from the start of the library's own message.

    >>> shorten("RuntimeError: [enforce fail] comm: rank 1 does not answer")
    'comm: rank 1 does not answer'
    """
    text = " ".join(text[max(0, text.find("comm: ")) :].split())
    if len(text) <= LINE:
        return text
    return text[: LINE - 3] + "..."


def _spoiler(case: FaultCase, world: OneHost) -> Callable[[], None] | None:
    if case.host_link is None:
        return None
    host = world.host_of(case.rank)
    link = dict(case.host_link)

    def spoil() -> None:
        world.spoil_link(host, **link)
        if case.mended_after_s is not None:
            Timer(case.mended_after_s, world.spoil_link, [host]).start()

    return spoil
