"""Bytes between the stages of a pipeline, counted by the kernel: of each cut one tensor there and its gradient back."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid.pipeline.rank_layout import PipelineRanks
from lightning_hybrid.pipeline.shapes import boundary_of
from tests.netlab.cluster import Cluster
from tests.netlab.test_bytes import TOLERANCE, bytes_sent
from tests.pipeline.schedule_step import step_over

NUM_RANKS, NUM_MICROBATCHES = 4, 8
SHAPE = (4, 128, 28, 28)  # 4 images behind the second stage of ResNet-50, channels-last in fp16
STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2}


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float16))

    def forward(self, x):
        return x * self.weight


def bytes_of_steps():
    """What this host sent over its loopback in a step of each schedule."""
    given, found = boundary_of(torch.empty(SHAPE).half().to(memory_format=torch.channels_last)), {}
    for schedule, parts in STAGES_PER_RANK.items():
        ranks = PipelineRanks(rank=dist.get_rank(), world_size=NUM_RANKS, num_ranks=NUM_RANKS, stages_per_rank=parts)
        blocks = {stage: Scales() for stage in ranks.stages}
        num_stages = ranks.num_stages
        with step_over(schedule, blocks, given, num_stages=num_stages, num_microbatches=NUM_MICROBATCHES) as step:
            step()  # opens connections
            dist.barrier()
            _, before = bytes_sent()
            dist.barrier()  # nobody starts before everybody has read
            step()
            dist.barrier()  # everybody has sent
            found[schedule] = bytes_sent()[1] - before
            dist.barrier()
    return found


@pytest.mark.long
def test_a_step_sends_each_cuts_tensor_and_its_gradient_once_for_each_micro_batch(cluster_or_skip):
    """2 M (v S - 1) tensors: interleaved stages, two on each rank, send (2 S - 1) / (S - 1) times as much."""
    with Cluster(num_hosts=1, ranks_per_host=NUM_RANKS, mbit_per_s=1000) as cluster:
        sent = cluster.call(bytes_of_steps, timeout_s=150)
    for schedule, parts in STAGES_PER_RANK.items():
        claim = 2 * NUM_MICROBATCHES * (parts * NUM_RANKS - 1) * math.prod(SHAPE) * 2
        counted = max(each[schedule] for each in sent)
        print(f"{schedule}: sent {counted}, claimed {claim}, ratio {counted / claim:.4f}")
        assert claim <= counted <= claim * (1 + TOLERANCE) + 2**16  # barriers and the watchdog's words
