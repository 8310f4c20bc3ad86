"""Which plans to try in the next steps of training, and which to take. Decisions only; session.py acts.

    start --> other algorithms --> other chunks --> other numbers of groups --> flat

Each arrow is a comparison (paired_comparison.py). It replaces the plan in force by one that takes less time beyond
noise, and by nothing else: where plans are equal, the start stays, which is the model's choice. The plan that comes out
has been tried against `flat` directly, so that it is not slower than that beyond noise. Tried plans differ in
algorithm, chunks and groups only: the same gradients are summed in the same dtype, in another order of additions.
Buckets stay as they are, as DDP would have to be built again to change them, and with it the state of its reducer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from lightning_hybrid.comm.plan import Algorithm, BucketPlan, CommPlan, NodeShape
from lightning_hybrid.comm.tuning.paired_comparison import PairedComparison

# Steps of trials, at most.
MOST_STEPS = 300

# The plans to compare with one.
Neighbours = Callable[[CommPlan], Sequence[CommPlan]]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A step under a plan. The first one under each is not counted: its groups connect."""

    plan: CommPlan
    is_counted: bool


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """The result of tuning."""

    plan: CommPlan
    num_steps: int  # of trials, those not counted too
    ratio: float  # time of a step over that under the start plan, medians of comparisons multiplied
    extra_s: float  # what the trials took beyond as many steps of the plan in force
    is_complete: bool  # False where the steps ran out


class PlanTrials:
    """Comparisons of plans with each other, until nothing is left to try or the steps run out.

    Args:
        start: the plan to begin with.
        neighbours: for each comparison in turn, what to try against the plan in force. It may give plans already tried.
        safeguard: what the outcome must not be slower than, tried last; None: nothing.
        most_steps: of trials in all. Where they run out, a comparison that is not decided leaves the plan in force,
            unless a challenger of it has won already.
    """

    def __init__(
        self,
        start: CommPlan,
        neighbours: Sequence[Neighbours],
        *,
        safeguard: CommPlan | None = None,
        most_steps: int = MOST_STEPS,
    ) -> None:
        self._plan = start
        self._neighbours = list(neighbours)
        self._safeguard = safeguard
        self._most_steps = most_steps
        self._comparison: PairedComparison | None = None
        self._warmed = {start}
        self._compared: set[tuple[CommPlan, CommPlan]] = set()
        self._seen = {start}
        self._pending: tuple[Trial, ...] = ()
        self._num_steps, self._ratio, self._extra_s = 0, 1.0, 0.0
        self._is_complete = True
        self._is_done = False

    def trials(self) -> tuple[Trial, ...]:
        """Return the next two rounds: plans of the steps to come, in order; empty where tuning is over."""
        # Two, so that ranks need to agree half as often. The same again until `record`.
        while not self._pending and not self._is_done:
            if self._comparison is None and not self._begin_comparison():
                self._is_done = True
                break
            assert self._comparison is not None
            order = self._comparison.order()
            first = [Trial(plan=plan, is_counted=False) for plan in order if plan not in self._warmed]  # groups connect
            if not order:  # all challengers have won or lost
                self._end_comparison()
            elif self._num_steps + len(first) + 2 * len(order) > self._most_steps:  # no steps left for two whole rounds
                self._end_comparison()
                self._is_complete, self._is_done = False, True
            else:
                # The second round is the first one mirrored, so that what changes steadily meets all plans equally.
                self._pending = (*first, *(Trial(plan=plan, is_counted=True) for plan in (*order, *order[::-1])))
        return self._pending

    def record(self, times_s: Sequence[float]) -> None:
        """Record the times of the trials, in their order."""
        trials = self._pending
        assert self._comparison is not None
        counted = [(trial.plan, time_s) for trial, time_s in zip(trials, times_s, strict=True) if trial.is_counted]
        half = len(counted) // 2
        for of_round in (dict(counted[:half]), dict(counted[half:])):
            if order := self._comparison.order():  # what the first round has decided needs no second
                self._comparison.record([of_round[plan] for plan in order])
        in_force_s = sum(time_s for plan, time_s in counted if plan == self._plan) / 2  # it is in both rounds
        self._extra_s += sum(times_s) - len(trials) * in_force_s
        self._num_steps += len(trials)
        # The first step under a plan connects its groups, once: later steps under it need no uncounted one.
        self._warmed |= {trial.plan for trial in trials}
        self._pending = ()

    def _begin_comparison(self) -> bool:
        while self._neighbours:
            # The neighbours of the plan in force now: each comparison may have changed it.
            found = [plan for plan in dict.fromkeys(self._neighbours.pop(0)(self._plan)) if plan not in self._seen]
            if found:
                return self._start(found)
        guard = self._safeguard  # flat, at the end: never slower than the plain all-reduce
        if guard is not None and guard != self._plan and (self._plan, guard) not in self._compared:
            return self._start([guard])
        return False

    def _start(self, challengers: Sequence[CommPlan]) -> bool:
        self._comparison = PairedComparison(self._plan, challengers)
        self._seen |= set(challengers)
        self._compared |= {(self._plan, challenger) for challenger in challengers}
        return True

    def _end_comparison(self) -> None:
        comparison, self._comparison = self._comparison, None
        assert comparison is not None
        winner = comparison.winner
        if winner != self._plan:
            self._ratio *= comparison.ratio(winner)  # gains of successive comparisons multiply
            self._compared.add((winner, self._plan))  # it has won against what was in force
            self._plan = winner

    @property
    def result(self) -> TuningResult:
        """What is known so far; all of it once `trials` is empty."""
        return TuningResult(
            plan=self._plan,
            num_steps=self._num_steps,
            ratio=self._ratio,
            extra_s=self._extra_s,
            is_complete=self._is_complete and self._is_done,
        )


def trials_for(
    start: CommPlan,
    buckets: Sequence[BucketPlan],
    topology: NodeShape,
    *,
    on_cuda: bool = False,
    is_coded: bool = False,
    most_steps: int = MOST_STEPS,
) -> PlanTrials:
    """Make the trials of a model's buckets on a topology: algorithms, then chunks, then groups, then flat.

    `buckets`: of the model as it is trained; of their plans only the contents count. `is_coded`: a codec rounds what
    nodes send each other; algorithms without a sum of each node would change the numbers, and are not tried.
    """

    def is_allowed(plan: CommPlan) -> bool:
        return not is_coded or topology.ranks_per_node == 1 or plan.algorithm not in ("flat", "parallel_flat")

    def without_equal(neighbours: Neighbours) -> Neighbours:
        def others(plan: CommPlan) -> list[CommPlan]:
            return list(filter(is_allowed, distinct([plan, *neighbours(plan)], buckets, topology, on_cuda=on_cuda)[1:]))

        return others

    flat = replace(start, algorithm="flat")
    is_flat = len(distinct([start, flat], buckets, topology, on_cuda=on_cuda)) == 1  # nothing to guard against
    found = (lambda plan: other_algorithms(plan, topology), other_chunks, other_groups)
    return PlanTrials(
        start,
        [without_equal(neighbours) for neighbours in found],
        safeguard=flat if is_allowed(flat) and not is_flat else None,
        most_steps=most_steps,
    )


def other_algorithms(plan: CommPlan, topology: NodeShape) -> list[CommPlan]:
    """Return the plan with each algorithm that fits the topology."""
    has_shards = topology.ranks_per_node is not None and topology.ranks_per_node > 1
    return [replace(plan, algorithm=name) for name in get_args(Algorithm) if name != "two_level" or has_shards]


def other_chunks(plan: CommPlan) -> list[CommPlan]:
    """Return the plan with chunks of half, twice and four times the size."""
    return [replace(plan, chunk_bytes=max(1, int(plan.chunk_bytes * factor))) for factor in (0.5, 2, 4)]


def other_groups(plan: CommPlan) -> list[CommPlan]:
    """Return the plan with one, two and four sets of groups, but for its own number."""
    return [replace(plan, num_parallel_groups=num) for num in (1, 2, 4) if num != plan.num_parallel_groups]


def distinct(
    plans: Sequence[CommPlan], buckets: Sequence[BucketPlan], topology: NodeShape, *, on_cuda: bool = False
) -> list[CommPlan]:
    """Leave out plans that do the same with these buckets as one before them."""
    found: dict[Any, CommPlan] = {}
    for plan in plans:
        found.setdefault(effect(plan, buckets, topology, on_cuda=on_cuda), plan)
    return list(found.values())


def effect(
    plan: CommPlan, buckets: Sequence[BucketPlan], topology: NodeShape, *, on_cuda: bool = False
) -> tuple[tuple[str, int, int], ...]:
    """Return what a plan does with each bucket: algorithm, chunks, and over how many sets of groups they go round.

    On CUDA there is one set of groups, only hierarchies cut buckets, and `parallel_flat` is `flat`.
    """
    contents = ("index", "numel", "dtype", "num_bytes")
    asked = [{name: getattr(bucket, name) for name in contents} for bucket in buckets]
    planned = [plan.bucket(**bucket, topology=topology, on_cuda=on_cuda) for bucket in asked]
    if on_cuda:
        whole = ("flat", "parallel_flat")
        return tuple(
            ("flat", 1, 1) if each.algorithm in whole else (each.algorithm, each.num_chunks, 1) for each in planned
        )
    # No more sets of groups are in use than there are chunks to go round them: other plans do the same.
    num_chunks = Counter[Algorithm]()
    for each in planned:
        num_chunks[each.algorithm] += each.num_chunks
    columns = {name: min(plan.num_columns(name, topology), num) for name, num in num_chunks.items()}
    return tuple((each.algorithm, each.num_chunks, columns[each.algorithm]) for each in planned)


def changes(before: CommPlan, after: CommPlan) -> str:
    """Say what differs between two plans.

    >>> changes(CommPlan(), CommPlan(algorithm="flat"))
    '`algorithm` flat instead of auto'
    >>> changes(CommPlan(), CommPlan())
    'nothing is changed'
    """
    pairs = [(field.name, getattr(before, field.name), getattr(after, field.name)) for field in fields(before)]
    found = [f"`{name}` {now} instead of {then}" for name, then, now in pairs if then != now]
    return ", ".join(found) or "nothing is changed"


def result_line(start: CommPlan, tuned: TuningResult, *, change_s: float = 0.0) -> str:
    """Write the result in a line. `change_s`: what building groups and agreeing took, outside of the steps.

    >>> result_line(CommPlan(), TuningResult(plan=CommPlan(), num_steps=60, ratio=1.0, extra_s=2.5, is_complete=True))
    'comm: plan tuned in 60 steps, which took 2.5 s more for it: nothing is faster beyond noise; plan e69c'
    """
    found = (
        "nothing is faster beyond noise"
        if tuned.plan == start
        else f"{changes(start, tuned.plan)}: {tuned.ratio:.3f} of the time of a step before"
    )
    cut_short = "" if tuned.is_complete else " (not all was tried: the steps for it ran out)"
    return (
        f"comm: plan tuned in {tuned.num_steps} steps, which took {tuned.extra_s + change_s:.3g} s more for it: "
        f"{found}{cut_short}; plan {tuned.plan.plan_hash[:4]}"
    )
