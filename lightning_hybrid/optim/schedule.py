"""The learning-rate schedule of the large-batch records, and a rate to begin a search with."""

import math
from itertools import pairwise
from typing import Any, Literal, get_args

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_hybrid.checks import (
    plain_value,
    require_choice,
    require_number,
    require_positive,
    require_whole,
)

DecayFrom = Literal["warmup_end", "start"]


def warmup_polynomial_lr(
    step: int,
    base_lr: Any,
    *,
    total_steps: int,
    warmup_steps: int,
    power: float,
    end_lr: float,
    warmup_start_lr: float,
    decay_from: DecayFrom = "warmup_end",
) -> Any:
    """Compute the learning rate of update number `step`, counted from 0, by the rule of `WarmupPolynomialDecay`.

    >>> rule = dict(total_steps=6, warmup_steps=2, power=2.0, end_lr=0.0, warmup_start_lr=0.0)
    >>> [warmup_polynomial_lr(step, 16.0, **rule) for step in range(8)]
    [0.0, 8.0, 16.0, 9.0, 4.0, 1.0, 0.0, 0.0]
    """
    if step < warmup_steps:
        return warmup_start_lr + (base_lr - warmup_start_lr) * (step / warmup_steps)
    begin = warmup_steps if decay_from == "warmup_end" else 0
    remaining = 1 - min(step - begin, total_steps - begin) / (total_steps - begin)
    return end_lr + (base_lr - end_lr) * remaining**power


class WarmupPolynomialDecay(LRScheduler):
    """Linear warm-up, then polynomial decay to `end_lr`, which stays; one `step()` per optimizer step.

    For update s = 0, 1, 2, ... with W = warmup_steps, T = total_steps - W:

        s <  W    lr = warmup_start_lr + (base - warmup_start_lr) * s / W
        s >= W    lr = end_lr + (base - end_lr) * (1 - min(s - W, T) / T) ** power

    base is the group's own lr at construction, so the peak is the lr given to the optimizer, at s = W; `end_lr` would
    be reached at s = total_steps, one past the last update, and holds beyond. This is MXNet's rule; the TensorFlow
    reference divides by T + 1, the same at thousands of steps. As in both, update 0 runs at `warmup_start_lr`, which
    at 0 is no update. Poly-2 ending at 1e-4 is MLPerf's for LARS (mlcommons/training, image classification).

    With `decay_from="start"` the decay counts from update 0 (W = 0 in the second line): at s = W the rate falls from
    near base to base * (1 - W / total_steps) ** power. This is Caffe's "poly" with NVCaffe's `rampup_interval`.

    `end_lr` and `warmup_start_lr` hold for all groups. A 0-dim tensor `lr` is filled in place, through the host.

    Raises:
        ValueError: An argument breaks its rule; a group has a smaller base than `end_lr`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        power: float = 2.0,
        end_lr: float = 1e-4,
        warmup_start_lr: float = 0.0,
        last_epoch: int = -1,
        decay_from: DecayFrom = "warmup_end",
    ) -> None:
        total_steps = plain_value(total_steps)
        warmup_steps = plain_value(warmup_steps)
        power = plain_value(power)
        end_lr = plain_value(end_lr)
        warmup_start_lr = plain_value(warmup_start_lr)
        why = "it counts optimizer steps, not epochs. Multiply epochs by steps per epoch and round"
        require_whole("total_steps", total_steps, why)
        require_whole("warmup_steps", warmup_steps, why, least=0)
        if warmup_steps >= total_steps:
            raise ValueError(
                f"`warmup_steps` (={warmup_steps}) must be less than `total_steps` (={total_steps}): the peak would "
                "come after the end. Count both in optimizer steps, and let `total_steps` include the warm-up."
            )
        require_number(
            "power", power, "2 is MLPerf's, 1 is linear; 0 would never decay", above=True
        )
        require_number("end_lr", end_lr, "it is a learning rate; 1e-4 is MLPerf's")
        require_number("warmup_start_lr", warmup_start_lr, "it is a learning rate; 0 is usual")
        require_choice("decay_from", decay_from, get_args(DecayFrom), "start is Caffe's rule")
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"`optimizer` (={optimizer!r:.80}) must be a torch.optim.Optimizer: its groups are changed."
            )
        for index, group in enumerate(optimizer.param_groups):
            # After a resume `lr` is that of the middle of the schedule; torch saves the base next to it.
            base_lr = group.get("initial_lr", group["lr"])
            if base_lr < end_lr:
                raise ValueError(
                    f"`end_lr` (={end_lr}) must not exceed the learning rate of group {index} (={float(base_lr)}): the "
                    "decay would be a rise. Lower `end_lr`, or raise the group's `lr`."
                )
        self.total_steps = total_steps
        self.warmup_steps = warmup_steps
        self.power = power
        self.end_lr = end_lr
        self.warmup_start_lr = warmup_start_lr
        self.decay_from: DecayFrom = decay_from
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Compute the learning rate of each group at update `last_epoch`."""
        # In closed form, so that rounding does not add up.
        names = ("total_steps", "warmup_steps", "power", "end_lr", "warmup_start_lr", "decay_from")
        rule = {name: getattr(self, name) for name in names}
        return [warmup_polynomial_lr(self.last_epoch, base_lr, **rule) for base_lr in self.base_lrs]

    _get_closed_form_lr = get_lr  # torch calls this name for `step(epoch)`


MLPERF_LARS = {4096: 10.0, 8192: 17.0, 32768: 21.2, 65536: 24.699}
"""Images of a step, and LARS's peak rate for ResNet-50 with a trust coefficient of 0.001: MLPerf's reference points
(`rcps_resnet.json`, github.com/mlcommons/logging), where SGD takes 0.1 at 256 images (Goyal et al. 2017)."""


def starting_rate(
    optimizer: Literal["sgd", "lars", "lamb"],
    *,
    batch_size: int,
    sgd_lr: float = 0.1,
    sgd_batch_size: int = 256,
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
    for name, value in (
        ("batch_size", batch_size),
        ("sgd_lr", sgd_lr),
        ("sgd_batch_size", sgd_batch_size),
    ):
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
    (below, low), (above, high) = next(
        pair for pair in pairwise(points) if batch_size <= pair[1][0]
    )
    return scale * low * (high / low) ** (math.log(batch_size / below) / math.log(above / below))
