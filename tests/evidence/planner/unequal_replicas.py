"""PipeDream's own planner: stages with numbers of replicas of their own, which no engine here has; for comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, kw_only=True)
class ReplicatedPipeline:
    """Best pipeline: the first block and the replicas of each stage, and seconds per batch of one replica."""

    first_blocks: tuple[int, ...]
    replicas: tuple[int, ...]
    seconds: float


def best_pipeline(
    seconds: Sequence[float],
    parameter_bytes: Sequence[float],
    output_bytes: Sequence[float],
    *,
    num_workers: int,
    bytes_per_s: float,
) -> ReplicatedPipeline:
    """Find the stages and replicas that minimise the time of the slowest stage, by dynamic programming.

        stage(i ... j, m) = (compute + 4 (m - 1) / m weights / B) / m
        A(j, m) = min over k, m' of max(A(k, m - m'), 2 outputs(k) / (m' B), stage(k + 1 ... j, m'))

    m -> workers, B -> `bytes_per_s`. As the optimizer that was published with the paper counts, on one level of links:
    Narayanan et al. 2019 (SOSP), msr-fiddle/pipedream.
    """
    last = len(seconds)

    def stage_s(begin: int, end: int, workers: int) -> float:
        moved_s = 4 * (workers - 1) / workers * sum(parameter_bytes[begin:end]) / bytes_per_s
        return (sum(seconds[begin:end]) + moved_s) / workers

    @cache
    def best(end: int, workers: int) -> ReplicatedPipeline:
        found = ReplicatedPipeline(first_blocks=(0,), replicas=(workers,), seconds=stage_s(0, end, workers))
        for cut in range(1, end):
            for of_last in range(1, workers):
                moved_s = 2 * output_bytes[cut - 1] / (of_last * bytes_per_s)
                least_s = max(moved_s, stage_s(cut, end, of_last))
                if least_s >= found.seconds:
                    continue
                before = best(cut, workers - of_last)
                slowest_s = max(before.seconds, least_s)
                if slowest_s < found.seconds and not math.isclose(slowest_s, found.seconds):
                    found = ReplicatedPipeline(
                        first_blocks=(*before.first_blocks, cut),
                        replicas=(*before.replicas, of_last),
                        seconds=slowest_s,
                    )
        return found

    return best(last, num_workers)
