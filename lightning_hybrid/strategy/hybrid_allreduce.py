"""The strategy `hybrid_allreduce`: wiring of precision, communication and input into Lightning's DDP."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_hybrid.checkpoint.mixin import DurableCheckpointMixin
from lightning_hybrid.comm import CommPlan, CommTrace, HookState
from lightning_hybrid.lightning_names import lightning_function
from lightning_hybrid.precision.loss_scale import LossScale
from lightning_hybrid.run_status import RunStatus, has_grad_scaler
from lightning_hybrid.strategy.arguments import (
    Planner,
    bucket_caps_for_ddp,
    factories_from,
    folder_from,
    rate_from,
    refuse_foreign_parameters,
    refuse_nothing_to_train,
    refuse_slices,
    refuse_two_precisions,
    refuse_what_is_not_averaged,
    tune_from,
    user_moves_batches,
)
from lightning_hybrid.strategy.comm_setup import CommSetupMixin, trained_parameters
from lightning_hybrid.strategy.extension import Extensions, FitContext, FitExtension, made_for
from lightning_hybrid.strategy.failures import FailureReportMixin
from lightning_hybrid.strategy.half_precision import HalfPrecisionMixin
from lightning_hybrid.strategy.node_slices.extension import SlicesMixin
from lightning_hybrid.strategy.registration import register_names
from lightning_hybrid.strategy.rendezvous import RendezvousMixin
from lightning_hybrid.strategy.shard_update.extension import SharedUpdateMixin
from lightning_hybrid.strategy.shard_update.refusals import shard_update_from

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy as _Base

    from lightning_hybrid.strategy.plan_tuning import FitTuning
else:
    _Base = object  # of either Lightning: the class that users see stands in `flavours/`


class HybridAllReduceMixin(
    CommSetupMixin,
    SlicesMixin,
    SharedUpdateMixin,
    HalfPrecisionMixin,
    DurableCheckpointMixin,
    RendezvousMixin,
    FailureReportMixin,
    _Base,
):
    """Data-parallel training as `DDPStrategy`, with a hybrid all-reduce and half precision on fp32 masters.

    `precision="16-true"` and `"bf16-true"` are carried out by `MasterWeightPrecision`. No hyper-parameter is changed
    behind the user: the learning rate is not multiplied by anything.

    Args:
        algorithm: `"flat"` (one all-reduce over all ranks), `"parallel_flat"` (several at once), `"hierarchical"`
            (reduce in the node, ring of node leaders, broadcast), `"two_level"` (scatter-reduce in the node, all-reduce
            across nodes, gather), or `"auto"`: per bucket the one that fits its bytes and the topology.
        ranks_per_node: consecutive ranks that share a node; None finds out which ranks share a host.
        bucket_bytes: size at which gradients are fused into one buffer; bytes.
        plan: how buckets are made and carried, instead of `algorithm` and `bucket_bytes`: a `CommPlan`, the path of its
            JSON, or a `Planner` that chooses one when training starts, such as a `planning.cluster.Cluster`.
        comm_dtype: dtype on the wire (`"float16"`, `torch.bfloat16`, ...); None: the gradients' own.
        comm_dtype_across_nodes: as `comm_dtype`, but between nodes only: sums inside a node keep more digits. Also
            `"int8"` or `"int4"`: rounded to 8 or 4 bits without bias, see comm/README.md.
        error_feedback: with these, whether sums are rounded to the nearest, and errors added to the next step's.
        tune: whether the first steps try other algorithms, chunks and groups, for one that takes less time beyond
            noise. `"auto"`: on several nodes, without `algorithm` and `plan`, in 1,000 steps or more; `"on"`; `"off"`.
        tune_cache_dir: has no effect: plans are no longer kept from run to run. It goes with the next release.
        trace_dir: directory of a timeline of every bucket and stage, `rank<r>.json`, for Perfetto; None: none.
        link_bytes_per_s: rate of a node's link to the others, in each direction; only for metrics and report.
        reduction: of the gradients of several nodes: `"mean"`, or `"adasum"`: for each parameter the Adasum of the
            nodes' means, which is their mean where they agree and their sum where they are orthogonal.
        loss_scale: for `"16-true"`: `"dynamic"` (default), a power of two, or a `LossScale`.
        shard_update: `"node"`: each rank of a node has a part of masters and optimizer state, and updates it; `"off"`.
        sync_across_nodes_every, sync_across_nodes_from_step, outer_step: steps from one average of nodes' weights to
            the next, the step from which, `lr` and `momentum` of a step between averages; see README.md.
        timeout: seconds or a `timedelta`, for every collective and for ranks to meet; a peer that died or never came is
            an error after this.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend,
            start_method: as in `DDPStrategy`.
        **ddp_kwargs: for `DistributedDataParallel`, such as `find_unused_parameters` or `static_graph`.
            `gradient_as_bucket_view` is on unless set.

    Raises:
        ValueError: an option does not exist or a value cannot work; before any process group exists.

    Source: Jia et al. 2018 (arXiv:1807.11205).
    """

    _extensions: Extensions | None = None  # of this fit, or of the last one, which may yet be saved
    _engine_options: Mapping[str, Any] = {}  # theirs

    def __init__(
        self,
        algorithm: Literal["auto", "flat", "parallel_flat", "hierarchical", "two_level"] = "auto",
        ranks_per_node: int | None = None,
        bucket_bytes: int | None = None,
        plan: CommPlan | Planner | str | None = None,
        comm_dtype: str | torch.dtype | None = None,
        comm_dtype_across_nodes: str | torch.dtype | None = None,
        error_feedback: bool = False,
        tune: Literal["auto", "on", "off"] | bool = "auto",
        tune_cache_dir: str | None = None,
        trace_dir: str | None = None,
        link_bytes_per_s: float | None = None,
        reduction: Literal["mean", "adasum"] = "mean",
        loss_scale: str | float | LossScale | None = None,
        shard_update: Literal["off", "node"] | bool = "off",
        sync_across_nodes_every: int = 1,
        sync_across_nodes_from_step: int = 0,
        outer_step: Mapping[str, float] | None = None,
        extensions: Sequence[Callable[[FitContext], FitExtension]] = (),
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any | None = None,
        checkpoint_io: Any | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **ddp_kwargs: Any,
    ) -> None:
        # Under another name: a command line that reads signatures (LightningCLI) would else pass DDP's own defaults.
        for_ddp = self._take_options(
            ddp_kwargs,
            own=inspect.signature(HybridAllReduceMixin).parameters,
            algorithm=algorithm,
            ranks_per_node=ranks_per_node,
            bucket_bytes=bucket_bytes,
            plan=plan,
            comm_dtype=comm_dtype,
            comm_dtype_across_nodes=comm_dtype_across_nodes,
            error_feedback=error_feedback,
            reduction=reduction,
            loss_scale=loss_scale,
            tune=tune,
            shard_update=shard_update,
            local_steps=(sync_across_nodes_every, sync_across_nodes_from_step, outer_step),
        )
        self._factories = factories_from(extensions)
        self.link_bytes_per_s, self._trace_dir = rate_from(link_bytes_per_s), folder_from("trace_dir", trace_dir)
        self._shard_update = shard_update_from(shard_update)
        sums_all_ranks = reduction == "mean" and self._local_steps is None  # in each step, by one of several ways
        is_own_choice = (plan is None or self._planner is not None) and algorithm == "auto" and sums_all_ranks
        self._tune = tune_from(tune, is_own_choice=is_own_choice, cache_dir=tune_cache_dir)
        self._tuning: FitTuning | None = None
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            **for_ddp,
        )

    @property
    def run_status(self) -> RunStatus:
        """What callbacks may know of the run."""
        return RunStatus(
            optimizer_steps=() if self._half is None else self._half.optimizer_steps,
            masters=self._masters,
            has_grad_scaler=has_grad_scaler(self.precision_plugin),
            comm_trace=self.comm_trace,
            communication_plan=self.communication_plan,
            link_bytes_per_s=self.link_bytes_per_s,
            is_ending=self._ending_error is not None,
            **({} if self._extensions is None else self._extensions.status()),
            **({} if self._shared is None else self._shared.placement),
            **dict[str, Any]({} if self._slices is None else {"own_state": self._slices.own_state}),
        )

    @property
    def comm_trace(self) -> CommTrace | None:
        """Counters of the communication, while a fit runs."""
        return None if self._engine is None else self._engine.trace

    def set_world_ranks(self) -> None:
        """Set ranks and world size, and refuse `ranks_per_node` that does not fit: here both are known first."""
        super().set_world_ranks()
        self._check_ranks_per_node()

    def connect(self, model: pl.LightningModule) -> None:
        """Connect as DDP, and give the precision what only a strategy knows: which backward ends a step."""
        if self._half is not None:
            refuse_two_precisions(model.trainer, self._half)
            # DDP's own flag: False between the batches of one step, whose gradients it does not average.
            self._half.connect_strategy(
                is_last_backward_of_step=lambda: getattr(self.model, "require_backward_grad_sync", True)
            )
        super().connect(model)

    # ---- setup -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up as DDP, after checking that there is something to train."""
        if trainer.state.fn == "fit":
            assert self.lightning_module is not None
            refuse_nothing_to_train(self.lightning_module)
            refuse_slices(self.lightning_module)
            self._topology = self._discover_topology()
            self._extensions = made_for(self, self._fit_context())
        super().setup(trainer)
        if self._engine is not None:
            if self._extensions is not None:
                self._extensions.begin(
                    plan=self._plan, engine=self._engine, hook_state=self._hook_state, wrapped=self.model
                )
            self._share_work(self.optimizers)
            self._connect_slices()
            if self._shares_update:
                self._begin_sharing(self._masters)
            self._warn_of_reduction(self.optimizers)
            self._end_setup_watchdog()  # the engine's watchdog names missing ranks from here on

    def _fit_context(self) -> FitContext:
        assert self.lightning_module is not None
        assert self._timeout is not None
        return FitContext(
            module=self.lightning_module,
            precision=self.precision_plugin,
            topology=self._topology,
            device=self.root_device,
            timeout=self._timeout,
            ddp_options=self._ddp_kwargs,
            failures=_Failures(self),
        )

    def model_to_device(self) -> None:
        """Move the module; in a fit, convert it after its optimizers were made and before DDP wraps it."""
        self._move_module()
        if self._extensions is not None:
            self._extensions.before_optimizers()
        if self._half is not None:
            assert self.lightning_module is not None
            # Now, on the fp32 parameters: what constructors make of them is then fp32. Lightning finds them made later.
            if self.lightning_module.trainer.state.fn == "fit":
                self.setup_optimizers(self.lightning_module.trainer)
                self._has_optimizers = True
            self._half.follow_device(self.root_device)

    def _move_module(self) -> None:
        super().model_to_device()

    def configure_ddp(self) -> None:
        """Wrap in DDP and remember which parameters it averages: those trainable now, and only those."""
        assert isinstance(self.model, nn.Module)
        self._averaged_parameters, ignored = trained_parameters(self.model)
        self._find_plan(self.model)
        if self._extensions is not None:
            self._engine_options = self._extensions.engine_options(self._plan)
            self._plan = self._engine_options["plan"]
        self._shares_update = self._check_sharing()
        super().configure_ddp()
        # DDP has just broadcast the half tensors; their masters would keep other lower digits on each rank.
        if self._masters is not None and self.world_size > 1 and self._ddp_kwargs.get("init_sync", True):
            assert self.lightning_module is not None
            self._masters.broadcast_(self.lightning_module, ignored)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        # On the current stream, where Lightning makes one of its own for this: gradients would cross streams.
        caps = bucket_caps_for_ddp(model, self._plan, self._ddp_kwargs, num_nodes=self._topology.num_nodes)
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **(self._ddp_kwargs | caps))

    def _register_ddp_hooks(self) -> None:
        # Lightning registers hooks on CUDA only; this one is for every device type.
        assert isinstance(self.model, DistributedDataParallel)
        self._engine = self._new_engine(keep_events=self._trace_dir is not None)
        parameters, dtype = self.model.parameters(), self._comm_dtype
        self._hook_state = HookState(engine=self._engine, comm_dtype=dtype, parameters=parameters)
        self.model.register_comm_hook(self._hook_state, self._bucket_hook)
        if self._tune != "off":
            from lightning_hybrid.strategy.plan_tuning import FitTuning  # here: only a fit that tunes needs it

            self._tuning = FitTuning(self._engine, self._tune, on_plan=self._note_plan)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Make the optimizers, and refuse parameters that the module does not have: DDP would not average them."""
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

    def process_dataloader(self, dataloader: object) -> object:
        """Put a prefetcher around the loader, unless the user moves batches by hooks of their own."""
        from lightning_hybrid.data.prefetch import prefetch  # here: its package brings loaders of our own

        dataloader = super().process_dataloader(dataloader)
        if hasattr(dataloader, "bind_trainer"):  # a loader of `data`, which resumes where the trainer's counters are
            dataloader.bind_trainer(self.lightning_module.trainer)
        if user_moves_batches(self.lightning_module):
            return dataloader
        # Lightning looks for a DataLoader, which the prefetcher hides.
        lightning_function("fabric.utilities.data._auto_add_worker_init_fn")(dataloader, self.global_rank)
        compute_dtype = None if self._masters is None else self._masters.dtype
        return prefetch(dataloader, self.root_device, compute_dtype)  # type: ignore[arg-type]

    # ---- step ------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Obey a SIGTERM to this rank; between two steps the plan of communication may change."""
        super().on_train_batch_start(batch, batch_idx)
        if self._extensions is not None:
            self._extensions.before_batch(batch_idx)
        self._obey_sigterm()
        if self._engine is not None and self._engine.coder is not None:
            assert self.lightning_module is not None
            self._engine.coder.begin_step(self.lightning_module.trainer.global_step)
        if self._tuning is not None:
            self._tuning.before_batch(self.lightning_module)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step as DDP, after checking that every trained parameter is averaged."""
        if self.world_size > 1 and self._averaged_parameters is not None:
            assert self.lightning_module is not None
            refuse_what_is_not_averaged(optimizer, self._averaged_parameters, self.lightning_module)
        run = partial(super().optimizer_step, optimizer, closure, model, **kwargs)
        if self._extensions is not None:
            run = partial(self._extensions.step, optimizer, closure, run, **kwargs)
        outputs = run()
        if self._tuning is not None:
            self._tuning.after_optimizer_step()
        return outputs

    def on_validation_end(self) -> None:
        """End validation as DDP; after hooks of callbacks and module extensions go back to training."""
        if self._extensions is not None:
            self._extensions.after_validation()
        super().on_validation_end()

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state. Collective where an extension's context is."""
        with nullcontext() if self._extensions is None else self._extensions.reading_module():
            return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state as DDP, whole. Collective where extensions make it so."""
        state = super().optimizer_state(optimizer)
        return state if self._extensions is None else self._extensions.optimizer_state(optimizer, state)

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save as DDP, with what extensions add. Raise after a failure on CUDA, where sums may be no averages."""
        if self._engine is not None and self._engine.device.type == "cuda":
            self._engine.raise_if_failed()
        if self._extensions is not None:
            self._extensions.save(checkpoint)
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load while the masters stand in `param_groups`: `load_state_dict` casts state to the parameters' dtype."""
        if self._extensions is not None:
            self._extensions.load(checkpoint)
        masters, checkpoint = self._masters, self._with_own_slices(checkpoint)
        if masters is None or self._shared is not None:
            return super().load_optimizer_state_dict(checkpoint)
        to_device = lightning_function("fabric.utilities.optimizer._optimizer_to_device")
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            with masters.swapped_in(optimizer):
                optimizer.load_state_dict(state)
                to_device(optimizer, self.root_device)
        return None

    # ---- end -------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Let extensions know, then report as DDP."""
        if self._extensions is not None:
            self._extensions.failed(exception)
        super().on_exception(exception)

    def teardown(self) -> None:
        """End the extensions, close the engine, give the module its fp32 weights back."""
        try:
            if self._extensions is not None:
                self._extensions.end(self._ended_by)
        finally:
            self._tear_down_engine()

    def _tear_down_engine(self) -> None:
        engine, self._engine, self._tuning = self._engine, None, None
        self.__dict__.pop("_hook_state", None)  # a codec's buckets are as large as all gradients
        try:
            self._end_sharing(self._ended_by)
            if engine is not None:
                engine.close()
                if self._trace_dir is not None:
                    engine.trace.write_if_possible(self._trace_dir, rank=self.global_rank)
        finally:
            self._end_shared_work(self.optimizers, has_failed=engine is not None and bool(engine.failure))
            self._averaged_parameters = None
            if self._masters is not None:
                self._masters.restore()  # before Lightning moves the module away from its masters
            try:
                if self._extensions is not None:
                    self._extensions.put_back(self._ended_by)
            finally:
                self._end_failure_reports()
                super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register `hybrid_allreduce` and the variants that `ddp` has."""
        register_names(strategy_registry, cls)


class _Failures:
    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.refuse_to_save_alone = strategy._refuse_to_save_alone

    @property
    def ending_error(self) -> BaseException | None:
        return self._strategy._ending_error
