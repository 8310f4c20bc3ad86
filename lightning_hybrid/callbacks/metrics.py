"""Registry of all logged metrics, with their names, units and meanings.

>>> METRICS["train/lr"].unit
'1'
>>> all(name == metric.name for name, metric in METRICS.items())
True
>>> metric_of("comm/exposed_s/bucket_3").unit, metric_of("my/own")
('s', None)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Logged metric, with its name, unit and meaning.

    Attributes:
        name: Name in loggers.
        unit: SI unit, or "1" for a pure number.
        meaning: Description in one sentence.
        from_clock: Whether the value comes from a clock or the operating system, and therefore
            differs in a repeated run. A repeated run reproduces all other metrics exactly.
        best: `"max"` or `"min"` if the largest or smallest value of a run is the best, else None.
    """

    name: str
    unit: str
    meaning: str
    from_clock: bool = False
    best: Literal["max", "min"] | None = None


METRICS: dict[str, Metric] = {}


def _metric(name: str, unit: str, meaning: str, **options: Any) -> str:
    """Add a metric to `METRICS`, and return its name."""
    METRICS[name] = Metric(name=name, unit=unit, meaning=meaning, **options)
    return name


_timed = partial(_metric, from_clock=True)

TRAIN_LOSS = _metric(
    "train/loss", "1", "Mean over all ranks of the loss of the latest training batch.", best="min"
)
TRAIN_LR = _metric(
    "train/lr", "1", "Learning rate of the latest step in the first parameter group."
)
TRAIN_MOMENTUM = _metric(
    "train/momentum",
    "1",
    "Momentum of the latest step in the first parameter group (beta1 for Adam and LAMB).",
)
TRAIN_LOSS_SCALE = _metric(
    "train/loss_scale", "1", "Loss scale of the next step. Logged only with fp16."
)
TRAIN_SKIPPED_STEPS = _metric(
    "train/skipped_steps", "1", "Number of steps skipped so far because a gradient was not finite."
)
TRUST_RATIO_MIN = _metric(
    "train/trust_ratio_min", "1", "Smallest trust ratio of a layer in the latest step."
)
TRUST_RATIO_MEDIAN = _metric(
    "train/trust_ratio_median",
    "1",
    "Median trust ratio of the layers (the lower median if their number is even).",
)
TRUST_RATIO_MAX = _metric(
    "train/trust_ratio_max", "1", "Largest trust ratio of a layer in the latest step."
)
DATA_WAIT_S = _timed(
    "data/wait_s", "s", "Time per step for which rank zero waited for its data loader."
)
COMM_BYTES = _metric(
    "comm/bytes",
    "B",
    "Bytes of gradients that rank zero passed to the all-reduce per step, in the data type that is sent.",
)
COMM_LINK_BYTES = _metric(
    "comm/link_bytes",
    "B",
    "Bytes that the busiest node sends to other nodes per step, computed from the algorithms' formulas.",
)
COMM_LEAST_LINK_BYTES = _metric(
    "comm/least_link_bytes",
    "B",
    "Minimum bytes that each of N nodes must send to other nodes per step: 2 (N - 1) / N of the summed data.",
)
COMM_NODE_BYTES = _metric(
    "comm/node_bytes",
    "B",
    "Bytes that the ranks of the busiest node send to one another per step, computed from the algorithms' formulas.",
)
COMM_QUANTIZATION_NMSE = _metric(
    "comm/quantization_nmse",
    "1",
    "Mean squared rounding error of the values that rank zero sends to other nodes, divided by their mean square.",
)
COMM_BUSY_S = _timed(
    "comm/busy_s",
    "s",
    "Time per step with at least one bucket of rank zero in flight, whether hidden by backward or not.",
)
COMM_EXPOSED_S = _timed(
    "comm/exposed_s",
    "s",
    "Time per step for which rank zero only waited for gradients of other ranks.",
)
COMM_EXPOSED_SHARE = _timed(
    "comm/exposed_share", "1", "Exposed communication as a fraction of the step time, from 0 to 1."
)
COMM_ACHIEVED_BYTES_PER_S = _timed(
    "comm/achieved_bytes_per_s",
    "B/s",
    "Achieved rate of a link between nodes: the minimum bytes to send, divided by the time in flight.",
)
COMM_ACHIEVED_SHARE = _timed(
    "comm/achieved_share",
    "1",
    "Achieved rate as a fraction of the link's bandwidth, which is the strategy's `report.link_bytes_per_s`.",
)
IMAGES_PER_S = _timed(
    "throughput/images_per_s",
    "1/s",
    "Training images per second over all ranks since the last logged value, excluding validation.",
)
FLOPS_PER_S = _timed(
    "throughput/flops_per_s",
    "1/s",
    "Floating-point operations per second: the model's operations per image, times images per second.",
)
MFU = _timed(
    "throughput/mfu",
    "1",
    "Model FLOPs utilization: floating-point operations per second, as a fraction of the peak of all devices.",
)
PEAK_MEMORY_BYTES = _timed(
    "memory/peak_bytes",
    "B",
    "Peak memory of rank zero so far, of tensors on CUDA or of the whole process on a CPU.",
)
STRAGGLER_COST_SHARE = _timed(
    "straggler/cost_share",
    "1",
    "Fraction of the step time for which the median rank waits for the slowest rank, from 0 to 1.",
)
STRAGGLER_WAIT_SHARE = _timed(
    "straggler/wait_share",
    "1",
    "Fraction of the step time for which even the slowest rank waits for gradients, because of the network.",
)
STRAGGLER_RANK = _timed(
    "straggler/rank",
    "1",
    "Rank that `StragglerMonitor` reports as slow. Not logged if it reports none.",
)
STRAGGLER_LINK_BYTES_PER_S = _timed(
    "straggler/link_bytes_per_s",
    "B/s",
    "Rate of the slowest link between nodes while it has data to send, according to TCP counters.",
)
STRAGGLER_EXCESS_S = {
    phase: _timed(
        f"straggler/{phase}_s",
        "s",
        f"Time per step by which the slowest rank's {phase} phase is longer than the median.",
    )
    for phase in ("input", "forward", "backward", "optimizer", "callbacks")
}
VAL_LOSS = _metric("val/loss", "1", "Mean loss over the validation set.", best="min")
VAL_ACC = _metric(
    "val/acc",
    "1",
    "Fraction of the validation set for which the most likely class is correct.",
    best="max",
)
_TOP5 = "Fraction of the {} set for which the correct class is one of the five most likely. Needs at least six classes."
VAL_ACC_TOP5 = _metric("val/acc_top5", "1", _TOP5.format("validation"), best="max")
TEST_ACC = _metric(
    "test/acc",
    "1",
    "Fraction of the test set for which the most likely class is correct.",
    best="max",
)
TEST_ACC_TOP5 = _metric("test/acc_top5", "1", _TOP5.format("test"), best="max")
ELAPSED_S = _timed(
    "time/elapsed_s",
    "s",
    "Time since training began, including validation. After a resume, it excludes the time between the checkpoint and "
    "the resume.",
)
RECALIBRATION_S = _timed(
    "time/recalibration_s", "s", "Time to recompute BatchNorm statistics before a validation run."
)
TIME_TO_ACCURACY_TRAIN_S = _timed(
    "time_to_accuracy/train_s",
    "s",
    "Training time until validation first reached the target, excluding validation.",
)
TIME_TO_ACCURACY_TOTAL_S = _timed(
    "time_to_accuracy/total_s",
    "s",
    "Time until validation first reached the target, including that validation and earlier ones.",
)
TIME_TO_ACCURACY_STEP = _metric(
    "time_to_accuracy/step", "1", "Number of steps until validation first reached the target."
)

TRUST_RATIOS = (TRUST_RATIO_MIN, TRUST_RATIO_MEDIAN, TRUST_RATIO_MAX)


def _indexed(name: str, item: str, meaning: str) -> Metric:
    return replace(METRICS[name], name=f"{name}/{item}_<index>", meaning=meaning)


INDEXED = {
    COMM_EXPOSED_S: _indexed(
        COMM_EXPOSED_S,
        "bucket",
        "Exposed time per step from the end of the previous bucket to the end of this bucket.",
    ),
    TRAIN_LOSS_SCALE: _indexed(TRAIN_LOSS_SCALE, "optimizer", "Loss scale of a further optimizer."),
    **{
        name: _indexed(name, "group", "Trust ratio of a further parameter group.")
        for name in TRUST_RATIOS
    },
}
"""Metrics that may exist several times, by the name of the first one.

They are the metrics of each bucket, by its position in the step, of each further optimizer in
manual optimization, and of each further parameter group with trust ratios. The first optimizer and
the first group have no index.
"""


def with_index(name: str, index: int) -> str:
    """Return the logged name of a metric for one bucket, optimizer or parameter group.

    The name ends with the index. Index 0 is omitted, except for buckets. `INDEXED` lists the
    metrics that have an index.

    >>> with_index(COMM_EXPOSED_S, 0), with_index(TRAIN_LOSS_SCALE, 0), with_index(TRUST_RATIO_MIN, 2)
    ('comm/exposed_s/bucket_0', 'train/loss_scale', 'train/trust_ratio_min/group_2')
    """
    if index == 0 and name != COMM_EXPOSED_S:
        return name
    return INDEXED[name].name.replace("<index>", str(index))


def metric_of(name: str) -> Metric | None:
    """Look up a metric by its logged name, which may contain an index.

    The result is None if the name is unknown.
    """
    index = name.rpartition("_")[2]
    for metric in INDEXED.values():
        if index.isdecimal() and name == metric.name.replace("<index>", index):
            return metric
    return METRICS.get(name)
