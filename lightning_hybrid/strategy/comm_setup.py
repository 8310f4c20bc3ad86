"""The communication of a strategy: options, topology, plan and engine, for the Trainer's strategy and for Fabric's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_hybrid.checks import require_choice, require_whole
from lightning_hybrid.comm import CommEngine, CommPlan, CommTrace, HookState, Topology, average_bucket
from lightning_hybrid.comm.adasum.combine import refuse_odd_nodes
from lightning_hybrid.comm.adasum.hook import adasum_bucket
from lightning_hybrid.comm.codec.codec import Codec
from lightning_hybrid.comm.codec.coded_plan import plan_for_codec
from lightning_hybrid.comm.engine.process_groups import end_group, new_node_group
from lightning_hybrid.comm.topology import ReplicaSets
from lightning_hybrid.precision.loss_scale import LossScale, loss_scale_from
from lightning_hybrid.strategy.arguments import (
    adasum_plan,
    ask_planner,
    bucket_caps_for_ddp,
    refuse_unknown_options,
    turned_on,
    warn_of_trust_ratios,
)
from lightning_hybrid.strategy.compatibility import in_options, refuse_excluded
from lightning_hybrid.strategy.elastic.option import Elastic
from lightning_hybrid.strategy.options import (
    Adasum,
    BetweenNodes,
    Comm,
    LocalSteps,
    Mean,
    Report,
    require_value,
)

if TYPE_CHECKING:
    from lightning_hybrid.comm.tuning.session import TuningSession
    from lightning_hybrid.strategy.elastic.elastic_fit import ElasticFit
    from lightning_hybrid.strategy.elastic.held_loggers import HeldLoggers


class CommSetup:
    """What a strategy has of communication: options, and in a fit topology, plan and the engines that carry it out.

    `plan`: of this fit, made from the options' for its topology and module. `communication_plan`: ranks, nodes, buckets
    and algorithms in one line, once known. `engine_options`: what extensions ask of the engine besides. `engine`,
    `hook_state`: of the fit, from when its module is in DDP until `close`. `asked`: what was asked for, by the
    names of `compatibility.CURES`. `kind`: of strategy, where it excludes options.
    """

    topology: Topology
    plan: CommPlan
    device: torch.device

    def __init__(self, kind: Literal["pipeline", "Fabric"] | None = None) -> None:
        self._kind = kind
        self.communication_plan: str | None = None
        self.bucket_hook: Callable[..., Any] = average_bucket
        self.engine_options: dict[str, Any] = {}
        self.engine: CommEngine | None = None
        self.hook_state: HookState | None = None
        self.elastic: Elastic | None = None
        self.elastic_fit: ElasticFit | None = None
        self.held_loggers: HeldLoggers | None = None
        self.is_first: bool | None = None  # of all ranks of an elastic run, also after its fit
        self._tuning: TuningSession | None = None
        self._begins_tuning = False  # at the next batch
        self.local_steps: LocalSteps | None = None
        self._timeout: timedelta | None = None
        self._trace_dir: str | None = None
        self._work_group: dist.ProcessGroup | None = None

    def take_options(
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
        elastic: Elastic | None = None,
    ) -> dict[str, Any]:
        """Check and keep the options, of which the strategy's `own` are known by name; return those for DDP."""
        refuse_unknown_options(ddp_kwargs, own=own)
        require_value("between_nodes", between_nodes, (Mean, Adasum, LocalSteps), 'Mean(dtype="int8")')
        require_value("comm", comm, (Comm,), 'Comm(tune="off")')
        require_value("report", report, (Report,), 'Report(trace_dir="traces")')
        if elastic is not None:
            require_value("elastic", elastic, (Elastic,), 'Elastic(max_hosts=4, meet="10.0.0.1:29400")')
        self.elastic = elastic
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
        why = "which ranks share masters and optimizer state. Set strategy.shard_update=node, or leave it out"
        require_choice("shard_update", shard_update, ("off", "node", "world", False), why)  # YAML: `off` is a boolean
        self.extension_factories = tuple(extensions) if isinstance(extensions, Iterable) else ()
        if not isinstance(extensions, Iterable | None) or not all(map(callable, self.extension_factories)):
            raise ValueError(
                f"`extensions` (={extensions!r:.120}) must be a list and must hold what makes extensions, such as "
                "classes or `functools.partial(LogsNorm, every=10)`: each fit in each process gets its own. Write "
                "extensions=[LogsNorm], without a call."
            )
        self._plan, self._planner, self._comm_dtype = comm.made_plan(), comm.planner, comm.on_wire
        self.dtype_across_nodes = between_nodes.on_wire
        self._is_adasum = isinstance(between_nodes, Adasum)
        self.local_steps = between_nodes if isinstance(between_nodes, LocalSteps) else None
        self.shard_update = shard_update or "off"
        self._ranks_per_node = ranks_per_node
        self._trace_dir = None if report.trace_dir is None else os.fspath(report.trace_dir)
        self.link_bytes_per_s = report.link_bytes_per_s
        # A plan that is not the library's own choice is not tuned by itself, nor another sum than that over all ranks.
        is_own = comm.algorithm == "auto" and (comm.plan is None or comm.planner is not None)
        is_tunable = is_own and isinstance(between_nodes, Mean) and self._kind is None
        self.tune = "off" if comm.tuning == "auto" and not is_tunable else comm.tuning
        self.asked = in_options(
            between_nodes, comm, shard_update=self.shard_update, for_ddp=for_ddp, extensions=extensions, elastic=elastic
        )
        if self._kind is not None:
            self.asked[self._kind] = "a pipeline" if self._kind == "pipeline" else "Fabric's strategy"
        refuse_excluded(self.asked)
        if loss_scale is not None:
            loss_scale_from(loss_scale)  # a bad value is refused here, not in training
        if elastic is not None:
            for_ddp["broadcast_buffers"] = False  # over the hosts, by `ElasticFit`
        return for_ddp | {"bucket_cap_mb": self._plan.bucket_bytes / 2**20}

    def has_several_communicators(self, module: nn.Module | None) -> bool:
        """Return whether groups beside the default one may be in use at the same time: stages, slices, pairs, ..."""
        needs_own_groups = self.asked.keys() - {"unused parameters", "Fabric"}
        is_named = self._plan.algorithm not in ("auto", "flat") or self.dtype_across_nodes is not None
        if needs_own_groups or is_named:
            return True
        for layer in () if module is None else module.modules():
            if getattr(layer, "node_slices", ()) or getattr(layer, "spans_all_ranks", False):
                return True
        return False

    def check_ranks(self, *, rank: int, world_size: int) -> None:
        """Check `ranks_per_node` where ranks and world size are known first, before any process group."""
        if self._ranks_per_node is not None:
            topology = self.topology_of(rank, world_size)
            if self._is_adasum:
                refuse_odd_nodes(topology)

    def topology_of(self, rank: int, world_size: int) -> Topology:
        """Return which ranks share a node. Collective, unless the user said it by `ranks_per_node`."""
        if self._ranks_per_node is None:
            return Topology.discover()
        return Topology.from_ranks_per_node(rank=rank, world_size=world_size, ranks_per_node=self._ranks_per_node)

    def begin(self, rank: int, world_size: int, device: torch.device, timeout: timedelta | None) -> None:
        """Find the topology of a fit. Collective, unless the user said it by `ranks_per_node`."""
        self.device, self._timeout, self.plan, self.engine_options = device, timeout, self._plan, {}
        self._rank, self._begins_tuning = rank, self.tune != "off"
        if self.elastic is None:
            self.topology = self.topology_of(rank, world_size)
        else:  # of all hosts that may come; `rank` and `world_size` are those of one
            most = world_size * self.elastic.max_hosts
            self.topology = Topology.from_ranks_per_node(rank=rank, world_size=most, ranks_per_node=world_size)

    def find_plan(self, module: nn.Module) -> None:
        """Make the plan for the topology and this module."""
        on_cuda = self.device.type == "cuda"
        if self._is_adasum and (plan := adasum_plan(self.plan, self.topology)) is not None:
            self.plan, self.bucket_hook = plan, adasum_bucket
        if self._planner is not None:
            self.plan = ask_planner(
                self._planner,
                module,
                self.topology,
                comm_dtype=self._comm_dtype,
                on_cuda=on_cuda,
                across_nodes=self.dtype_across_nodes,
            )
        if isinstance(codec := self.dtype_across_nodes, Codec):
            self.plan = plan_for_codec(self.plan, self.topology, bits=codec.bits, on_cuda=on_cuda)

    def take_engine_options(self, options: Mapping[str, Any]) -> None:
        """Take another plan, and arguments of the engine."""
        self.engine_options = dict(options)
        self.plan = self.engine_options.pop("plan", self.plan)

    def wrap(
        self, module: nn.Module, *, device_ids: list[int] | None, is_half: bool, **ddp_kwargs: Any
    ) -> DistributedDataParallel:
        """Wrap a module in DDP, with the buckets of the plan; `is_half`: a window shows half-precision parameters."""
        caps = bucket_caps_for_ddp(module, self.plan, ddp_kwargs, num_nodes=self.topology.num_nodes)
        if is_half:
            # The gradients of half-precision parameters are never the user's: a view saves a copy into the buckets.
            ddp_kwargs.setdefault("gradient_as_bucket_view", True)
        return DistributedDataParallel(module, device_ids=device_ids, **(ddp_kwargs | caps))

    def new_engine(self, precision: Any, *, replicas: ReplicaSets | None = None, group: Any = None) -> CommEngine:
        """Make an engine, for what averages its gradients over all ranks or `replicas`; say what is on. Collective."""
        assert self._timeout is not None
        self.topology = self.topology if replicas is None else replicas.own
        engine = (CommEngine if self.elastic_fit is None else self.elastic_fit.engine_type)(
            topology=self.topology,
            plan=self.plan,
            timeout=self._timeout,
            device=self.device,
            trace=CommTrace(keep_events=self._trace_dir is not None),
            dtype_across_nodes=self.dtype_across_nodes,
            replicas=replicas,
            group=group,
            **self.engine_options,
        )
        self.note_plan(self.plan)
        across = self.dtype_across_nodes if self.topology.num_nodes > 1 else None
        on = turned_on(precision, across, self.local_steps, self.asked, shard_update=self.shard_update)
        rank_zero_info(f"{self.communication_plan}; {on}")
        return engine

    def average_by(
        self, engine: CommEngine, wrapped: DistributedDataParallel | None, parameters: Iterable[Tensor] = ()
    ) -> HookState:
        """Let this engine average what DDP, if any, puts into buckets; `parameters`: as in `HookState`: the result."""
        state = HookState(engine=engine, comm_dtype=self._comm_dtype, parameters=parameters)
        elastic = self.elastic_fit
        if wrapped is not None:
            wrapped.register_comm_hook(state, self.bucket_hook if elastic is None else elastic.hook(self.bucket_hook))
        return state

    def before_batch(self, module: Any) -> None:
        """Tell the codec the number of the step; between two steps tuning may change the plan."""
        if self.engine is not None and self.engine.coder is not None:
            self.engine.coder.begin_step(module.trainer.global_step)
        if self._begins_tuning and self.engine is not None:
            from lightning_hybrid.strategy.plan_tuning import tuning_of  # here: only a fit that tunes needs it

            self._begins_tuning = False
            self._tuning = tuning_of(self.engine, self.tune, module.trainer, on_plan=self.note_plan)
        if self._tuning is not None:
            self._tuning.before_batch()

    def after_optimizer_step(self) -> None:
        """Count a step of an optimizer."""
        if self._tuning is not None:
            self._tuning.after_optimizer_step()

    def share_work(self, optimizers: Sequence[Optimizer]) -> None:
        """Let the ranks of a node share the work of `LARS(direction="orthogonal")`. Collective."""
        sharing = [one for one in optimizers if any(g.get("direction") == "orthogonal" for g in one.param_groups)]
        if sharing and self.topology.world_size > self.topology.num_nodes:
            self._work_group = new_node_group(self.topology, timeout=self._timeout, desc="orthogonal work")
            for one in sharing:
                vars(one)["work_group"] = self._work_group

    def close(self, optimizers: Sequence[Optimizer]) -> None:
        """Join the engine's threads, write its timeline, destroy its groups and that of shared work."""
        engine, elastic, self.engine, self.elastic_fit = self.engine, self.elastic_fit, None, None
        self.hook_state = self._tuning = None  # a codec's buckets are as large as all gradients
        try:
            for part in (elastic, self.held_loggers):
                if part is not None:
                    part.end()
            if engine is not None:
                engine.close()
                if self._trace_dir is not None:
                    engine.trace.write_if_possible(self._trace_dir, rank=self._rank)
        finally:
            group, self._work_group = self._work_group, None
            if group is not None:
                for one in optimizers:
                    vars(one).pop("work_group", None)
                has_failed = engine is not None and bool(engine.failure)
                end_group(group, is_aborted=has_failed and self.device.type == "cuda")

    def warn_of_reduction(self, optimizers: Sequence[Optimizer]) -> None:
        """Warn of what Adasum takes from optimizers, once it is known whether there are several nodes."""
        if self.bucket_hook is adasum_bucket:
            warn_of_trust_ratios(optimizers)

    def note_plan(self, plan: CommPlan) -> None:
        """Put a plan into words."""
        on_cuda = self.device.type == "cuda"
        self.communication_plan = plan.describe(self.topology, on_cuda=on_cuda)
        if self.bucket_hook is adasum_bucket:
            self.communication_plan += "; Adasum between nodes"
        is_flat = plan.algorithms(self.topology, on_cuda=True) == ("flat",) and self.dtype_across_nodes is None
        if on_cuda and (self.engine_options.get("shares_update") or not is_flat):
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
