"""The strategy `hybrid_allreduce`: wiring of precision, communication and input into Lightning's DDP."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import HalfPrecision, Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_hybrid.checkpoint.io import DurableCheckpointMixin
from lightning_hybrid.comm import CommEngine, CommPlan, CommTrace, HookState, Topology, average_bucket
from lightning_hybrid.data.prefetch import prefetch
from lightning_hybrid.planning.cluster import Cluster
from lightning_hybrid.precision import MasterWeightPrecision
from lightning_hybrid.precision.loss_scale import LossScale
from lightning_hybrid.strategy.arguments import (
    bucket_caps_for_ddp,
    dtype_from,
    one_bucket_size,
    plan_from,
    plan_on,
    rate_from,
    refuse_foreign_parameters,
    refuse_nothing_to_train,
    refuse_two_precisions,
    refuse_unknown_options,
    refuse_what_is_not_averaged,
    register_variants,
    tune_from,
    user_moves_batches,
)
from lightning_hybrid.strategy.failures import FailureReportMixin
from lightning_hybrid.strategy.plan_tuning import FitTuning
from lightning_hybrid.strategy.rendezvous import RendezvousMixin


class HybridAllReduceStrategy(DurableCheckpointMixin, RendezvousMixin, FailureReportMixin):
    """Data-parallel training as `DDPStrategy`, with a hybrid all-reduce and half precision on fp32 masters.

    `precision="16-true"` and `"bf16-true"` are carried out by
    `MasterWeightPrecision`; other precisions keep Lightning's meaning. No
    hyper-parameter is changed behind the user: in particular the learning rate is not multiplied by anything.

    Args:
        algorithm: `"flat"` (one all-reduce over all ranks), `"parallel_flat"` (several at once),
            `"hierarchical"` (reduce in the node, ring of node leaders, broadcast in the node), `"two_level"`
            (scatter-reduce in the node, all-reduce across nodes, gather in the node), or `"auto"`: per bucket the
            one that fits its bytes and the topology.
        ranks_per_node: consecutive ranks that share a node; None finds out which ranks share a host.
        bucket_bytes: size at which gradients are fused into one buffer; bytes.
        plan: all of how buckets are made and carried: a `CommPlan` or the path of its
            JSON; or a `planning.cluster.Cluster`, on whose model the plan with the shortest step
            is chosen when training starts. Instead of `algorithm` and `bucket_bytes`.
        comm_dtype: dtype on the wire (`"float16"`, `torch.bfloat16`, ...); None: the gradients' own.
        comm_dtype_across_nodes: as `comm_dtype`, but between nodes only: sums inside a node keep more digits.
        tune: whether other algorithms, chunks and groups are tried in the first steps, and one that takes less time
            beyond noise is taken: only the order of additions changes. `"auto"`: on several nodes, without
            `algorithm` and `plan`, in runs of 1,000 steps or more; `"on"`: in any; `"off"`: never.
        tune_cache_dir: where plans that were tuned are kept and found by later runs; None: in the user's cache.
        trace_dir: directory of a timeline of every bucket and stage, `rank<r>.json`, for Perfetto; None: none.
        link_bytes_per_s: rate of a node's link to the others, in each direction; bytes per second. Only for metrics and
            report, which then say what part of it is achieved.
        loss_scale: for `"16-true"`: `"dynamic"` (default), a power of two, or a
            `LossScale`.
        timeout: for every collective, and for ranks to meet; a peer that died or never came is an error after this.
        start_method: `"popen"`, `"spawn"`, `"fork"` or `"forkserver"`, as in `DDPStrategy`.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend:
            as in `DDPStrategy`.
        **ddp_kwargs: for `DistributedDataParallel`, such as `find_unused_parameters` or `static_graph`.
            `gradient_as_bucket_view` is on unless set.

    Raises:
        ValueError: for an option that does not exist or a value that cannot work, when the object is made or when the
            `Trainer` is, before any process group exists.

    Source: Jia et al. 2018 (arXiv:1807.11205).
    """

    def __init__(
        self,
        algorithm: Literal["auto", "flat", "parallel_flat", "hierarchical", "two_level"] = "auto",
        ranks_per_node: int | None = None,
        bucket_bytes: int | None = None,
        plan: CommPlan | Cluster | str | None = None,
        comm_dtype: str | torch.dtype | None = None,
        comm_dtype_across_nodes: str | torch.dtype | None = None,
        tune: Literal["auto", "on", "off"] | bool = "auto",
        tune_cache_dir: str | None = None,
        trace_dir: str | None = None,
        link_bytes_per_s: float | None = None,
        loss_scale: str | float | LossScale | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any | None = None,
        checkpoint_io: Any | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **ddp_kwargs: Any,
    ) -> None:
        refuse_unknown_options(ddp_kwargs, own=inspect.signature(HybridAllReduceStrategy).parameters)
        bucket_bytes = one_bucket_size(bucket_bytes, ddp_kwargs)
        self._plan = plan_from(plan, algorithm=algorithm, bucket_bytes=bucket_bytes)
        self._cluster = plan if isinstance(plan, Cluster) else None
        self._ranks_per_node = ranks_per_node
        self._comm_dtype = dtype_from(comm_dtype)
        self._dtype_across_nodes = dtype_from(comm_dtype_across_nodes, name="comm_dtype_across_nodes")
        self._trace_dir = trace_dir
        self.link_bytes_per_s = rate_from(link_bytes_per_s)
        self._loss_scale = loss_scale
        if loss_scale is not None:
            MasterWeightPrecision("16-true", loss_scale=loss_scale)  # a bad value is refused here, not in training
        is_own_choice = (plan is None or self._cluster is not None) and algorithm == "auto"
        self._tune, self._tune_cache_dir = tune_from(tune, is_own_choice=is_own_choice), tune_cache_dir
        self._tuning: FitTuning | None = None
        self._engine: CommEngine | None = None
        self._topology: Topology  # known when DDP is configured
        self._averaged_parameters: set[int] | None = None
        self._has_optimizers = False  # made before the module was converted
        ddp_kwargs.setdefault("gradient_as_bucket_view", True)
        ddp_kwargs["bucket_cap_mb"] = self._plan.bucket_bytes / 2**20
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            **ddp_kwargs,
        )

    carries_master_weights = True  # checkpoints hold fp32 masters: asked for by MasterWeightPrecision
    communication_plan: str | None = None  # ranks, nodes, buckets, algorithms in a line, once it is known

    # ---- construction ----------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        """The precision in force; Lightning's `trainer.precision` reads it from here."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        """Master weights take the place of Lightning's plain half precision; everything else is kept."""
        if isinstance(plugin, HalfPrecision):
            scale = self._loss_scale if plugin.precision == "16-true" else None
            plugin = MasterWeightPrecision(plugin.precision, loss_scale=scale)
        self._precision_plugin = plugin

    def set_world_ranks(self) -> None:
        """Learn the world's size, and refuse a topology that does not fit it: the first moment at which it is known."""
        super().set_world_ranks()
        if self._ranks_per_node is not None and self.cluster_environment is not None:
            self._topology_as_told()

    def connect(self, model: pl.LightningModule) -> None:
        """Refuse two different precisions: one in the strategy object, one in `Trainer(precision=...)`."""
        if isinstance(self.precision_plugin, MasterWeightPrecision):
            refuse_two_precisions(model.trainer, self.precision_plugin)
        super().connect(model)

    # ---- setup -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """As DDP, after checking that there is something to train."""
        if trainer.state.fn == TrainerFn.FITTING:
            assert self.lightning_module is not None
            refuse_nothing_to_train(self.lightning_module)
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Move the module; masters and loss scale follow, before DDP looks at the parameters.

        A module that is to be half is converted after its optimizers were made, and before DDP wraps it.
        """
        super().model_to_device()
        if isinstance(self.precision_plugin, MasterWeightPrecision):
            assert self.lightning_module is not None
            if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
                self.setup_optimizers(self.lightning_module.trainer)
                self._has_optimizers = True
            self.precision_plugin.follow_device(self.root_device)

    def configure_ddp(self) -> None:
        """Wrap in DDP and remember which parameters it averages: those trainable now, and only those."""
        assert isinstance(self.model, nn.Module)
        ignored = set(getattr(self.model, "_ddp_params_and_buffers_to_ignore", ()))
        self._averaged_parameters = {
            id(parameter)
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
            if parameter.requires_grad or name in ignored
        }
        self._topology = Topology.discover() if self._ranks_per_node is None else self._topology_as_told()
        if self._cluster is not None:
            dtype, on_cuda = self._comm_dtype, self.root_device.type == "cuda"
            self._plan = plan_on(self._cluster, self.model, self._topology, comm_dtype=dtype, on_cuda=on_cuda)
        own = self._ddp_kwargs
        caps = bucket_caps_for_ddp(self.model, self._plan, own, num_nodes=self._topology.num_nodes)
        self._ddp_kwargs = {**own, **caps}
        try:
            super().configure_ddp()
        finally:
            self._ddp_kwargs = own
        if self._masters is not None and self.world_size > 1 and own.get("init_sync", True):
            assert self.lightning_module is not None
            self._masters.broadcast_(self.lightning_module, ignored)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        """Wrap on the current stream: after one of its own, as Lightning's, gradients cross streams in backward."""
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        """Build groups and engine, and register the hook: on every device type, CPU included."""
        assert isinstance(self.model, DistributedDataParallel)
        assert self._timeout is not None
        self._engine = CommEngine(
            topology=self._topology,
            plan=self._plan,
            timeout=self._timeout,
            device=self.root_device,
            trace=CommTrace(keep_events=self._trace_dir is not None),
            dtype_across_nodes=self._dtype_across_nodes,
        )
        self.model.register_comm_hook(HookState(engine=self._engine, comm_dtype=self._comm_dtype), average_bucket)
        self._note_plan(self._plan)
        rank_zero_info(self.communication_plan)
        self._tuning = FitTuning(self._engine, self._tune, self._tune_cache_dir, on_plan=self._note_plan)

    def _note_plan(self, plan: CommPlan) -> None:
        self.communication_plan = plan.describe(self._topology, on_cuda=self.root_device.type == "cuda")

    def _topology_as_told(self) -> Topology:
        assert self._ranks_per_node is not None
        return Topology.from_ranks_per_node(
            rank=self.global_rank, world_size=self.world_size, ranks_per_node=self._ranks_per_node
        )

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """As DDP, refusing parameters that the module does not have: DDP would not average them."""
        if self._has_optimizers:
            self._has_optimizers = False
            return
        super().setup_optimizers(trainer)
        if trainer.ckpt_path is not None:
            # `trainer.estimated_stepping_batches` in `configure_optimizers` has built the training loaders before the
            # checkpoint's state for them was read, and Lightning 2.6 would drop it: let it build them again.
            trainer.fit_loop._combined_loader = None
        assert self.lightning_module is not None
        refuse_foreign_parameters(self.optimizers, self.lightning_module)

    @property
    def comm_trace(self) -> CommTrace | None:
        """Counters of the communication, while a fit runs."""
        return None if self._engine is None else self._engine.trace

    def process_dataloader(self, dataloader: object) -> object:
        """Put a prefetcher around the loader, unless the user moves batches by hooks of their own."""
        dataloader = super().process_dataloader(dataloader)
        if user_moves_batches(self.lightning_module):
            return dataloader
        _auto_add_worker_init_fn(dataloader, self.global_rank)  # Lightning looks for a DataLoader, which this hides
        compute_dtype = getattr(self.precision_plugin, "dtype", None) if self._masters is not None else None
        return prefetch(dataloader, self.root_device, compute_dtype)  # type: ignore[arg-type]

    # ---- step ------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """As DDP; between two steps the plan of communication may change."""
        super().on_train_batch_start(batch, batch_idx)
        if self._tuning is not None:
            self._tuning.before_batch(self.lightning_module)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """As DDP, after checking that every trained parameter is averaged."""
        if self.world_size > 1 and self._averaged_parameters is not None:
            assert self.lightning_module is not None
            refuse_what_is_not_averaged(optimizer, self._averaged_parameters, self.lightning_module)
        outputs = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._tuning is not None:
            self._tuning.after_optimizer_step()
        return outputs

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """As DDP; predictions are fp32, as of a model that is."""
        outputs = super().predict_step(*args, **kwargs)
        return outputs if self._masters is None else self._masters.to_fp32(outputs)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As DDP, once the schedules have moved its rate as far as they are to."""
        if isinstance(self.precision_plugin, MasterWeightPrecision):
            self.precision_plugin.run_deferred_schedules()
        return super().optimizer_state(optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load while the masters stand in: `load_state_dict` casts state to the parameters' dtype."""
        masters = self._masters
        if masters is None:
            return super().load_optimizer_state_dict(checkpoint)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            with masters.swapped_in(optimizer):
                optimizer.load_state_dict(state)
                _optimizer_to_device(optimizer, self.root_device)
        return None

    @property
    def _masters(self) -> Any:
        plugin = self.precision_plugin
        return plugin.masters if isinstance(plugin, MasterWeightPrecision) else None

    # ---- end -------------------------------------------------------------------------------------------------------

    def on_train_end(self) -> None:
        """As DDP; schedules come to rest, and endless overflow that no logged step has seen is an error."""
        super().on_train_end()
        if isinstance(self.precision_plugin, MasterWeightPrecision):
            self.precision_plugin.on_train_end()

    def teardown(self) -> None:
        """Join the engine's threads, destroy its groups, give the module its fp32 weights back."""
        engine, self._engine, self._tuning = self._engine, None, None
        try:
            if engine is not None:
                engine.close()
                if self._trace_dir is not None:
                    engine.trace.write_if_possible(self._trace_dir, rank=self.global_rank)
        finally:
            self._averaged_parameters = None
            if self._masters is not None:
                self._masters.restore()  # before Lightning moves the module away from its masters
            super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register `hybrid_allreduce` and the variants that `ddp` has."""
        register_variants(strategy_registry, cls)


HybridAllReduceStrategy.register_strategies(StrategyRegistry)
