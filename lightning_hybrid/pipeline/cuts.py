"""Places at which a sequence of blocks is cut into the stages of a pipeline."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_hybrid.checks import make_plain, require_whole
from lightning_hybrid.pipeline.shapes import as_arguments


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """What the blocks of a network were measured to take, as a pipeline's `cuts`: it balances stages by it.

    Args:
        seconds: Forward and backward of one micro-batch in each block, in any unit.
        activation_bytes: What each block keeps of one micro-batch for backward. None: nothing is known.
        held_bytes: What each block holds besides: parameters, gradients, optimizer state. None: nothing is known.
        most_bytes: Memory of a rank, which each stage must fit into, with the micro-batches that its schedule keeps.
    """

    seconds: Sequence[float]
    activation_bytes: Sequence[float] | None = None
    held_bytes: Sequence[float] | None = None
    most_bytes: float = math.inf

    def __post_init__(self) -> None:
        make_plain(self, "seconds", "activation_bytes", "held_bytes", "most_bytes")

    @classmethod
    def measured(
        cls, blocks: Sequence[nn.Module], example: Tensor | tuple[Tensor, ...], *, num_runs: int = 5
    ) -> BlockProfile:
        """Run copies of the blocks on one micro-batch; of each the least time of forward and backward counts."""
        seconds = list[float]()
        kept = list[float]()
        for index, block in enumerate(map(copy.deepcopy, blocks)):
            values = as_arguments(example)
            times_s = []
            saved = dict[int, int]()

            def note(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
                saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            for _ in range(num_runs):
                saved.clear()
                # A block may change what it is given in place.
                given = [
                    each.detach().requires_grad_(index > 0 and each.is_floating_point()).clone()
                    for each in values
                ]
                begin_s = _clock_s(given[0])
                with saved_tensors_hooks(note, lambda tensor: tensor):
                    example = block(*given)
                outputs = [each for each in as_arguments(example) if each.requires_grad]
                torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
                times_s.append(_clock_s(given[0]) - begin_s)
            own = {each.untyped_storage().data_ptr() for each in block.parameters()}
            seconds.append(min(times_s))
            kept.append(sum(saved[address] for address in saved.keys() - own))
        return cls(seconds=seconds, activation_bytes=kept)


Cuts = Sequence[int] | BlockProfile | None


def _clock_s(tensor: Tensor) -> float:
    getattr(torch, tensor.device.type).synchronize()  # the CPU's does nothing
    return time.perf_counter()


def balanced_cuts(
    seconds: Sequence[float],
    bytes_: Sequence[float],
    num_stages: int,
    *,
    most_bytes: float = math.inf,
    activation_bytes: Sequence[float] | None = None,
    num_alive: Sequence[int] | None = None,
) -> list[int]:
    """Cut blocks into stages so that the slowest stage is as fast as it can be, and each fits into memory.

        minimise   max over stages j   sum of seconds[i] over blocks i of stage j
        such that  sum of bytes_[i] + num_alive[j] * activation_bytes[i]  <=  most_bytes

    A pipeline runs at the pace of its slowest stage. Of the cuts with the same slowest stage those with the least sum
    of squares are taken, so that the other stages are even too. Exact, by dynamic programming over the ends of stages:
    O(S n^2) for S stages and n blocks.

    Args:
        seconds: Forward and backward of each block, for one micro-batch, in any unit. All 0 counts blocks instead.
        bytes_: What each block holds whatever the number of micro-batches: parameters, gradients, optimizer state.
        num_stages: Stages; each gets one block at least.
        most_bytes: Memory of a rank.
        activation_bytes: What each block keeps of one micro-batch for backward; None: nothing.
        num_alive: Micro-batches that each stage keeps at the same time: M in all stages for GPipe, min(M, S - j) in
            stage j for 1F1B. None: one.

    Returns:
        The indices of the first blocks of stages 1 to S - 1, ascending.

    Raises:
        ValueError: There are fewer blocks than stages, the lengths differ, a number is negative or not finite, or no
            cut fits into `most_bytes`.

    Source: Kleinberg and Tardos, Algorithm Design, linear partitions; PipeDream's planner (Narayanan et al. 2019)
    without replicas of single stages.

    >>> balanced_cuts([1, 1, 1, 3, 1, 1], [0] * 6, 3)
    [3, 4]
    >>> balanced_cuts([1, 1, 1, 3, 1, 1], [6, 4, 4, 2, 2, 2], 3, most_bytes=8)    # the first two do not fit together
    [1, 3]
    """
    num_blocks = len(seconds)
    require_whole("num_stages", num_stages, "stages are counted. Write num_stages=2")
    kept = [0.0] * num_blocks if activation_bytes is None else activation_bytes
    alive = [1] * num_stages if num_alive is None else num_alive
    for name, values, length, of in (
        ("bytes_", bytes_, num_blocks, "blocks"),
        ("activation_bytes", kept, num_blocks, "blocks"),
        ("num_alive", alive, num_stages, "stages"),
    ):
        if len(values) != length:
            raise ValueError(
                f"`{name}` (={len(values)} numbers) must have one for each of {length} {of}."
            )
    for name, values in (
        ("seconds", seconds),
        ("bytes_", bytes_),
        ("activation_bytes", kept),
        ("num_alive", alive),
    ):
        if not all(0 <= value < math.inf for value in values):
            raise ValueError(
                f"`{name}` (={list(values)!r:.80}) must hold finite numbers, none negative."
            )
    if num_blocks < num_stages:
        raise ValueError(
            f"`num_stages` (={num_stages}) must not exceed the number of blocks ({num_blocks}): a stage "
            f"without one would compute nothing. Write num_stages={max(1, num_blocks)} or less, or "
            "offer smaller blocks."
        )
    # Sums from the first block on: what blocks begin ... end - 1 take is a difference, and the same in both passes.
    seconds_to, bytes_to, kept_to = (
        [0.0, *itertools.accumulate(map(float, values))]
        for values in (seconds if any(seconds) else [1.0] * num_blocks, bytes_, kept)
    )

    def time(begin: int, end: int) -> float:
        return seconds_to[end] - seconds_to[begin]

    def held(stage: int, begin: int, end: int) -> float:
        return bytes_to[end] - bytes_to[begin] + alive[stage] * (kept_to[end] - kept_to[begin])

    def time_if_it_fits(stage: int, begin: int, end: int) -> float:
        return time(begin, end) if held(stage, begin, end) <= most_bytes else math.inf

    slowest, _ = _best(num_blocks, num_stages, time_if_it_fits, max)
    if slowest == math.inf:
        least, _ = _best(num_blocks, num_stages, held, max)
        raise ValueError(
            f"`most_bytes` (={most_bytes:g}) must be {least:g} or more: of all cuts into {num_stages} stages the "
            "most even one in memory has a stage of that size. Give more `num_stages`, or "
            "write checkpoint_activations=True."
        )

    def square_if_not_slower(stage: int, begin: int, end: int) -> float:
        each = time_if_it_fits(stage, begin, end)
        return each**2 if each <= slowest else math.inf

    return _best(num_blocks, num_stages, square_if_not_slower, lambda one, other: one + other)[1]


def _best(
    num_blocks: int,
    num_stages: int,
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """Find the cuts of least joint cost; `cost(stage, begin, end)` is of one stage. Infinite: there are none."""
    # least[end]: of all ways to deal the first `end` blocks to the stages so far, the least joint cost.
    least = [0.0] + [math.inf] * num_blocks
    begins: list[list[int]] = []
    for stage in range(num_stages):
        new = [math.inf] * (num_blocks + 1)
        came_from = [0] * (num_blocks + 1)
        for end in range(stage + 1, num_blocks - (num_stages - stage - 1) + 1):
            for begin in range(stage, end):
                if least[begin] == math.inf:
                    continue
                joint = join(least[begin], cost(stage, begin, end))
                if joint < new[end]:
                    new[end] = joint
                    came_from[end] = begin
        least = new
        begins.append(came_from)
    cuts = []
    end = num_blocks
    for came_from in reversed(begins):
        end = came_from[end]
        cuts.append(end)
    return least[num_blocks], cuts[-2::-1]
