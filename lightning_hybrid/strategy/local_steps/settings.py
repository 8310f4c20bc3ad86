"""What a user sets of local steps, and what excludes them; checked before training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_hybrid.checks import require_number, require_whole
from lightning_hybrid.comm import Topology
from lightning_hybrid.lightning_names import lightning_types

_OPTION = "sync_across_nodes_every"


@dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """The steps after which nodes average their weights: every `every` ones, counted from `from_step` on.

    Before `from_step` gradients are averaged over all ranks in each step. `outer_lr` and `outer_momentum` are those of
    the outer step (`outer_step.py`); 1 and 0: the average itself.

    >>> steps = LocalSteps(every=4, from_step=2)
    >>> [step for step in range(12) if steps.end_at(step)]      # after so many optimizer steps
    [6, 10]
    """

    every: int
    from_step: int = 0
    outer_lr: float = 1.0
    outer_momentum: float = 0.0

    @property
    def options(self) -> dict[str, object]:
        """The options by the user's names, to be compared between ranks."""
        outer = {"lr": self.outer_lr, "momentum": self.outer_momentum}
        return {_OPTION: self.every, "sync_across_nodes_from_step": self.from_step, "outer_step": outer}

    def end_at(self, num_steps: int) -> bool:
        """Return whether a period ends after the run's first `num_steps` optimizer steps."""
        return num_steps > self.from_step and (num_steps - self.from_step) % self.every == 0

    def num_periods(self, num_steps: int) -> int:
        """Return how many periods have ended after the run's first `num_steps` optimizer steps."""
        return max(0, num_steps - self.from_step) // self.every

    @property
    def has_outer_step(self) -> bool:
        """Whether the next common weights are another thing than the average."""
        return self.outer_lr != 1 or self.outer_momentum != 0


def local_steps_from(
    every: Any,
    from_step: Any,
    outer_step: Any,
    *,
    excluded: Mapping[str, tuple[Any, tuple[Any, ...]]],
) -> LocalSteps | None:
    """Return the settings of local steps; None where every step is synchronous.

    `excluded`: other options by name, each with its value and the values with which local steps can be taken.

    Raises:
        ValueError: a value cannot work, or another option excludes local steps.

    >>> local_steps_from(8, 0, {"lr": 0.7, "momentum": 0.9}, excluded={}).outer_lr
    0.7
    >>> local_steps_from(1, 0, None, excluded={}) is None
    True
    """
    why = (
        "it counts the optimizer steps that a node takes on its own before the nodes' weights are averaged. 1 averages "
        f"gradients over all ranks in every step: leave strategy.{_OPTION} out"
    )
    require_whole(_OPTION, every, why, unit="steps")
    why = "it counts optimizer steps that are synchronous, before nodes train on their own. Leave it out for none"
    require_whole("sync_across_nodes_from_step", from_step, why, least=0, unit="steps")
    outer = _outer_from(outer_step)
    if every == 1:
        for name, value in {"sync_across_nodes_from_step": from_step, "outer_step": outer_step}.items():
            if value:
                raise ValueError(
                    f"`{name}` (={value!r}) has no effect with `{_OPTION}` (=1): all steps are synchronous then. Set "
                    f"strategy.{_OPTION}=8 or so, or leave `strategy.{name}` out."
                )
        return None
    for name, (value, accepted) in excluded.items():
        if not any(value is one or value == one for one in accepted):
            raise ValueError(
                f"`{name}` (={value!r}) cannot be combined with `{_OPTION}` (={every}): {_WHY[name]}. Leave "
                f"`strategy.{name}` out, or `strategy.{_OPTION}`."
            )
    return LocalSteps(every=every, from_step=from_step, **outer)


_WHY = {
    "reduction": "between nodes there are no gradients to combine, weights are averaged",
    "shard_update": "an average needs whole masters",
    "comm_dtype_across_nodes": (
        "what weights have moved has no loss scale and can be below what fp16 holds; bfloat16, int8 and int4 carry it"
    ),
    "error_feedback": "residuals are those of gradients, which nodes do not send each other",
    "tune": "there is no all-reduce over all ranks in each step whose plan could be tried",
    "find_unused_parameters": "DDP then asks all ranks in every step which parameters each has used",
}


def _outer_from(setting: Any) -> dict[str, float]:
    if setting is None:
        return {}
    is_known = isinstance(setting, Mapping) and set(setting) <= {"lr", "momentum"}
    if not is_known:
        raise ValueError(
            f"`outer_step` (={setting!r}) must be a mapping with `lr` and `momentum`, of the step from the last common "
            "weights to the next: {lr: 0.7, momentum: 0.9} in DiLoCo. Leave `strategy.outer_step` out for the average."
        )
    lr, momentum = setting.get("lr", 1.0), setting.get("momentum", 0.0)
    require_number("outer_step.lr", lr, "it multiplies what the average has moved. 1 takes the average", above=True)
    require_number("outer_step.momentum", momentum, "past periods would never fade. DiLoCo's is 0.9", high=1)
    return {"outer_lr": float(lr), "outer_momentum": float(momentum)}


def refuse_setup(
    topology: Topology, layers: Iterable[tuple[str, nn.Module]], callbacks: Iterable[Any] = (), *, has_grad_scaler: bool
) -> None:
    """Check nodes, layers, callbacks and precision.

    Raises:
        ValueError: nodes differ in size, a layer talks to all ranks in its forward, a callback prunes by the weights of
            a node, or Lightning scales the loss.
    """
    if topology.ranks_per_node is None:
        sizes = ", ".join(str(len(node)) for node in topology.nodes)
        raise ValueError(
            f"`{_OPTION}` needs nodes of equal size: each node counts as much in the average, and here nodes hold "
            f"{sizes} ranks. Launch equal nodes, or leave `strategy.{_OPTION}` out."
        )
    for name, layer in layers:
        if isinstance(layer, nn.SyncBatchNorm):
            raise ValueError(
                f"`{name}` (=SyncBatchNorm) and `{_OPTION}` exclude each other: it waits for all ranks in every "
                "forward pass. Leave `sync_batchnorm` out: running statistics are averaged with the weights."
            )
    pruning = lightning_types("pytorch.callbacks.ModelPruning")
    if any(isinstance(callback, pruning) for callback in callbacks):
        raise ValueError(
            f"`callbacks` (=ModelPruning) and `{_OPTION}` exclude each other: each node would prune by its own "
            f"weights. Prune after training, or leave `strategy.{_OPTION}` out."
        )
    if has_grad_scaler:
        raise ValueError(
            f"`precision` (='16-mixed') and `{_OPTION}` exclude each other: Lightning's loss scale would part between "
            f"nodes. Take 16-true, whose scales are agreed on, bf16-mixed, or leave `strategy.{_OPTION}` out."
        )
