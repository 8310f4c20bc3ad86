"""The strategy `hybrid_allreduce` for Fabric: the same communication, precision and checkpoints in a user's own loop.

Of the Trainer's strategy it leaves out what needs a trainer: the timeline, prefetching, schedules that wait after a
skipped step.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_hybrid.checkpoint.io import durable_by_default
from lightning_hybrid.comm import CommEngine
from lightning_hybrid.comm.health.watchdog import is_of_a_collective
from lightning_hybrid.fabric.precision import FabricMasterWeightMixin
from lightning_hybrid.precision.loss_scale import LossScale
from lightning_hybrid.strategy.arguments import refuse_what_is_not_averaged, with_masters
from lightning_hybrid.strategy.comm_setup import CommSetup, trained_parameters
from lightning_hybrid.strategy.exact_resume.loop_loaders import LoopLoaders
from lightning_hybrid.strategy.failures import FailureReports, reason_of
from lightning_hybrid.strategy.options import BetweenNodes, Comm, Mean
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
    from lightning.fabric.accelerators import Accelerator
    from lightning.fabric.plugins.precision import Precision
    from lightning.fabric.strategies import DDPStrategy as _Base
else:
    _Base = object


def _explaining(name: str) -> Any:
    def call(self: FabricHybridAllReduce, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(super(FabricHybridAllReduce, self), name)(*args, **kwargs)
        except RuntimeError as error:
            watchdog = self._failures.watchdog
            if watchdog is not None and is_of_a_collective(error):
                error.args = (watchdog.explain(error),)
            raise

    return call


class FabricHybridAllReduce(_Base):
    """Data-parallel training as Fabric's `DDPStrategy`, with a hybrid all-reduce and half precision on fp32 weights.

    `precision="16-true"` and `"bf16-true"` train fp32 weights. `fabric.setup` may be called for several
    modules: each has buckets and an engine of its own. `fabric.save` adds the loss scales to a state that holds an
    optimizer, and `fabric.load` takes them from it.

    Args:
        between_nodes: what becomes of gradients of several nodes: `Mean(...)` or `Adasum()`. The noise of `"int8"` and
            `"int4"` is that of the sums since the run began, as Fabric counts no steps.
        ranks_per_node: consecutive ranks that share a node; None finds out which ranks share a host.
        comm: how sums are carried out: `Comm(...)`; a planner chooses a plan for each module.
        loss_scale: for `"16-true"`: `"dynamic"` (default), a power of two, or a `LossScale`.
        exact_resume: whether loaders in a state resume in mid-epoch with the images that were left: see data/README.md.
        timeout: seconds or a `timedelta`, for every collective and for ranks to meet; a peer that died or never came is
            an error after this.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision, process_group_backend,
            start_method: as in Fabric's `DDPStrategy`.
        **ddp_kwargs: for `DistributedDataParallel`. `gradient_as_bucket_view` is off unless set.

    Raises:
        ValueError: an option does not exist or a value cannot work; before any process group exists.

    Source: Jia et al. 2018 (arXiv:1807.11205).
    """

    _precision_type: type[FabricMasterWeightMixin]  # of the same Fabric, as the next
    _checkpoint_io_type: type
    checkpoint_io = durable_by_default

    def __init__(
        self,
        between_nodes: BetweenNodes = Mean(),  # noqa: B008  frozen
        ranks_per_node: int | None = None,
        comm: Comm = Comm(),  # noqa: B008
        loss_scale: str | float | LossScale | None = None,
        exact_resume: bool = True,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any | None = None,
        checkpoint_io: Any | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **ddp_kwargs: Any,
    ) -> None:
        self._options = StrategyOptions.parse(
            ddp_kwargs,
            argument_names=inspect.signature(FabricHybridAllReduce).parameters,
            strategy_features={"Fabric": "Fabric's strategy"},
            between_nodes=between_nodes,
            comm=comm,
            ranks_per_node=ranks_per_node,
            loss_scale=loss_scale,
        )
        self._comm = CommSetup(self._options)
        self._failures = FailureReports()
        self._loaders = LoopLoaders(exact_resume)
        self._engines: list[CommEngine] = []
        self._modules = nn.ModuleList()  # those that were set up
        self._wrapper_of: dict[
            int, DistributedDataParallel
        ] = {}  # by `id` of a parameter that DDP averages
        self._error_before: BaseException | None = None
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout_from(timeout),
            start_method=start_method_from(start_method),
            **self._options.ddp_options,
        )

    @property
    def precision(self) -> Precision:
        """The precision in force."""
        return super().precision

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        """Replace Fabric's plain half precision by ours on fp32 weights, and leave everything else."""
        self._precision = with_masters(precision, self._precision_type, self._options.loss_scale)

    @property
    def communication_plan(self) -> str | None:
        """Ranks, nodes, buckets and algorithms in one line, once known."""
        return self._comm.communication_plan

    @property
    def _half(self) -> FabricMasterWeightMixin | None:
        return self.precision if isinstance(self.precision, FabricMasterWeightMixin) else None

    # ---- setup -----------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        refuse_launch(STRATEGY_NAME, self._start_method, self.parallel_devices)
        super()._configure_launcher()

    def setup_environment(self) -> None:
        """Set up as DDP; from here on a missing rank is named."""
        has_several = self._comm.has_several_communicators(None)
        self._failures.begin(self.parallel_devices or (), has_several_communicators=has_several)
        super().setup_environment()
        self._failures.watch_setup(SetupWatchdog, self.root_device, self._timeout)

    def _set_world_ranks(self) -> None:
        super()._set_world_ranks()
        if self.cluster_environment is not None:
            self._comm.check_ranks(rank=self.global_rank, world_size=self.world_size)

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        connect_ranks(
            self.cluster_environment, self._process_group_backend, self.root_device, self._timeout
        )

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap in DDP with an engine of its own, and give every rank rank zero's weights. Collective."""
        half = self._half
        averaged, ignored = trained_parameters(module)
        if half is not None:
            half.add_module(module, self.root_device)
            half.averages = partial(_is_averaged_now, self._wrapper_of)
            assert half.window is not None
            if self.world_size > 1 and self._ddp_kwargs.get("init_sync", True):
                half.window.broadcast_(module, ignored)
        topology = self._comm.topology_of(self.global_rank, self.world_size)
        self._comm.begin(topology, self.root_device, self._timeout)
        device_ids = self._determine_ddp_device_ids()
        # DDP and the plan of its buckets are for the parameters of forward and backward.
        with nullcontext() if half is None or half.window is None else half.window.opened():
            self._comm.find_plan(module)
            wrapped = self._comm.wrap(
                module, device_ids=device_ids, is_half=half is not None, **self._ddp_kwargs
            )
        engine = self._comm.new_engine(self.precision)
        self._comm.average_by(engine, wrapped, module.parameters())
        if not self._engines:
            self._failures.end_setup()  # the engine's watchdog names missing ranks from here on
            # A Fabric has no end but the process's, in a child of `launch(function)` as well.
            Finalize(None, self._close_engines, exitpriority=1)
            self._error_before = getattr(
                sys, "last_value", None
            )  # a fork of a notebook has the notebook's
        self._engines.append(engine)
        self._failures.engine = engine
        self._modules.append(module)
        self._wrapper_of |= dict.fromkeys(averaged, wrapped)
        return wrapped

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Give the optimizer a loss scale."""
        self._comm.warn_of_reduction([optimizer])
        if self._half is not None:
            self._half.connect_optimizer(optimizer)
        return optimizer

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the loader, as one that `save_checkpoint` and `load_checkpoint` take."""
        return self._loaders.process(
            super().process_dataloader(dataloader), self.global_rank, self.world_size
        )

    # ---- step ------------------------------------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step as DDP, after checking that every trained parameter is averaged."""
        if self.world_size > 1:
            refuse_what_is_not_averaged(optimizer, self._wrapper_of, self._modules)
        return super().optimizer_step(optimizer, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip as DDP; a norm of inf or nan is no error where a loss scale may be the cause: the step is skipped."""
        is_scaled = self._half is not None and self._half.loss_scale is not None
        strict = error_if_nonfinite and not is_scaled
        return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, strict)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save as DDP, with loss scales next to the state of an optimizer. Collective, where it has loaders."""
        half = self._half
        state = self._loaders.with_states(state, self.global_rank)
        if half is not None and _has_optimizer(state) and (own := half.state_dict()):
            state = {**state, _key(half): own}
        super().save_checkpoint(path, state, *args, **kwargs)

    def load_checkpoint(
        self, path: Any, state: Any = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Load as DDP, and the loss scales with the state of an optimizer."""
        remainder = super().load_checkpoint(path, state, *args, **kwargs)
        half = self._half
        if half is not None and isinstance(state, dict) and _has_optimizer(state):
            half.load_state_dict(remainder.pop(_key(half), {}))
        return remainder

    # ---- end -------------------------------------------------------------------------------------------------------

    # As DDP; a rank that does not come is named.
    backward, barrier, broadcast, all_reduce, all_gather = (
        _explaining(name)
        for name in ("backward", "barrier", "broadcast", "all_reduce", "all_gather")
    )

    def _close_engines(self) -> None:
        # What ended this process, if the interpreter has shown an error: the others get to know.
        error = getattr(sys, "last_value", None)
        self._failures.end_setup()
        engines = self._engines
        self._engines = []
        self._failures.engine = None
        for engine in engines:
            if error is not None and error is not self._error_before:
                engine.abort(reason_of(error))
            engine.close()

    def teardown(self) -> None:
        """End the engines, and give the modules their fp32 weights back."""
        self._close_engines()
        self._modules = nn.ModuleList()
        self._wrapper_of = {}
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register `hybrid_allreduce` and the variants that `ddp` has."""
        register_names(strategy_registry, cls)


def _key(plugin: FabricMasterWeightMixin) -> str:
    return type(plugin).__qualname__  # as the Trainer's checkpoints have it


def _is_averaged_now(wrapper_of: dict[int, DistributedDataParallel], parameter: Tensor) -> bool:
    # DDP's own flag: False under `no_backward_sync`.
    wrapper = wrapper_of.get(id(parameter))
    return wrapper is None or wrapper.require_backward_grad_sync


def _has_optimizer(state: dict[str, Any]) -> bool:
    return any(isinstance(value, Optimizer) for value in state.values())
