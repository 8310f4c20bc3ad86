"""What Lightning asks of ranks: those of one pipeline read the same batches and count once."""

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
from lightning_hybrid.pipeline.options import STAGES_PER_RANK, check_ranks
from lightning_hybrid.pipeline.rank_layout import PipelineGroups, PipelineRanks
from lightning_hybrid.pipeline.whole_state import share_
from lightning_hybrid.run_status import RunStatus
from lightning_hybrid.strategy.hybrid_allreduce import HybridAllReduce


class DataRanksMixin(HybridAllReduce):
    """Strategy mixin: samplers, means over ranks and the state of a run by data ranks."""

    num_stages: int
    schedule: str
    checkpoint_activations: bool
    _groups: PipelineGroups | None = None
    _cut: CutModel | None = None
    _stages: Stages | None = None

    @property
    def _here(self) -> Stages:
        assert self._stages is not None  # from setup to teardown
        return self._stages

    def set_world_ranks(self) -> None:
        """Set ranks and world size, and refuse a world that does not divide into pipelines."""
        super().set_world_ranks()
        if self.cluster_environment is not None:
            given: dict[str, Any] = {
                "schedule": self.schedule,
                "checkpoints": self.checkpoint_activations,
            }
            check_ranks(num_stages=self.num_stages, world_size=self.world_size, **given)

    @property
    def pipeline_ranks(self) -> PipelineRanks:
        """The place of this rank."""
        per_rank = STAGES_PER_RANK[self.schedule]
        return PipelineRanks(
            rank=self.global_rank,
            world_size=self.world_size,
            num_ranks=self.num_stages,
            stages_per_rank=per_rank,
        )

    @property
    def replicas(self) -> ReplicaSets:
        """The ranks that hold the same stages: data ranks, or ranks that share the layers of a stage."""
        return ReplicaSets(world=self._comm.topology, sets=self.pipeline_ranks.replicas)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        # Inside, layers that are cut over these are whole, as in validation.
        extensions = self._extensions if self._module.trainer.training else None
        if extensions is not None:
            extensions.call("in_validation")
        try:
            yield
        finally:
            if extensions is not None:
                extensions.call("after_validation")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All ranks of a pipeline read the same batches."""
        return {
            "num_replicas": self.pipeline_ranks.num_data_ranks,
            "rank": self.pipeline_ranks.data_rank,
        }

    @property
    def run_status(self) -> RunStatus:
        """What callbacks may know of the run."""
        status = super().run_status

        @contextmanager
        def own_state() -> Iterator[None]:
            with self._allowed(), status.own_state():
                yield

        return dataclasses.replace(status, replica_group=self._data_group, own_state=own_state)

    def _allowed(self) -> AbstractContextManager[None]:
        return nullcontext() if self._cut is None else self._cut.guard.allowed()

    def on_validation_start(self) -> None:
        """Give every data rank the running statistics of the first, as DDP does before a forward."""
        super().on_validation_start()
        self._share_buffers()

    def _share_buffers(self) -> None:
        here = self._here
        # The stages run under `no_sync`, where DDP shares none.
        for body in here.bodies.values() if here.ranks.num_data_ranks > 1 else ():
            owner = here.ranks.replicas[here.ranks.position][0]
            share_(body.buffers(), owner=owner, device=here.device, group=here.groups.data)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data ranks: those of a pipeline hold the same values."""
        return super().reduce(tensor, self._data_group if group is None else group, reduce_op)

    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather from the data ranks: those of a pipeline hold the same values."""
        return super().all_gather(tensor, self._data_group if group is None else group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide over all ranks."""
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes)

    @property
    def _data_group(self) -> Any:
        return None if self._groups is None else self._groups.data
