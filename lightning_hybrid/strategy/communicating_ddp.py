"""Base class of the strategies. It handles rendezvous, gradient averaging and failure reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hybrid.comm import CommTrace
from lightning_hybrid.comm.stats.phases import Phase
from lightning_hybrid.lightning_names import lightning_function
from lightning_hybrid.precision.plugin import MasterWeightMixin
from lightning_hybrid.run_status import RunStatus
from lightning_hybrid.strategy.comm_setup import CommSetup
from lightning_hybrid.strategy.failures.failure_reports import FailureReports, use_own_names
from lightning_hybrid.strategy.failures.setup_watchdog import SetupWatchdog
from lightning_hybrid.strategy.loss_checks import (
    refuse_loss_without_gradient,
    refuse_loss_without_parameters,
)
from lightning_hybrid.strategy.registration import STRATEGY_NAME, register_names
from lightning_hybrid.strategy.rendezvous import (
    connect_ranks,
    refuse_launch,
    start_method_from,
    timeout_from,
)
from lightning_hybrid.strategy.strategy_options import StrategyOptions
from lightning_hybrid.strategy.user_code_checks import refuse_other_accumulation

if TYPE_CHECKING:
    from datetime import timedelta

    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    # The class that users see is in `flavours/` and derives from the DDPStrategy of one Lightning package.
    _Base = object


class CommunicatingDDP(_Base):
    """DDP strategy with its own rendezvous, gradient-averaging engine and failure reports.

    Args:
        options: The validated options of the strategy.
        timeout: Maximum time that ranks wait for one another, in seconds or as a `timedelta`.
        start_method: The way in which Lightning starts the ranks of a node.
        **lightning_arguments: Further arguments of Lightning's `DDPStrategy`, without the arguments of torch's DDP.

    Raises:
        ValueError: `timeout` or `start_method` has an invalid value.
    """

    registered_name = STRATEGY_NAME
    _watchdog_type: type[SetupWatchdog] = SetupWatchdog

    def __init__(
        self,
        options: StrategyOptions,
        *,
        timeout: timedelta | float,
        start_method: Literal["popen", "spawn", "fork", "forkserver"],
        **lightning_arguments: Any,
    ) -> None:
        self._options = options
        self._comm = CommSetup(options)
        self._failures = FailureReports()
        super().__init__(
            timeout=timeout_from(timeout),
            start_method=start_method_from(start_method),
            **lightning_arguments,
            **options.ddp_options,
        )

    @property
    def comm_trace(self) -> CommTrace | None:
        """Communication counters and timings of the current run, or None if no engine exists."""
        return self._comm.trace

    @property
    def communication_plan(self) -> str | None:
        """One-line description of ranks, nodes, buckets and algorithms, or None before setup."""
        return self._comm.communication_plan

    @property
    def run_status(self) -> RunStatus:
        """Status of the run for callbacks, such as loss scales and the communication trace."""
        return RunStatus(**self._run_status_fields())

    def _run_status_fields(self) -> dict[str, Any]:
        return {
            "comm_trace": self.comm_trace,
            "communication_plan": self.communication_plan,
            "link_bytes_per_s": self._options.report.link_bytes_per_s,
        }

    @property
    def _module(self) -> Any:
        return self.lightning_module  # set by `connect`

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy's name and its variants, such as `_spawn`, in a Lightning registry."""
        register_names(strategy_registry, cls, cls.registered_name)

    def connect(self, model: pl.LightningModule) -> None:
        """Connect the strategy to the module like DDP, and check the trainer's gradient accumulation."""
        if model.trainer.state.fn == "fit":
            refuse_other_accumulation(model.trainer.accumulate_grad_batches)
        self._failures.module = model
        super().connect(model)

    # ---- launch ------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        refuse_launch(self.registered_name, self._start_method, self.parallel_devices)
        super()._configure_launcher()

    def setup_environment(self) -> None:
        """Set up processes like DDP, and start a watchdog so that error messages name missing or failed ranks."""
        has_several = self._comm.has_several_communicators(self._module)
        self._failures.begin(self.parallel_devices or (), has_several_communicators=has_several)
        super().setup_environment()
        self._failures.watch_setup(self._watchdog_type, self.root_device, self._timeout)

    def set_world_ranks(self) -> None:
        """Set rank and world size like DDP, and raise if `ranks_per_node` does not divide the world size."""
        super().set_world_ranks()
        if self.cluster_environment is not None:
            self._comm.check_ranks(rank=self.global_rank, world_size=self.world_size)

    def setup_distributed(self) -> None:
        """Create the process group like DDP, after a rendezvous that names missing ranks.

        Collective: every rank must call it.
        """
        lightning_function("fabric.utilities.seed.reset_seed")()
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        connect_ranks(
            self.cluster_environment, self._process_group_backend, self.root_device, self._timeout
        )

    # ---- communication of a run --------------------------------------------------------------

    def _begin_communication(self) -> None:
        """Reset the communication setup for a training run, and determine the topology.

        Collective, unless the user set `ranks_per_node`: every rank must call it.
        """
        topology = self._comm.topology_of(self.global_rank, self.world_size)
        self._comm.begin(topology, self.root_device, self._timeout)

    def _share_of_data(self) -> dict[str, Any]:
        """Return the sampler arguments `num_replicas` and `rank` that select this rank's data."""
        share: dict[str, Any] = self.distributed_sampler_kwargs
        return share

    @property
    def _sums_over_ranks(self) -> bool:
        """True if gradients are all-reduced over more than one rank."""
        return bool(self.world_size > 1)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        # DDP is created on the current stream. Lightning would use a new one, and gradients would cross streams.
        return self._comm.wrap(
            model,
            device_ids=self.determine_ddp_device_ids(),
            is_half=isinstance(self.precision_plugin, MasterWeightMixin),
            **self._ddp_kwargs,
        )

    def _register_ddp_hooks(self) -> None:
        # Lightning registers hooks on CUDA only. This hook is registered on every device type.
        assert isinstance(self.model, DistributedDataParallel)
        engine = self._comm.new_engine(self.precision_plugin)
        self._comm.engine = engine
        self._failures.engine = engine
        self._comm.hook_state = self._comm.average_by(engine, self.model, self.model.parameters())

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the backward pass, and raise an error if other ranks wait for gradients that it does not produce."""
        refuse_loss_without_gradient(
            closure_loss, rank=self.global_rank, world_size=self.world_size
        )
        self._comm.enter(Phase.BACKWARD)
        state = self._comm.hook_state
        num_buckets_before = 0
        if state is not None:
            num_buckets_before = state.num_buckets
        scaled_loss = super().backward(closure_loss, *args, **kwargs)
        if state is not None and state.num_buckets == num_buckets_before:
            self._refuse_backward_without_buckets(closure_loss)
        return scaled_loss

    def _refuse_backward_without_buckets(self, closure_loss: torch.Tensor) -> None:
        """Raise if a backward pass has filled no gradient bucket, because other ranks would wait for this rank."""
        is_averaged = (
            isinstance(self.model, DistributedDataParallel)
            and self.model.require_backward_grad_sync
        )
        if is_averaged and self.world_size > 1:
            refuse_loss_without_parameters(
                closure_loss, rank=self.global_rank, world_size=self.world_size
            )

    def _close_communication(self) -> None:
        """Close the communication engine at the end of a training run."""
        self._comm.close(self.optimizers)

    # ---- failures ----------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Run DDP's `on_train_start`, and install a SIGTERM handler that stops all ranks together."""
        super().on_train_start()
        self._failures.watch_sigterm(self._module.trainer)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks at a barrier, unless an error has ended the run on this rank.

        After such an error the method returns at once, because the other ranks would not reach the barrier.
        """
        if not self._failures.is_alone():
            with self._comm.waiting():
                super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Broadcast an object from rank `src`, or return it unchanged if an error has ended this rank's run."""
        if self._failures.is_alone():
            return obj
        with self._comm.waiting():
            return super().broadcast(obj, *args, **kwargs)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce a tensor over all ranks, and record the duration as waiting time."""
        with self._comm.waiting():
            return super().reduce(tensor, *args, **kwargs)

    def all_gather(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Gather a tensor from all ranks, and record the duration as waiting time."""
        with self._comm.waiting():
            gathered: torch.Tensor = super().all_gather(tensor, *args, **kwargs)
            return gathered

    def on_exception(self, exception: BaseException) -> None:
        """Report this rank's error to the other ranks, or name the rank at fault if another rank caused the error."""
        # This comes first, because DDP replaces torch's message by its advice, which the report then repeats.
        super().on_exception(exception)
        use_own_names(exception, strategy=type(self).__name__)
        first_rank = self.node_rank * self.num_processes
        self._failures.report(exception, rank=self.global_rank, first_rank=first_rank)
        if self.lightning_module is not None:
            self._failures.ended_by = exception
