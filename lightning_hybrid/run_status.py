"""Status of a training run that the strategy shares with callbacks."""

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
from lightning_hybrid.precision.half_window import HalfPrecisionWindow
from lightning_hybrid.precision.loss_scale import LossScale
from lightning_hybrid.precision.skipped_steps import OptimizerStepState

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import torch.distributed as dist
    from lightning.pytorch.plugins.precision import Precision


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """Read-only status of a training run under `HybridAllReduceStrategy`, for callbacks.

    With other strategies, every field except `has_grad_scaler` has its default value.

    Args:
        optimizer_steps: Loss scale and step counters of each optimizer. Empty unless training in half precision.
        window: Object that swaps half-precision and fp32 parameters around each training step. None if training is not
            in half precision.
        has_grad_scaler: Whether Lightning scales the loss (`precision="16-mixed"`).
        comm_trace: Communication counters and timings of the current training run. None if no training is running.
        communication_plan: One-line description of ranks, nodes, buckets and algorithms, once they are known.
        master_parts: fp32 values of the shard that this rank updates, by the `id` of the parameter. Only parameters
            with a sharded update have an entry.
        parts: Shard that this rank updates, by the `id` of the parameter.
        place_in_node: Local rank and number of ranks in the node, if the update is sharded. Ranks with equal values
            hold equal shards.
        update_context: Function that returns a context for an optimizer. Within the context, the optimizer holds the
            shards that this rank updates instead of the full parameters.
        own_state: Function that returns a context. Within the context, state dicts of the module contain only this
            rank's slices of tensor-parallel layers, and need no communication.
        link_bytes_per_s: Bandwidth of a node's link, if the user set it.
        repeats_batch: Whether this rank repeats an earlier batch only to join the other ranks' step, with
            `uneven_batches="join"`. The gradients of a repeated batch do not count.
        has_uneven_batches: Whether ranks may have different numbers of batches, with `uneven_batches="join"`.
        replica_group: Ranks that hold the same stage of a pipeline. None means all ranks.
        node_group: Ranks of the node while nodes train independently, otherwise None.
        verdict_group: Ranks that skip the same steps throughout the run. None means all ranks.
        num_shards: Number of batches in a step over all hosts of an elastic run, otherwise None.
        num_ranks: Number of ranks on all present hosts of an elastic run, otherwise None.
        gather_over_hosts: Function that gathers a value from each rank of all present hosts of an elastic run, see
            `Views.gather`. None if the run is not elastic.
        process_second_loader: Function that prepares a loader that a callback reads in addition to Lightning's own.
            It returns a loader of the same batches, which moves them to the device. None with Lightning's own
            strategies, whose `process_dataloader` does this in every stage.
        user_loader_of: Function that returns the user's loader behind a training loader that the strategy has prepared.
            None with Lightning's own strategies, which do not replace loaders.
    """

    optimizer_steps: Sequence[OptimizerStepState] = ()
    window: HalfPrecisionWindow | None = None
    has_grad_scaler: bool = False
    comm_trace: CommTrace | None = None
    communication_plan: str | None = None
    master_parts: Mapping[int, Tensor] = field(default_factory=dict)
    parts: Mapping[int, Part] = field(default_factory=dict)
    place_in_node: tuple[int, int] = (0, 1)
    update_context: Callable[[Optimizer], AbstractContextManager[Any]] = nullcontext
    own_state: Callable[[], AbstractContextManager[Any]] = nullcontext
    link_bytes_per_s: float | None = None
    repeats_batch: bool = False
    has_uneven_batches: bool = False
    replica_group: dist.ProcessGroup | None = None
    node_group: dist.ProcessGroup | None = None
    verdict_group: dist.ProcessGroup | None = None
    num_shards: int | None = None
    num_ranks: int | None = None
    gather_over_hosts: Callable[[Any], list[Any] | None] | None = None
    process_second_loader: Callable[[Any], Any] | None = None
    user_loader_of: Callable[[Any], Any] | None = None

    @property
    def loss_scales(self) -> list[LossScale]:
        """Loss scales of all optimizers, or an empty list without loss scaling, as with bf16."""
        scales = []
        for state in self.optimizer_steps:
            if state.loss_scale is not None:
                scales.append(state.loss_scale)
        return scales

    @property
    def num_skipped_steps(self) -> int | None:
        """Total number of skipped optimizer steps, or None if training is not in half precision.

        Reading the property makes the host wait for the device.
        """
        if not self.optimizer_steps:
            return None
        return sum(int(state.num_skipped) for state in self.optimizer_steps)


def run_status(trainer: pl.Trainer) -> RunStatus:
    """Return the `RunStatus` of the trainer's run.

    With Lightning's own strategies, every field except `has_grad_scaler` has its default value.
    """
    status: RunStatus | None = getattr(trainer.strategy, "run_status", None)
    if status is None:
        return RunStatus(has_grad_scaler=has_grad_scaler(trainer.precision_plugin))
    return status


def has_grad_scaler(plugin: Precision) -> bool:
    """Return whether Lightning's precision plugin scales the loss with a `torch.amp.GradScaler`."""
    return getattr(plugin, "scaler", None) is not None


def tensors_of_replica(trainer: pl.Trainer) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) pairs of all training state that must be identical across replicas.

    The tensors are parameters, master weights, optimizer state, loss scales and counts of skipped steps. A name that
    begins with `PART` marks a shard, which is compared only between the ranks that hold this shard.
    """
    module = trainer.strategy.lightning_module
    assert module is not None
    status = run_status(trainer)
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    # Buffers are left out: the running statistics of BatchNorm differ between ranks until the next forward pass.
    for name, parameter in module.named_parameters():
        # DDP does not average ignored parameters, shards of a DTensor differ, and parameters on `meta` belong to
        # another stage of a pipeline.
        if name in ignored or is_dtensor(parameter) or parameter.is_meta:
            continue
        yield f"`{name}`", parameter
        part = status.parts.get(id(parameter))
        prefix = ""
        if part is not None:
            prefix = f"{PART} {part.begin} to {part.end} of "
        master_part = status.master_parts.get(id(parameter))
        if master_part is not None:
            yield f"{prefix}the fp32 values of `{name}`", master_part
        for optimizer in trainer.optimizers:
            for kind, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor):
                    continue
                label = f"`{kind}` of the optimizer for `{name}`"
                if part is not None and value.numel() == part.end - part.begin:
                    label = prefix + label
                yield label, value

    for index, state in enumerate(status.optimizer_steps):
        if state.loss_scale is not None:
            yield f"loss scale {index}", state.loss_scale.scale
            yield f"number of skipped steps {index}", state.num_skipped
