"""The strategy `hybrid_allreduce`: wiring of precision, communication and input into Lightning's DDP."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_hybrid.checkpoint.io import durable_by_default
from lightning_hybrid.comm import CommTrace
from lightning_hybrid.lightning_names import lightning_function
from lightning_hybrid.precision.loss_scale import LossScale
from lightning_hybrid.precision.plugin import MasterWeightMixin
from lightning_hybrid.precision.window import HalfPrecisionWindow
from lightning_hybrid.run_status import RunStatus, has_grad_scaler
from lightning_hybrid.strategy.arguments import (
    refuse_foreign_parameters,
    refuse_loss_without_gradient,
    refuse_loss_without_parameters,
    refuse_nothing_to_train,
    refuse_two_precisions,
    refuse_what_is_not_averaged,
    with_masters,
)
from lightning_hybrid.strategy.comm_setup import CommSetup, trained_parameters
from lightning_hybrid.strategy.compatibility import warn_of_coupled_batches
from lightning_hybrid.strategy.extension import Extensions, FitContext, FitExtension
from lightning_hybrid.strategy.factories import made_for
from lightning_hybrid.strategy.failures import (
    FailureReports,
    SigtermOnAnyRank,
    refuse_after_failure,
    use_own_names,
)
from lightning_hybrid.strategy.loaders import TrainingLoaders
from lightning_hybrid.strategy.options import BetweenNodes, Comm, Mean, Report
from lightning_hybrid.strategy.registration import STRATEGY_NAME, register_names
from lightning_hybrid.strategy.rendezvous import (
    connect_ranks,
    refuse_launch,
    start_method_from,
    timeout_from,
)
from lightning_hybrid.strategy.setup_watchdog import SetupWatchdog
from lightning_hybrid.strategy.strategy_options import StrategyOptions

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object  # of either Lightning: the class that users see stands in `flavours/`


class HybridAllReduce(_Base):
    """Data-parallel training as `DDPStrategy`, with a hybrid all-reduce and half precision on fp32 weights.

    `precision="16-true"` and `"bf16-true"` are carried out by `MasterWeightPrecision`. No hyper-parameter is changed
    behind the user: the learning rate is not multiplied by anything.

    Args:
        between_nodes: what becomes of gradients, or weights, of several nodes: `Mean(...)`, `Adasum()` or
            `LocalSteps(every=8, ...)`.
        ranks_per_node: consecutive ranks that share a node; None finds out which ranks share a host.
        shard_update: `"node"`, `"world"`: each rank of a node, or of all, has a part of masters and optimizer state,
            and updates it; `"off"`.
        comm: how sums are carried out: `Comm(...)`.
        loss_scale: for `"16-true"`: `"dynamic"` (default), a power of two, or a `LossScale`.
        report: what the run says of its communication: `Report(...)`.
        extensions: what makes the extensions of a fit, such as their classes; they come after those of options.
        exact_resume: whether a user's `DataLoader` resumes in mid-epoch with the images that were left, or as in `ddp`.
        timeout: seconds or a `timedelta`; a peer that died or never came to a collective is an error after this.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend,
            start_method: as in `DDPStrategy`.
        **ddp_kwargs: for `DistributedDataParallel`, such as `find_unused_parameters` or `static_graph`.
            `gradient_as_bucket_view` is off unless set, as in `ddp`;
            in half precision the gradients of buckets are never the user's, and it is on.

    Raises:
        ValueError: an option does not exist or a value cannot work; before any process group exists.

    Source: Jia et al. 2018 (arXiv:1807.11205).
    """

    registered_name = STRATEGY_NAME
    _strategy_features: Mapping[str, str] = MappingProxyType({})
    """Features of the strategy itself, by the names of `compatibility.CURES`, with texts for errors."""

    _watchdog_type: type[SetupWatchdog] = SetupWatchdog
    _loaders_type: type[TrainingLoaders] = TrainingLoaders
    saves_residuals = True
    """Whether checkpoints hold the residuals of error feedback."""

    _precision_type: type[MasterWeightMixin]  # of the same Lightning, as the next
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
        exact_resume: bool = True,
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
        # DDP gets `ddp_options` and not `**ddp_kwargs`: a command line that follows keyword arguments into the base
        # class (LightningCLI) would pass all defaults of DDP.
        self._options = StrategyOptions.parse(
            ddp_kwargs,
            argument_names=_argument_names(type(self)),
            strategy_name=self.registered_name,
            strategy_features=self._strategy_features,
            between_nodes=between_nodes,
            comm=comm,
            ranks_per_node=ranks_per_node,
            shard_update=shard_update,
            loss_scale=loss_scale,
            report=report,
            extensions=extensions,
        )
        self._comm = CommSetup(self._options)
        self._failures = FailureReports()
        self._loaders: TrainingLoaders = self._loaders_type(exact_resume)
        self._extensions: Extensions | None = (
            None  # of this fit, or of the last one, which may yet be saved
        )
        self._averaged_parameters: set[int] | None = None  # by `id`
        self._has_rebuilt_buckets = False
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout_from(timeout),
            start_method=start_method_from(start_method),
            **self._options.ddp_options,
        )

    @property
    def run_status(self) -> RunStatus:
        """The state of the run that callbacks may read."""
        return RunStatus(**self._run_status_fields())

    def _run_status_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "optimizer_steps": () if self._half is None else self._half.optimizer_steps,
            "window": self._window,
            "has_grad_scaler": has_grad_scaler(self.precision_plugin),
            "comm_trace": self.comm_trace,
            "communication_plan": self.communication_plan,
            "link_bytes_per_s": self._options.report.link_bytes_per_s,
        }
        if self._extensions is not None:
            fields |= self._extensions.status()
        return fields

    @property
    def comm_trace(self) -> CommTrace | None:
        """Counters of the communication, while a fit runs."""
        return None if self._comm.engine is None else self._comm.engine.trace

    @property
    def communication_plan(self) -> str | None:
        """Ranks, nodes, buckets and algorithms in one line, once known."""
        return self._comm.communication_plan

    @property
    def precision_plugin(self) -> Precision:
        """The precision in force, which Lightning's `trainer.precision` reads."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        """Replace Lightning's plain half precision by ours on fp32 weights, and leave everything else."""
        self._precision_plugin = with_masters(
            plugin, self._precision_type, self._options.loss_scale
        )

    @property
    def _module(self) -> Any:
        return self.lightning_module  # there from `connect` on

    @property
    def _half(self) -> MasterWeightMixin | None:
        return (
            self.precision_plugin if isinstance(self.precision_plugin, MasterWeightMixin) else None
        )

    @property
    def _window(self) -> HalfPrecisionWindow | None:
        return None if self._half is None else self._half.window

    def connect(self, model: pl.LightningModule) -> None:
        """Connect as DDP, and give the precision what only a strategy knows: which backward ends a step."""
        self._failures.module = model
        if self._half is not None:
            refuse_two_precisions(model.trainer, self._half)
            # DDP's own flag: False between the batches of one step, whose gradients it does not average.
            self._half.connect_strategy(
                is_last_backward_of_step=lambda: getattr(
                    self.model, "require_backward_grad_sync", True
                ),
                flush_backward=self._flush_backward,
            )
        super().connect(model)

    def _configure_launcher(self) -> None:
        refuse_launch(self.registered_name, self._start_method, self.parallel_devices)
        super()._configure_launcher()

    def setup_environment(self) -> None:
        """Set up as DDP. A rank that is missing from here on is named."""
        has_several = self._comm.has_several_communicators(self._module)
        self._failures.begin(self.parallel_devices or (), has_several_communicators=has_several)
        super().setup_environment()
        self._failures.watch_setup(self._watchdog_type, self.root_device, self._timeout)

    def set_world_ranks(self) -> None:
        """Set ranks and world size, and refuse `ranks_per_node` that does not fit: here both are known first."""
        super().set_world_ranks()
        if self.cluster_environment is not None:
            self._comm.check_ranks(rank=self.global_rank, world_size=self.world_size)

    def setup_distributed(self) -> None:
        """Set up as DDP, with the store of `rendezvous.meet`."""
        lightning_function("fabric.utilities.seed.reset_seed")()
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        connect_ranks(
            self.cluster_environment, self._process_group_backend, self.root_device, self._timeout
        )

    # ---- setup -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up as DDP, after checking that there is something to train."""
        if trainer.state.fn == "fit":
            refuse_nothing_to_train(self._module)
            warn_of_coupled_batches(self._module, trainer.accumulate_grad_batches)
            self._begin_communication()
            self._extensions = made_for(self)
            self._loaders.begin(trainer, self._share_of_data())
        super().setup(trainer)
        if self._failures.engine is not None:
            if self._extensions is not None:
                self._extensions.begin(self._comm, self.model)
            self._comm.share_work(self.optimizers)
            self._comm.warn_of_reduction(self.optimizers)
            self._failures.end_setup()  # the engine's watchdog names missing ranks from here on

    def _begin_communication(self) -> None:
        """Find the topology of a fit. Collective, unless the user said it by `ranks_per_node`."""
        self._comm.begin(
            self._comm.topology_of(self.global_rank, self.world_size),
            self.root_device,
            self._timeout,
        )

    def _share_of_data(self) -> dict[str, Any]:
        """Return how many ranks read different data, and the number of this one."""
        share: dict[str, Any] = self.distributed_sampler_kwargs
        return share

    @property
    def _sums_over_ranks(self) -> bool:
        """True if gradients are summed over several ranks."""
        return bool(self.world_size > 1)

    def _hidden(self) -> AbstractContextManager[None]:
        """Hide, while the module is moved, what is not on this rank."""
        return nullcontext()

    def model_to_device(self) -> None:
        """Move the module, and make its half-precision copies there, before DDP wraps it."""
        with self._hidden():
            super().model_to_device()
        if self._extensions is not None:
            self._extensions.before_optimizers()
        if self._half is not None:
            self._half.follow_device(self.root_device)

    def configure_ddp(self) -> None:
        """Wrap in DDP and remember which parameters it averages: those trainable now, and only those."""
        assert isinstance(self.model, nn.Module)
        self._has_rebuilt_buckets = False
        self._averaged_parameters, ignored = trained_parameters(self.model)
        if (
            self._window is not None
            and self.world_size > 1
            and self._ddp_kwargs.get("init_sync", True)
        ):
            self._window.broadcast_(self._module, ignored)
        # DDP and the plan of its buckets are for the parameters of forward and backward.
        with nullcontext() if self._window is None else self._window.opened():
            self._comm.find_plan(self.model)
            if self._extensions is not None:
                self._comm.take_engine_options(self._extensions.engine_options(self._comm.plan))
            super().configure_ddp()

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        # On the current stream, where Lightning makes one of its own for this: gradients would cross streams.
        is_half = self._half is not None
        return self._comm.wrap(
            model, device_ids=self.determine_ddp_device_ids(), is_half=is_half, **self._ddp_kwargs
        )

    def _register_ddp_hooks(self) -> None:
        # Lightning registers hooks on CUDA only; this one is for every device type.
        assert isinstance(self.model, DistributedDataParallel)
        self._comm.engine = self._failures.engine = engine = self._comm.new_engine(
            self.precision_plugin
        )
        self._comm.hook_state = self._comm.average_by(engine, self.model, self.model.parameters())

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Make the optimizers, and refuse parameters that the module does not have: DDP would not average them."""
        super().setup_optimizers(trainer)
        self._loaders.after_optimizers(trainer)
        refuse_foreign_parameters(self.optimizers, self._module)

    def process_dataloader(self, dataloader: object) -> object:
        """Put a prefetcher around the loader, unless the user moves batches by hooks of their own."""
        dtype = None if self._window is None else self._window.dtype
        made = super().process_dataloader(dataloader)
        return self._loaders.process(made, self._module, self.root_device, dtype)

    # ---- step ------------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Start as DDP. A SIGTERM to any rank stops all ranks from here on."""
        super().on_train_start()
        self._failures.sigterm = SigtermOnAnyRank(self._module.trainer)
        self._loaders.on_train_start()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Obey a SIGTERM to this rank, and begin the step of extensions and communication."""
        super().on_train_batch_start(batch, batch_idx)
        if self._extensions is not None:
            self._extensions.call("before_batch", batch_idx)
        if self._failures.sigterm is not None:
            self._failures.sigterm.before_batch()
        self._comm.before_batch(self.lightning_module)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step. Without a loss there is no backward that would end its half precision."""
        if self._extensions is not None:
            self._extensions.call("before_training_step", args, kwargs)
        self._rebuild_buckets()
        output = super().training_step(*args, **kwargs)
        if output is None and self._half is not None:
            self._half.close_window()
        return output

    def _rebuild_buckets(self) -> None:
        """Let DDP make its buckets again, which it does once, while it finds no gradients that it would round."""
        is_due = (
            self._window is not None and not self._has_rebuilt_buckets and torch.is_grad_enabled()
        )
        if is_due and isinstance(self.model, DistributedDataParallel):
            assert self._half is not None
            assert self._half.gradients is not None
            with self._half.gradients.hidden(list(self.model.parameters())):
                self._has_rebuilt_buckets = self.model.reducer._rebuild_buckets()

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run backward as DDP, and check that the loss has gradients: other ranks wait for them."""
        refuse_loss_without_gradient(
            closure_loss, rank=self.global_rank, world_size=self.world_size
        )
        state = self._comm.hook_state
        num_buckets_before = 0
        if state is not None:
            num_buckets_before = state.num_buckets
        scaled_loss = super().backward(closure_loss, *args, **kwargs)
        if state is not None and state.num_buckets == num_buckets_before:
            self._refuse_backward_without_buckets(closure_loss)
        return scaled_loss

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """End a backward, unless the precision plugin has done so before it unscaled the gradients."""
        if self._half is None:
            self._flush_backward(closure_loss)

    def _flush_backward(self, closure_loss: torch.Tensor) -> None:
        """End DDP's own work for a backward, after which gradients are averages."""
        super().post_backward(closure_loss)

    def _refuse_backward_without_buckets(self, closure_loss: torch.Tensor) -> None:
        """Check that no other rank waits for the gradients of a backward that has handed over no bucket."""
        is_averaged = (
            isinstance(self.model, DistributedDataParallel)
            and self.model.require_backward_grad_sync
        )
        if is_averaged and self.world_size > 1:
            refuse_loss_without_parameters(
                closure_loss, rank=self.global_rank, world_size=self.world_size
            )

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Step as DDP, after checking that every trained parameter is averaged."""
        if self._sums_over_ranks and self._averaged_parameters is not None:
            refuse_what_is_not_averaged(optimizer, self._averaged_parameters, self.lightning_module)
        run = partial(super().optimizer_step, optimizer, closure, model, **kwargs)
        if self._extensions is not None:
            run = partial(self._extensions.step, optimizer, closure, run, **kwargs)
        return run()

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict as DDP, and return fp32: what a model in fp32 returns."""
        outputs = super().predict_step(*args, **kwargs)
        return outputs if self._window is None else self._window.hooks.to_fp32(outputs)

    def on_validation_end(self) -> None:
        """End validation as DDP: this comes after hooks of callbacks and module."""
        if self._extensions is not None:
            self._extensions.call("after_validation")
        super().on_validation_end()

    def on_train_end(self) -> None:
        """Make the last schedules' steps, and raise for endless overflow that no logged step has seen."""
        super().on_train_end()
        if self._half is not None:
            self._half.on_train_end()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait as DDP, except on a rank that fails: the others do not reach this barrier."""
        if not self._failures.is_alone():
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Broadcast as DDP, except on a rank that fails, which gets its own object back."""
        return obj if self._failures.is_alone() else super().broadcast(obj, *args, **kwargs)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state. Collective where an extension makes it so."""
        # Inside of a step, where user code may save as well, state dicts hold fp32 values.
        with nullcontext() if self._extensions is None else self._extensions.reading_module():
            return super().lightning_module_state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save as DDP, with the state of extensions, unless a failure has left invalid weights."""
        refuse_after_failure(self._comm.engine)
        self._loaders.save(checkpoint, is_alone=self._failures.is_failing())
        if self._extensions is not None:
            self._extensions.save(checkpoint)
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load as DDP, and the places of loaders."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        self._loaders.load(checkpoint)
        return checkpoint

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state, once schedules that wait for a step's outcome have set the learning rate."""
        if self._half is not None:
            self._half.run_deferred_schedules()
        state = super().optimizer_state(optimizer)
        return (
            state
            if self._extensions is None
            else self._extensions.optimizer_state(optimizer, state)
        )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load as DDP, or this rank's part of the state if extensions share it."""
        if self._extensions is not None:
            self._extensions.call("load", checkpoint)
        to_device = lightning_function("fabric.utilities.optimizer._optimizer_to_device")
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            loading = (
                nullcontext(state)
                if self._extensions is None
                else self._extensions.loading(optimizer, state)
            )
            with loading as own_state:
                optimizer.load_state_dict(dict(own_state))
                to_device(optimizer, self.root_device)

    # ---- end -------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Report the error to the ranks that wait for this one, and name the rank that is the cause."""
        if self._half is not None:
            self._half.close_window()
        if self._extensions is not None:
            self._extensions.failed(exception)
        # First of all DDP's advice takes the place of torch's message: the report below the traceback repeats it.
        super().on_exception(exception)
        use_own_names(exception, strategy=type(self).__name__)
        self._failures.report(
            exception, rank=self.global_rank, first_rank=self.node_rank * self.num_processes
        )
        if self.lightning_module is not None:
            self._failures.ended_by = exception

    def teardown(self) -> None:
        """End what a fit has begun: extensions, engine, masters, what the module lacks, then DDP's own."""
        try:
            if self._extensions is not None:
                self._extensions.end(self._failures.ended_by)
        finally:
            self._failures.engine = None
            try:
                self._close_communication()
            finally:
                if self._half is not None:
                    self._half.end_run()
                try:
                    self._put_back()
                finally:
                    self._failures.end(self.lightning_module)
                    with self._hidden():
                        super().teardown()

    def _close_communication(self) -> None:
        """End the communication of a fit."""
        self._comm.close(self.optimizers)

    def _put_back(self) -> None:
        """Give the module back what a fit has taken from it."""
        self._averaged_parameters = None
        if self._extensions is not None:
            self._extensions.put_back(self._failures.ended_by)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy's name and the variants that `ddp` has."""
        register_names(strategy_registry, cls, cls.registered_name)


def _argument_names(strategy_type: type[HybridAllReduce]) -> list[str]:
    """Return the arguments of a strategy: its own, and those of the classes from which it derives, up to this one."""
    names: list[str] = []
    for base in strategy_type.__mro__:
        if not issubclass(base, HybridAllReduce) or "__init__" not in vars(base):
            continue
        for parameter in inspect.signature(vars(base)["__init__"]).parameters.values():
            is_named = (
                parameter.kind is not inspect.Parameter.VAR_KEYWORD and parameter.name != "self"
            )
            if is_named and parameter.name not in names:
                names.append(parameter.name)
    return names
