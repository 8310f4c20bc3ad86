"""The strategy `hybrid_allreduce`: wiring of precision, communication and input into Lightning's DDP."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
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
    bucket_caps_for_ddp,
    refuse_foreign_parameters,
    refuse_nothing_to_train,
    refuse_two_precisions,
    refuse_what_is_not_averaged,
    user_moves_batches,
)
from lightning_hybrid.strategy.comm_setup import CommSetupMixin, trained_parameters
from lightning_hybrid.strategy.failures import FailureReportMixin
from lightning_hybrid.strategy.feedback_state import FeedbackMixin
from lightning_hybrid.strategy.half_precision import HalfPrecisionMixin
from lightning_hybrid.strategy.local_steps.extension import LocalSGDMixin
from lightning_hybrid.strategy.node_slices.extension import SlicesMixin
from lightning_hybrid.strategy.old_keywords import with_old_keywords
from lightning_hybrid.strategy.options import BetweenNodes, Comm, Mean, Planner, Report
from lightning_hybrid.strategy.registration import register_names
from lightning_hybrid.strategy.rendezvous import RendezvousMixin
from lightning_hybrid.strategy.shard_update.extension import SharedUpdateMixin

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
    FeedbackMixin,
    LocalSGDMixin,
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
        between_nodes: what becomes of gradients, or weights, of several nodes: `Mean(...)`, `Adasum()` or
            `LocalSteps(every=8, ...)`.
        ranks_per_node: consecutive ranks that share a node; None finds out which ranks share a host.
        shard_update: `"node"`: each rank of a node has a part of masters and optimizer state, and updates it; `"off"`.
        comm: how sums are carried out: `Comm(...)`.
        loss_scale: for `"16-true"`: `"dynamic"` (default), a power of two, or a `LossScale`.
        report: what the run says of its communication: `Report(...)`.
        extensions: what makes the extensions of a fit, such as their classes; they come after those of options.
        timeout: seconds or a `timedelta`, for every collective and for ranks to meet; a peer that died or never came is
            an error after this.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend,
            start_method: as in `DDPStrategy`.
        algorithm, bucket_bytes, plan, comm_dtype, comm_dtype_across_nodes, error_feedback, reduction, tune,
            tune_cache_dir, trace_dir, link_bytes_per_s, sync_across_nodes_every, sync_across_nodes_from_step,
            outer_step: keywords of 0.2, which go with the next release; the warning has what to write.
        **ddp_kwargs: for `DistributedDataParallel`, such as `find_unused_parameters` or `static_graph`.
            `gradient_as_bucket_view` is on unless set.

    Raises:
        ValueError: an option does not exist or a value cannot work; before any process group exists.

    Source: Jia et al. 2018 (arXiv:1807.11205).
    """

    def __init__(
        self,
        between_nodes: BetweenNodes = Mean(),  # noqa: B008  frozen
        ranks_per_node: int | None = None,
        shard_update: Literal["off", "node"] | bool = "off",
        comm: Comm = Comm(),  # noqa: B008
        loss_scale: str | float | LossScale | None = None,
        report: Report = Report(),  # noqa: B008
        extensions: Sequence[Callable[..., Any]] | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any | None = None,
        checkpoint_io: Any | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        # Of 0.2: in the signature, as LightningCLI reads it.
        algorithm: str | None = None,
        bucket_bytes: int | None = None,
        plan: CommPlan | Planner | str | None = None,
        comm_dtype: str | torch.dtype | None = None,
        comm_dtype_across_nodes: str | torch.dtype | None = None,
        error_feedback: bool | None = None,
        reduction: str | None = None,
        tune: str | bool | None = None,
        tune_cache_dir: str | None = None,
        trace_dir: str | None = None,
        link_bytes_per_s: float | None = None,
        sync_across_nodes_every: int | None = None,
        sync_across_nodes_from_step: int | None = None,
        outer_step: Mapping[str, float] | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        between_nodes, comm, report = with_old_keywords(locals(), between_nodes=between_nodes, comm=comm, report=report)
        # Under another name: a command line that reads signatures (LightningCLI) would else pass DDP's own defaults.
        for_ddp = self._take_options(
            ddp_kwargs,
            own=inspect.signature(HybridAllReduceMixin).parameters,
            between_nodes=between_nodes,
            comm=comm,
            ranks_per_node=ranks_per_node,
            loss_scale=loss_scale,
            shard_update=shard_update,
            report=report,
            extensions=extensions,
        )
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
            node_group=self._equal_ranks,
            verdict_group=None if self._nodes is None else self._nodes.group,
            is_ending=self._ending_error is not None,
            **({} if self._shared is None else self._shared.placement),
            **({} if self._slices is None else {"own_state": self._slices.own_state}),
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
        super().setup(trainer)
        if self._engine is not None:
            self._share_work(self.optimizers)
            self._connect_slices()
            if self._shares_update:
                self._begin_sharing(self._masters)
            self._warn_of_reduction(self.optimizers)
            self._end_setup_watchdog()  # the engine's watchdog names missing ranks from here on

    def model_to_device(self) -> None:
        """Move the module; in a fit, convert it after its optimizers were made and before DDP wraps it."""
        self._move_module()
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
        outputs = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._tuning is not None:
            self._tuning.after_optimizer_step()
        return outputs

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load while the masters stand in `param_groups`: `load_state_dict` casts state to the parameters' dtype."""
        self._load_residuals(checkpoint)
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

    def teardown(self) -> None:
        """Join the engine's threads, destroy its groups, give the module its fp32 weights back."""
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
            self._end_failure_reports()
            super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register `hybrid_allreduce` and the variants that `ddp` has."""
        register_names(strategy_registry, cls)
