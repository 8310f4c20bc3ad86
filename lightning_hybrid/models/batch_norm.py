"""BatchNorm when a step has several micro-batches: how fast its running statistics forget."""

from __future__ import annotations

import math

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_hybrid.checks import require_whole


def corrected_momentum(momentum: float, *, accumulate_grad_batches: int) -> float:
    """Compute the momentum with which k updates forget as much as one update with `momentum` does.

        m' = 1 - (1 - m)^(1/k)          (1 - m')^k = 1 - m

    m -> `momentum`, torch's: the weight of the new batch; k -> `accumulate_grad_batches`.

    Raises:
        ValueError: `accumulate_grad_batches` is below 1, or `momentum` is outside [0, 1].

    >>> one = corrected_momentum(0.1, accumulate_grad_batches=4)
    >>> round(one, 6), round((1 - one) ** 4, 12)
    (0.025996, 0.9)
    """
    why = "a step has no fewer micro-batches. Give that of the Trainer"
    require_whole("accumulate_grad_batches", accumulate_grad_batches, why)
    if not 0 <= momentum <= 1:
        raise ValueError(
            f"`momentum` (={momentum}) must be in [0, 1]: it weighs the new batch against the old average. "
            "0.1 is torch's."
        )
    # log1p(-1) is -inf; and one micro-batch must leave the momentum as it is, to the bit.
    if momentum == 1 or accumulate_grad_batches == 1:
        return momentum
    # 1 - (1 - m)^(1/k) would lose digits where k makes the result small.
    return -math.expm1(math.log1p(-momentum) / accumulate_grad_batches)


def correct_momentum_(module: nn.Module, *, accumulate_grad_batches: int) -> int:
    """Make `module`'s running statistics forget per optimizer step, not per micro-batch. In place.

    BatchNorm updates its running statistics r in every forward, k times a step with k micro-batches:

        r <- (1 - m) r + m * statistics of this micro-batch

    With the momentum m unchanged, (1 - m)^k of the old average is left after a step, 0.43 instead of 0.9 for m = 0.1
    and k = 8: evaluation then sees noisier statistics. With m' of `corrected_momentum` it is 1 - m again, and where all
    micro-batches agree, r is what one update gives. What still differs from one batch of all images: the last
    micro-batch weighs more than the first, by (1 - m')^-(k - 1), at most 1 / (1 - m); and the variance lacks that
    between the means of micro-batches. Each micro-batch is normalised by itself, as before.

    This changes BatchNorm, SyncBatchNorm and InstanceNorm with running statistics and a momentum; None (plain average
    over all batches) forgets nothing and stays. Call it once for each network built: a second call would correct again.

    Returns:
        The number of layers corrected; 0 with `accumulate_grad_batches=1`.

    Raises:
        ValueError: As `corrected_momentum`.

    >>> norm = nn.BatchNorm2d(8, momentum=0.19)
    >>> correct_momentum_(norm, accumulate_grad_batches=2), round(norm.momentum, 12)
    (1, 0.1)
    """
    corrected_momentum(
        0.0, accumulate_grad_batches=accumulate_grad_batches
    )  # checks the argument without layers too
    corrected = 0
    for layer in module.modules():
        if (
            isinstance(layer, _NormBase)
            and layer.track_running_stats
            and layer.momentum is not None
        ):
            # The momentum is no part of a checkpoint: a resumed network is corrected when it is built.
            layer.momentum = corrected_momentum(
                layer.momentum, accumulate_grad_batches=accumulate_grad_batches
            )
            corrected += accumulate_grad_batches > 1
    return corrected
