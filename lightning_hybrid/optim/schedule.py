"""The learning-rate schedule of the large-batch records: linear warm-up, then polynomial decay."""

from typing import Any, Literal, get_args

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_hybrid.checks import require_choice, require_number, require_whole

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

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=16.0)
    >>> schedule = WarmupPolynomialDecay(optimizer, total_steps=6, warmup_steps=2, end_lr=0.0)
    >>> for _ in range(6):
    ...     print(schedule.get_last_lr())
    ...     optimizer.step()
    ...     schedule.step()
    [0.0]
    [8.0]
    [16.0]
    [9.0]
    [4.0]
    [1.0]
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
        why = "it counts optimizer steps, not epochs. Multiply epochs by steps per epoch and round"
        require_whole("total_steps", total_steps, why)
        require_whole("warmup_steps", warmup_steps, why, least=0)
        if warmup_steps >= total_steps:
            raise ValueError(
                f"`warmup_steps` (={warmup_steps}) must be less than `total_steps` (={total_steps}): the peak would "
                "come after the end. Count both in optimizer steps, and let `total_steps` include the warm-up."
            )
        require_number("power", power, "2 is MLPerf's, 1 is linear; 0 would never decay", above=True)
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
        return [
            warmup_polynomial_lr(
                self.last_epoch,
                base_lr,
                total_steps=self.total_steps,
                warmup_steps=self.warmup_steps,
                power=self.power,
                end_lr=self.end_lr,
                warmup_start_lr=self.warmup_start_lr,
                decay_from=self.decay_from,
            )
            for base_lr in self.base_lrs
        ]

    _get_closed_form_lr = get_lr  # torch calls this name for `step(epoch)`
