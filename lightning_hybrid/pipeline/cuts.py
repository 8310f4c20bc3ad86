"""Division of a sequence of blocks into balanced pipeline stages."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_hybrid.checks import make_plain, require_whole


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """Measured time and memory of each block of a network.

    Pass it as a pipeline's `cuts` to balance the stages.

    Args:
        seconds: Time of forward and backward of one micro-batch in each block, in an arbitrary unit.
        activation_bytes: Bytes that each block keeps of one micro-batch for backward. None: not
            limited.
        held_bytes: Bytes that each block holds in addition: parameters, gradients, optimizer state.
            None: not limited.
        most_bytes: Memory of a rank. Each stage must fit into it, with the micro-batches that its
            schedule keeps.
    """

    seconds: Sequence[float]
    activation_bytes: Sequence[float] | None = None
    held_bytes: Sequence[float] | None = None
    most_bytes: float = math.inf

    def __post_init__(self) -> None:
        make_plain(self, "seconds", "activation_bytes", "held_bytes", "most_bytes")


Cuts = Sequence[int] | BlockProfile | None


def balanced_cuts(
    seconds: Sequence[float],
    bytes_: Sequence[float],
    num_stages: int,
    *,
    most_bytes: float = math.inf,
    activation_bytes: Sequence[float] | None = None,
    num_alive: Sequence[int] | None = None,
) -> list[int]:
    """Return stage boundaries that minimize the slowest stage's time within the memory limit.

        minimize   max over stages j   sum of seconds[i] over blocks i of stage j
        such that  sum of bytes_[i] + num_alive[j] * activation_bytes[i]  <=  most_bytes

    A pipeline runs at the pace of its slowest stage. Among cuts with the same slowest time, the
    result has the smallest sum of squared stage times, so that the other stages are balanced too. The result is exact,
    by dynamic programming over the ends of stages: O(S n^2) for S stages and n blocks.

    Args:
        seconds: Time of forward and backward of each block, for one micro-batch, in any unit. If
            all are 0, blocks are counted instead.
        bytes_: Bytes that each block holds for any number of micro-batches: parameters, gradients,
            optimizer state.
        num_stages: Number of stages. Each gets at least one block.
        most_bytes: Memory of a rank, in bytes.
        activation_bytes: Bytes that each block keeps of one micro-batch for backward. None: zero.
        num_alive: Number of micro-batches that each stage keeps at the same time. With M
            micro-batches, it is M in all stages for GPipe, and min(M, S - j) in stage j for 1F1B.
            None: one.

    Returns:
        The indices of the first blocks of stages 1 to S - 1, ascending.

    Raises:
        ValueError: There are fewer blocks than stages, the lengths differ, a number is negative or
            not finite, or no cut fits into `most_bytes`.

    Source: Kleinberg and Tardos, Algorithm Design, linear partitions; PipeDream's planner
    (Narayanan et al. 2019) without replicas of single stages.

    >>> balanced_cuts([1, 1, 1, 3, 1, 1], [0] * 6, 3)
    [3, 4]
    >>> balanced_cuts([1, 1, 1, 3, 1, 1], [6, 4, 4, 2, 2, 2], 3, most_bytes=8)    # the first two do not fit together
    [1, 3]
    """
    num_blocks = len(seconds)
    require_whole(
        "num_stages",
        num_stages,
        "the network is divided into this number of stages. Set num_stages=2",
    )
    if activation_bytes is None:
        activation_bytes = [0.0] * num_blocks
    if num_alive is None:
        num_alive = [1] * num_stages
    _check_length("bytes_", bytes_, num_blocks, "blocks")
    _check_length("activation_bytes", activation_bytes, num_blocks, "blocks")
    _check_length("num_alive", num_alive, num_stages, "stages")
    _check_finite("seconds", seconds)
    _check_finite("bytes_", bytes_)
    _check_finite("activation_bytes", activation_bytes)
    _check_finite("num_alive", num_alive)
    if num_blocks < num_stages:
        raise ValueError(
            f"`num_stages` (={num_stages}) must not exceed the number of blocks ({num_blocks}), because "
            f"every stage needs at least one. Set num_stages={max(1, num_blocks)} or less, or split the "
            "network into more blocks."
        )

    costs = _StageCosts(seconds, bytes_, activation_bytes, num_alive, most_bytes)
    slowest, _ = _best_cuts(num_blocks, num_stages, costs.time_if_it_fits, max)
    if slowest == math.inf:
        least_bytes, _ = _best_cuts(num_blocks, num_stages, costs.held_bytes, max)
        raise ValueError(
            f"`most_bytes` (={most_bytes:g}) must be {least_bytes:g} or more, because even the most balanced split "
            f"into {num_stages} stages has a stage of that size. Increase `num_stages`, or set "
            "checkpoint_activations=True."
        )

    def square_if_not_slower(stage: int, begin: int, end: int) -> float:
        stage_time = costs.time_if_it_fits(stage, begin, end)
        if stage_time <= slowest:
            return stage_time**2
        return math.inf

    _, cuts = _best_cuts(num_blocks, num_stages, square_if_not_slower, operator.add)
    return cuts


class _StageCosts:
    """Calculator of time and memory for candidate stages, each given as a range of consecutive blocks.

    A stage has the blocks `begin` to `end` - 1. Time and memory are differences of cumulative sums, so the time of a
    stage is bitwise equal in both passes of `balanced_cuts`.
    """

    def __init__(
        self,
        seconds: Sequence[float],
        held_bytes: Sequence[float],
        activation_bytes: Sequence[float],
        num_alive: Sequence[int],
        most_bytes: float,
    ) -> None:
        if not any(seconds):
            seconds = [1.0] * len(seconds)
        self._seconds_until = _cumulative(seconds)
        self._held_bytes_until = _cumulative(held_bytes)
        self._activation_bytes_until = _cumulative(activation_bytes)
        self._num_alive = num_alive
        self._most_bytes = most_bytes

    def held_bytes(self, stage: int, begin: int, end: int) -> float:
        held = self._held_bytes_until[end] - self._held_bytes_until[begin]
        activations = self._activation_bytes_until[end] - self._activation_bytes_until[begin]
        return held + self._num_alive[stage] * activations

    def time_if_it_fits(self, stage: int, begin: int, end: int) -> float:
        if self.held_bytes(stage, begin, end) <= self._most_bytes:
            return self._seconds_until[end] - self._seconds_until[begin]
        return math.inf


def _cumulative(values: Sequence[float]) -> list[float]:
    return [0.0, *itertools.accumulate(map(float, values))]


def _check_length(name: str, values: Sequence[float], length: int, items: str) -> None:
    if len(values) != length:
        raise ValueError(
            f"`{name}` has length {len(values)}, but must contain one number for each of the {length} {items}. Pass "
            f"a list of {length} numbers."
        )


def _check_finite(name: str, values: Sequence[float]) -> None:
    if not all(0 <= value < math.inf for value in values):
        raise ValueError(
            f"`{name}` (={list(values)!r:.80}) contains a number that is negative, infinite or nan. Pass only finite "
            "numbers that are not negative."
        )


def _best_cuts(
    num_blocks: int,
    num_stages: int,
    cost_of: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """Return the lowest combined cost of all partitions into stages, and the boundaries that achieve it.

    The cost is infinite if no partition is possible.

    Args:
        num_blocks: Number of blocks.
        num_stages: Number of stages.
        cost_of: Function of (stage, begin, end) that returns the cost of a stage.
        join: Function that combines the costs of two stages, such as `max`.
    """
    # best_costs[end]: lowest combined cost over all ways to split the first `end` blocks into the
    # stages so far.
    best_costs = [0.0] + [math.inf] * num_blocks
    best_begins: list[list[int]] = []  # first block of the stage, by stage and end
    for stage in range(num_stages):
        next_costs = [math.inf] * (num_blocks + 1)
        begins = [0] * (num_blocks + 1)
        num_later_stages = num_stages - stage - 1
        for end in range(stage + 1, num_blocks - num_later_stages + 1):
            for begin in range(stage, end):
                if best_costs[begin] == math.inf:
                    continue
                joint_cost = join(best_costs[begin], cost_of(stage, begin, end))
                if joint_cost < next_costs[end]:
                    next_costs[end] = joint_cost
                    begins[end] = begin
        best_costs = next_costs
        best_begins.append(begins)

    # Each stage begins where the previous one ends. The first stage begins at 0, which is no cut.
    cuts = []
    end = num_blocks
    for begins in reversed(best_begins[1:]):
        end = begins[end]
        cuts.append(end)
    cuts.reverse()
    return best_costs[num_blocks], cuts
