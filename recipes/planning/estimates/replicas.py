"""Stages with numbers of replicas of their own: PipeDream's planner, and the order of work of such a step.

    profile of the blocks -> `best_replicas` -> first block and replicas of each stage
    `replicated_tasks`    -> what each rank does, in order -> `simulate_pipeline`, as for other pipelines

Micro-batch m is the work of replica m mod R of a stage with R replicas. `hybrid_pipeline` has as many replicas of each
stage: torch's stages have one neighbour on each side. This is what unequal ones would be worth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from recipes.planning.estimates.pipeline_cost import PipelineTask, in_turns


@dataclass(frozen=True, kw_only=True)
class ReplicatedStages:
    """The first block and the replicas of each stage, and the seconds of a micro-batch at the slowest one's pace."""

    first_blocks: tuple[int, ...]
    replicas: tuple[int, ...]
    seconds: float


def best_replicas(
    seconds: Sequence[float],
    parameter_bytes: Sequence[float],
    output_bytes: Sequence[float],
    *,
    num_ranks: int,
    bytes_per_s: float = math.inf,
) -> ReplicatedStages:
    """Find the stages and replicas whose slowest stage or message is fastest, by dynamic programming.

        stage(i ... j, m) = (seconds of its blocks + 4 (m - 1) / m of their parameter bytes / B) / m
        A(j, m) = min over k, m' of max(A(k, m - m'), 2 outputs(k) / (m' B), stage(k + 1 ... j, m'))

    As the optimizer that was published with the paper counts, on one level of links, all ranks in use.

    Args:
        seconds: Forward and backward of each block, of one micro-batch.
        parameter_bytes: Of each block.
        output_bytes: Of one micro-batch, of the tensor that each block returns.
        num_ranks: Ranks; the replicas of all stages are as many. (m)
        bytes_per_s: Of the link of a rank. (B)

    Source: Narayanan et al. 2019, SOSP; msr-fiddle/pipedream.

    >>> best_replicas([1, 2, 1], [0] * 3, [0] * 3, num_ranks=4)
    ReplicatedStages(first_blocks=(0,), replicas=(4,), seconds=1.0)
    >>> best_replicas([1, 2, 1], [0, 0, 9], [0] * 3, num_ranks=4, bytes_per_s=8)    # the last one's weights stay
    ReplicatedStages(first_blocks=(0, 2), replicas=(3, 1), seconds=1.0)
    """

    def stage_s(begin: int, end: int, ranks: int) -> float:
        moved_s = 4 * (ranks - 1) / ranks * sum(parameter_bytes[begin:end]) / bytes_per_s
        return (sum(seconds[begin:end]) + moved_s) / ranks

    @cache
    def best(end: int, ranks: int) -> ReplicatedStages:
        found = ReplicatedStages(first_blocks=(0,), replicas=(ranks,), seconds=stage_s(0, end, ranks))
        for cut in range(1, end):
            for of_last in range(1, ranks):
                least_s = max(2 * output_bytes[cut - 1] / (of_last * bytes_per_s), stage_s(cut, end, of_last))
                if least_s >= found.seconds:
                    continue
                before = best(cut, ranks - of_last)
                slowest_s = max(before.seconds, least_s)
                if slowest_s < found.seconds and not math.isclose(slowest_s, found.seconds):
                    found = ReplicatedStages(
                        first_blocks=(*before.first_blocks, cut),
                        replicas=(*before.replicas, of_last),
                        seconds=slowest_s,
                    )
        return found

    return best(len(seconds), num_ranks)


def replicated_tasks(replicas: Sequence[int], num_microbatches: int) -> list[list[PipelineTask]]:
    """Return what each rank does in a step of 1F1B, in order: all replicas of stage 0, then those of stage 1, ...

    A replica is ahead by as many forwards as there are ranks from its stage on for each of its own, rounded up, as in
    PipeDream. Where stages differ in replicas it is one more for each stage behind: without, three stages of 1 + 2 + 1
    replicas of which the middle takes twice as long need 1,100 ms in place of 900 for twelve micro-batches of 60 ms.

    >>> tasks = replicated_tasks((2, 1), 4)
    >>> [" ".join(f"{'F' if task.is_forward else 'B'}{task.microbatch}" for task in of_rank) for of_rank in tasks]
    ['F0 F2 B0 B2', 'F1 F3 B1 B3', 'F0 B0 F1 B1 F2 B2 F3 B3']
    """
    found = []
    for stage, number in enumerate(replicas):
        num_alive = sum(replicas[stage:]) + (len(replicas) - 1 - stage if len(set(replicas)) > 1 else 0)
        for replica in range(number):
            own = range(replica, num_microbatches, number)
            forwards, backwards = (
                [PipelineTask(stage=stage, microbatch=each, is_forward=is_forward) for each in own]
                for is_forward in (True, False)
            )
            found.append(in_turns(forwards, backwards, min(len(own), -(-num_alive // number))))
    return found
