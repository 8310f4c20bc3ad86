"""Parts of the method taken out, one at a time, for configurations: `optim._target_=recipes.ablations....`."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_hybrid.models import AlexNetBN
from lightning_hybrid.optim import LARS


def _with_options(params: Any, **options: Any) -> list[dict[str, Any]]:
    groups = [param if isinstance(param, dict) else {"params": [param]} for param in params]
    return [group | options for group in groups]


def lars_without_trust_ratio(params: Any, **arguments: Any) -> LARS:
    """LARS with every trust ratio 1: SGD with momentum, in the form of `momentum_form`."""
    return LARS(_with_options(params, trust_ratio=False), **arguments)


def lars_with_decay_everywhere(params: Any, *, weight_decay: float, **arguments: Any) -> LARS:
    """LARS with weight decay on biases and normalisation too; they still have no trust ratio."""
    return LARS(_with_options(params, weight_decay=weight_decay), weight_decay=weight_decay, **arguments)


def alexnet_without_pool5_norm(**arguments: Any) -> AlexNetBN:
    """AlexNet-BN without the BatchNorm after the last pooling."""
    network = AlexNetBN(**arguments)
    assert isinstance(network.features[-1], nn.BatchNorm2d)
    network.features[-1] = nn.Identity()
    return network
