"""The communication of a strategy: options, topology, plan and engine, for the Trainer's strategy and for Fabric's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_hybrid.comm import (
    CommEngine,
    CommPlan,
    CommTrace,
    HookState,
    Topology,
    average_bucket,
)
from lightning_hybrid.comm.adasum.combine import refuse_odd_nodes
from lightning_hybrid.comm.adasum.hook import adasum_bucket
from lightning_hybrid.comm.codec.codec import Codec
from lightning_hybrid.comm.codec.coded_plan import plan_for_codec
from lightning_hybrid.comm.engine.process_groups import end_group, new_node_group
from lightning_hybrid.comm.topology import ReplicaSets
from lightning_hybrid.strategy.arguments import (
    adasum_plan,
    ask_planner,
    bucket_caps_for_ddp,
    describe_options,
    warn_of_trust_ratios,
)
from lightning_hybrid.strategy.strategy_options import StrategyOptions

_WITHOUT_GROUPS = {"unused parameters", "ranks per node", "Fabric", "algorithm"}
"""Features of options that need no process group of their own."""


BucketHook = Callable[..., Any]


def _unwrapped(hook: BucketHook) -> BucketHook:
    return hook


class CommSetup:
    """Topology, plan and engines of a strategy's fits.

    Attributes:
        options: The options of the strategy.
        plan: The plan of this fit, made from that of the options for its topology and module.
        communication_plan: Ranks, nodes, buckets and algorithms in one line, once known.
        engine_options: Arguments of the engine that extensions ask for.
        engine: The engine of this fit, from when its module is in DDP until `close`.
        hook_state: The state of DDP's hook, for as long.
        engine_type: The class of the engine. A strategy may set another one after `begin`.
        wrap_hook: Returns the hook for DDP, from the one that averages a bucket. A strategy may set it after `begin`.
    """

    topology: Topology
    plan: CommPlan
    device: torch.device

    def __init__(self, options: StrategyOptions) -> None:
        self.options = options
        self.communication_plan: str | None = None
        self.bucket_hook: Callable[..., Any] = average_bucket
        self.engine_options: dict[str, Any] = {}
        self.engine: CommEngine | None = None
        self.hook_state: HookState | None = None
        self.engine_type: type[CommEngine] = CommEngine
        self.wrap_hook: Callable[[BucketHook], BucketHook] = _unwrapped
        self._timeout: timedelta | None = None
        self._work_group: dist.ProcessGroup | None = None

    def has_several_communicators(self, module: nn.Module | None) -> bool:
        """Return whether groups other than the default one may be in use at the same time, such as those of stages."""
        if self.options.features().keys() - _WITHOUT_GROUPS:
            return True
        if (
            self.options.plan.algorithm not in ("auto", "flat")
            or self.options.dtype_across_nodes is not None
        ):
            return True
        layers = () if module is None else module.modules()
        return any(
            getattr(layer, "node_slices", ()) or getattr(layer, "spans_all_ranks", False)
            for layer in layers
        )

    def check_ranks(self, *, rank: int, world_size: int) -> None:
        """Check `ranks_per_node` where ranks and world size are known first, before any process group."""
        if self.options.ranks_per_node is not None:
            topology = self.topology_of(rank, world_size)
            if self.options.is_adasum:
                refuse_odd_nodes(topology)

    def topology_of(self, rank: int, world_size: int) -> Topology:
        """Return which ranks share a node. Collective, unless the user said it by `ranks_per_node`."""
        if self.options.ranks_per_node is None:
            return Topology.discover()
        return Topology.from_ranks_per_node(
            rank=rank, world_size=world_size, ranks_per_node=self.options.ranks_per_node
        )

    def begin(self, topology: Topology, device: torch.device, timeout: timedelta | None) -> None:
        """Prepare for a fit over the ranks of a topology."""
        self.topology = topology
        self.device = device
        self.plan = self.options.plan
        self.engine_options = {}
        self._timeout = timeout

    def find_plan(self, module: nn.Module) -> None:
        """Make the plan for the topology and this module."""
        on_cuda = self.device.type == "cuda"
        if self.options.is_adasum and (plan := adasum_plan(self.plan, self.topology)) is not None:
            self.plan = plan
            self.bucket_hook = adasum_bucket
        if self.options.comm.planner is not None:
            self.plan = ask_planner(
                self.options.comm.planner,
                module,
                self.topology,
                comm_dtype=self.options.comm.on_wire,
                on_cuda=on_cuda,
                across_nodes=self.options.dtype_across_nodes,
            )
        if isinstance(codec := self.options.dtype_across_nodes, Codec):
            self.plan = plan_for_codec(self.plan, self.topology, bits=codec.bits, on_cuda=on_cuda)

    def take_engine_options(self, options: Mapping[str, Any]) -> None:
        """Take another plan, and arguments of the engine."""
        self.engine_options = dict(options)
        self.plan = self.engine_options.pop("plan", self.plan)

    def wrap(
        self, module: nn.Module, *, device_ids: list[int] | None, is_half: bool, **ddp_kwargs: Any
    ) -> DistributedDataParallel:
        """Wrap a module in DDP, with the buckets of the plan.

        Args:
            module: The module.
            device_ids: As in `DistributedDataParallel`.
            is_half: Whether a window shows half-precision copies of its parameters.
            **ddp_kwargs: For `DistributedDataParallel`.
        """
        caps = bucket_caps_for_ddp(module, self.plan, ddp_kwargs, num_nodes=self.topology.num_nodes)
        if is_half:
            # The gradients of half-precision parameters are never the user's: a view saves a copy into the buckets.
            ddp_kwargs.setdefault("gradient_as_bucket_view", True)
        return DistributedDataParallel(module, device_ids=device_ids, **(ddp_kwargs | caps))

    def new_engine(
        self, precision: Any, *, replicas: ReplicaSets | None = None, group: Any = None
    ) -> CommEngine:
        """Make the engine that averages gradients over all ranks or `replicas`, and log the options. Collective."""
        assert self._timeout is not None
        self.topology = self.topology if replicas is None else replicas.own
        engine = self.engine_type(
            topology=self.topology,
            plan=self.plan,
            timeout=self._timeout,
            device=self.device,
            trace=CommTrace(keep_events=self.options.trace_dir is not None),
            dtype_across_nodes=self.options.dtype_across_nodes,
            replicas=replicas,
            group=group,
            **self.engine_options,
        )
        self.note_plan(self.plan)
        described = describe_options(self.options, precision, num_nodes=self.topology.num_nodes)
        rank_zero_info(f"{self.communication_plan}; {described}")
        return engine

    def average_by(
        self,
        engine: CommEngine,
        wrapped: DistributedDataParallel | None,
        parameters: Iterable[Tensor] = (),
    ) -> HookState:
        """Register the hook by which an engine averages the buckets of DDP, and return the hook's state.

        Args:
            engine: The engine.
            wrapped: The wrapped module, or None if something else hands over the buckets.
            parameters: As in `HookState`.
        """
        state = HookState(
            engine=engine, comm_dtype=self.options.comm.on_wire, parameters=parameters
        )
        if wrapped is not None:
            wrapped.register_comm_hook(state, self.wrap_hook(self.bucket_hook))
        return state

    def before_batch(self, module: Any) -> None:
        """Set the number of the step, from which the codec draws its noise."""
        if self.engine is not None and self.engine.coder is not None:
            self.engine.coder.begin_step(module.trainer.global_step)

    def share_work(self, optimizers: Sequence[Optimizer]) -> None:
        """Let the ranks of a node share the work of `LARS(direction="orthogonal")`. Collective."""
        sharing = [
            one
            for one in optimizers
            if any(g.get("direction") == "orthogonal" for g in one.param_groups)
        ]
        if sharing and self.topology.world_size > self.topology.num_nodes:
            self._work_group = new_node_group(
                self.topology, timeout=self._timeout, desc="orthogonal work"
            )
            for one in sharing:
                vars(one)["work_group"] = self._work_group

    def close(self, optimizers: Sequence[Optimizer]) -> None:
        """Join the engine's threads, write its timeline, destroy its groups and that of shared work."""
        engine = self.engine
        self.engine = None
        self.hook_state = None  # a codec's buckets are as large as all gradients
        self.engine_type = CommEngine
        self.wrap_hook = _unwrapped
        try:
            if engine is not None:
                engine.close()
                if self.options.trace_dir is not None:
                    engine.trace.write_if_possible(self.options.trace_dir, rank=self.topology.rank)
        finally:
            group = self._work_group
            self._work_group = None
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
        is_flat = (
            plan.algorithms(self.topology, on_cuda=True) == ("flat",)
            and self.options.dtype_across_nodes is None
        )
        if on_cuda and (self.engine_options.get("shares_update") or not is_flat):
            self.communication_plan += (
                "; no record shows these stages on a GPU yet, where the default is flat"
            )


def trained_parameters(module: nn.Module) -> tuple[set[int], set[str]]:
    """Return the parameters that DDP averages or is to ignore, by `id`, and the names of the ignored."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    averaged = {
        id(parameter)
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if parameter.requires_grad or name in ignored
    }
    return averaged, ignored
