"""The `hybrid_allreduce` strategy for Fabric.

Communication, precision and checkpoints are the same as for the Trainer. Features of the Trainer's strategy that need a
trainer are not supported: the timeline, prefetching, and schedules that wait after a skipped step.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from lightning_hybrid.comm.health.backend_errors import is_of_a_collective
from lightning_hybrid.fabric.precision import FabricMasterWeightMixin
from lightning_hybrid.fabric.uneven_batches import (
    JoinedLoopLoader,
    JoinedSteps,
    ResumableJoinedLoader,
    device_of,
    refuse_gather_with_gradients,
    refuse_unsupported,
    samples_in,
)
from lightning_hybrid.precision.living_modules import LivingModules
from lightning_hybrid.precision.loss_scale import LossScale
from lightning_hybrid.strategy.comm_setup import CommSetup, trained_parameters
from lightning_hybrid.strategy.exact_resume.loop_loaders import LoopLoaders
from lightning_hybrid.strategy.failures.failure_reports import FailureReports, reason_of
from lightning_hybrid.strategy.failures.setup_watchdog import SetupWatchdog
from lightning_hybrid.strategy.master_weights import with_masters
from lightning_hybrid.strategy.option_classes import BetweenNodes, Comm, Mean
from lightning_hybrid.strategy.registration import STRATEGY_NAME, register_names
from lightning_hybrid.strategy.rendezvous import (
    connect_ranks,
    refuse_launch,
    start_method_from,
    timeout_from,
)
from lightning_hybrid.strategy.strategy_options import StrategyOptions
from lightning_hybrid.strategy.uneven_batches.agreement import BatchAgreement
from lightning_hybrid.strategy.uneven_batches.repeated_batch import gradient_leaves
from lightning_hybrid.strategy.user_code_checks import refuse_what_is_not_averaged

if TYPE_CHECKING:
    from lightning.fabric.accelerators import Accelerator
    from lightning.fabric.plugins.precision import Precision
    from lightning.fabric.strategies import DDPStrategy as _Base
else:
    _Base = object


def _explaining(name: str) -> Any:
    """Wrap a method of the base class so that its error messages name missing ranks."""

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
    """Data-parallel strategy for Fabric with a hybrid all-reduce and fp32 master weights.

    The strategy is a drop-in replacement for Fabric's `DDPStrategy`. `precision="16-true"` and `"bf16-true"` train fp32
    master weights. `fabric.setup` may be called for several modules, each of which has its own buckets and engine.
    `fabric.save` adds the loss scales to a state that contains an optimizer, and `fabric.load` restores them.

    Args:
        between_nodes: How nodes combine their gradients: `Mean(...)` or `Adasum()`. The rounding noise of `"int8"`
            and `"int4"` depends on the number of reductions since the run began, because Fabric does not count steps.
        ranks_per_node: Number of consecutive ranks that form a node. If None, ranks on the same host form a node.
        comm: Algorithm, bucket size and wire dtype of the all-reduce: `Comm(...)`. A planner chooses a plan for each
            module.
        loss_scale: Loss scaling for `"16-true"`: `"dynamic"` (default), a power of two, or a `LossScale`.
        uneven_batches: What happens if the training loader of a rank ends before the others. `"error"` (default) raises
            an error. With `"join"`, ranks without batches join the remaining steps of loaders from `join_loader`.
        exact_resume: Whether loaders in a saved state resume in the middle of an epoch with exactly the remaining
            samples. See data/README.md.
        timeout: Seconds or a `timedelta` after which a rank that is dead or missing from a collective raises an error.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision, process_group_backend,
            start_method: As in Fabric's `DDPStrategy`.
        **ddp_kwargs: Passed to `DistributedDataParallel`. `gradient_as_bucket_view` is False by default, except in half
            precision.

    Raises:
        ValueError: An option is unknown or has an invalid value. The error is raised before any process group is
            created.

    Source: Jia et al. 2018 (arXiv:1807.11205).
    """

    # The classes in `flavours/` set both to the classes for their own Fabric package.
    _precision_type: type[FabricMasterWeightMixin]
    _checkpoint_io_type: type
    checkpoint_io = durable_by_default

    def __init__(
        self,
        between_nodes: BetweenNodes = Mean(),  # noqa: B008  frozen
        ranks_per_node: int | None = None,
        comm: Comm = Comm(),  # noqa: B008
        loss_scale: str | float | LossScale | None = None,
        uneven_batches: Literal["error", "join"] = "error",
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
            uneven_batches=uneven_batches,
        )
        self._comm = CommSetup(self._options)
        self._failures = FailureReports()
        self._loaders = LoopLoaders(exact_resume)
        self._engines: list[CommEngine] = []
        self._wrappers: list[weakref.ref[DistributedDataParallel]] = []  # one for each engine
        self._modules = LivingModules()  # modules that were set up
        # Each module that was set up, with the `id`s of its parameters, until it no longer exists on any rank.
        self._parameters_of: list[tuple[weakref.ref[nn.Module], set[int]]] = []
        self._has_new_module = False  # set up since the last backward, in addition to others
        self._joined_steps: JoinedSteps | None = None  # with `uneven_batches="join"`
        self._agreements: list[BatchAgreement] = []  # one for each joined loader
        # DDP wrapper of each parameter whose gradient it averages, by the parameter's `id`.
        self._wrapper_of: dict[int, weakref.ref[DistributedDataParallel]] = {}
        self._earlier_error: BaseException | None = None  # an error from before the first setup
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
        """Precision plugin of the strategy."""
        return super().precision

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        """Set the precision plugin, replacing plain half precision by half precision with fp32 master weights."""
        self._precision = with_masters(precision, self._precision_type, self._options.loss_scale)

    @property
    def communication_plan(self) -> str | None:
        """One-line description of ranks, nodes, buckets and algorithms, or None before setup."""
        return self._comm.communication_plan

    @property
    def _half(self) -> FabricMasterWeightMixin | None:
        if isinstance(self.precision, FabricMasterWeightMixin):
            return self.precision
        return None

    # ---- setup -----------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        refuse_launch(STRATEGY_NAME, self._start_method, self.parallel_devices)
        super()._configure_launcher()

    def setup_environment(self) -> None:
        """Set up the processes like DDP, and start a watchdog that names missing ranks in errors."""
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
        """Wrap a module in DDP with its own communication engine, and broadcast rank zero's weights.

        Collective: every rank of the group must call it, in the same order.
        """
        half = self._half
        self._close_unused_engines()
        if self._options.joins_uneven_batches:
            refuse_unsupported(module)
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
        # DDP and the plan of its buckets need the parameters that forward and backward use.
        window: AbstractContextManager[Any] = nullcontext()
        if half is not None and half.window is not None:
            window = half.window.opened()
        with window:
            self._comm.find_plan(module)
            wrapped = self._comm.wrap(
                module, device_ids=device_ids, is_half=half is not None, **self._ddp_kwargs
            )

        if half is not None:
            half.keep_gradients_in_rebuild(wrapped)

        engine = self._comm.new_engine(self.precision)
        self._comm.average_by(engine, wrapped, module.parameters())
        if not self._engines:
            self._failures.end_setup()  # from here on, the engine's watchdog names missing ranks
            # Fabric has no hook at the end of training, so the engines are closed when the process ends. This also
            # works in a child process of `launch(function)`.
            Finalize(None, self._close_engines, exitpriority=1)
            # A process that was forked from a notebook has inherited the notebook's last error.
            self._earlier_error = getattr(sys, "last_value", None)
        self._engines.append(engine)
        self._failures.engine = engine
        self._modules.append(module)
        parameters = {id(parameter) for parameter in module.parameters()}
        self._parameters_of.append((weakref.ref(module), parameters))
        reference = weakref.ref(wrapped)
        self._wrappers.append(reference)
        self._wrapper_of |= dict.fromkeys(averaged, reference)
        self._has_new_module = len(self._engines) > 1
        return wrapped

    def _close_unused_engines(self) -> None:
        """Close the engines and drop the loss scales of models that no longer exist on any rank.

        Collective if there are engines: every rank must call it, in the same order. Ranks free their wrappers and
        modules at different times, so they agree here on which of them to drop.
        """
        if not self._engines:
            return
        is_dead = [float(wrapped() is None) for wrapped in self._wrappers]
        is_dead += [float(module() is None) for module, _ in self._parameters_of]
        agreed = torch.tensor(is_dead, device=self.root_device)
        agreed = self.all_reduce(agreed, reduce_op="min")
        are_dead = [flag > 0 for flag in agreed.tolist()]
        num_engines = len(self._engines)
        self._forget_modules(are_dead[num_engines:])

        engines: list[CommEngine] = []
        wrappers: list[weakref.ref[DistributedDataParallel]] = []
        for engine, wrapped, closes in zip(
            self._engines, self._wrappers, are_dead[:num_engines], strict=True
        ):
            if closes:
                engine.close()
            else:
                engines.append(engine)
                wrappers.append(wrapped)
        self._engines = engines
        self._wrappers = wrappers
        self._failures.engine = None
        if engines:
            self._failures.engine = engines[-1]  # because the last one may have been closed

        # The next parameter may have the `id` of one that no longer exists.
        living = {id(parameter) for parameter in self._modules.parameters()}
        wrapper_of: dict[int, weakref.ref[DistributedDataParallel]] = {}
        for key, wrapped in self._wrapper_of.items():
            if key in living:
                wrapper_of[key] = wrapped
        self._wrapper_of = wrapper_of

    def _forget_modules(self, are_dead: Sequence[bool]) -> None:
        """Drop the loss scales of modules that no longer exist on any rank."""
        dead: set[int] = set()
        living: set[int] = set()
        remaining = []
        for entry, is_dead in zip(self._parameters_of, are_dead, strict=True):
            if is_dead:
                dead |= entry[1]
            else:
                living |= entry[1]
                remaining.append(entry)
        self._parameters_of = remaining
        if dead and self._half is not None:
            self._half.optimizer_steps.forget(dead - living)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Register an optimizer with the precision plugin, which creates its loss scale."""
        self._comm.warn_of_reduction([optimizer])
        if self._half is not None:
            self._half.connect_optimizer(optimizer)
        return optimizer

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader that can resume in the middle of an epoch, if exact resume is enabled and supported."""
        processed = super().process_dataloader(dataloader)
        return self._loaders.process(processed, self.global_rank, self.world_size)

    def join_loader(
        self, loader: Any, count_samples: Callable[[Any], int] | None = None
    ) -> JoinedLoopLoader:
        """Wrap a training loader so that ranks without batches join the remaining steps of an epoch.

        The resulting loader yields the same number of batches on every rank. Each loss must be the mean over the
        samples of its batch. `fabric.backward` then computes the gradient of the mean over the samples of all ranks:

            gradient = sum over ranks of (samples of the rank * gradient of its loss) / (samples of all ranks)

        While a rank repeats an earlier batch, with weight zero, the attribute `repeats_batch` of the loader is True.

        Collective: every rank must call it, in the same order. Every pass over the loader is collective as well.

        Args:
            loader: Loader from `fabric.setup_dataloaders`.
            count_samples: Function that returns the number of samples in a batch. The default is the length of the
                first tensor.

        Raises:
            ValueError: The strategy was created without `uneven_batches="join"`.
        """
        if not self._options.joins_uneven_batches:
            raise ValueError(
                f"`uneven_batches` (={self._options.uneven_batches!r}) must be 'join' to use `join_loader`. Create "
                "the strategy with HybridAllReduceStrategy(uneven_batches='join')."
            )
        assert self._timeout is not None
        agreement = BatchAgreement(
            rank=self.global_rank,
            world_size=self.world_size,
            timeout=self._timeout,
            device=device_of(loader),
            count_samples=partial(samples_in, count_samples=count_samples),
        )
        self._agreements.append(agreement)
        if self._joined_steps is None:
            has_fp16_gradients = self.precision.precision == "16-true"
            self._joined_steps = JoinedSteps(self.world_size, has_fp16_gradients=has_fp16_gradients)
        loader_type = JoinedLoopLoader
        if hasattr(loader, "exact_resume"):
            loader_type = ResumableJoinedLoader
        return loader_type(loader, agreement, self._joined_steps, self._modules)

    # ---- step ------------------------------------------------------------------------------------------------------

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass like DDP, with a weighted loss if the batch is from a joined loader."""
        if self._has_new_module:
            # By now, a loop that trains one model after another has released the previous one.
            self._has_new_module = False
            self._close_unused_engines()

        def run(loss: Tensor) -> None:
            self._run_backward(loss, module, *args, **kwargs)

        steps = self._joined_steps
        if steps is None or not steps.is_within_batch:
            run(tensor)
            return
        window: AbstractContextManager[Any] = nullcontext()
        if self._half is not None and self._half.window is not None:
            window = self._half.window.opened()
        with window:
            steps.backward(
                tensor,
                run,
                engines=self._engines,
                wrappers=self._living_wrappers(),
                tensors=gradient_leaves(self._modules, self.precision),
            )

    def _living_wrappers(self) -> list[DistributedDataParallel]:
        wrappers = [wrapped() for wrapped in self._wrappers]
        return [wrapped for wrapped in wrappers if wrapped is not None]

    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather a tensor from all ranks like DDP.

        Raises:
            RuntimeError: The gathered values have gradients, and the batch is from a joined loader.
        """
        steps = self._joined_steps
        if sync_grads and steps is not None and steps.is_within_batch:
            refuse_gather_with_gradients()
        gathered: Tensor = self._run_all_gather(tensor, group, sync_grads)
        return gathered

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Run the optimizer step, after a check that all gradients are averaged."""
        if self.world_size > 1:
            averaged = {key for key, wrapped in self._wrapper_of.items() if wrapped() is not None}
            refuse_what_is_not_averaged(optimizer, averaged, self._modules)
        return super().optimizer_step(optimizer, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip gradients by norm like DDP, but do not raise for inf or nan if the loss is scaled.

        In that case, the optimizer step is skipped later.
        """
        is_scaled = self._half is not None and self._half.loss_scale is not None
        raises_error = error_if_nonfinite and not is_scaled
        return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, raises_error)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint like DDP, with the loss scales if the state contains an optimizer.

        Collective if the state contains loaders: every rank of the group must call it, in the same order.
        """
        half = self._half
        state = self._loaders.with_states(state, self.global_rank)
        if half is not None and _has_optimizer(state):
            loss_scales = half.state_dict()
            if loss_scales:
                state = {**state, _key(half): loss_scales}
        super().save_checkpoint(path, state, *args, **kwargs)

    def load_checkpoint(
        self, path: Any, state: Any = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Load a checkpoint like DDP, and restore the loss scales if the state contains an optimizer."""
        remainder = super().load_checkpoint(path, state, *args, **kwargs)
        half = self._half
        if half is not None and isinstance(state, dict) and _has_optimizer(state):
            half.load_state_dict(remainder.pop(_key(half), {}))
        return remainder

    # ---- end -------------------------------------------------------------------------------------------------------

    # These methods behave like DDP's, but their errors name a missing rank.
    _run_backward = _explaining("backward")
    _run_all_gather = _explaining("all_gather")
    barrier = _explaining("barrier")
    broadcast = _explaining("broadcast")
    all_reduce = _explaining("all_reduce")

    def _close_engines(self) -> None:
        # If an error ended this process, the interpreter has stored it. The engines report it to the other ranks.
        error = getattr(sys, "last_value", None)
        if error is self._earlier_error:  # from before the first setup
            error = None
        self._failures.end_setup()
        engines = self._engines
        self._engines = []
        self._wrappers = []
        self._failures.engine = None
        for engine in engines:
            if error is not None:
                engine.abort(reason_of(error))
            engine.close()
        agreements = self._agreements
        self._agreements = []
        for agreement in agreements:
            agreement.close(has_failed=error is not None)

    def teardown(self) -> None:
        """Close the communication engines, and restore the modules' fp32 weights."""
        self._close_engines()
        self._modules = LivingModules()
        self._parameters_of = []
        self._wrapper_of = {}
        self._joined_steps = None
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register `hybrid_allreduce` and its variants, such as `_spawn`, in Fabric's registry."""
        register_names(strategy_registry, cls)


def _key(plugin: FabricMasterWeightMixin) -> str:
    return type(plugin).__qualname__  # as in the Trainer's checkpoints


def _is_averaged_now(
    wrapper_of: dict[int, weakref.ref[DistributedDataParallel]], parameter: Tensor
) -> bool:
    # DDP's flag is False under `no_backward_sync`.
    reference = wrapper_of.get(id(parameter))
    wrapper = reference() if reference is not None else None
    return wrapper is None or wrapper.require_backward_grad_sync


def _has_optimizer(state: dict[str, Any]) -> bool:
    return any(isinstance(value, Optimizer) for value in state.values())
