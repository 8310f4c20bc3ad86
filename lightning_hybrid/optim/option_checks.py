"""Checks of what a user gave, each with the rule, what it means and the cure."""

import math
from collections.abc import Collection
from typing import Any

from torch import Tensor


def check_number(name: str, value: Any, *, low: float, high: float = math.inf, above: bool = False, why: str) -> None:
    """Raise `ValueError` unless `value` is a finite number in [low, high), or in (low, high) with `above`.

    >>> check_number("momentum", 1.5, low=0, high=1, why="past gradients would never fade. SGD's usual is 0.9.")
    Traceback (most recent call last):
    ValueError: `momentum` (=1.5) must be a number in [0, 1): past gradients would never fade. SGD's usual is 0.9.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value < high or (above and value == low):
        interval = f"{'(' if above else '['}{low:g}, {high:g})"
        raise ValueError(f"`{name}` (={value!r:.80}) must be a number in {interval}: {why}")


def check_choice(name: str, value: Any, choices: Collection[Any], *, why: str) -> None:
    """Raise `ValueError` unless `value` is one of `choices`; 1 does not pass for True.

    >>> check_choice("nesterov", "yes", (True, False), why="it is a switch.")
    Traceback (most recent call last):
    ValueError: `nesterov` (='yes') must be one of True, False: it is a switch.
    """
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        raise ValueError(f"`{name}` (={value!r:.80}) must be one of {', '.join(map(repr, choices))}: {why}")


def check_common(group: dict[str, Any]) -> None:
    """Check the options that LARS and LAMB share: lr, weight_decay, excluded_lr_mult, trust_ratio and switches."""
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.dim() != 0 or not lr.is_floating_point():
            raise ValueError(
                f"`lr` (={lr!r:.80}) must be a number or a 0-dim floating-point tensor: a group has one learning rate. "
                "Use `torch.tensor(0.1)`, and one group per learning rate."
            )
        lr = lr.item()
    check_number("lr", lr, low=0, why="a negative rate would climb; to climb, use `maximize=True`.")
    check_number("weight_decay", group["weight_decay"], low=0, why="a negative decay would grow the weights; 0 is off.")
    check_number(
        "excluded_lr_mult",
        group["excluded_lr_mult"],
        low=0,
        why="it scales the learning rate of groups with trust_ratio=False; 1 leaves it, 0 freezes them.",
    )
    if group["trust_clip"] is not None:
        check_number(
            "trust_clip", group["trust_clip"], low=0, above=True, why="it bounds the trust ratio; None is no bound."
        )
    # torch leaves False there by itself.
    check_choice(
        "differentiable",
        group.get("differentiable", False),
        (False,),
        why="the step writes in place and records no gradient. To differentiate through it, use torch.optim.SGD or "
        "AdamW, whose rule is that of groups with trust_ratio=False.",
    )
    check_choice(
        "capturable",
        group["capturable"],
        (True, False),
        why="True reads nothing on the host in a step, so that a CUDA graph may capture it.",
    )
    check_choice("trust_ratio", group["trust_ratio"], (True, False), why="False excludes the group from layer scaling.")
    check_choice("maximize", group["maximize"], (True, False), why="True climbs the objective.")
    check_choice(
        "foreach", group["foreach"], (None, True, False), why="None is one tensor at a time on the CPU, else lists."
    )
    check_choice(
        "fused",
        group["fused"],
        (None, True, False),
        why="True is few passes over memory for the whole model, None that on CUDA.",
    )
    if group["fused"] and group["foreach"]:
        raise ValueError(
            "`fused` (=True) excludes `foreach` (=True): they are two ways to do the same step. Set one of them."
        )
