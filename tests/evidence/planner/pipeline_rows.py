"""Published results of pipelines and of memory, and predictions: `python -m tests.evidence.planner.pipeline_rows`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from lightning_hybrid.pipeline.cuts import balanced_cuts
from lightning_hybrid.planning.memory import StateBytes
from lightning_hybrid.planning.pipeline_cost import StageLoad, pipeline_step_s, schedule_tasks, simulate_pipeline
from recipes.networks.resnet import ResNet
from recipes.planning.blocks import blocks_of
from recipes.planning.layers import FORWARD_SHARE
from tests.evidence.planner.known_clusters import IMAGE, PublishedRow, cluster_of
from tests.evidence.planner.published import write

GIB = 2**30
SGD_FP32 = StateBytes(weights=4, gradients=4, masters=0, optimizer=4, rest=0)

# ---- memory ----------------------------------------------------------------------------------------------------------

ZERO = "Rajbhandari et al. 2019, arXiv:1910.02054"
ZERO_GB = {(): 120.0, ("state",): 31.4, ("state", "gradient"): 16.6, ("state", "gradient", "weight"): 1.9}
TORCHGPIPE = "torchgpipe 0.0.5, docs/benchmarks.rst"
AMOEBANET_GIB = {81.5e6: 0.91, 319.0e6: 3.57, 542.7e6: 6.07, 1.06e9: 11.80, 1.84e9: 20.62}
GPIPE = "Huang et al. 2018, arXiv:1811.06965, as torchgpipe quotes it"
GPIPE_GB = {82e6: 1.05, 318e6: 3.8, 542e6: 6.45, 1.05e9: 12.53, 1.8e9: 24.62}


def memory_rows() -> Iterator[PublishedRow]:
    """Yield ZeRO's table, and the parameters of the largest AmoebaNets that GPipe trains on 1 to 8 devices."""
    adam = StateBytes(weights=2, gradients=2, masters=4, optimizer=8, rest=0)
    for stage, (shared, published) in enumerate(ZERO_GB.items()):
        each = adam.per_parameter(**{f"{name}_share": 1 / 64 for name in shared})
        yield PublishedRow(f"ZeRO stage {stage}, 7.5 B parameters, 64 ranks", ZERO, "GB", published, 7.5 * each)
    for table, source, unit, divisor in ((AMOEBANET_GIB, TORCHGPIPE, "GiB", GIB), (GPIPE_GB, GPIPE, "GB", 1e9)):
        for numel, published in table.items():
            yield PublishedRow(
                f"AmoebaNet-D of {numel / 1e6:,.0f} M: parameters",
                source,
                unit,
                published,
                numel * SGD_FP32.per_parameter() / divisor,
                note="fp32 weights, gradients and one moment",
            )


# ---- GPipe's schedule ------------------------------------------------------------------------------------------------


def gpipe_step_s(loads: Sequence[StageLoad], num_micro: int) -> float:
    """Simulate GPipe's schedule; each forward runs again, except that of the last micro-batch, spread over all."""
    again = (num_micro - 1) / num_micro
    loads = [
        StageLoad(forward_s=load.forward_s, backward_s=load.backward_s + again * load.forward_s, send_s=load.send_s)
        for load in loads
    ]
    return pipeline_step_s(simulate_pipeline(schedule_tasks("gpipe", len(loads), num_micro), loads), loads)


RESNET_101_SPEEDUPS = {  # devices: images, micro-batches, over one device without a pipeline
    1: (220, 2, 0.853),
    2: (25000, 1667, 1.414),
    4: (5632, 256, 2.774),
    8: (5400, 150, 4.294),
}
P40_IMAGES_PER_S = 95.862  # ResNet-101, fp32, alone: the baseline of the same table


def resnet_101_rows() -> Iterator[PublishedRow]:
    """Yield torchgpipe's speed-ups of ResNet-101 on P40s."""
    with torch.device("meta"):
        blocks = blocks_of(ResNet(depth=101), IMAGE, precision="32-true")
    near = cluster_of("p40_roce", 1).inside
    total = sum(block.forward_flops for block in blocks)
    for num_stages, (images, num_micro, published) in RESNET_101_SPEEDUPS.items():
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
        yield PublishedRow(
            f"ResNet-101, {num_stages} P40, {num_micro} micro-batches: speed-up",
            "torchgpipe 0.0.5, benchmarks/resnet101-speed",
            "x",
            published,
            images / gpipe_step_s(loads, num_micro) / P40_IMAGES_PER_S,
            note="cuts between blocks by FLOPs, theirs within blocks by hand",
        )


# Devices and micro-batches: torchgpipe on P40s, GPipe on TPUs; over two devices with one micro-batch.
AMOEBANET_SPEEDUPS = {
    (2, 4): (1.546, 1.07),
    (2, 32): (1.780, 1.21),
    (4, 1): (1.006, 1.13),
    (4, 4): (1.680, 1.26),
    (4, 32): (2.711, 1.84),
    (8, 1): (0.932, 1.38),
    (8, 4): (2.625, 1.72),
    (8, 32): (4.966, 3.48),
}


def amoebanet_rows() -> Iterator[PublishedRow]:
    """Yield the speed-ups of AmoebaNet-D (18, 256)."""

    def step_s(num_stages: int, num_micro: int) -> float:
        part = 1 / (num_stages * num_micro)
        return gpipe_step_s([StageLoad(forward_s=part, backward_s=2 * part)] * num_stages, num_micro)

    for (num_stages, num_micro), published in AMOEBANET_SPEEDUPS.items():
        for value, source in zip(published, ("torchgpipe 0.0.5, benchmarks/amoebanetd-speed", GPIPE), strict=True):
            yield PublishedRow(
                f"AmoebaNet-D, {num_stages} devices, {num_micro} micro-batches: speed-up over 2 with 1",
                source,
                "x",
                value,
                step_s(2, 1) / step_s(num_stages, num_micro),
                note="even stages, free messages",
            )


def pipeline_rows() -> list[PublishedRow]:
    """Return all rows."""
    return [*memory_rows(), *resnet_101_rows(), *amoebanet_rows()]


if __name__ == "__main__":
    write(pipeline_rows())
