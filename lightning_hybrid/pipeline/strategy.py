"""Pipeline-parallel Lightning strategy `hybrid_pipeline`, which extends `hybrid_allreduce`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.checks import plain_value, require_choice
from lightning_hybrid.comm import CommEngine
from lightning_hybrid.comm.norm_clipping import clip_by_norm_over_ranks
from lightning_hybrid.lightning_names import is_overridden
from lightning_hybrid.pipeline.cut_model import CutModel, add_cause, example_hidden
from lightning_hybrid.pipeline.cuts import Cuts
from lightning_hybrid.pipeline.data_ranks import DataRanksMixin
from lightning_hybrid.pipeline.local_stages import Stages
from lightning_hybrid.pipeline.microbatches import rows_if_known, single_metrics
from lightning_hybrid.pipeline.options import (
    Schedule,
    blocks_of,
    check_options,
    compare_stages,
    cut_places,
    refuse_in_pipeline,
)
from lightning_hybrid.pipeline.pipeline_watchdog import PipelineWatchdog
from lightning_hybrid.pipeline.rank_layout import PipelineGroups, TiedWeights
from lightning_hybrid.pipeline.shapes import costs_of
from lightning_hybrid.pipeline.training_step import NUM_COMPARED, TrainingStep
from lightning_hybrid.pipeline.user_clipping import clip_as_user
from lightning_hybrid.pipeline.whole_state import gather_checkpoint, without_others
from lightning_hybrid.placement import ignored_by_ddp
from lightning_hybrid.precision.optimizer_protocol import temporary_attributes
from lightning_hybrid.strategy.comm_setup import trained_parameters
from lightning_hybrid.strategy.failures.failure_reports import refuse_after_failure
from lightning_hybrid.strategy.registration import PIPELINE_NAME

if TYPE_CHECKING:
    import lightning.pytorch as pl


class HybridPipeline(DataRanksMixin):
    """Pipeline-parallel strategy that runs a network in stages, without changes to the user's `training_step`.

        number of ranks = num_stages * (number of data-parallel ranks)
        batch size of a data-parallel rank = num_microbatches * (size of a micro-batch)
        idle fraction of a step = (num_stages - 1) / (v * num_microbatches + num_stages - 1)         v: stages per rank

    The result is bit-identical to `hybrid_allreduce` on the data-parallel ranks with
    `accumulate_grad_batches = num_microbatches`. Checkpoints are the same files, so runs with any
    number of stages, and plain `ddp`, can load them.

    Args:
        num_stages: Number of ranks of a pipeline. It must divide the number of ranks.
        num_microbatches: Number of micro-batches into which a rank's batch is split, at least
            `num_stages`. With four times as many or more, the idle fraction is below 20 %.
        schedule: `"gpipe"`: all forwards, then all backwards; all micro-batches in memory.
            `"1f1b"`: each backward as early as possible; stage j keeps `num_stages - j`
            micro-batches. `"interleaved"`: two stages per rank, half the idle time.
            `"zero_bubble"`: like `"interleaved"`, with gradients of weights computed in idle time;
            for one data-parallel rank.
        of: Name of the network in the module: an `nn.Sequential`, or a module with
            `pipeline_blocks()`.
        cuts: First block of each stage after the first. A `BlockProfile` balances the stages by
            seconds and bytes. None balances by operations if there is an `example_input_array` (the
            network's input), otherwise by parameters.
        checkpoint_activations: Whether to store only the input of each block and to recompute its
            activations in backward, as in GPipe, for about a third more arithmetic.
        **options: As in `HybridAllReduceStrategy`, for the data-parallel ranks. Options that need the
            gradients of the whole network raise an error: a codec, a planner, `Adasum`,
            `LocalSteps`.

    Raises:
        ValueError: An option is invalid. Raised before any process group exists if the check needs
            only the options.

    Source: Huang et al. 2018 (arXiv:1811.06965); Narayanan et al. 2021 (arXiv:2104.04473).
    """

    registered_name = PIPELINE_NAME
    _strategy_features = MappingProxyType({"pipeline": "a pipeline"})
    _watchdog_type = PipelineWatchdog

    def __init__(
        self,
        num_stages: int = 2,
        num_microbatches: int = 8,
        # Any text is accepted here, so that `check_options` can give the reason for an invalid one.
        schedule: Schedule | str = "1f1b",
        of: str = "net",
        cuts: Cuts = None,
        checkpoint_activations: bool = False,
        **options: Any,
    ) -> None:
        num_stages = plain_value(num_stages)
        num_microbatches = plain_value(num_microbatches)
        cuts = plain_value(cuts)
        require_choice(
            "checkpoint_activations",
            checkpoint_activations,
            (True, False),
            "True recomputes activations in backward, and False stores them",
        )
        check_options(
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            schedule=schedule,
            cuts=cuts,
            of=of,
        )
        self.num_stages = num_stages
        self.num_microbatches = num_microbatches
        self.schedule = schedule
        self.of = of
        self.cuts = cuts
        self.checkpoint_activations = checkpoint_activations
        self._training: TrainingStep | None = None
        self._cut: CutModel | None = None
        self._gradients: list[Tensor | None] = []  # between `training_step` and `backward`
        self._until_teardown = ExitStack()  # temporary changes of the user's module
        super().__init__(**dict(options))

    # ---- setup ---------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """Move other ranks' stages to the meta device, and set up data parallelism for the local stages."""
        module = self.lightning_module
        assert module is not None
        is_fit = trainer.state.fn == "fit"
        if is_fit:
            refuse_in_pipeline(trainer, module, self.precision_plugin, is_setup=True)
        ranks = self.pipeline_ranks
        blocks = blocks_of(module, self.of)
        costs = costs_of(blocks, module.example_input_array)
        places = cut_places(
            costs, self.cuts, ranks.num_stages, self.num_microbatches, self.schedule
        )
        compare_stages(
            blocks,
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            schedule=self.schedule,
            cuts=list(places[1:-1]),
            checkpoint_activations=self.checkpoint_activations,
            precision=self.precision_plugin.precision,
        )
        self._stages = self._cut_network(module, places)

        if is_fit:
            super().setup(trainer)
        else:
            with self._active_cut.ignored_by_ddp():
                super().setup(trainer)
        for metric in single_metrics(module):
            if metric.process_group is None:
                metric.process_group = self._stages.groups.data
        if is_fit:
            self._extensions.begin(self._comm, self._stages)
            self._clip_over_stages()
            self._check_clipping_of(module)
        self._until_teardown.enter_context(example_hidden(module))
        rank_zero_info(
            f"pipeline: {ranks.num_stages} stages, each pipeline on {ranks.num_ranks} of {ranks.world_size} ranks; "
            f"schedule {self.schedule}, {self.num_microbatches} micro-batches; cuts before blocks {places[1:-1]} of "
            f"{len(blocks)}"
        )

    def _cut_network(self, module: pl.LightningModule, places: Sequence[int]) -> Stages:
        """Create process groups, divide the network into stages, and return the stages of this rank.

        Collective: every rank must call it, in the same order.
        """
        # Imported here, as it imports torch's schedules.
        from lightning_hybrid.pipeline.checked_stage import StageBody

        watchdog = self._failures.setup_watchdog
        assert isinstance(watchdog, PipelineWatchdog)
        assert self._timeout is not None
        ranks = self.pipeline_ranks
        self._groups = PipelineGroups(ranks, timeout=self._timeout)
        self._cut = CutModel(module, self.of, places=places, ranks=ranks, device=self.root_device)
        blocks_by_stage = [self._cut.stage(index) for index in range(ranks.num_stages)]
        tied = TiedWeights(blocks_by_stage, ranks, self._groups)
        bodies = {}
        for index in ranks.stages:
            bodies[index] = StageBody(
                blocks_by_stage[index], checkpoint_activations=self.checkpoint_activations
            )
        return Stages(
            module=module,
            net=module.get_submodule(self.of),
            bodies=bodies,
            wrapped=bodies,
            ranks=ranks,
            groups=self._groups,
            tied=tied,
            watchdog=watchdog,
            device=self.root_device,
            num_microbatches=self.num_microbatches,
            whole_layers=self._whole_layers,
        )

    @property
    def _active_cut(self) -> CutModel:
        """Network divided into stages, available between setup and teardown."""
        assert self._cut is not None
        return self._cut

    def _clip_over_stages(self) -> None:
        """Make the precision plugin clip gradients by their norm over all stages.

        The plugin may be Lightning's.
        """
        stages = self._active_stages
        precision: Any = self.precision_plugin
        # Tensor-parallel layers may have set their own clipping, to which the stages are added.
        clip = vars(precision).get("clip_grad_by_norm", clip_by_norm_over_ranks)
        precision.clip_grad_by_norm = partial(
            clip,
            device=self.root_device,
            stage_group=stages.groups.pipe,
            counted_elsewhere=stages.tied.counted_elsewhere,
        )

    def _check_clipping_of(self, module: pl.LightningModule) -> None:
        """Add a check to the module's own `configure_gradient_clipping`, if it defines one."""
        name = "configure_gradient_clipping"
        if not is_overridden(name, module, "pytorch.LightningModule"):
            return
        clip = partial(clip_as_user, module, module.configure_gradient_clipping)
        self._until_teardown.enter_context(
            temporary_attributes(module, configure_gradient_clipping=clip)
        )

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        cut = self._cut
        if self._stages is None:
            # The run ends. After a failure, the blocks of other ranks stay on the meta device.
            self._cut = None
        with nullcontext() if cut is None else cut.hidden():
            yield

    def configure_ddp(self) -> None:
        """Wrap each stage in DDP over its data-parallel ranks, and record the averaged parameters."""
        stages = self._active_stages
        self._averaged_parameters, ignored_names = trained_parameters(stages.module)
        ignored_ids = set()
        for name, parameter in stages.module.named_parameters(remove_duplicate=False):
            if name in ignored_names:
                ignored_ids.add(id(parameter))
        if stages.ranks.num_data_ranks > 1:
            self._wrap_stages(ignored_ids)
        if self._half is not None:
            self._half.connect_stages(stages.largest)

        seed = [int(torch.initial_seed()) % 2**32]
        dist.broadcast_object_list(seed, src=0)
        self._training = TrainingStep(
            stages,
            schedule=self.schedule,
            precision=self.precision_plugin,
            seed=seed[0],
            cut=self._active_cut,
        )

    def _wrap_stages(self, ignored_ids: set[int]) -> None:
        """Create the engine that averages gradients over data-parallel ranks, and wrap stages in DDP."""
        stages = self._active_stages
        self._comm.take_engine_options(self._extensions.engine_options(self._comm.plan))
        engine = self._comm.new_engine(
            self.precision_plugin, replicas=self.replicas, group=self._data_group
        )
        stages.watchdog.engine = engine
        self._comm.engine = engine
        # A stage may have no parameters that DDP averages.
        self._comm.hook_state = self._comm.average_by(engine, None)
        with nullcontext() if self._window is None else self._window.opened():
            wrapped = {}
            for index, body in stages.bodies.items():
                wrapped[index] = self._wrap_stage(body, engine, ignored_ids)
            stages.wrapped = wrapped

    def _wrap_stage(self, body: nn.Module, engine: CommEngine, ignored_ids: set[int]) -> nn.Module:
        """Wrap a stage in DDP unless it has no parameters to average."""
        ignored_names = []
        has_averaged_parameters = False
        for name, parameter in body.named_parameters(remove_duplicate=False):
            if id(parameter) in ignored_ids:
                ignored_names.append(name)
            elif parameter.requires_grad:
                has_averaged_parameters = True
        if not has_averaged_parameters:
            return body

        options = self._ddp_kwargs | {"process_group": self._data_group, "init_sync": False}
        with ignored_by_ddp(body, ignored_names):
            wrapped = self._comm.wrap(
                body,
                device_ids=self.determine_ddp_device_ids(),
                is_half=self._half is not None,
                **options,
            )
        self._comm.hook_state = self._comm.average_by(engine, wrapped)
        return wrapped

    # ---- step ----------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline schedule, then the user's `training_step` on the whole batch to log values.

        `training_step` then runs without gradients, and the network returns the outputs of the schedule.
        """
        assert self._training is not None
        trainer = self._active_stages.module.trainer
        refuse_in_pipeline(trainer, self._active_stages.module, self.precision_plugin)
        batch, *step_arguments = [*args, *kwargs.values()]
        parameters = self._training.parameters
        for parameter in parameters:
            parameter.grad = None
        output = self._training.run(
            batch,
            tuple(step_arguments),
            epoch=trainer.current_epoch,
            batch_index=trainer.fit_loop.batch_idx,
        )

        # Lightning sets gradients to None between here and `backward`, which restores them.
        self._gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        with torch.no_grad(), self._training.on_whole_batch(output):
            result: Any = super().training_step(batch, *step_arguments)
        if self._half is not None:
            loss = result
            if isinstance(result, Mapping):
                loss = result["loss"]
            self._half.end_microbatches(loss)
        return result

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Call the hooks around the backward pass, and restore the gradients that the schedule computed."""
        assert self._training is not None
        module = self._active_stages.module
        if self._half is None:
            closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        else:
            closure_loss = self._half.call_before_backward(closure_loss, module)

        for parameter, gradient in zip(self._training.parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._gradients = []

        if self._half is None:
            return self.precision_plugin.post_backward(closure_loss, module)
        return self._half.call_after_backward(closure_loss, module)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the optimizer step of `hybrid_allreduce`, then compare logged values between stages."""
        result = super().optimizer_step(*args, **kwargs)
        assert self._training is not None
        self._training.compare_logged(self._active_stages.module.trainer._results)
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `validation_step` with a forward pass through all stages."""
        with self._over_stages(*args, *kwargs.values()):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `test_step` with a forward pass through all stages."""
        with self._over_stages(*args, *kwargs.values()):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `predict_step` with a forward pass through all stages."""
        with self._over_stages(*args, *kwargs.values()):
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _over_stages(self, batch: Any, batch_idx: int = 0, *_: Any) -> Iterator[None]:
        """Temporarily route the network's forward pass through all pipeline stages.

        Every rank logs values of its own batch, so the first batches of an epoch are compared
        between ranks. If the step takes no batch index, all batches are compared.
        """
        stages = self._active_stages
        if batch_idx < NUM_COMPARED:
            stages.agree_on_batch(batch)
        forward = partial(stages.evaluate, rows_if_known(batch))
        with temporary_attributes(stages.net, forward=forward):
            yield

    # ---- checkpoints ---------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state dict of this rank's stages.

        `save_checkpoint` adds the entries of other ranks.
        """
        with self._allowed():
            return dict(super().lightning_module_state_dict())

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save the state of all stages in one file.

        Collective: every rank must call it, in the same order, as Lightning does.
        """
        refuse_after_failure(self._comm.engine)  # before any collective
        self._failures.refuse_to_save_alone(
            "A pipeline", "its stages are distributed over several ranks"
        )
        group = None if self._groups is None else self._groups.agree  # None: after training
        gather_checkpoint(checkpoint, self.pipeline_ranks, group=group)
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer state of this rank's parameters."""
        states = []
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            states.append(without_others(state, optimizer))
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})

    # ---- end -----------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Report the error to all ranks, and abort the all-reduces in flight."""
        if self._cut is not None:
            stages = " and ".join(map(str, self.pipeline_ranks.stages))
            add_cause(exception, stages=f"stage {stages} of {self.pipeline_ranks.num_stages}")
        super().on_exception(exception)
        if self._comm.engine is not None:
            self._comm.engine.abort(f"{type(exception).__name__}: {exception}")

    def _put_back(self) -> None:
        """Restore the whole module on every rank unless the run has failed."""
        super()._put_back()
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        self._until_teardown.close()
        try:
            if self._cut is not None and self._failures.ended_by is None:
                self._cut.make_whole(self.optimizers)
                self._cut = None
        finally:
            if self._half is not None:
                self._half.connect_stages(None)
            if self._stages is not None:
                self._release(self._stages)
            self._stages = None
            self._training = None
            self._groups = None

    def _release(self, stages: Stages) -> None:
        """Destroy the process groups, and remove them from the module's metrics."""
        for metric in single_metrics(stages.module):
            if metric.process_group is stages.groups.data:
                metric.process_group = None
        if not stages.watchdog.is_stuck:
            stages.groups.destroy(are_aborted=stages.watchdog.has_aborted)
