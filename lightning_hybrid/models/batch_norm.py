"""Correction of BatchNorm's momentum for optimizer steps with several micro-batches."""

from __future__ import annotations

import math

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_hybrid.checks import require_whole


def corrected_momentum(momentum: float, *, accumulate_grad_batches: int) -> float:
    """Compute the BatchNorm momentum with which k updates decay the running statistics as much as one update.

        m' = 1 - (1 - m)^(1/k)          (1 - m')^k = 1 - m

    Args:
        momentum: Weight m of the new batch, as in torch.
        accumulate_grad_batches: Number k of micro-batches per step.

    Raises:
        ValueError: `accumulate_grad_batches` is below 1, or `momentum` is outside [0, 1].

    >>> corrected = corrected_momentum(0.1, accumulate_grad_batches=4)
    >>> round(corrected, 6), round((1 - corrected) ** 4, 12)
    (0.025996, 0.9)
    """
    why = "a step has this many micro-batches. Pass the `accumulate_grad_batches` of the Trainer"
    require_whole("accumulate_grad_batches", accumulate_grad_batches, why)
    if not 0 <= momentum <= 1:
        raise ValueError(
            f"`momentum` (={momentum}) must be from 0 to 1, because it is the weight of the new batch in the running "
            "statistics. Set momentum=0.1, the default of PyTorch."
        )
    # log1p(-1) is -inf. With a single micro-batch, rounding must not change the momentum.
    if momentum == 1 or accumulate_grad_batches == 1:
        return momentum
    # The formula 1 - (1 - m)^(1/k) itself would lose digits for a large k.
    return -math.expm1(math.log1p(-momentum) / accumulate_grad_batches)


def correct_momentum_(module: nn.Module, *, accumulate_grad_batches: int) -> int:
    """Correct the momentum of BatchNorm layers, in place, for steps with several micro-batches.

    BatchNorm updates its running statistics r in every forward pass, which is k times per step with k micro-batches:

        r <- (1 - m) r + m * statistics of this micro-batch

    With an unchanged momentum m, only (1 - m)^k of the old average remains after a step. For m = 0.1 and k = 8, this is
    0.43 instead of 0.9, so evaluation uses noisier statistics. With the corrected momentum m', a fraction of 1 - m
    remains. If all micro-batches have equal statistics, r is then the result of a single update. Two differences from
    one batch of all images remain:

    * The last micro-batch has a larger weight than the first, by the factor (1 - m')^-(k - 1), at most 1 / (1 - m).
    * The variance does not include the variance between the means of micro-batches.

    Each micro-batch is normalized with its own statistics, as before.

    The function changes BatchNorm, SyncBatchNorm and InstanceNorm layers with running statistics and a momentum. Layers
    whose momentum is None (plain average over all batches) are not changed. Call it once for each network that you
    create, because a second call would correct the momentum again.

    Returns:
        The number of corrected layers. With `accumulate_grad_batches=1` it is 0.

    Raises:
        ValueError: `accumulate_grad_batches` is below 1, or the momentum of a layer is outside [0, 1].

    >>> norm = nn.BatchNorm2d(8, momentum=0.19)
    >>> correct_momentum_(norm, accumulate_grad_batches=2), round(norm.momentum, 12)
    (1, 0.1)
    """
    # This call validates the argument even if the module has no such layers.
    corrected_momentum(0.0, accumulate_grad_batches=accumulate_grad_batches)

    num_corrected = 0
    for layer in module.modules():
        if not isinstance(layer, _NormBase):
            continue
        if layer.track_running_stats and layer.momentum is not None:
            # The momentum is not part of a checkpoint, so the network of a resumed run must be corrected as well.
            layer.momentum = corrected_momentum(
                layer.momentum, accumulate_grad_batches=accumulate_grad_batches
            )
            num_corrected += 1
    if accumulate_grad_batches == 1:
        return 0
    return num_corrected
