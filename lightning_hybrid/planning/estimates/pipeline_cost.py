"""Model of the time and memory of a pipeline's training step, for each schedule.

    blocks -> cuts -> stages        pipeline/cuts.py
    schedule                        order of each rank's tasks: `schedule_tasks`
    timeline                        times: a forward waits for the stage before, a backward for the stage after

With S ranks, v stages on each, M micro-batches of f + b seconds on a rank, even stages and free
messages:

    step     (M + (S - 1) / v) (f + b)
    bubble   (S - 1) / (v M + S - 1)
    alive    M micro-batches (gpipe), min(M, S - j) in stage j (1f1b)

Sources: GPipe, Huang et al. 2018, arXiv:1811.06965; 1F1B, Narayanan et al. 2019 (PipeDream), here
with a flush at the end of each step; interleaved, Narayanan et al. 2021, arXiv:2104.04473.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_hybrid.checks import require_choice, require_whole

SCHEDULES = ("gpipe", "1f1b", "interleaved")


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """Compute, communication and memory cost of one micro-batch in a pipeline stage.

    Args:
        forward_s: Time of the forward pass in seconds.
        backward_s: Time of the backward pass in seconds, including recomputation with activation checkpointing.
        send_s: Time until the output has reached the next stage. Its gradient takes the same time back.
        kept_bytes: Bytes that forward keeps for backward.
        gradient_s: Time to all-reduce the stage's gradients over the ranks that hold this stage, once per step.
    """

    forward_s: float
    backward_s: float
    send_s: float = 0.0
    kept_bytes: float = 0.0
    gradient_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PipelineTask:
    """Forward or backward pass of one micro-batch through one pipeline stage.

    The times are 0 before the task is simulated.
    """

    stage: int
    microbatch: int
    is_forward: bool
    begin_s: float = 0.0
    end_s: float = 0.0


def schedule_tasks(
    schedule: str, num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 1
) -> list[list[PipelineTask]]:
    """Return the tasks of each rank, in the order of the schedule.

    Rank r holds the stages r, r + S, r + 2 S and so on.

    Raises:
        ValueError: The schedule is unknown, or cannot run with these numbers.

    >>> [f"{'F' if task.is_forward else 'B'}{task.microbatch}" for task in schedule_tasks("1f1b", 2, 3)[0]]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    require_choice("schedule", schedule, SCHEDULES, "the planner supports only these schedules")
    require_whole("num_ranks", num_ranks, "a pipeline has at least one rank")
    require_whole("num_microbatches", num_microbatches, "a batch has at least one micro-batch")
    require_whole("stages_per_rank", stages_per_rank, "each rank has at least one stage")
    if schedule == "interleaved" and num_microbatches % num_ranks:
        fitting = num_ranks * (num_microbatches // num_ranks + 1)
        raise ValueError(
            f"`num_microbatches` (={num_microbatches}) must be a multiple of the number of ranks in a pipeline "
            f"(={num_ranks}), because the interleaved schedule processes that many micro-batches per round. Set "
            f"num_microbatches={fitting}."
        )
    if schedule != "interleaved" and stages_per_rank > 1:
        raise ValueError(
            f"`stages_per_rank` (={stages_per_rank}) must be 1 with schedule={schedule!r}, because only the "
            "interleaved schedule supports several stages per rank. Set schedule='interleaved'."
        )
    return [
        _tasks_of_rank(schedule, rank, num_ranks, num_microbatches, stages_per_rank)
        for rank in range(num_ranks)
    ]


def _tasks_of_rank(
    schedule: str, rank: int, num_ranks: int, num_micro: int, per_rank: int
) -> list[PipelineTask]:
    total = num_micro * per_rank
    counts: Counter[tuple[int, bool]] = Counter()

    def task(step: int, is_forward: bool) -> PipelineTask:
        # S micro-batches go through a stage before the rank's next stage runs. Backward starts with the last stage.
        turn = step // num_ranks % per_rank
        stage = rank + num_ranks * (turn if is_forward else per_rank - 1 - turn)
        counts[stage, is_forward] += 1
        return PipelineTask(
            stage=stage, microbatch=counts[stage, is_forward] - 1, is_forward=is_forward
        )

    behind = num_ranks - 1 - rank
    if schedule == "gpipe":
        ahead = total
    elif schedule == "1f1b":
        ahead = min(total, behind + 1)
    else:
        ahead = min(total, (per_rank - 1) * num_ranks + 2 * behind + 1)
    return in_turns(
        [task(step, True) for step in range(total)],
        [task(step, False) for step in range(total)],
        ahead,
    )


def in_turns(
    forwards: list[PipelineTask], backwards: list[PipelineTask], num_ahead: int
) -> list[PipelineTask]:
    """Return forward and backward tasks in alternation, after `num_ahead` initial forward tasks.

    One backward and one forward task alternate until no forward task is left. The remaining
    backward tasks follow.
    """
    order = forwards[:num_ahead]
    for backward, forward in zip(backwards, forwards[num_ahead:], strict=False):
        order += [backward, forward]
    return order + backwards[len(forwards) - num_ahead :]


def simulate_pipeline(
    order: Sequence[Sequence[PipelineTask]], loads: Sequence[StageLoad]
) -> list[list[PipelineTask]]:
    """Simulate a pipeline step, and return the tasks of each rank with begin and end times.

    A rank runs its tasks in order, each as soon as its input has arrived. Messages take time but do
    not slow down computation, because sends are asynchronous.
    """
    ends: dict[tuple[int, int, bool], float] = {}
    free_s = [0.0] * len(order)
    done = [0] * len(order)
    tasks_by_rank: list[list[PipelineTask]] = [[] for _ in order]
    left = sum(map(len, order))
    while left:
        before = left
        for rank, tasks in enumerate(order):
            while done[rank] < len(tasks):
                task = tasks[done[rank]]
                ready_s = _arrival_s(task, loads, ends)
                if ready_s is None:
                    break
                load = loads[task.stage]
                begin_s = max(free_s[rank], ready_s)
                end_s = begin_s + (load.forward_s if task.is_forward else load.backward_s)
                free_s[rank] = ends[task.stage, task.microbatch, task.is_forward] = end_s
                tasks_by_rank[rank].append(replace(task, begin_s=begin_s, end_s=end_s))
                done[rank] += 1
                left -= 1
        if left == before:
            raise ValueError(
                "`order` cannot be executed, because all ranks would wait for each other. Use an order that "
                "`schedule_tasks` returns."
            )
    return tasks_by_rank


def _arrival_s(
    task: PipelineTask, loads: Sequence[StageLoad], ends: dict[tuple[int, int, bool], float]
) -> float | None:
    # Return the time at which the input of the task arrives, or None if it is not known yet.
    stage = task.stage
    micro = task.microbatch
    last = len(loads) - 1
    if task.is_forward:
        if stage == 0:
            return 0.0
        end_s = ends.get((stage - 1, micro, True))
        return None if end_s is None else end_s + loads[stage - 1].send_s
    end_s = ends.get((stage, micro, True) if stage == last else (stage + 1, micro, False))
    return None if end_s is None else end_s + (0.0 if stage == last else loads[stage].send_s)


def pipeline_step_s(tasks: Sequence[Sequence[PipelineTask]], loads: Sequence[StageLoad]) -> float:
    """Return the duration of a simulated pipeline step in seconds, including the averaging of gradients.

    The all-reduce of a stage's gradients starts with its last backward pass, and the stages of a rank
    follow one another. The all-reduce overlaps with this backward pass and with those of earlier stages.
    """
    step_s = 0.0
    for of_rank in tasks:
        # The last backward task of each stage.
        begins = {task.stage: task.begin_s for task in of_rank if not task.is_forward}
        done_s = max(task.end_s for task in of_rank)
        travelled_s = 0.0
        for stage, begin_s in sorted(begins.items(), key=lambda item: item[1]):
            travelled_s = max(travelled_s, begin_s) + loads[stage].gradient_s
        step_s = max(step_s, done_s, travelled_s)
    return step_s


def waiting_share(tasks: Sequence[Sequence[PipelineTask]]) -> float:
    """Return the pipeline bubble: the average fraction of a step during which a rank is idle.

    The step ends with the last task.
    """
    end_s = max(task.end_s for of_rank in tasks for task in of_rank)
    busy_s = sum(task.end_s - task.begin_s for of_rank in tasks for task in of_rank)
    return 1 - busy_s / (len(tasks) * end_s)


def most_kept_bytes(tasks: Sequence[PipelineTask], loads: Sequence[StageLoad]) -> float:
    """Return the peak activation memory of a rank in bytes, given its tasks in order.

    >>> load = StageLoad(forward_s=1, backward_s=2, kept_bytes=10)
    >>> [most_kept_bytes(tasks, [load] * 4) for tasks in schedule_tasks("1f1b", 4, 8)]
    [40.0, 30.0, 20.0, 10.0]
    """
    kept = most = 0.0
    for task in tasks:
        kept += loads[task.stage].kept_bytes * (1 if task.is_forward else -1)
        most = max(most, kept)
    return most
