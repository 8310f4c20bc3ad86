"""Conversion of optimizer state dicts with parameter indices (as in `ddp`) to parameter names (FSDP2)."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer


def state_by_name(
    state_dict: dict[str, Any], optimizer: Optimizer, module: nn.Module
) -> dict[str, Any]:
    """Return an optimizer's state dict with parameter indices replaced by parameter names.

    An index counts the parameters of all groups, one group after the other. Lightning's `ModelParallelStrategy` treats
    it as an index into `module.parameters()`. With more than one group, as created by `param_groups`, Lightning would
    load the state of one parameter into another. Names are not ambiguous.

    Args:
        state_dict: State saved by `ddp` or `hybrid_allreduce` (`checkpoint["optimizer_states"][0]`). A state with names
            is returned unchanged.
        optimizer: Optimizer with the same parameter groups as in the run that saved the state.
        module: Module that owns the parameters.

    Raises:
        ValueError: The numbers of parameters differ.
    """
    numbers: list[Any] = []
    for group in state_dict["param_groups"]:
        numbers.extend(group["params"])
    if numbers and isinstance(numbers[0], str):
        return state_dict

    name_of_parameter = {parameter: name for name, parameter in module.named_parameters()}
    names = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            names.append(name_of_parameter[parameter])
    if len(names) != len(numbers):
        raise ValueError(
            f"`state_dict` (={len(numbers)} parameters) must have as many parameters as `optimizer` (={len(names)}), "
            "because parameters are identified by their position. Create the optimizer as in the run that saved the "
            "checkpoint, or load only the weights."
        )

    name_of_number = dict(zip(numbers, names, strict=True))
    state = {}
    for number, parameter_state in state_dict["state"].items():
        state[name_of_number[number]] = parameter_state
    groups = []
    for group in state_dict["param_groups"]:
        group_names = [name_of_number[number] for number in group["params"]]
        groups.append({**group, "params": group_names})
    return {**state_dict, "state": state, "param_groups": groups}
