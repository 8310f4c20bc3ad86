"""Resuming what was trained with apex: its optimizer's state and its fp32 master weights, in the order of groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def load_apex_state_(
    optimizer: Optimizer, state: Mapping[str, Any] | None = None, *, masters: Iterable[Tensor] | None = None
) -> None:
    """Put the state of an apex run into `optimizer` and its parameters, by their order in `param_groups`. In place.

    To be called in `configure_optimizers`, with the parameters in the order that apex's optimizer had. Options of the
    groups, learning rate included, stay those of `optimizer`. FusedAdam and FusedLAMB count steps per group, torch's
    optimizers and `LAMB` per parameter: each gets its group's.

    Args:
        optimizer: A new optimizer, on fp32 parameters, with the same state as apex's: `torch.optim.SGD` or `LARS` for
            SGD, FusedSGD and LARC, `torch.optim.AdamW` for FusedAdam, `LAMB` for FusedLAMB.
        state: What `optimizer.state_dict()` returned under apex; None: state begins at zero.
        masters: What `list(apex.amp.master_params(optimizer))` returned, one tensor per parameter; None: the parameters
            stay as they are. `model.state_dict()` under O2 has no masters: it is rounded to fp16.

    Raises:
        ValueError: Another number of parameters, or another shape.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    >>> saved = {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"lr": 3.0, "params": [0]}]}
    >>> load_apex_state_(optimizer, saved, masters=[torch.tensor([1.0, 2.0])])
    >>> weight.tolist(), optimizer.state[weight]["momentum_buffer"].tolist(), optimizer.param_groups[0]["lr"]
    ([1.0, 2.0], [1.0, 1.0], 0.1)
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if masters is not None:
        masters = list(masters)
        _check_same("masters", [master.shape for master in masters], [parameter.shape for parameter in parameters])
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
    if state is not None:
        saved, lengths = state["param_groups"], [len(group["params"]) for group in optimizer.param_groups]
        _check_same("state", [len(group["params"]) for group in saved], lengths)
        # By order, not by key: torch before 1.5 saved addresses as keys.
        keys = [(key, group.get("step")) for group in saved for key in group["params"]]
        by_order = {index: dict(state["state"][key]) for index, (key, _) in enumerate(keys) if key in state["state"]}
        for index, tensors in by_order.items():
            if keys[index][1] is not None:
                tensors.setdefault("step", torch.tensor(float(keys[index][1])))
        optimizer.load_state_dict({"state": by_order, "param_groups": optimizer.state_dict()["param_groups"]})


def _check_same(name: str, given: list[Any], needed: list[Any]) -> None:
    if given != needed:
        pairs = enumerate(zip(given, needed, strict=False))
        at = next((f"at {i}: {one} for {other}" for i, (one, other) in pairs if one != other), "")
        raise ValueError(
            f"`{name}` ({at or f'{len(given)} for {len(needed)}'}) must match the optimizer's parameters in number, "
            "order and shape. Build the optimizer from the same groups as under apex."
        )
