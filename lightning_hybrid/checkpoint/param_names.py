"""Optimizer state by the names of parameters, which FSDP2 loads, in place of their numbers, which `ddp` saves."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import nn
from torch.optim import Optimizer


def state_by_name(
    state_dict: dict[str, Any], optimizer: Optimizer, module: nn.Module
) -> dict[str, Any]:
    """Return an optimizer's `state_dict` with the names of parameters in place of their numbers.

    Numbers count the parameters of the groups, one group after the other. Lightning's `ModelParallelStrategy` takes
    them for places in `module.parameters()`, so with more than one group, as of `param_groups`, it would give the state
    of one parameter to another. Names it takes as they are.

    Args:
        state_dict: Saved by `ddp` or `hybrid_allreduce`: `checkpoint["optimizer_states"][0]`. One with names stays.
        optimizer: As it was there: the same groups of the same parameters.
        module: The module whose parameters they are.

    Raises:
        ValueError: The numbers of parameters differ.
    """
    saved = list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
    if saved and isinstance(saved[0], str):
        return state_dict
    name_of = {param: name for name, param in module.named_parameters()}
    names = [name_of[param] for group in optimizer.param_groups for param in group["params"]]
    if len(names) != len(saved):
        raise ValueError(
            f"`state_dict` (={len(saved)} parameters) must be of as many parameters as `optimizer` (={len(names)}): "
            "numbers say which is which. Make the optimizer as in the run that saved it, or load weights alone."
        )
    by_number = dict(zip(saved, names, strict=True))
    return {
        **state_dict,
        "state": {by_number[number]: state for number, state in state_dict["state"].items()},
        "param_groups": [
            {**group, "params": [by_number[number] for number in group["params"]]}
            for group in state_dict["param_groups"]
        ],
    }
