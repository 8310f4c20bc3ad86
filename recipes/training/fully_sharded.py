"""FSDP2 for the networks of the recipes: weights, gradients and optimizer state in shards over all ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_hybrid import DurableCheckpointIO, LossScale, ShardedHalfPrecision
from lightning_hybrid.checkpoint.param_names import state_by_name
from lightning_hybrid.precision.sharded import HostShards
from lightning_hybrid.strategy.arguments import with_masters
from recipes.training.classifier import Classifier
from recipes.training.gathered_blocks import gathered_alone


class ShardedClassifier(Classifier):
    """A `Classifier` whose network is sharded by the strategy."""

    # Of its own: Lightning treats every module with this hook as one that may be sharded.
    def configure_model(self) -> None:
        """Shard the network, once."""
        strategy: Any = self.trainer.strategy
        strategy.shard_(self.model)


class FullyShardedStrategy(HostShards, ModelParallelStrategy):
    """Lightning's `ModelParallelStrategy` with all ranks data-parallel, and one file per checkpoint.

    The module gives its network to `shard_`, in `configure_model`, as `ShardedClassifier` does.

    Args:
        offload: Whether weights, gradients and optimizer state are in the host's memory, where the optimizer then
            steps; the device has what is gathered.
        reshard_after_forward: Whether gathered weights are freed after forward and gathered again in backward.
        timeout: Of every collective.
        checkpoint_io: Writes checkpoints, whole on rank zero; None: `DurableCheckpointIO`.
        loss_scale: Of `precision="16-true"`, which `ShardedHalfPrecision` carries out.
    """

    def __init__(
        self,
        offload: bool = False,
        reshard_after_forward: bool = True,
        timeout: timedelta = timedelta(minutes=30),
        checkpoint_io: CheckpointIO | None = None,
        loss_scale: str | float | LossScale | None = None,
    ) -> None:
        self.loss_scale = loss_scale
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False, timeout=timeout)
        self.offload = offload
        self.reshard_after_forward = reshard_after_forward
        self.checkpoint_io = checkpoint_io or DurableCheckpointIO()

    @property
    def precision_plugin(self) -> Any:
        """The precision in force."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        """Put half precision on fp32 shards in the place of Lightning's plain one."""
        self._precision_plugin = with_masters(plugin, ShardedHalfPrecision, self.loss_scale)

    def teardown(self) -> None:
        """End the run, with all checkpoints on the disk."""
        try:
            super().teardown()
        finally:
            self.checkpoint_io.teardown()

    def setup_environment(self) -> None:
        """Start the processes' group, with a mesh over all ranks."""
        # Lightning's "auto" is a node's worth of tensor parallelism, and data parallelism between nodes.
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def shard_(self, network: nn.Module) -> None:
        """Shard `network` over all ranks, in place: its blocks, each gathered on its own, and what is left.

        A block has a matrix or a kernel, and is a layer of an `nn.ModuleList`, as Transformers have them; where there
        is none, a child of the network, or of an `nn.Sequential` in it. Called again, it does nothing, as
        `configure_model` must.

        Raises:
            ValueError: A weight is not contiguous, as `channels_last` makes it.
        """
        if isinstance(network, FSDPModule):
            return
        for name, param in network.named_parameters():
            if not param.is_contiguous():
                raise ValueError(
                    "`channels_last` (=true) and strategy=fsdp2 cannot be combined: shards are rows of contiguous "
                    f"weights, and `{name}` has strides {param.stride()}. Set channels_last=false."
                )
        options: dict[str, Any] = {"mesh": self.device_mesh["data_parallel"]}
        options["reshard_after_forward"] = self.reshard_after_forward
        if self.offload:  # copies overlap the work only from and to pinned memory, which is CUDA's
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.root_device.type == "cuda")
        blocks = gathered_alone(network)
        if isinstance(self.precision_plugin, ShardedHalfPrecision):
            self.precision_plugin.shard_(network, blocks, **options)
            return
        for block in blocks:
            fully_shard(block, **options)
        fully_shard(network, **options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a whole file into the shards, also one of `ddp` and `hybrid_allreduce`. Every rank reads it."""
        checkpoint = self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)
        assert self.model is not None
        assert self.lightning_module is not None
        options = StateDictOptions(
            full_state_dict=True, strict=self.lightning_module.strict_loading
        )
        # Cut here, with no word to others: torch does not where shards are on the host and buffers on the device.
        own_state = get_model_state_dict(self.model)
        weights = checkpoint["state_dict"]
        cut = {name: _cut(whole, like=own_state.get(name)) for name, whole in weights.items()}
        set_model_state_dict(self.model, cut, options=StateDictOptions(strict=options.strict))
        # No optimizers: to validate or to test.
        for optimizer, saved in zip(
            self.optimizers, checkpoint.get("optimizer_states", ()), strict=False
        ):
            state = state_by_name(saved, optimizer, self.model)
            set_optimizer_state_dict(self.model, optimizer, state, options=options)
        return checkpoint

    def on_validation_start(self) -> None:
        """Make buffers those of rank zero."""
        self._broadcast_buffers()

    def on_test_start(self) -> None:
        """Make buffers those of rank zero."""
        self._broadcast_buffers()

    def on_predict_start(self) -> None:
        """Make buffers those of rank zero."""
        self._broadcast_buffers()

    def _broadcast_buffers(self) -> None:
        # FSDP2 leaves BatchNorm's running statistics to each rank; checkpoints have those of rank zero, as under DDP.
        assert self.model is not None
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)


def _cut(whole: Any, *, like: Any) -> Any:
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to(
        like.device
    )
