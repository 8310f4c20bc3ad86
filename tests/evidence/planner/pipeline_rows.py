"""Published results of pipelines and of memory, and predictions: `python -m tests.evidence.planner.pipeline_rows`."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from lightning_hybrid.pipeline.cuts import balanced_cuts
from recipes.networks.resnet import ResNet
from recipes.planning.blocks import blocks_of
from recipes.planning.estimates.memory import StateBytes
from recipes.planning.estimates.pipeline_cost import StageLoad, pipeline_step_s, schedule_tasks, simulate_pipeline
from recipes.planning.layers import FORWARD_SHARE
from tests.evidence.planner.known_clusters import IMAGE, PublishedRow, cluster_of, rows_of
from tests.evidence.planner.published import show

SGD_FP32 = StateBytes(weights=4, gradients=4, masters=0, optimizer=4, rest=0)

# ---- memory ----------------------------------------------------------------------------------------------------------

ZERO_SHARED = ((), ("state",), ("state", "gradient"), ("state", "gradient", "weight"))
AMOEBANETS = (((81.5e6, 319.0e6, 542.7e6, 1.06e9, 1.84e9), 2**30), ((82e6, 318e6, 542e6, 1.05e9, 1.8e9), 1e9))


def memory_rows() -> Iterator[tuple[str, float]]:
    """Yield ZeRO's table, and the parameters of the largest AmoebaNets, by torchgpipe and by GPipe."""
    adam = StateBytes(weights=2, gradients=2, masters=4, optimizer=8, rest=0)
    for stage, shared in enumerate(ZERO_SHARED):
        each = adam.per_parameter(**{f"{name}_share": 1 / 64 for name in shared})
        yield f"ZeRO stage {stage}, 7.5 B parameters, 64 ranks", 7.5 * each
    for numels, unit in AMOEBANETS:
        for numel in numels:
            yield f"AmoebaNet-D of {numel / 1e6:,.0f} M: parameters", numel * SGD_FP32.per_parameter() / unit


# ---- GPipe's schedule ------------------------------------------------------------------------------------------------


def gpipe_step_s(loads: Sequence[StageLoad], num_micro: int) -> float:
    """Simulate GPipe's schedule; each forward runs again, except that of the last micro-batch, spread over all."""
    again = (num_micro - 1) / num_micro
    loads = [
        StageLoad(forward_s=load.forward_s, backward_s=load.backward_s + again * load.forward_s, send_s=load.send_s)
        for load in loads
    ]
    return pipeline_step_s(simulate_pipeline(schedule_tasks("gpipe", len(loads), num_micro), loads), loads)


RESNET_101 = {1: (220, 2), 2: (25000, 1667), 4: (5632, 256), 8: (5400, 150)}  # devices: images, micro-batches
P40_IMAGES_PER_S = 95.862  # ResNet-101, fp32, alone: the baseline of the same table


def resnet_101_rows() -> Iterator[tuple[str, float]]:
    """Yield torchgpipe's speed-ups of ResNet-101 on P40s."""
    with torch.device("meta"):
        blocks = blocks_of(ResNet(depth=101), IMAGE, precision="32-true")
    near = cluster_of("p40_roce", 1).inside
    total = sum(block.forward_flops for block in blocks)
    for num_stages, (images, num_micro) in RESNET_101.items():
        each = images / num_micro
        seconds = [each / P40_IMAGES_PER_S * block.forward_flops / total for block in blocks]
        cuts = balanced_cuts(seconds, [0.0] * len(blocks), num_stages)
        ends = [0, *cuts, len(blocks)]
        loads = [
            StageLoad(
                forward_s=FORWARD_SHARE * sum(seconds[begin:end]),
                backward_s=(1 - FORWARD_SHARE) * sum(seconds[begin:end]),
                send_s=near.seconds(each * blocks[end].input_bytes) if end < len(blocks) else 0.0,
            )
            for begin, end in pairwise(ends)
        ]
        speed_up = images / gpipe_step_s(loads, num_micro) / P40_IMAGES_PER_S
        yield f"ResNet-101, {num_stages} P40, {num_micro} micro-batches: speed-up", speed_up


AMOEBANET_D = ((2, 4), (2, 32), (4, 1), (4, 4), (4, 32), (8, 1), (8, 4), (8, 32))  # devices and micro-batches


def amoebanet_rows() -> Iterator[tuple[str, float]]:
    """Yield the speed-ups of AmoebaNet-D (18, 256): by torchgpipe on P40s, then by GPipe on TPUs."""

    def step_s(num_stages: int, num_micro: int) -> float:
        part = 1 / (num_stages * num_micro)
        return gpipe_step_s([StageLoad(forward_s=part, backward_s=2 * part)] * num_stages, num_micro)

    for num_stages, num_micro in AMOEBANET_D:
        what = f"AmoebaNet-D, {num_stages} devices, {num_micro} micro-batches: speed-up over 2 with 1"
        for _ in range(2):
            yield what, step_s(2, 1) / step_s(num_stages, num_micro)


def pipeline_rows() -> list[PublishedRow]:
    """Return all rows."""
    return rows_of("2026-11-22_check_pipelines", [*memory_rows(), *resnet_101_rows(), *amoebanet_rows()])


if __name__ == "__main__":
    show(pipeline_rows())
