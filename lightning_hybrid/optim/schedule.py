"""Learning-rate schedule with warm-up and polynomial decay, and suggestions for peak learning rates."""

import math
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
    """Compute the learning rate of one optimizer step with the formula of `WarmupPolynomialDecay`.

    Steps are counted from 0.

    >>> rule = dict(total_steps=6, warmup_steps=2, power=2.0, end_lr=0.0, warmup_start_lr=0.0)
    >>> [warmup_polynomial_lr(step, 16.0, **rule) for step in range(8)]
    [0.0, 8.0, 16.0, 9.0, 4.0, 1.0, 0.0, 0.0]
    """
    if step < warmup_steps:
        return warmup_start_lr + (base_lr - warmup_start_lr) * (step / warmup_steps)
    decay_begin = 0
    if decay_from == "warmup_end":
        decay_begin = warmup_steps
    decay_steps = total_steps - decay_begin
    remaining = 1 - min(step - decay_begin, decay_steps) / decay_steps
    return end_lr + (base_lr - end_lr) * remaining**power


class WarmupPolynomialDecay(LRScheduler):
    """Learning-rate schedule with linear warm-up and polynomial decay over optimizer steps.

    For update s = 0, 1, 2, ... with W = warmup_steps, T = total_steps - W:

        s <  W    lr = warmup_start_lr + (base - warmup_start_lr) * s / W
        s >= W    lr = end_lr + (base - end_lr) * (1 - min(s - W, T) / T) ** power

    base is the learning rate of the group at construction. So the peak, at s = W, is the learning rate that
    you pass to the optimizer. `end_lr` is reached at s = total_steps, one step after the last update, and is
    kept from then on. This is MXNet's rule. The TensorFlow reference divides by T + 1, which makes no
    difference for thousands of steps. As in both, update 0 uses `warmup_start_lr`, so by default it changes no
    weight. Power 2 with `end_lr` 1e-4 is MLPerf's schedule for LARS (mlcommons/training, image classification).

    With `decay_from="start"` the decay begins at update 0 (W = 0 in the second line). At s = W the learning
    rate then falls from nearly base to base * (1 - W / total_steps) ** power. This is Caffe's "poly" with
    NVCaffe's `rampup_interval`.

    If `lr` is a 0-dim tensor, its value is set in place from the host.

    Args:
        optimizer: Optimizer whose groups get the learning rate.
        total_steps: Number of optimizer steps of the run, including the warm-up.
        warmup_steps: Number of optimizer steps of the warm-up.
        power: Power of the decay. 1 is linear.
        end_lr: Learning rate of all groups at the end.
        warmup_start_lr: Learning rate of all groups in update 0.
        last_epoch: Index of the last update, as in torch's schedules. -1 starts the schedule.
        decay_from: Beginning of the decay: `"warmup_end"` or `"start"`.

    Raises:
        TypeError: `optimizer` is not an optimizer.
        ValueError: An argument is out of range, or the base of a group is below `end_lr`.
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
        _check_numbers(total_steps, warmup_steps, power, end_lr, warmup_start_lr)
        reason = (
            'the decay begins after the warm-up or at the first step. Set "start" for Caffe\'s rule'
        )
        require_choice("decay_from", decay_from, get_args(DecayFrom), reason)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"`optimizer` (={optimizer!r:.80}) must be a torch.optim.Optimizer, because the schedule sets its "
                "learning rates. Pass the optimizer of the module."
            )
        _check_base_rates(optimizer, end_lr)

        self.total_steps = total_steps
        self.warmup_steps = warmup_steps
        self.power = power
        self.end_lr = end_lr
        self.warmup_start_lr = warmup_start_lr
        self.decay_from: DecayFrom = decay_from
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Compute the learning rate of each parameter group at step `last_epoch`."""
        # The closed form avoids accumulated rounding errors.
        rates = []
        for base_lr in self.base_lrs:
            rate = warmup_polynomial_lr(
                self.last_epoch,
                base_lr,
                total_steps=self.total_steps,
                warmup_steps=self.warmup_steps,
                power=self.power,
                end_lr=self.end_lr,
                warmup_start_lr=self.warmup_start_lr,
                decay_from=self.decay_from,
            )
            rates.append(rate)
        return rates

    _get_closed_form_lr = get_lr  # torch calls this method for `step(epoch)`.


def _check_numbers(
    total_steps: Any, warmup_steps: Any, power: Any, end_lr: Any, warmup_start_lr: Any
) -> None:
    """Raise `ValueError` if an argument of the schedule is out of range."""
    reason = "the schedule counts optimizer steps, not epochs. Multiply epochs by steps per epoch, and round"
    require_whole("total_steps", total_steps, reason)
    require_whole("warmup_steps", warmup_steps, reason, least=0)
    if warmup_steps >= total_steps:
        raise ValueError(
            f"`warmup_steps` (={warmup_steps}) must be less than `total_steps` (={total_steps}), because "
            "`total_steps` includes the warm-up. Set both as numbers of optimizer steps."
        )
    reason = (
        "with 0 the learning rate would never decay. Use 1 for a linear decay, or 2 as MLPerf does"
    )
    require_number("power", power, reason, above=True)
    require_number("end_lr", end_lr, "a learning rate cannot be negative. Use 1e-4, as MLPerf does")
    require_number(
        "warmup_start_lr", warmup_start_lr, "a learning rate cannot be negative. Use 0, for example"
    )


def _check_base_rates(optimizer: Optimizer, end_lr: float) -> None:
    """Raise `ValueError` if the learning rate of a parameter group is below `end_lr`."""
    for index, group in enumerate(optimizer.param_groups):
        # After a resume, `lr` is a value from the middle of the schedule, and torch stores the base next to it.
        base_lr = group.get("initial_lr", group["lr"])
        if base_lr < end_lr:
            raise ValueError(
                f"`end_lr` (={end_lr}) must not exceed the learning rate of group {index} (={float(base_lr)}), because "
                "the learning rate would otherwise grow instead of decay. Lower `end_lr`, or raise the group's `lr`."
            )


MLPERF_LARS = {4096: 10.0, 8192: 17.0, 32768: 21.2, 65536: 24.699}
"""Peak learning rate of LARS for ResNet-50 by the number of images per step, with a trust coefficient of 0.001.

These are MLPerf's reference points (`rcps_resnet.json`, github.com/mlcommons/logging). SGD uses 0.1 at 256 images
(Goyal et al. 2017)."""


def starting_rate(
    optimizer: Literal["sgd", "lars", "lamb"],
    *,
    batch_size: int,
    sgd_lr: float = 0.1,
    sgd_batch_size: int = 256,
) -> float:
    """Suggest a peak learning rate for a large batch, as a starting point for a search.

        s = sgd_lr * 256 / sgd_batch_size / 0.1              your SGD learning rate relative to that of ResNet-50
        sgd    sgd_lr * batch_size / sgd_batch_size          Goyal et al. 2017, who validated it up to 8,192
        lars   s * MLPerf's learning rate at that batch      interpolated in log space, linear below 4,096
        lamb   s * 0.04 * sqrt(batch_size / 32,768)          You et al. 2020, ResNet-50

    Search around the suggested value by factors of two. The scaling of the LARS and LAMB learning rates with the
    SGD learning rate is our assumption. The function only returns a number, and changes no optimizer.

    Args:
        optimizer: `"sgd"`, `"lars"` or `"lamb"`.
        batch_size: Number of samples per optimizer step, over all ranks.
        sgd_lr: Learning rate that works with SGD.
        sgd_batch_size: Batch size for which `sgd_lr` works.

    Raises:
        ValueError: `optimizer` is unknown, a number is not positive, or `batch_size` exceeds 65,536 for LARS.

    Source: Goyal et al. 2017 (arXiv:1706.02677), MLPerf's reference points, You et al. 2020 (arXiv:1904.00962).

    >>> starting_rate("lars", batch_size=4096), starting_rate("sgd", batch_size=4096)
    (10.0, 1.6)
    >>> round(starting_rate("lamb", batch_size=8192, sgd_lr=0.2, sgd_batch_size=512), 3)
    0.02
    """
    reason = "suggestions exist only for these optimizers"
    require_choice("optimizer", optimizer, ("sgd", "lars", "lamb"), reason)
    require_positive(
        "batch_size",
        batch_size,
        "the suggestion grows with it. Pass the number of samples per step",
    )
    require_positive("sgd_lr", sgd_lr, "the suggestion is a multiple of it. Pass 0.1, for example")
    require_positive(
        "sgd_batch_size",
        sgd_batch_size,
        "the suggestion is relative to it. Pass the batch size for which `sgd_lr` works",
    )

    scale = sgd_lr * 256 / sgd_batch_size / 0.1
    if optimizer == "sgd":
        return sgd_lr * batch_size / sgd_batch_size
    if optimizer == "lamb":
        return scale * 0.04 * math.sqrt(batch_size / 32768)
    return _scaled_lars_rate(batch_size, scale)


def _scaled_lars_rate(batch_size: int, scale: float) -> float:
    """Return MLPerf's LARS learning rate for a batch size, multiplied by `scale`.

    It is interpolated in log space, and linear below the first reference point.
    """
    batch_sizes = list(MLPERF_LARS)
    smallest = batch_sizes[0]
    largest = batch_sizes[-1]
    if batch_size > largest:
        raise ValueError(
            f"`batch_size` (={batch_size}) must be at most {largest} for LARS, because no reference learning rate "
            "for larger batches has been published. Start your search from the learning rate for batch size "
            f"{largest}."
        )
    if batch_size <= smallest:
        return scale * MLPERF_LARS[smallest] * batch_size / smallest

    below = max(size for size in batch_sizes if size < batch_size)
    above = min(size for size in batch_sizes if size >= batch_size)
    low = MLPERF_LARS[below]
    high = MLPERF_LARS[above]
    fraction = math.log(batch_size / below) / math.log(above / below)
    return scale * low * (high / low) ** fraction
