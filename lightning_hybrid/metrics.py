"""Every metric that a run logs: its name, its unit, what it means.

>>> METRICS["train/lr"].unit
'1'
>>> all(name == metric.name for name, metric in METRICS.items())
True
>>> metric_of("comm/exposed_s/bucket_3").unit, metric_of("my/own")
('s', None)
"""

from __future__ import annotations

from dataclasses import dataclass

TRAIN_LOSS = "train/loss"
TRAIN_LR = "train/lr"
TRAIN_LOSS_SCALE = "train/loss_scale"
TRAIN_SKIPPED_STEPS = "train/skipped_steps"
COMM_BYTES = "comm/bytes"
COMM_LINK_BYTES = "comm/link_bytes"
COMM_LEAST_LINK_BYTES = "comm/least_link_bytes"
COMM_NODE_BYTES = "comm/node_bytes"
COMM_BUSY_S = "comm/busy_s"
COMM_EXPOSED_S = "comm/exposed_s"
COMM_EXPOSED_SHARE = "comm/exposed_share"
COMM_ACHIEVED_BYTES_PER_S = "comm/achieved_bytes_per_s"
COMM_ACHIEVED_SHARE = "comm/achieved_share"
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
    Metric(name=COMM_BYTES, unit="B", meaning="Gradients per step that rank zero handed to the sum, as on the wire."),
    Metric(
        name=COMM_LINK_BYTES,
        unit="B",
        meaning="What the busiest node sends to others per step, by the formula of each bucket's algorithm.",
    ),
    Metric(
        name=COMM_LEAST_LINK_BYTES,
        unit="B",
        meaning="What each of N nodes must send to others per step, whatever the algorithm: 2 (N - 1) / N of the sums.",
    ),
    Metric(
        name=COMM_NODE_BYTES,
        unit="B",
        meaning="What the ranks of the busiest node send one another per step, by the formula of the algorithm.",
    ),
    Metric(
        name=COMM_BUSY_S,
        unit="s",
        meaning="Time per step with at least one bucket of rank zero in flight, hidden by backward or not.",
        from_clock=True,
    ),
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
        name=COMM_ACHIEVED_BYTES_PER_S,
        unit="B/s",
        meaning="Least bytes between nodes by the time in flight: what the algorithm makes of a node's link.",
        from_clock=True,
    ),
    Metric(
        name=COMM_ACHIEVED_SHARE,
        unit="1",
        meaning="The achieved rate as a part of the link's, which the strategy was given as `link_bytes_per_s`.",
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

BUCKET_EXPOSED_S = Metric(
    name=f"{COMM_EXPOSED_S}/bucket_<index>",
    unit="s",
    meaning="Part of the exposed time per step until this bucket was done, and no other that was done before.",
    from_clock=True,
)
"""A metric for each bucket, by its place in the step."""


def exposed_s_of_bucket(index: int) -> str:
    """The name of ``BUCKET_EXPOSED_S`` for one bucket.

    >>> exposed_s_of_bucket(3)
    'comm/exposed_s/bucket_3'
    """
    return BUCKET_EXPOSED_S.name.replace("<index>", str(index))


LOSS_SCALE_OF_OPTIMIZER = Metric(
    name=f"{TRAIN_LOSS_SCALE}/optimizer_<index>",
    unit="1",
    meaning="The same for a further optimizer in manual optimization; the first has no index.",
)
"""A metric for each optimizer but the first."""


def loss_scale_of_optimizer(index: int) -> str:
    """The name of the loss scale of one optimizer.

    >>> loss_scale_of_optimizer(0), loss_scale_of_optimizer(1)
    ('train/loss_scale', 'train/loss_scale/optimizer_1')
    """
    return LOSS_SCALE_OF_OPTIMIZER.name.replace("<index>", str(index)) if index else TRAIN_LOSS_SCALE


def metric_of(name: str) -> Metric | None:
    """What is known of a logged name; None where it is not ours."""
    index = name.rpartition("_")[2]
    for metric in (BUCKET_EXPOSED_S, LOSS_SCALE_OF_OPTIMIZER):
        if index.isdecimal() and name == metric.name.replace("<index>", index):
            return metric
    return METRICS.get(name)
