"""Detection of ranks that are slow in several consecutive windows of steps.

Clocks of different ranks are never compared. In each step, ranks wait for one another, so the slow rank waits least:

    held_r   = median of the other ranks' waits - wait_r                   seconds that rank r costs a step
    excess_p = seconds of phase p on rank r - median of the other ranks    a phase that explains the cost

    rank r is suspected if  held_r >= min_share * step  and  sum of max(excess_p, 0) >= held_r / 2
                       and  held_r >= errors of the medians of the waits

Callbacks may do work, or wait in collectives that they call. For a rank that is slow in another phase, time in
callbacks counts as waiting. For a rank that is slow in its callbacks, it counts as work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_high, median_low, mode

from lightning_hybrid.callbacks.stragglers.streaks import Streaks
from lightning_hybrid.callbacks.stragglers.window import RankWindow
from lightning_hybrid.comm.stats.phases import Phase

MIN_EXPLAINED = 0.5
"""Minimum fraction of the delay of the other ranks that the slow rank's own phases must explain."""

_COMPUTING = (Phase.INPUT, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """Rank that makes the other ranks wait, with the phase in which it is slow.

    Attributes:
        rank: Index among the ranks that are compared.
        phase: Phase with the largest excess over the other ranks.
        phase_s: Seconds of this phase per step.
        typical_s: Median seconds of this phase per step on the other ranks.
        cost_share: Fraction of a step for which the other ranks wait.
    """

    rank: int
    phase: Phase
    phase_s: float
    typical_s: float
    cost_share: float


def held_up_s(windows: Sequence[RankWindow], rank: int, waiting: Sequence[Phase]) -> float:
    """Return how long the other ranks wait for this rank, in seconds per step.

    Args:
        windows: Step times of all ranks.
        rank: Index of the rank.
        waiting: Phases that count as waiting.
    """
    waits_s = [sum(window.phases_s[phase] for phase in waiting) for window in windows]
    wait_s = waits_s.pop(rank)
    # With an even number of values, the larger of the two middle values is used, because half of
    # the ranks may be slow, for example all ranks of one host.
    return max(0.0, median_high(waits_s) - wait_s)


def suspect_of(
    windows: Sequence[RankWindow], rank: int, *, min_share: float = 0.0
) -> SlowRank | None:
    """Return a rank's slow phase and cost in a window of steps, or None if the rank is not slow.

    Args:
        windows: Step times of all ranks, at least two.
        rank: Index of the rank.
        min_share: Fraction of a step for which the other ranks must wait for a slow rank.
    """
    suspect = _suspect_in(windows, rank, _COMPUTING, (Phase.WAIT, Phase.CALLBACKS), min_share)
    if suspect is None:
        suspect = _suspect_in(windows, rank, (Phase.CALLBACKS,), (Phase.WAIT,), min_share)
    return suspect


def _suspect_in(
    windows: Sequence[RankWindow],
    rank: int,
    phases: Sequence[Phase],
    waiting: Sequence[Phase],
    min_share: float,
) -> SlowRank | None:
    step_s = median([window.step_s for window in windows])
    held_s = held_up_s(windows, rank, waiting)
    if held_s <= 0 or held_s < max(min_share * step_s, _error_s(windows, rank)):
        return None

    explained_s = 0.0
    largest_excess_s = 0.0
    slowest_phase = phases[0]
    for phase in phases:
        excess_s = windows[rank].phases_s[phase] - typical_s(windows, rank, phase)
        explained_s += max(0.0, excess_s)
        if excess_s > largest_excess_s:
            largest_excess_s = excess_s
            slowest_phase = phase
    if explained_s < MIN_EXPLAINED * held_s:
        return None
    return SlowRank(
        rank=rank,
        phase=slowest_phase,
        phase_s=windows[rank].phases_s[slowest_phase],
        typical_s=typical_s(windows, rank, slowest_phase),
        cost_share=held_s / step_s,
    )


def _error_s(windows: Sequence[RankWindow], rank: int) -> float:
    """Return the statistical uncertainty of how much less a rank waits than others, in seconds."""
    errors_s = [window.wait_error_s for window in windows]
    error_s = errors_s.pop(rank)
    return error_s + median(errors_s)


def typical_s(windows: Sequence[RankWindow], rank: int, phase: Phase) -> float:
    """Return the median time of a phase on the other ranks, in seconds.

    With an even number of other ranks, the smaller of the two middle values is returned.
    """
    others_s = []
    for other_rank, window in enumerate(windows):
        if other_rank != rank:
            others_s.append(window.phases_s[phase])
    return median_low(others_s)


class SlowRanks:
    """Detector of ranks that delay the other ranks in several consecutive windows of steps.

    Args:
        min_share: Fraction of a step by which a slow rank must delay the other ranks.
        num_windows: Number of consecutive windows in which the rank must be slow.

    Attributes:
        named: Ranks that are currently reported as slow, with their latest values.
        has_suspect: Whether a rank was slow in the last window.
    """

    def __init__(self, *, min_share: float, num_windows: int) -> None:
        self.named: dict[int, SlowRank] = {}
        self.has_suspect = False
        self._min_share = min_share
        self._streaks: Streaks[int, SlowRank] = Streaks(num_windows)
        # Phases of each rank that were reported since the rank was last fast.
        self._reported: dict[int, set[Phase]] = {}

    def add(self, windows: Sequence[RankWindow]) -> list[SlowRank]:
        """Evaluate a window of steps, and return the ranks to report as slow.

        A slow phase of a rank is returned only once, unless the rank recovers and becomes slow again.
        """
        suspects: dict[int, SlowRank] = {}
        for rank in range(len(windows)):
            suspect = suspect_of(windows, rank, min_share=self._min_share)
            if suspect is not None:
                suspects[rank] = suspect
        self.has_suspect = bool(suspects)

        new = []
        for rank, streak in self._streaks.add(suspects).items():
            slow_rank = _combined(streak)
            self.named[rank] = slow_rank
            reported = self._reported.setdefault(rank, set())
            if slow_rank.phase not in reported:
                reported.add(slow_rank.phase)
                new.append(slow_rank)
        return new

    def take_recovered(self) -> list[SlowRank]:
        """Return the reported ranks that have recovered.

        A rank has recovered if it was not slow in the last `num_windows` windows. It is returned only once.
        """
        recovered = []
        for rank in self._streaks.take_ended():
            self._reported.pop(rank, None)
            slow_rank = self.named.pop(rank, None)
            if slow_rank is not None:
                recovered.append(slow_rank)
        return recovered


def _combined(streak: Sequence[SlowRank]) -> SlowRank:
    """Summarize the findings of a streak by the most frequent phase and the median times."""
    phase = mode([suspect.phase for suspect in streak])
    of_phase = [suspect for suspect in streak if suspect.phase is phase]
    return SlowRank(
        rank=streak[0].rank,
        phase=phase,
        phase_s=median([suspect.phase_s for suspect in of_phase]),
        typical_s=median([suspect.typical_s for suspect in of_phase]),
        cost_share=median([suspect.cost_share for suspect in streak]),
    )
