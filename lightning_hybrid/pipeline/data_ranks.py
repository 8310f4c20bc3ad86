"""Strategy mixin that adapts samplers, reductions and run state to pipeline training.

The ranks of one pipeline read the same batches and count as one data-parallel rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.comm.topology import ReplicaSets
from lightning_hybrid.pipeline.cut_model import CutModel
from lightning_hybrid.pipeline.local_stages import Stages
from lightning_hybrid.pipeline.options import STAGES_PER_RANK, check_ranks, warn_of_last_batch
from lightning_hybrid.pipeline.rank_layout import PipelineGroups, PipelineRanks
from lightning_hybrid.pipeline.whole_state import share_
from lightning_hybrid.run_status import RunStatus
from lightning_hybrid.strategy.hybrid_allreduce import HybridAllReduce


class DataRanksMixin(HybridAllReduce):
    """Strategy mixin that defines samplers, reductions and run state over data-parallel ranks."""

    num_stages: int
    schedule: str
    checkpoint_activations: bool
    _groups: PipelineGroups | None = None
    _cut: CutModel | None = None
    _stages: Stages | None = None

    @property
    def _active_stages(self) -> Stages:
        """Pipeline stages of this rank, available between setup and teardown."""
        assert self._stages is not None
        return self._stages

    def set_world_ranks(self) -> None:
        """Set the rank and the world size, and raise an error if the world cannot be divided into pipelines."""
        super().set_world_ranks()
        if self.cluster_environment is not None:
            check_ranks(
                num_stages=self.num_stages,
                world_size=self.world_size,
                schedule=self.schedule,
                checkpoints=self.checkpoint_activations,
            )

    @property
    def pipeline_ranks(self) -> PipelineRanks:
        """Pipeline index and stage index of this rank."""
        return PipelineRanks(
            rank=self.global_rank,
            world_size=self.world_size,
            num_ranks=self.num_stages,
            stages_per_rank=STAGES_PER_RANK[self.schedule],
        )

    @property
    def replicas(self) -> ReplicaSets:
        """Sets of ranks that hold the same pipeline stages.

        They are data-parallel ranks, or ranks that hold slices of a stage's tensor-parallel layers.
        """
        return ReplicaSets(world=self._comm.topology, sets=self.pipeline_ranks.replicas)

    @contextmanager
    def _whole_layers(self) -> Iterator[None]:
        """Temporarily replace sliced tensor-parallel layers by whole layers, as in validation.

        Does nothing unless the trainer is training.

        Collective: every rank must call it, in the same order.
        """
        extensions = None
        if self._module.trainer.training:
            extensions = self._extensions
        if extensions is not None:
            extensions.call("in_validation")
        try:
            yield
        finally:
            if extensions is not None:
                extensions.call("after_validation")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for distributed samplers.

        All ranks of a pipeline read the same batches.
        """
        return {
            "num_replicas": self.pipeline_ranks.num_data_ranks,
            "rank": self.pipeline_ranks.data_rank,
        }

    @property
    def run_status(self) -> RunStatus:
        """State of the run that callbacks can read."""
        status = super().run_status

        @contextmanager
        def own_state() -> Iterator[None]:
            with self._allowed(), status.own_state():
                yield

        return dataclasses.replace(status, replica_group=self._data_group, own_state=own_state)

    def _allowed(self) -> AbstractContextManager[None]:
        """Return a context in which state dicts may contain only this rank's stages."""
        return nullcontext() if self._cut is None else self._cut.guard.allowed()

    def on_train_start(self) -> None:
        """Warn if the last batch of an epoch cannot be split into micro-batches."""
        super().on_train_start()
        warn_of_last_batch(self._active_stages.module.trainer, self._active_stages.num_microbatches)

    def on_validation_start(self) -> None:
        """Broadcast module buffers from the first data-parallel rank to the other ranks, as DDP does."""
        super().on_validation_start()
        self._share_buffers()

    def _share_buffers(self) -> None:
        stages = self._active_stages
        ranks = stages.ranks
        if ranks.num_data_ranks == 1:
            return
        # The stages run under `no_sync`, in which DDP does not broadcast buffers.
        owner = ranks.replicas[ranks.position][0]
        for body in stages.bodies.values():
            share_(body.buffers(), owner=owner, device=stages.device, group=stages.groups.data)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over `group`, or over the data-parallel ranks if it is None.

        The ranks of a pipeline hold the same values, so each pipeline counts once.
        """
        if group is None:
            group = self._data_group
        return super().reduce(tensor, group, reduce_op)

    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather a tensor from all ranks of `group`, or from the data-parallel ranks if it is None.

        The ranks of a pipeline hold the same values, so each pipeline contributes once.
        """
        if group is None:
            group = self._data_group
        return super().all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether the decision is True on all ranks, or on at least one rank if `all` is False.

        Collective: every rank must call it, in the same order.
        """
        votes = torch.tensor(int(decision), device=self.root_device)
        if self._stages is None:
            dist.all_reduce(votes)
        else:
            self._stages.watchdog.wait_for(lambda: dist.all_reduce(votes))
        if all:
            return bool(votes == self.world_size)
        return bool(votes)

    @property
    def _data_group(self) -> Any:
        return None if self._groups is None else self._groups.data
