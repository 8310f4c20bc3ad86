"""FSDP2 strategy of the recipes, which shards weights, gradients and optimizer state over all ranks."""

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
from lightning_hybrid.strategy.master_weights import with_masters
from recipes.training.classifier import Classifier
from recipes.training.gathered_blocks import gathered_alone


class ShardedClassifier(Classifier):
    """`Classifier` whose network is sharded by `FullyShardedStrategy`."""

    # A separate class, because Lightning treats every module with this hook as one that may be sharded.
    def configure_model(self) -> None:
        """Shard the network over all ranks, unless this has already been done."""
        strategy: Any = self.trainer.strategy
        strategy.shard_(self.model)


class FullyShardedStrategy(HostShards, ModelParallelStrategy):
    """FSDP2 strategy that shards over all ranks and writes one file per checkpoint.

    Based on Lightning's `ModelParallelStrategy`. The module passes its network to `shard_` in `configure_model`, as
    `ShardedClassifier` does.

    Args:
        offload: Keep weights, gradients and optimizer state in host memory and run the optimizer there. The device
            holds only the gathered weights.
        reshard_after_forward: Free gathered weights after forward and gather them again in backward.
        timeout: Timeout of every collective.
        checkpoint_io: Plugin that writes the complete checkpoint on rank zero. None: `DurableCheckpointIO`.
        loss_scale: Loss scale of `precision="16-true"`, which `ShardedHalfPrecision` implements.
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
        """Precision plugin of the strategy."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        """Set the precision plugin, after replacing plain half precision by one with fp32 master shards."""
        self._precision_plugin = with_masters(plugin, ShardedHalfPrecision, self.loss_scale)

    def teardown(self) -> None:
        """Tear down the strategy, and wait for checkpoints that are still being written."""
        try:
            super().teardown()
        finally:
            self.checkpoint_io.teardown()

    def setup_environment(self) -> None:
        """Initialize the process group and a data-parallel device mesh over all ranks."""
        # Lightning's "auto" would use tensor parallelism within a node and data parallelism only between nodes.
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def shard_(self, network: nn.Module) -> None:
        """Shard a network over all ranks in place with FSDP2, with each block as a separate FSDP unit.

        A block has at least one parameter with two or more dimensions. Blocks are the layers of `nn.ModuleList`s, as in
        Transformers. Without an `nn.ModuleList`, they are the children of the network, or of an `nn.Sequential` in it.
        A second call does nothing, as Lightning requires of `configure_model`.

        Raises:
            ValueError: A weight is not contiguous, for example because of `channels_last`.
        """
        if isinstance(network, FSDPModule):
            return
        for name, param in network.named_parameters():
            if not param.is_contiguous():
                raise ValueError(
                    "`channels_last` (=true) and strategy=fsdp2 cannot be combined, because FSDP2 "
                    f"needs contiguous weights, but `{name}` has strides {param.stride()}. Set "
                    "channels_last=false."
                )
        options: dict[str, Any] = {"mesh": self.device_mesh["data_parallel"]}
        options["reshard_after_forward"] = self.reshard_after_forward
        if self.offload:  # copies overlap with computation only for pinned memory, which needs CUDA
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
        """Load an unsharded checkpoint into the sharded network and optimizers.

        Checkpoints of `ddp` and `hybrid_allreduce` can be loaded too. Every rank reads the file.
        """
        checkpoint = self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)
        assert self.model is not None
        assert self.lightning_module is not None
        options = StateDictOptions(
            full_state_dict=True, strict=self.lightning_module.strict_loading
        )
        # Sharded here without communication: torch does not support shards on the host with buffers on the device.
        own_state = get_model_state_dict(self.model)
        weights = checkpoint["state_dict"]
        cut = {name: _cut(whole, like=own_state.get(name)) for name, whole in weights.items()}
        set_model_state_dict(self.model, cut, options=StateDictOptions(strict=options.strict))
        # There are no optimizers when validating or testing.
        for optimizer, saved in zip(
            self.optimizers, checkpoint.get("optimizer_states", ()), strict=False
        ):
            state = state_by_name(saved, optimizer, self.model)
            set_optimizer_state_dict(self.model, optimizer, state, options=options)
        return checkpoint

    def on_validation_start(self) -> None:
        """Broadcast the buffers of rank zero to all ranks."""
        self._broadcast_buffers()

    def on_test_start(self) -> None:
        """Broadcast the buffers of rank zero to all ranks."""
        self._broadcast_buffers()

    def on_predict_start(self) -> None:
        """Broadcast the buffers of rank zero to all ranks."""
        self._broadcast_buffers()

    def _broadcast_buffers(self) -> None:
        # With FSDP2 each rank has its own BatchNorm running statistics. Checkpoints contain rank zero's, as in DDP.
        assert self.model is not None
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)


def _cut(whole: Any, *, like: Any) -> Any:
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to(
        like.device
    )
