"""Every metric that a run logs: its name, its unit, what it means.

>>> METRICS["train/lr"].unit
'1'
>>> all(name == metric.name for name, metric in METRICS.items())
True
"""

from __future__ import annotations

from dataclasses import dataclass

TRAIN_LOSS = "train/loss"
TRAIN_LR = "train/lr"
TRAIN_LOSS_SCALE = "train/loss_scale"
TRAIN_SKIPPED_STEPS = "train/skipped_steps"
COMM_EXPOSED_S = "comm/exposed_s"
COMM_EXPOSED_SHARE = "comm/exposed_share"
IMAGES_PER_S = "throughput/images_per_s"
VAL_LOSS = "val/loss"
VAL_ACC = "val/acc"
TEST_ACC = "test/acc"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric.

    Attributes:
        name: As loggers see it.
        unit: SI, or "1" for a pure number.
        meaning: In one sentence.
        from_clock: Whether it comes from a clock, so that a repeated run gives another value; all others repeat digit
            for digit.
    """

    name: str
    unit: str
    meaning: str
    from_clock: bool = False


_TABLE = (
    Metric(name=TRAIN_LOSS, unit="1", meaning="Mean over ranks of the loss of the batch just trained on."),
    Metric(name=TRAIN_LR, unit="1", meaning="Learning rate of the step just made, of the first parameter group."),
    Metric(name=TRAIN_LOSS_SCALE, unit="1", meaning="Factor on the loss for the next step; none without fp16."),
    Metric(name=TRAIN_SKIPPED_STEPS, unit="1", meaning="Steps skipped so far because a gradient was not finite."),
    Metric(
        name=COMM_EXPOSED_S,
        unit="s",
        meaning="Time per step in which rank zero had nothing to do but wait for gradients of other ranks.",
        from_clock=True,
    ),
    Metric(
        name=COMM_EXPOSED_SHARE,
        unit="1",
        meaning="Exposed communication as a part of the time of a step, 0 to 1.",
        from_clock=True,
    ),
    Metric(
        name=IMAGES_PER_S,
        unit="1/s",
        meaning="Training images per second over all ranks, since the last value; validation is not counted.",
        from_clock=True,
    ),
    Metric(name=VAL_LOSS, unit="1", meaning="Mean loss over the validation set."),
    Metric(name=VAL_ACC, unit="1", meaning="Part of the validation set whose most likely class is right."),
    Metric(name=TEST_ACC, unit="1", meaning="Part of the test set whose most likely class is right."),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _TABLE}
