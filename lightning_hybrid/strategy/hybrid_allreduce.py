"""The `hybrid_allreduce` strategy, which extends Lightning's DDP strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.checkpoint.io import durable_by_default
from lightning_hybrid.comm.stats.phases import Phase
from lightning_hybrid.precision.loss_scale import LossScale
from lightning_hybrid.strategy.comm_setup import trained_parameters
from lightning_hybrid.strategy.compatibility import warn_of_coupled_batches
from lightning_hybrid.strategy.evaluation import Evaluation
from lightning_hybrid.strategy.extension import FitContext, FitExtension
from lightning_hybrid.strategy.failures.failure_reports import refuse_after_failure
from lightning_hybrid.strategy.fit_extensions import FitExtensions, build_extensions
from lightning_hybrid.strategy.half_precision_ddp import HalfPrecisionDDP
from lightning_hybrid.strategy.loaders import TrainingLoaders
from lightning_hybrid.strategy.option_classes import BetweenNodes, Comm, Mean, Report
from lightning_hybrid.strategy.strategy_options import StrategyOptions, argument_names
from lightning_hybrid.strategy.user_code_checks import (
    refuse_foreign_parameters,
    refuse_nothing_to_train,
    refuse_what_is_not_averaged,
)

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision


class HybridAllReduce(HalfPrecisionDDP):
    """Data-parallel strategy with a topology-aware all-reduce, and half precision with fp32 master weights.

    A drop-in replacement for Lightning's `DDPStrategy`. `MasterWeightPrecision` implements
    `precision="16-true"` and `"bf16-true"`. The strategy never changes a hyper-parameter; in
    particular it does not scale the learning rate.

    Args:
        between_nodes: How nodes combine their gradients or weights: `Mean(...)`, `Adasum()` or
            `LocalSteps(every=8, ...)`.
        ranks_per_node: Number of consecutive ranks that form a node. None: the ranks of a host.
        shard_update: Ranks between which master weights and optimizer state are sharded, so that each
            rank updates its shard: `"off"` (none), `"node"` (the ranks of a node) or `"world"` (all
            ranks).
        comm: Algorithm, bucket size and wire dtype of the all-reduce: `Comm(...)`.
        loss_scale: Loss scaling for `"16-true"`: `"dynamic"` (default), a power of two, or a
            `LossScale`.
        report: Communication trace and link bandwidth for reports: `Report(...)`.
        extensions: Factories of `FitExtension`, such as their classes. Their extensions run after
            the built-in ones.
        uneven_batches: What happens if the training loader of a rank ends before the others:
            `"error"` raises an error that names the rank. With `"join"` the rank takes part in the
            remaining steps of the epoch with zero gradients, and gradients are averaged over the
            samples that were actually read.
        exact_resume: Whether a `DataLoader` resumes in the middle of an epoch with exactly the
            remaining samples. False: as in `ddp`.
        exact_evaluation: Whether every sample counts once in validation, test and prediction. False:
            as in `ddp`, whose samplers repeat samples until all ranks have equally many.
        timeout: Seconds or `timedelta` after which a rank that is dead or missing from a collective
            raises an error.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin,
            process_group_backend, start_method: As in `DDPStrategy`.
        **ddp_kwargs: Passed to `DistributedDataParallel`, such as `find_unused_parameters` or
            `static_graph`. `gradient_as_bucket_view` defaults to False, as in `ddp`. In half
            precision it defaults to True, because user code never sees the gradients in buckets.

    Raises:
        ValueError: An option is unknown or has an invalid value. Raised before any process group
            is created.

    Source: Jia et al. 2018 (arXiv:1807.11205).
    """

    _strategy_features: Mapping[str, str] = MappingProxyType({})
    """Features of the strategy itself, by the names of `compatibility.CURES`, with texts for errors."""
    saves_residuals = True
    """Whether checkpoints contain the residuals of error feedback."""

    _loaders_type: type[TrainingLoaders] = TrainingLoaders
    # The classes in `flavours/` set it to the class for their own Lightning package.
    _checkpoint_io_type: type
    checkpoint_io = durable_by_default

    def __init__(
        self,
        between_nodes: BetweenNodes = Mean(),  # noqa: B008  frozen
        ranks_per_node: int | None = None,
        shard_update: Literal["off", "node", "world"] | bool = "off",
        comm: Comm = Comm(),  # noqa: B008
        loss_scale: str | float | LossScale | None = None,
        report: Report = Report(),  # noqa: B008
        extensions: Sequence[Callable[[FitContext], FitExtension]] | None = None,
        uneven_batches: Literal["error", "join"] = "error",
        exact_resume: bool = True,
        exact_evaluation: bool = False,
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
        # DDP gets `ddp_options` and not `**ddp_kwargs`, because LightningCLI follows keyword arguments
        # into the base class and would pass all defaults of DDP.
        options = StrategyOptions.parse(
            ddp_kwargs,
            argument_names=argument_names(type(self), HybridAllReduce),
            strategy_name=self.registered_name,
            strategy_features=self._strategy_features,
            between_nodes=between_nodes,
            comm=comm,
            ranks_per_node=ranks_per_node,
            shard_update=shard_update,
            loss_scale=loss_scale,
            report=report,
            extensions=extensions,
            uneven_batches=uneven_batches,
            exact_evaluation=exact_evaluation,
        )
        self._evaluation = Evaluation(options.exact_evaluation)
        self._loaders: TrainingLoaders = self._loaders_type(exact_resume, self._evaluation)
        # The extensions of the last run are kept until the next one begins, because a checkpoint may still be saved.
        self._extensions = FitExtensions()
        self._averaged_parameters: set[int] | None = None  # by `id`
        super().__init__(
            options,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )

    def _run_status_fields(self) -> dict[str, Any]:
        fields = super()._run_status_fields() | self._extensions.status()
        fields["process_second_loader"] = self._process_second_loader
        fields["user_loader_of"] = self._loaders.user_loader_of
        return fields

    # ---- setup -------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up the module, extensions, optimizers and communication for a run."""
        if trainer.state.fn == "fit":
            refuse_nothing_to_train(self._module)
            warn_of_coupled_batches(self._module, trainer.accumulate_grad_batches)
            self._begin_communication()
            self._extensions = build_extensions(self)
            share = self._share_of_data()
            self._loaders.begin(trainer, share, self._extensions.training_loader)
        super().setup(trainer)
        if self._failures.engine is not None:
            self._extensions.begin(self._comm, self.model)
            self._comm.share_work(self.optimizers)
            self._comm.warn_of_reduction(self.optimizers)
            self._failures.end_setup()  # The engine's watchdog names missing ranks from here on.

    def _hidden(self) -> AbstractContextManager[None]:
        """Return a context in which moving the module to the device leaves out the layers of other ranks."""
        return nullcontext()

    def model_to_device(self) -> None:
        """Move the module to the device, let extensions modify it, and create half-precision copies."""
        with self._hidden():
            super().model_to_device()
        self._extensions.before_optimizers()
        self._masters.follow_device(self.root_device)

    def configure_ddp(self) -> None:
        """Wrap the module in DDP with the planned bucket sizes, and record the averaged parameters."""
        assert isinstance(self.model, nn.Module)
        self._averaged_parameters, ignored = trained_parameters(self.model)
        if self.world_size > 1 and self._ddp_kwargs.get("init_sync", True):
            self._masters.broadcast(self._module, ignored)
        # DDP and the plan of its buckets need the parameters that forward and backward use.
        with self._masters.opened():
            self._comm.find_plan(self.model)
            engine_options = self._extensions.engine_options(self._comm.plan)
            self._comm.take_engine_options(engine_options)
            super().configure_ddp()

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Create the optimizers, and raise an error if one of them has parameters outside the module."""
        super().setup_optimizers(trainer)
        self._loaders.after_optimizers(trainer)
        refuse_foreign_parameters(self.optimizers, self._module)

    def process_dataloader(self, dataloader: object) -> object:
        """Add prefetching to a loader, as well as exact resume or exact evaluation if enabled.

        Batches are not prefetched to the device if the user's own hooks move them.
        """
        loader = super().process_dataloader(dataloader)
        dtype = self._masters.dtype
        return self._loaders.process(loader, self._module, self.root_device, dtype)

    def _process_second_loader(self, loader: Any) -> Any:
        dtype = self._masters.dtype
        return self._loaders.process_second(loader, self._module, self.root_device, dtype)

    # ---- step --------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Run DDP's `on_train_start`, and correct the loaders' batch counters in a resumed run."""
        super().on_train_start()
        self._loaders.on_train_start()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Prepare extensions and communication for a batch, or raise if SIGTERM must stop this rank."""
        super().on_train_batch_start(batch, batch_idx)
        self._extensions.call("before_batch", batch_idx)
        self._failures.before_batch()
        self._comm.before_batch(self.lightning_module)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's `training_step` with half-precision parameters and the hooks of extensions.

        If the step returns no loss, the fp32 parameters are restored here, because no backward pass will do so.
        """
        # Extensions and DDP may wait for other ranks before the module's own forward.
        self._comm.enter(Phase.WAIT)
        self._extensions.call("before_training_step", args, kwargs)
        self._masters.rebuild_buckets(self.model)
        output = super().training_step(*args, **kwargs)
        self._extensions.call("after_training_step", output)
        if output is None:
            self._masters.close_window()
        return output

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the backward pass like DDP, inside the backward hooks of extensions."""

        def run(loss: torch.Tensor) -> torch.Tensor:
            return super(HybridAllReduce, self).backward(loss, *args, **kwargs)

        scaled_loss: torch.Tensor = self._extensions.backward(closure_loss, run)
        return scaled_loss

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Check that DDP averages all trained parameters, then run the step inside the hooks of extensions."""
        if self._sums_over_ranks and self._averaged_parameters is not None:
            refuse_what_is_not_averaged(optimizer, self._averaged_parameters, self.lightning_module)
        step = partial(super().optimizer_step, optimizer, closure, model, **kwargs)
        self._comm.enter(Phase.OPTIMIZER)
        result = self._extensions.step(optimizer, closure, step, **kwargs)
        self._comm.enter(self._phase_unless_manual(Phase.CALLBACKS))
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's `validation_step`, and count its collectives for exact evaluation."""
        with self._evaluation.step(self.model):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's `test_step`, and count its collectives for exact evaluation."""
        with self._evaluation.step(self.model):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's `predict_step`, and convert half-precision outputs to fp32."""
        with self._evaluation.step(self.model):
            output = super().predict_step(*args, **kwargs)
            return self._masters.to_fp32(output)

    def on_validation_end(self) -> None:
        """Call the `after_validation` hooks of extensions, then DDP's `on_validation_end`."""
        self._extensions.call("after_validation")
        super().on_validation_end()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks. In exact evaluation, integers are converted to floats for averaging."""
        tensor = self._evaluation.to_reduce(tensor, reduce_op)
        return super().reduce(tensor, group=group, reduce_op=reduce_op)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather a tensor from all ranks, after checks by the extensions and by exact evaluation."""
        self._extensions.call("before_all_gather")
        self._evaluation.refuse_unequal_shapes(tensor, group)
        return super().all_gather(tensor, group=group, sync_grads=sync_grads)

    # ---- checkpoints -------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict in fp32, even in the middle of a step.

        Collective if an extension gathers state from other ranks.
        """
        with self._extensions.reading_module():
            return super().lightning_module_state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint with the states of extensions and loaders, unless training has failed on CUDA."""
        refuse_after_failure(self._comm.engine)
        self._loaders.save(checkpoint, is_alone=self._failures.is_failing())
        self._extensions.save(checkpoint)
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint, and store its loader states for the resumed run."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        self._loaders.load(checkpoint)
        return checkpoint

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Run deferred learning-rate schedules, then return an optimizer's full state dict."""
        self._masters.run_deferred_schedules()
        return self._extensions.optimizer_state(optimizer, super().optimizer_state(optimizer))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers from a checkpoint, with this rank's shards if the update is sharded."""
        self._extensions.load_optimizers(self.optimizers, checkpoint, self.root_device)

    def on_exception(self, exception: BaseException) -> None:
        """Restore fp32 parameters, then report an error to the extensions and the other ranks."""
        self._masters.close_window()
        self._extensions.failed(exception)
        super().on_exception(exception)

    def teardown(self) -> None:
        """Tear down the extensions, the engine, the master weights and DDP, in this order."""
        try:
            self._extensions.end(self._failures.ended_by)
        finally:
            self._failures.engine = None
            try:
                self._close_communication()
            finally:
                self._masters.end_run()
                try:
                    self._put_back()
                finally:
                    self._tear_down_ddp()

    def _tear_down_ddp(self) -> None:
        """Tear down DDP, and then log where a failed run stopped.

        DDP's teardown waits until the checkpoints of a background thread are on disk, so that the newest one is named.
        """
        try:
            with self._hidden():
                super().teardown()
        finally:
            self._failures.end(self.lightning_module)

    def _put_back(self) -> None:
        """Let extensions restore the module to its state before the run."""
        self._averaged_parameters = None
        self._extensions.put_back(self._failures.ended_by)
