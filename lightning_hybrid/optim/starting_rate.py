"""A learning rate to begin a search with, from the one that SGD has at a small batch."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

from lightning_hybrid.checks import require_choice, require_positive

MLPERF_LARS = {4096: 10.0, 8192: 17.0, 32768: 21.2, 65536: 24.699}
"""Images of a step, and LARS's peak rate for ResNet-50 with a trust coefficient of 0.001: MLPerf's reference points
(`rcps_resnet.json`, github.com/mlcommons/logging), where SGD takes 0.1 at 256 images (Goyal et al. 2017)."""


def starting_rate(
    optimizer: Literal["sgd", "lars", "lamb"], *, batch_size: int, sgd_lr: float = 0.1, sgd_batch_size: int = 256
) -> float:
    """Return a peak learning rate for `batch_size` samples a step; a point to search from, by factors of two.

        s = sgd_lr * 256 / sgd_batch_size / 0.1              how SGD's rate compares with that of ResNet-50
        sgd    sgd_lr * batch_size / sgd_batch_size          Goyal et al. 2017; they claim it up to 8,192
        lars   s * MLPerf's rate at that batch               between its points by logarithms; below 4,096 linear
        lamb   s * 0.04 * sqrt(batch_size / 32,768)          You et al. 2020, ResNet-50

    That LARS's and LAMB's rates grow with SGD's is our assumption. No rate is changed behind a user.

    Raises:
        ValueError: an unknown optimizer, a number that is not above 0, or for LARS more than 65,536 samples.

    Source: Goyal et al. 2017 (arXiv:1706.02677); MLPerf's reference points; You et al. 2020 (arXiv:1904.00962).

    >>> starting_rate("lars", batch_size=4096), starting_rate("sgd", batch_size=4096)
    (10.0, 1.6)
    >>> round(starting_rate("lamb", batch_size=8192, sgd_lr=0.2, sgd_batch_size=512), 3)
    0.02
    """
    require_choice("optimizer", optimizer, ("sgd", "lars", "lamb"), "whose rate is asked for")
    for name, value in (("batch_size", batch_size), ("sgd_lr", sgd_lr), ("sgd_batch_size", sgd_batch_size)):
        require_positive(name, value, "it is a rate, or counts samples")
    scale = sgd_lr * 256 / sgd_batch_size / 0.1
    if optimizer == "sgd":
        return sgd_lr * batch_size / sgd_batch_size
    if optimizer == "lamb":
        return scale * 0.04 * math.sqrt(batch_size / 32768)
    points = list(MLPERF_LARS.items())
    if batch_size > points[-1][0]:
        raise ValueError(
            f"`batch_size` (={batch_size}) must be at most {points[-1][0]} for LARS: no larger reference point is "
            "published. Search from the rate of that batch."
        )
    if batch_size <= points[0][0]:
        return scale * points[0][1] * batch_size / points[0][0]
    (below, low), (above, high) = next(pair for pair in pairwise(points) if batch_size <= pair[1][0])
    return scale * low * (high / low) ** (math.log(batch_size / below) / math.log(above / below))
