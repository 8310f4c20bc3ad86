"""The communication of a strategy: options, topology, plan and engine, for the Trainer's strategy and for Fabric's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.checks import require_whole
from lightning_hybrid.comm import CommEngine, CommPlan, CommTrace, Topology, average_bucket
from lightning_hybrid.comm.adasum.combine import refuse_odd_nodes
from lightning_hybrid.comm.adasum.hook import adasum_bucket
from lightning_hybrid.comm.codec.codec import Codec
from lightning_hybrid.comm.codec.coded_plan import plan_for_codec
from lightning_hybrid.comm.engine.process_groups import own_group
from lightning_hybrid.comm.health.abort import forget
from lightning_hybrid.precision.loss_scale import LossScale, loss_scale_from
from lightning_hybrid.strategy.arguments import (
    Planner,
    across_nodes_from,
    ask_planner,
    dtype_from,
    one_bucket_size,
    plan_from,
    refuse_unknown_options,
)
from lightning_hybrid.strategy.reduction import adasum_plan, reduction_from, warn_of_trust_ratios


class CommSetupMixin:
    """Strategy mixin: take the options of communication, and make the engine that carries them out."""

    communication_plan: str | None = None  # ranks, nodes, buckets and algorithms in one line, once known
    _work_group: dist.ProcessGroup | None = None
    _shares_update = False
    _local_steps: Any = None
    _engine_options: Mapping[str, Any] = {}  # of extensions
    _averaged_parameters: set[int] | None = None  # by `id`
    _has_optimizers = False  # made before the module was converted
    _topology: Topology  # known when DDP is configured
    _reduction: Literal["mean", "adasum"] = "mean"
    _bucket_hook: Callable[..., Any] = staticmethod(average_bucket)
    cluster_environment: Any
    global_rank: int
    world_size: int
    root_device: torch.device
    _timeout: timedelta | None

    def _take_options(
        self,
        ddp_kwargs: Mapping[str, Any],
        *,
        own: Any,
        algorithm: Any,
        ranks_per_node: int | None,
        bucket_bytes: int | None,
        plan: CommPlan | Planner | str | None,
        comm_dtype: str | torch.dtype | None,
        comm_dtype_across_nodes: str | torch.dtype | None,
        reduction: Any,
        loss_scale: str | float | LossScale | None,
        tune: Any = "off",
        error_feedback: bool = False,
        shard_update: Any = "off",
        local_steps: tuple[Any, Any, Any] = (1, 0, None),
    ) -> dict[str, Any]:
        # Returns the options for DDP. `own`: the strategy's, by name.
        refuse_unknown_options(ddp_kwargs, own=own)
        for_ddp = dict(ddp_kwargs)
        bucket_bytes = one_bucket_size(bucket_bytes, for_ddp)
        if ranks_per_node is not None:
            require_whole("ranks_per_node", ranks_per_node, "leave `strategy.ranks_per_node` out to find out")
        self._plan = plan_from(plan, algorithm=algorithm, bucket_bytes=bucket_bytes)
        self._planner = plan if isinstance(plan, Planner) else None
        self._comm_dtype = dtype_from(comm_dtype)
        self._dtype_across_nodes = across_nodes_from(comm_dtype_across_nodes)
        if error_feedback is not False:  # imported here, as below: a run without an option needs none of its modules
            from lightning_hybrid.strategy.feedback_state import with_feedback

            self._dtype_across_nodes = with_feedback(self._dtype_across_nodes, error_feedback)
        self._ranks_per_node, self._loss_scale = ranks_per_node, loss_scale
        self._reduction = reduction_from(
            reduction,
            self._plan,
            has_planner=self._planner is not None,
            dtype_across_nodes=comm_dtype_across_nodes,
            tune=tune,
        )
        excluded: dict[str, tuple[Any, tuple[Any, ...]]] = {  # by local steps: name, value, and what they go with
            "reduction": (reduction, ("mean",)),
            "shard_update": (shard_update, ("off", False)),
            "comm_dtype_across_nodes": (
                comm_dtype_across_nodes,
                () if self._dtype_across_nodes is torch.float16 else (comm_dtype_across_nodes,),
            ),
            "error_feedback": (error_feedback, (False,)),
            "tune": (tune, ("auto", "off", False)),
            "find_unused_parameters": (for_ddp.get("find_unused_parameters", False), (False,)),
        }
        self._local_steps = None
        if local_steps != (1, 0, None):
            from lightning_hybrid.strategy.local_steps.settings import local_steps_from

            self._local_steps = local_steps_from(*local_steps, excluded=excluded)
        if loss_scale is not None:
            loss_scale_from(loss_scale)  # a bad value is refused here, not in training
        for_ddp.setdefault("gradient_as_bucket_view", True)  # saves a copy into the buckets and back
        return for_ddp | {"bucket_cap_mb": self._plan.bucket_bytes / 2**20}

    def _check_ranks_per_node(self) -> None:
        # Where ranks and world size are known first, before any process group.
        if self._ranks_per_node is not None and self.cluster_environment is not None:
            topology = self._discover_topology()
            if self._reduction == "adasum":
                refuse_odd_nodes(topology)

    def _discover_topology(self) -> Topology:
        # Collective, unless the user said it by `ranks_per_node`.
        if self._ranks_per_node is None:
            return Topology.discover()
        return Topology.from_ranks_per_node(
            rank=self.global_rank, world_size=self.world_size, ranks_per_node=self._ranks_per_node
        )

    def _find_plan(self, module: nn.Module) -> None:
        """Find the plan for this module, where a planner was given its choice."""
        if self._reduction == "adasum" and (plan := adasum_plan(self._plan, self._topology)) is not None:
            self._plan, self._bucket_hook = plan, adasum_bucket
        if self._planner is not None:
            self._plan = ask_planner(
                self._planner,
                module,
                self._topology,
                comm_dtype=self._comm_dtype,
                on_cuda=self.root_device.type == "cuda",
                across_nodes=self._dtype_across_nodes,
            )
        if isinstance(codec := self._dtype_across_nodes, Codec):
            on_cuda = self.root_device.type == "cuda"
            self._plan = plan_for_codec(self._plan, self._topology, bits=codec.bits, on_cuda=on_cuda)

    def _new_engine(self, *, keep_events: bool = False) -> CommEngine:
        """Make an engine for one module that DDP wraps. Collective."""
        assert self._timeout is not None
        engine = CommEngine(
            topology=self._topology,
            plan=self._plan,
            timeout=self._timeout,
            device=self.root_device,
            trace=CommTrace(keep_events=keep_events),
            dtype_across_nodes=self._dtype_across_nodes,
            shares_update=self._shares_update,
            **{name: value for name, value in self._engine_options.items() if name != "plan"},
        )
        self._note_plan(self._plan)
        rank_zero_info(self.communication_plan)
        return engine

    def _share_work(self, optimizers: Sequence[Optimizer]) -> None:
        """Let the ranks of a node share the work of `LARS(direction="orthogonal")`. Collective."""
        sharing = [one for one in optimizers if any(g.get("direction") == "orthogonal" for g in one.param_groups)]
        if sharing and self.world_size > self._topology.num_nodes:
            self._work_group = own_group(self._topology.nodes, timeout=self._timeout, desc="orthogonal work")
            for one in sharing:
                one.work_group = self._work_group  # type: ignore[attr-defined]

    def _warn_of_reduction(self, optimizers: Sequence[Optimizer]) -> None:
        # Once it is known whether there are several nodes.
        if self._bucket_hook is adasum_bucket:
            warn_of_trust_ratios(optimizers)

    def _end_shared_work(self, optimizers: Sequence[Optimizer], *, has_failed: bool) -> None:
        group, self._work_group = self._work_group, None
        if group is not None:
            for one in optimizers:
                one.__dict__.pop("work_group", None)
            if has_failed and self.root_device.type == "cuda":
                forget(group)  # a failure has aborted all communicators: nothing is to be waited for
            else:
                dist.destroy_process_group(group)

    def _note_plan(self, plan: CommPlan) -> None:
        on_cuda = self.root_device.type == "cuda"
        self.communication_plan = plan.describe(self._topology, on_cuda=on_cuda)
        if self._bucket_hook is adasum_bucket:
            self.communication_plan += "; Adasum between nodes"
        if on_cuda and (self._shares_update or plan.algorithms(self._topology, on_cuda=True) != ("flat",)):
            self.communication_plan += "; no record shows these stages on a GPU yet, where the default is flat"


def trained_parameters(module: nn.Module) -> tuple[set[int], set[str]]:
    """Return the parameters that DDP averages or is to ignore, by `id`, and the names of the ignored."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    averaged = {
        id(parameter)
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if parameter.requires_grad or name in ignored
    }
    return averaged, ignored
