"""One step of stages with replicas of their own, on real ranks, over torch's point-to-point messages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.planning.estimates.pipeline_cost import StageLoad
from recipes.planning.estimates.replicas import replicated_tasks

FEATURES = 4


def layer_of(stage: int) -> nn.Linear:
    torch.manual_seed(stage)
    return nn.Linear(FEATURES, FEATURES, dtype=torch.float64)


def batch_of(microbatch: int) -> Tensor:
    return torch.full((2, FEATURES), microbatch + 1.0, dtype=torch.float64)


def step_on_rank(
    replicas: Sequence[int], num_microbatches: int, loads: Sequence[StageLoad], num_steps: int = 1
) -> tuple[list[float], Tensor]:
    """Return the seconds of each step, and the stage's gradient of one step, summed over its replicas.

    Each stage is a small layer that sleeps as long as its load says, in place of arithmetic. The loss is the sum of the
    outputs. Collective: every rank of WORLD, `sum(replicas)` in number.
    """
    begins, rank = [0, *accumulate(replicas)], dist.get_rank()
    stage = max(stage for stage, begin in enumerate(begins[:-1]) if begin <= rank)
    groups = [
        dist.new_group(list(range(begin, begin + number)), timeout=timedelta(seconds=30))
        for begin, number in zip(begins, replicas, strict=False)
    ]
    layer, load, last = layer_of(stage), loads[stage], len(replicas) - 1

    def peer(of_stage: int, microbatch: int) -> int:
        return begins[of_stage] + microbatch % replicas[of_stage]

    def received(of_stage: int, microbatch: int) -> Tensor:
        found = torch.empty_like(batch_of(0))
        dist.recv(found, peer(of_stage, microbatch))
        return found

    def run(sent: list[Any]) -> None:
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        for task in replicated_tasks(replicas, num_microbatches)[rank]:
            micro = task.microbatch
            if task.is_forward:
                given = (received(stage - 1, micro) if stage else batch_of(micro)).requires_grad_()
                time.sleep(load.forward_s)
                kept[micro] = given, layer(given)
                to, tensor = stage + 1, kept[micro][1].detach()
            else:
                given, output = kept.pop(micro)
                gradient = received(stage + 1, micro) if stage < last else torch.ones_like(output)
                time.sleep(load.backward_s)
                output.backward(gradient)
                assert given.grad is not None
                to, tensor = stage - 1, given.grad
            if 0 <= to <= last:
                sent.append((dist.isend(tensor, peer(to, micro)), tensor))
        assert layer.weight.grad is not None
        dist.all_reduce(layer.weight.grad, group=groups[stage])
        for work, _ in sent:
            work.wait()

    steps_s = []
    for _ in range(num_steps):
        layer.zero_grad()
        dist.barrier()
        begin_s = time.perf_counter()
        run([])
        dist.barrier()  # a step is over when all ranks are
        steps_s.append(time.perf_counter() - begin_s)
    for group in groups:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    assert layer.weight.grad is not None
    return steps_s, layer.weight.grad
