"""Every metric that a run logs: name, unit and meaning.

>>> METRICS["train/lr"].unit
'1'
>>> all(name == metric.name for name, metric in METRICS.items())
True
>>> metric_of("comm/exposed_s/bucket_3").unit, metric_of("my/own")
('s', None)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

TRAIN_LOSS = "train/loss"
TRAIN_LR = "train/lr"
TRAIN_MOMENTUM = "train/momentum"
TRAIN_LOSS_SCALE = "train/loss_scale"
TRAIN_SKIPPED_STEPS = "train/skipped_steps"
TRUST_RATIO_MIN = "train/trust_ratio_min"
TRUST_RATIO_MEDIAN = "train/trust_ratio_median"
TRUST_RATIO_MAX = "train/trust_ratio_max"
DATA_WAIT_S = "data/wait_s"
COMM_BYTES = "comm/bytes"
COMM_LINK_BYTES = "comm/link_bytes"
COMM_LEAST_LINK_BYTES = "comm/least_link_bytes"
COMM_NODE_BYTES = "comm/node_bytes"
COMM_QUANTISATION_NMSE = "comm/quantisation_nmse"
COMM_BUSY_S = "comm/busy_s"
COMM_EXPOSED_S = "comm/exposed_s"
COMM_EXPOSED_SHARE = "comm/exposed_share"
COMM_ACHIEVED_BYTES_PER_S = "comm/achieved_bytes_per_s"
COMM_ACHIEVED_SHARE = "comm/achieved_share"
IMAGES_PER_S = "throughput/images_per_s"
FLOPS_PER_S = "throughput/flops_per_s"
MFU = "throughput/mfu"
PEAK_MEMORY_BYTES = "memory/peak_bytes"
VAL_LOSS = "val/loss"
VAL_ACC = "val/acc"
VAL_ACC_TOP5 = "val/acc_top5"
TEST_ACC = "test/acc"
TEST_ACC_TOP5 = "test/acc_top5"
ELAPSED_S = "time/elapsed_s"
RECALIBRATION_S = "time/recalibration_s"
TIME_TO_ACCURACY_TRAIN_S = "time_to_accuracy/train_s"
TIME_TO_ACCURACY_TOTAL_S = "time_to_accuracy/total_s"
TIME_TO_ACCURACY_STEP = "time_to_accuracy/step"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric."""

    name: str  # in loggers
    unit: str  # SI unit, or "1" for a pure number
    meaning: str  # one sentence
    # From a clock or the operating system: a repeated run gives another value. All others repeat digit for digit.
    from_clock: bool = False
    best: Literal["max", "min"] | None = None  # of a run's values; None where neither is


_timed = partial(Metric, from_clock=True)

_TABLE = (
    Metric(name=TRAIN_LOSS, unit="1", meaning="Mean over ranks of the loss of the batch just trained on.", best="min"),
    Metric(name=TRAIN_LR, unit="1", meaning="Learning rate of the step just made, of the first parameter group."),
    Metric(name=TRAIN_MOMENTUM, unit="1", meaning="Momentum (Adam, LAMB: beta1) of that step, of the first group."),
    Metric(name=TRAIN_LOSS_SCALE, unit="1", meaning="Factor on the loss for the next step; none without fp16."),
    Metric(name=TRAIN_SKIPPED_STEPS, unit="1", meaning="Steps skipped so far because a gradient was not finite."),
    Metric(name=TRUST_RATIO_MIN, unit="1", meaning="Least trust ratio of a layer, for the gradients just used."),
    Metric(name=TRUST_RATIO_MEDIAN, unit="1", meaning="Median over layers of the trust ratio; of two, the smaller."),
    Metric(name=TRUST_RATIO_MAX, unit="1", meaning="Largest trust ratio of a layer."),
    _timed(name=DATA_WAIT_S, unit="s", meaning="Time per step in which rank zero waited for its loader."),
    Metric(name=COMM_BYTES, unit="B", meaning="Gradients per step that rank zero gave to the sum, as on the wire."),
    Metric(
        name=COMM_LINK_BYTES,
        unit="B",
        meaning="Bytes that the busiest node sends to others per step, by the formula of each bucket's algorithm.",
    ),
    Metric(
        name=COMM_LEAST_LINK_BYTES,
        unit="B",
        meaning="Bytes that each of N nodes must send to others per step by any algorithm: 2 (N - 1) / N of the sums.",
    ),
    Metric(
        name=COMM_NODE_BYTES,
        unit="B",
        meaning="Bytes that the ranks of the busiest node send one another per step, by the formula of the algorithm.",
    ),
    Metric(
        name=COMM_QUANTISATION_NMSE,
        unit="1",
        meaning="Mean squared error of what rank zero rounded to 8 or 4 bits for other nodes, by its mean square.",
    ),
    _timed(
        name=COMM_BUSY_S,
        unit="s",
        meaning="Time per step with at least one bucket of rank zero in flight, hidden by backward or not.",
    ),
    _timed(
        name=COMM_EXPOSED_S,
        unit="s",
        meaning="Time per step in which rank zero had nothing to do but wait for gradients of other ranks.",
    ),
    _timed(name=COMM_EXPOSED_SHARE, unit="1", meaning="Exposed communication as a part of the time of a step, 0 to 1."),
    _timed(
        name=COMM_ACHIEVED_BYTES_PER_S,
        unit="B/s",
        meaning="Least bytes between nodes by the time in flight: the rate that the algorithm reaches on a link.",
    ),
    _timed(
        name=COMM_ACHIEVED_SHARE,
        unit="1",
        meaning="The achieved rate as a part of the link's, which the strategy was given as `report.link_bytes_per_s`.",
    ),
    _timed(
        name=IMAGES_PER_S,
        unit="1/s",
        meaning="Training images per second over all ranks, since the last value; validation is not counted.",
    ),
    _timed(
        name=FLOPS_PER_S,
        unit="1/s",
        meaning="Floating-point operations per second over all ranks: images per second by the model's per image.",
    ),
    _timed(
        name=MFU,
        unit="1",
        meaning="Model FLOP utilisation: these operations as a part of what all devices could do at their peak.",
    ),
    _timed(
        name=PEAK_MEMORY_BYTES,
        unit="B",
        meaning="Peak memory of rank zero so far: tensors on CUDA; on a CPU the whole process.",
    ),
    Metric(name=VAL_LOSS, unit="1", meaning="Mean loss over the validation set.", best="min"),
    Metric(name=VAL_ACC, unit="1", meaning="Part of the validation set whose most likely class is right.", best="max"),
    Metric(
        name=VAL_ACC_TOP5,
        unit="1",
        meaning="Part of the validation set whose class is among the five most likely; not with five classes or fewer.",
        best="max",
    ),
    Metric(name=TEST_ACC, unit="1", meaning="Part of the test set whose most likely class is right.", best="max"),
    Metric(
        name=TEST_ACC_TOP5,
        unit="1",
        meaning="Part of the test set whose class is among the five most likely; not with five classes or fewer.",
        best="max",
    ),
    _timed(
        name=ELAPSED_S,
        unit="s",
        meaning="Time since training began, validation included; without the work of an interrupted run after its last "
        "checkpoint and the time until it was resumed.",
    ),
    _timed(name=RECALIBRATION_S, unit="s", meaning="Time to compute BatchNorm's statistics again before a validation."),
    _timed(
        name=TIME_TO_ACCURACY_TRAIN_S,
        unit="s",
        meaning="Time of training until a validation found the target reached, without validation.",
    ),
    _timed(name=TIME_TO_ACCURACY_TOTAL_S, unit="s", meaning="The same with validation, that one included."),
    Metric(name=TIME_TO_ACCURACY_STEP, unit="1", meaning="Steps until a validation found the target reached."),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _TABLE}

# A metric for each bucket, by its place in the step.
BUCKET_EXPOSED_S = Metric(
    name=f"{COMM_EXPOSED_S}/bucket_<index>",
    unit="s",
    meaning="Part of the exposed time per step from the end of the bucket before until this bucket was done.",
    from_clock=True,
)


def exposed_s_of_bucket(index: int) -> str:
    """Return the name of `BUCKET_EXPOSED_S` for one bucket.

    >>> exposed_s_of_bucket(3)
    'comm/exposed_s/bucket_3'
    """
    return BUCKET_EXPOSED_S.name.replace("<index>", str(index))


# A metric for each optimizer but the first.
LOSS_SCALE_OF_OPTIMIZER = Metric(
    name=f"{TRAIN_LOSS_SCALE}/optimizer_<index>",
    unit="1",
    meaning="The same for a further optimizer in manual optimization; the first has no index.",
)


def loss_scale_of_optimizer(index: int) -> str:
    """Return the name of the loss scale of one optimizer.

    >>> loss_scale_of_optimizer(0), loss_scale_of_optimizer(1)
    ('train/loss_scale', 'train/loss_scale/optimizer_1')
    """
    return LOSS_SCALE_OF_OPTIMIZER.name.replace("<index>", str(index)) if index else TRAIN_LOSS_SCALE


# Metrics for each parameter group with trust ratios but the first.
TRUST_RATIO_OF_GROUP = tuple(
    Metric(name=f"{name}/group_<index>", unit="1", meaning="The same of a further group; the first has no index.")
    for name in (TRUST_RATIO_MIN, TRUST_RATIO_MEDIAN, TRUST_RATIO_MAX)
)


def trust_ratios_of_group(index: int) -> tuple[str, ...]:
    """Return the names of least, median and largest trust ratio of one parameter group.

    >>> trust_ratios_of_group(0)[0], trust_ratios_of_group(2)[0]
    ('train/trust_ratio_min', 'train/trust_ratio_min/group_2')
    """
    if not index:
        return TRUST_RATIO_MIN, TRUST_RATIO_MEDIAN, TRUST_RATIO_MAX
    return tuple(metric.name.replace("<index>", str(index)) for metric in TRUST_RATIO_OF_GROUP)


def metric_of(name: str) -> Metric | None:
    """Find the metric of a logged name; None if it is not one of these."""
    index = name.rpartition("_")[2]
    for metric in (BUCKET_EXPOSED_S, LOSS_SCALE_OF_OPTIMIZER, *TRUST_RATIO_OF_GROUP):
        if index.isdecimal() and name == metric.name.replace("<index>", index):
            return metric
    return METRICS.get(name)
