"""The communication of a strategy: options, topology, plan and engine, for the Trainer's strategy and for Fabric's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.checks import require_choice, require_whole
from lightning_hybrid.comm import CommEngine, CommPlan, CommTrace, Topology, average_bucket
from lightning_hybrid.comm.adasum.combine import refuse_odd_nodes
from lightning_hybrid.comm.adasum.hook import adasum_bucket
from lightning_hybrid.comm.codec.codec import Codec
from lightning_hybrid.comm.codec.coded_plan import plan_for_codec
from lightning_hybrid.comm.engine.process_groups import own_group
from lightning_hybrid.comm.health.abort import forget
from lightning_hybrid.precision.loss_scale import LossScale, loss_scale_from
from lightning_hybrid.strategy.arguments import (
    ask_planner,
    refuse_slices,
    refuse_unknown_options,
)
from lightning_hybrid.strategy.compatibility import in_options, refuse_excluded
from lightning_hybrid.strategy.options import (
    Adasum,
    BetweenNodes,
    Comm,
    LocalSteps,
    Mean,
    Report,
    require_value,
)
from lightning_hybrid.strategy.reduction import adasum_plan, warn_of_trust_ratios


class CommSetupMixin:
    """Strategy mixin: take the options of communication, and make the engine that carries them out."""

    communication_plan: str | None = None  # ranks, nodes, buckets and algorithms in one line, once known
    _work_group: dist.ProcessGroup | None = None
    _shares_update = False
    _local_steps: LocalSteps | None = None
    _averaged_parameters: set[int] | None = None  # by `id`
    _has_optimizers = False  # made before the module was converted
    _slices: Any = None  # of layers that the strategy has cut
    _topology: Topology  # known when DDP is configured
    _kind: str | None = None  # of strategy, where it excludes options: "pipeline", "Fabric"
    _asked: dict[str, str]  # by the names of `compatibility.CURES`
    _reduction: Literal["mean", "adasum"] = "mean"
    _tune: Literal["auto", "on", "off"]
    _trace_dir: str | None
    link_bytes_per_s: float | None
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
        own: Iterable[str],
        between_nodes: BetweenNodes,
        comm: Comm,
        ranks_per_node: int | None,
        loss_scale: str | float | LossScale | None,
        shard_update: Any = "off",
        report: Report = Report(),  # noqa: B008
        extensions: Sequence[Callable[..., Any]] | None = None,
    ) -> dict[str, Any]:
        # Returns the options for DDP. `own`: the strategy's, by name. All that is kept of values is set here.
        refuse_unknown_options(ddp_kwargs, own=own)
        require_value("between_nodes", between_nodes, (Mean, Adasum, LocalSteps), 'Mean(dtype="int8")')
        require_value("comm", comm, (Comm,), 'Comm(tune="off")')
        require_value("report", report, (Report,), 'Report(trace_dir="traces")')
        for_ddp = dict(ddp_kwargs)
        if (cap_mb := for_ddp.pop("bucket_cap_mb", None)) is not None:
            if comm.bucket_bytes is not None:
                raise ValueError(
                    f"`bucket_cap_mb` (={cap_mb}) and `comm.bucket_bytes` (={comm.bucket_bytes}) say the same thing. "
                    "Keep `comm.bucket_bytes`."
                )
            comm = replace(comm, bucket_bytes=int(cap_mb * 2**20))
        if ranks_per_node is not None:
            require_whole("ranks_per_node", ranks_per_node, "leave `strategy.ranks_per_node` out to find out")
        why = (
            "whether a node's ranks share masters and optimizer state. Set strategy.shard_update=node, or leave it out"
        )
        require_choice("shard_update", shard_update, ("off", "node", False), why)  # YAML reads `off` as a boolean
        self._extension_factories = tuple(extensions or ())
        if wrong := [one for one in self._extension_factories if not callable(one)]:
            raise ValueError(
                f"`extensions` (with {wrong[0]!r:.80}) must hold what makes extensions, such as their classes or "
                "`functools.partial(LogsNorm, every=10)`: each fit in each process gets its own. Leave out the call."
            )
        self._plan, self._planner, self._comm_dtype = comm.made_plan(), comm.planner, comm.on_wire
        self._dtype_across_nodes = between_nodes.on_wire
        self._reduction = "adasum" if isinstance(between_nodes, Adasum) else "mean"
        self._local_steps = between_nodes if isinstance(between_nodes, LocalSteps) else None
        self._shard_update = shard_update or "off"
        self._ranks_per_node, self._loss_scale = ranks_per_node, loss_scale
        self._trace_dir = None if report.trace_dir is None else os.fspath(report.trace_dir)
        self.link_bytes_per_s = report.link_bytes_per_s
        # A plan that is not the library's own choice is not tuned by itself, nor another sum than that over all ranks.
        is_own = comm.algorithm == "auto" and (comm.plan is None or comm.planner is not None)
        is_tunable = is_own and isinstance(between_nodes, Mean) and self._kind is None
        self._tune = "off" if comm.tuning == "auto" and not is_tunable else comm.tuning
        self._asked = in_options(
            between_nodes, comm, shard_update=self._shard_update, for_ddp=for_ddp, extensions=extensions
        )
        if self._kind is not None:
            self._asked[self._kind] = "a pipeline" if self._kind == "pipeline" else "Fabric's strategy"
        refuse_excluded(self._asked)
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
        """Find the topology and, where a planner was given, its plan for this module. Collective."""
        refuse_slices(module, cut=() if self._slices is None else self._slices.names)
        self._topology = self._discover_topology()
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
            compared=None if self._local_steps is None else {"between_nodes": self._local_steps},
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
