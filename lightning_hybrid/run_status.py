"""What callbacks may know of a run: one typed view of precision and communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.comm.health.replica_difference import PART
from lightning_hybrid.comm.stats.trace import CommTrace
from lightning_hybrid.optim.dtensor import is_dtensor
from lightning_hybrid.placement import Part
from lightning_hybrid.precision.loss_scale import LossScale
from lightning_hybrid.precision.skipped_steps import OptimizerStepState
from lightning_hybrid.precision.window import HalfPrecisionWindow

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import torch.distributed as dist
    from lightning.pytorch.plugins.precision import Precision


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The state of a run that `HybridAllReduceStrategy` carries out; every field is empty under another strategy."""

    optimizer_steps: Sequence[
        OptimizerStepState
    ] = ()  # of each optimizer; () unless in half precision
    window: HalfPrecisionWindow | None = None  # of half precision, while a run lasts
    has_grad_scaler: bool = False  # whether Lightning scales the loss (`precision="16-mixed"`)
    comm_trace: CommTrace | None = None  # counters of the communication, while a fit runs
    communication_plan: str | None = (
        None  # ranks, nodes, buckets and algorithms in one line, once known
    )
    # By id of a parameter that ranks share: the fp32 values of this rank's part.
    master_parts: Mapping[int, Tensor] = field(default_factory=dict)
    parts: Mapping[int, Part] = field(
        default_factory=dict
    )  # by id of a parameter: what this rank has of it to update
    place_in_node: tuple[int, int] = (
        0,
        1,
    )  # where parts are shared: local rank, ranks; equal ones have the same parts
    # While it is entered with an optimizer, that has what this rank updates in place of the parameters.
    update_context: Callable[[Optimizer], AbstractContextManager[Any]] = nullcontext
    # While it is entered, state dicts of the module have this rank's slices of cut layers, and ask no other rank.
    own_state: Callable[[], AbstractContextManager[Any]] = nullcontext
    link_bytes_per_s: float | None = None  # rate of a node's link, where the user gave it
    replica_group: dist.ProcessGroup | None = (
        None  # ranks that hold the same stage of a pipeline; None: all ranks
    )
    node_group: dist.ProcessGroup | None = (
        None  # those of the node, while nodes train on their own; None: all agree
    )
    verdict_group: dist.ProcessGroup | None = (
        None  # ranks that skip the same steps, all through a fit; None: all ranks
    )
    # In an elastic run: batches of a step over all hosts, ranks of all present hosts; None in other runs.
    num_shards: int | None = None
    num_ranks: int | None = None
    # In an elastic run: gathers a value of each rank of all present hosts, or returns None; see `Views.gather`.
    gather_over_hosts: Callable[[Any], list[Any] | None] | None = None

    @property
    def loss_scales(self) -> list[LossScale]:
        """The loss scales of all optimizers; none with bf16."""
        return [one.loss_scale for one in self.optimizer_steps if one.loss_scale is not None]

    @property
    def num_skipped_steps(self) -> int | None:
        """Skipped steps of all optimizers; None unless in half precision. Waits for the device."""
        return (
            sum(int(one.num_skipped) for one in self.optimizer_steps)
            if self.optimizer_steps
            else None
        )


def run_status(trainer: pl.Trainer) -> RunStatus:
    """Return the status from the trainer's strategy; under a strategy of Lightning's, an almost empty one."""
    status: RunStatus | None = getattr(trainer.strategy, "run_status", None)
    return (
        RunStatus(has_grad_scaler=has_grad_scaler(trainer.precision_plugin))
        if status is None
        else status
    )


def has_grad_scaler(plugin: Precision) -> bool:
    """Whether Lightning's plugin scales the loss by a `torch.amp.GradScaler`."""
    return getattr(plugin, "scaler", None) is not None


def tensors_of_replica(trainer: pl.Trainer) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that must be the same on all ranks, or on those that have the same `PART`, with its name."""
    module = trainer.strategy.lightning_module
    assert module is not None
    status = run_status(trainer)
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    # No buffers: the running statistics of BatchNorm are each rank's own until the next forward.
    for name, parameter in module.named_parameters():
        # DDP does not average these, shards of a DTensor differ, and others belong to another stage of a pipeline.
        if name in ignored or is_dtensor(parameter) or parameter.is_meta:
            continue
        yield f"`{name}`", parameter
        part = status.parts.get(id(parameter))
        which = "" if part is None else f"{PART} {part.begin} to {part.end} of "
        master_part = status.master_parts.get(id(parameter))
        if master_part is not None:
            yield f"{which}the fp32 values of `{name}`", master_part
        for optimizer in trainer.optimizers:
            for kind, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    of_part = (
                        which if part is not None and value.numel() == part.end - part.begin else ""
                    )
                    yield f"{of_part}`{kind}` of the optimizer for `{name}`", value
    for index, one in enumerate(status.optimizer_steps):
        if one.loss_scale is not None:
            yield f"loss scale {index}", one.loss_scale.scale
            yield f"number of skipped steps {index}", one.num_skipped
