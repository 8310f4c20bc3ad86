"""Layer-wise optimizers for large batches, with helpers for parameter groups and a learning-rate schedule."""

from lightning_hybrid.optim.lamb import LAMB
from lightning_hybrid.optim.lars import LARS
from lightning_hybrid.optim.param_groups import ParamChoice, ParamGroups, param_groups
from lightning_hybrid.optim.schedule import (
    WarmupPolynomialDecay,
    starting_rate,
    warmup_polynomial_lr,
)

__all__ = [
    "LAMB",
    "LARS",
    "ParamChoice",
    "ParamGroups",
    "WarmupPolynomialDecay",
    "param_groups",
    "starting_rate",
    "warmup_polynomial_lr",
]
