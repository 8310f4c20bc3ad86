"""Setup of communication for the Trainer and Fabric strategies: topology, plan and engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from lightning_hybrid.comm.stats.phases import Phase
from lightning_hybrid.comm.topology import ReplicaSets
from lightning_hybrid.strategy.fit_plan import (
    adasum_plan,
    ask_planner,
    bucket_caps_for_ddp,
    describe_options,
)
from lightning_hybrid.strategy.strategy_options import StrategyOptions
from lightning_hybrid.strategy.user_code_checks import warn_of_trust_ratios

_WITHOUT_GROUPS = {"unused parameters", "ranks per node", "Fabric", "algorithm"}
"""Features of options that need no process group of their own."""

BucketHook = Callable[..., Any]


def _unwrapped(hook: BucketHook) -> BucketHook:
    return hook


class CommSetup:
    """Communication setup of a strategy, which holds a run's topology, plan, engine and DDP hook.

    Attributes:
        options: The options of the strategy.
        topology: The ranks and nodes of the run.
        device: The device of this rank.
        plan: The communication plan of the run: the plan of the options, adapted to the topology and the module.
        communication_plan: One-line description of ranks, nodes, buckets and algorithms, once they are known.
        bucket_hook: The function that averages a bucket.
        engine_options: Arguments of the engine that extensions request.
        engine: The engine of the run, from the wrapping of the module in DDP until `close`.
        hook_state: The state of DDP's communication hook, as long as there is an engine.
        engine_type: The class of the engine. A strategy may set another one after `begin`.
        wrap_hook: Function that returns the hook for DDP, given `bucket_hook`. A strategy may set it after `begin`.
    """

    topology: Topology
    plan: CommPlan
    device: torch.device

    def __init__(self, options: StrategyOptions) -> None:
        self.options = options
        self.communication_plan: str | None = None
        self.bucket_hook: BucketHook = average_bucket
        self.engine_options: dict[str, Any] = {}
        self.engine: CommEngine | None = None
        self.hook_state: HookState | None = None
        self.engine_type: type[CommEngine] = CommEngine
        self.wrap_hook: Callable[[BucketHook], BucketHook] = _unwrapped
        self._timeout: timedelta | None = None
        self._work_group: dist.ProcessGroup | None = None

    @property
    def trace(self) -> CommTrace | None:
        """Communication counters and timings of the current run, or None if no engine exists."""
        if self.engine is None:
            return None
        return self.engine.trace

    def enter(self, phase: Phase) -> None:
        """Record the start of a phase of the training step in the communication trace."""
        if self.engine is not None:
            self.engine.trace.enter(phase)

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context whose duration is recorded as time spent waiting for other ranks."""
        if self.engine is None:
            return nullcontext()
        return self.engine.trace.waiting()

    # ---- topology and plan -------------------------------------------------------------------

    def has_several_communicators(self, module: nn.Module | None) -> bool:
        """Return whether the options or the layers of the module may use several process groups at the same time."""
        if self.options.features().keys() - _WITHOUT_GROUPS:
            return True
        if self.options.plan.algorithm not in ("auto", "flat"):
            return True
        if self.options.dtype_across_nodes is not None:
            return True
        if module is None:
            return False
        for layer in module.modules():
            if getattr(layer, "node_slices", ()) or getattr(layer, "spans_all_ranks", False):
                return True
        return False

    def check_ranks(self, *, rank: int, world_size: int) -> None:
        """Raise if `ranks_per_node` is incompatible with the world size or with Adasum.

        This needs no process group.

        Raises:
            ValueError: The ranks do not divide into such nodes, or Adasum cannot combine the nodes in pairs.
        """
        if self.options.ranks_per_node is not None:
            topology = self.topology_of(rank, world_size)
            if self.options.is_adasum:
                refuse_odd_nodes(topology)

    def topology_of(self, rank: int, world_size: int) -> Topology:
        """Return the topology of the run, which lists the ranks of each node.

        Collective, unless the user set `ranks_per_node`: every rank must call it, in the same order.
        """
        if self.options.ranks_per_node is None:
            return Topology.discover()
        return Topology.from_ranks_per_node(
            rank=rank, world_size=world_size, ranks_per_node=self.options.ranks_per_node
        )

    def begin(self, topology: Topology, device: torch.device, timeout: timedelta | None) -> None:
        """Store the topology, device and timeout of a new training run, and reset the communication plan."""
        self.topology = topology
        self.device = device
        self.plan = self.options.plan
        self.engine_options = {}
        self._timeout = timeout

    def find_plan(self, module: nn.Module) -> None:
        """Determine the communication plan from the options, the topology and the module's gradients."""
        on_cuda = self.device.type == "cuda"
        codec = self.options.dtype_across_nodes
        if self.options.is_adasum:
            plan = adasum_plan(self.plan, self.topology)
            if plan is not None:
                self.plan = plan
                self.bucket_hook = adasum_bucket
        if self.options.comm.planner is not None:
            self.plan = ask_planner(
                self.options.comm.planner,
                module,
                self.topology,
                comm_dtype=self.options.comm.on_wire,
                on_cuda=on_cuda,
                across_nodes=codec,
            )
        if isinstance(codec, Codec):
            self.plan = plan_for_codec(self.plan, self.topology, bits=codec.bits, on_cuda=on_cuda)

    def take_engine_options(self, options: Mapping[str, Any]) -> None:
        """Store additional engine arguments. If they include a communication plan, use it for the run."""
        self.engine_options = dict(options)
        self.plan = self.engine_options.pop("plan", self.plan)

    # ---- DDP and the engine ------------------------------------------------------------------

    def wrap(
        self, module: nn.Module, *, device_ids: list[int] | None, is_half: bool, **ddp_kwargs: Any
    ) -> DistributedDataParallel:
        """Wrap a module in `DistributedDataParallel` with the bucket sizes of the communication plan.

        Args:
            module: Module to wrap.
            device_ids: The device of the module, as in `DistributedDataParallel`.
            is_half: Whether the module's parameters are half-precision copies during a step.
            **ddp_kwargs: Arguments for `DistributedDataParallel`.
        """
        caps = bucket_caps_for_ddp(module, self.plan, ddp_kwargs, num_nodes=self.topology.num_nodes)
        if is_half:
            # User code never sees gradients of half-precision parameters, so views of the buckets can save a copy.
            ddp_kwargs.setdefault("gradient_as_bucket_view", True)
        return DistributedDataParallel(module, device_ids=device_ids, **(ddp_kwargs | caps))

    def new_engine(
        self, precision: Any, *, replicas: ReplicaSets | None = None, group: Any = None
    ) -> CommEngine:
        """Create the engine that averages gradients, and log the communication plan and options.

        Collective: every rank of the group must call it, in the same order.

        Args:
            precision: The precision plugin, for the log.
            replicas: The sets of ranks that average with each other. None: all ranks average together.
            group: The process group of this rank's set. None: the default group.
        """
        assert self._timeout is not None
        if replicas is not None:
            self.topology = replicas.own
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
        """Register a DDP communication hook that averages gradient buckets, and return its state.

        Args:
            engine: Engine that averages the buckets.
            wrapped: Module wrapped in DDP, or None if other code passes the buckets to the engine.
            parameters: The parameters whose gradients are in the buckets, as in `HookState`.
        """
        state = HookState(
            engine=engine, comm_dtype=self.options.comm.on_wire, parameters=parameters
        )
        if wrapped is not None:
            wrapped.register_comm_hook(state, self.wrap_hook(self.bucket_hook))
        return state

    def before_batch(self, module: Any) -> None:
        """Seed the stochastic rounding of the gradient codec with the global step."""
        if self.engine is not None and self.engine.coder is not None:
            self.engine.coder.begin_step(module.trainer.global_step)

    def share_work(self, optimizers: Sequence[Optimizer]) -> None:
        """Share the computation of `LARS(direction="orthogonal")` among the ranks of each node.

        Collective: every rank of the group must call it, in the same order.
        """
        sharing: list[Any] = [optimizer for optimizer in optimizers if _is_orthogonal(optimizer)]
        if not sharing or self.topology.world_size <= self.topology.num_nodes:
            return
        self._work_group = new_node_group(
            self.topology, timeout=self._timeout, desc="orthogonal work"
        )
        for optimizer in sharing:
            optimizer.work_group = self._work_group

    def warn_of_reduction(self, optimizers: Sequence[Optimizer]) -> None:
        """Warn if Adasum is used with an optimizer whose trust ratios discard gradient magnitudes."""
        if self.bucket_hook is adasum_bucket:
            warn_of_trust_ratios(optimizers)

    # ---- end ---------------------------------------------------------------------------------

    def close(self, optimizers: Sequence[Optimizer]) -> None:
        """Close the engine, write its timeline and destroy the process group that `share_work` created."""
        engine = self.engine
        self.engine = None
        self.hook_state = None  # This frees a codec's buckets, which are as large as all gradients.
        self.engine_type = CommEngine
        self.wrap_hook = _unwrapped
        try:
            if engine is not None:
                engine.close()
                if self.options.trace_dir is not None:
                    engine.trace.write_if_possible(self.options.trace_dir, rank=self.topology.rank)
        finally:
            has_failed = engine is not None and bool(engine.failure)
            self._end_shared_work(optimizers, has_failed=has_failed)

    def _end_shared_work(self, optimizers: Sequence[Any], *, has_failed: bool) -> None:
        group = self._work_group
        self._work_group = None
        if group is None:
            return
        for optimizer in optimizers:
            if getattr(optimizer, "work_group", None) is not None:
                optimizer.work_group = None
        end_group(group, is_aborted=has_failed and self.device.type == "cuda")

    # ---- description -------------------------------------------------------------------------

    def note_plan(self, plan: CommPlan) -> None:
        """Set `communication_plan` to a one-line description of a communication plan."""
        on_cuda = self.device.type == "cuda"
        self.communication_plan = plan.describe(self.topology, on_cuda=on_cuda)
        if self.bucket_hook is adasum_bucket:
            self.communication_plan += "; Adasum between nodes"
        is_always_flat = plan.algorithms(self.topology, on_cuda=True) == ("flat",)
        is_flat = is_always_flat and self.options.dtype_across_nodes is None
        if on_cuda and (self.engine_options.get("shares_update") or not is_flat):
            self.communication_plan += "; not yet measured on a GPU, where the default is flat"


def _is_orthogonal(optimizer: Optimizer) -> bool:
    return any(group.get("direction") == "orthogonal" for group in optimizer.param_groups)


def trained_parameters(module: nn.Module) -> tuple[set[int], set[str]]:
    """Return the `id`s of all parameters that DDP averages or ignores, and the names of those that it ignores."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    averaged: set[int] = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad or name in ignored:
            averaged.add(id(parameter))
    return averaged, ignored
