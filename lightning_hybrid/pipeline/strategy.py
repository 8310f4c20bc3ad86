"""The strategy `hybrid_pipeline`: wiring of stages, schedules and checkpoints into `hybrid_allreduce`."""

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
from lightning_hybrid.pipeline.microbatches import single_metrics
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
from lightning_hybrid.strategy.failures import refuse_after_failure
from lightning_hybrid.strategy.registration import PIPELINE_NAME

if TYPE_CHECKING:
    import lightning.pytorch as pl


class HybridPipeline(DataRanksMixin):
    """A pipeline: the network of a module in stages, each on a rank of its own; `training_step` stays as it is.

        ranks = num_stages * (data ranks)         batch of a data rank = num_microbatches * (micro-batch)
        waiting part of a step = (num_stages - 1) / (v * num_microbatches + num_stages - 1)         v: stages per rank

    It trains what `hybrid_allreduce` trains on the data ranks with `accumulate_grad_batches = num_microbatches`, to the
    bit. Checkpoints are the same files: any number of stages, and plain `ddp`, can load them.

    Args:
        num_stages: ranks of a pipeline; divides the ranks.
        num_microbatches: parts into which the batch of a rank is cut, at least `num_stages`; four times as many and
            more keep the waiting part below 20 %.
        schedule: `"gpipe"`: all forwards, then all backwards; all micro-batches in memory. `"1f1b"`: backward as soon
            as it can; stage j keeps `num_stages - j`. `"interleaved"`: two stages a rank: half the waiting.
            `"zero_bubble"`: these, with gradients of weights computed while others wait; for one data rank.
        of: name of the network in the module: an `nn.Sequential`, or a module with `pipeline_blocks()`.
        cuts: first block of each stage after the first; a `BlockProfile` balances the stages by seconds and bytes, None
            by operations where there is an `example_input_array` (the network's input), else by parameters.
        checkpoint_activations: whether to store only the input of each block and to compute its inside again in
            backward: GPipe's second half, for about a third more arithmetic.
        **options: as in `HybridAllReduceStrategy`, for the data ranks; what needs the gradients of a whole network is
            refused: a codec, a planner, `Adasum`, `LocalSteps`.

    Raises:
        ValueError: an option cannot work; before any process group exists where it can be known by then.

    Source: Huang et al. 2018 (arXiv:1811.06965); Narayanan et al. 2021 (arXiv:2104.04473).
    """

    registered_name = PIPELINE_NAME
    _strategy_features = MappingProxyType({"pipeline": "a pipeline"})
    _watchdog_type = PipelineWatchdog

    def __init__(
        self,
        num_stages: int = 2,
        num_microbatches: int = 8,
        schedule: Schedule
        | str = "1f1b",  # any text: what is refused gets its reason, by `check_options`
        of: str = "net",
        cuts: Cuts = None,
        checkpoint_activations: bool = False,
        **options: Any,
    ) -> None:
        num_stages = plain_value(num_stages)
        num_microbatches = plain_value(num_microbatches)
        cuts = plain_value(cuts)
        require_choice(
            "checkpoint_activations", checkpoint_activations, (True, False), "it is a switch"
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
        self._gradients: list[Tensor | None] = []
        self._until_teardown = ExitStack()
        super().__init__(**dict(options))

    # ---- setup -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """Keep this rank's stages, put the others on the meta device, and set up as `hybrid_allreduce`."""
        module = self.lightning_module
        watchdog = self._failures.setup_watchdog
        is_fit = trainer.state.fn == "fit"
        assert module is not None
        assert self._timeout is not None
        assert isinstance(watchdog, PipelineWatchdog)
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
        self._groups = PipelineGroups(ranks, timeout=self._timeout)
        self._cut = CutModel(module, self.of, places=places, ranks=ranks, device=self.root_device)
        stages = [self._cut.stage(stage) for stage in range(ranks.num_stages)]
        tied = TiedWeights(stages, ranks, self._groups)
        bodies = {stage: self._body_of(stages[stage]) for stage in ranks.stages}
        self._stages = Stages(
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
            whole=self._whole,
        )
        with nullcontext() if is_fit else self._cut.ignored_by_ddp():
            super().setup(trainer)
        for metric in single_metrics(module):
            if metric.process_group is None:
                metric.process_group = self._groups.data
        if is_fit:
            if self._extensions is not None:
                self._extensions.begin(self._comm, self._stages)
            clip = vars(self.precision_plugin).get(
                "clip_grad_by_norm", clip_by_norm_over_ranks
            )  # of slices
            stages_of_norm = {
                "stage_group": self._groups.pipe,
                "counted_elsewhere": tied.counted_elsewhere,
            }
            vars(self.precision_plugin)["clip_grad_by_norm"] = partial(
                clip, device=self.root_device, **stages_of_norm
            )
            if is_overridden(
                name := "configure_gradient_clipping", module, "pytorch.LightningModule"
            ):
                clipped = {name: partial(clip_as_user, module, getattr(module, name))}
                self._until_teardown.enter_context(temporary_attributes(module, **clipped))
        self._until_teardown.enter_context(example_hidden(module))
        rank_zero_info(
            f"pipeline: {ranks.num_stages} stages on {ranks.num_ranks} of {ranks.world_size} ranks each; "
            f"{self.schedule}, {self.num_microbatches} micro-batches; cuts {places[1:-1]} of {len(blocks)} blocks"
        )

    def _body_of(self, blocks: Sequence[nn.Module]) -> nn.Module:
        from lightning_hybrid.pipeline.checked_stage import (
            StageBody,
        )  # here: it imports torch's schedules

        return StageBody(blocks, checkpoint_activations=self.checkpoint_activations)

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        cut = self._cut
        if (
            self._stages is None
        ):  # the end: after a failure blocks of others stay on the meta device
            self._cut = None
        with nullcontext() if cut is None else cut.hidden():
            yield

    def configure_ddp(self) -> None:
        """Wrap each stage in DDP over its data ranks, and remember which parameters are trained."""
        here = self._here
        self._averaged_parameters, ignored = trained_parameters(here.module)
        named = here.module.named_parameters(remove_duplicate=False)
        ignored_ids = {id(parameter) for name, parameter in named if name in ignored}
        if here.ranks.num_data_ranks > 1:
            if self._extensions is not None:
                self._comm.take_engine_options(self._extensions.engine_options(self._comm.plan))
            new = self._comm.new_engine(
                self.precision_plugin, replicas=self.replicas, group=self._data_group
            )
            here.watchdog.engine = self._comm.engine = new
            self._comm.hook_state = self._comm.average_by(new, None)  # all of a stage may be cut
            with nullcontext() if self._window is None else self._window.opened():
                here.wrapped = {
                    index: self._wrapped(body, new, ignored_ids)
                    for index, body in here.bodies.items()
                }
        if self._half is not None:
            self._half.connect_stages(here.largest)
        seed = [int(torch.initial_seed()) % 2**32]
        dist.broadcast_object_list(seed, src=0)
        assert self._cut is not None
        self._training = TrainingStep(
            here,
            schedule=self.schedule,
            precision=self.precision_plugin,
            seed=seed[0],
            cut=self._cut,
        )

    def _wrapped(self, body: nn.Module, engine: CommEngine, ignored: set[int]) -> nn.Module:
        if not any(
            parameter.requires_grad and id(parameter) not in ignored
            for parameter in body.parameters()
        ):
            return body
        options = self._ddp_kwargs | {"process_group": self._data_group, "init_sync": False}
        named = body.named_parameters(remove_duplicate=False)
        with ignored_by_ddp(body, [name for name, one in named if id(one) in ignored]):
            wrapped = self._comm.wrap(
                body,
                device_ids=self.determine_ddp_device_ids(),
                is_half=self._half is not None,
                **options,
            )
        self._comm.hook_state = self._comm.average_by(engine, wrapped)
        return wrapped

    # ---- step ------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the schedule, then the user's `training_step` on the whole batch with the outputs, without gradients."""
        assert self._training is not None
        trainer = self._here.module.trainer
        refuse_in_pipeline(trainer, self._here.module, self.precision_plugin)
        (batch, *rest) = (*args, *kwargs.values())
        parameters = self._training.parameters
        for parameter in parameters:
            parameter.grad = None
        place = (trainer.current_epoch, trainer.fit_loop.batch_idx)
        output = self._training.run(batch, tuple(rest), place=place)
        # Lightning sets gradients to None between here and `backward`, which puts these back.
        self._gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        with torch.no_grad(), self._training.on_whole_batch(output):
            result: Any = super().training_step(batch, *rest)
        if self._half is not None:
            self._half.end_microbatches(result["loss"] if isinstance(result, Mapping) else result)
        return result

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Call the hooks around backward, which the schedule has run; give the parameters their gradients."""
        assert self._training is not None
        plain = self.precision_plugin
        half = self._half
        module = self._here.module
        closure_loss = (plain.pre_backward if half is None else half.call_before_backward)(
            closure_loss, module
        )
        for parameter, gradient in zip(self._training.parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._gradients = []
        return (plain.post_backward if half is None else half.call_after_backward)(
            closure_loss, module
        )

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Step as `hybrid_allreduce`; look at what hooks have logged."""
        result = super().optimizer_step(*args, **kwargs)
        assert self._training is not None
        self._training.compare_logged(self._here.module.trainer._results)
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Validate with the network's output from all stages."""
        with self._over_stages(*args, *kwargs.values()):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Test with the network's output from all stages."""
        with self._over_stages(*args, *kwargs.values()):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict with the network's output from all stages."""
        with self._over_stages(*args, *kwargs.values()):
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _over_stages(self, batch: Any, batch_idx: int = 0, *_: Any) -> Iterator[None]:
        # Every rank logs of its own batch. Without a number, which a step need not take, all are compared.
        if batch_idx < NUM_COMPARED:
            self._here.agree_on_batch(batch)
        with temporary_attributes(self._here.net, forward=self._here.evaluate):
            yield

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return what this rank has; `save_checkpoint` brings it together."""
        with self._allowed():
            return dict(super().lightning_module_state_dict())

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save what all stages hold, in one file. Collective: every rank must call it, as Lightning does."""
        refuse_after_failure(self._comm.engine)  # before anything collective
        self._failures.refuse_to_save_alone("A pipeline", "its stages are on several ranks")
        group = None if self._groups is None else self._groups.agree  # None: after the fit
        gather_checkpoint(checkpoint, self.pipeline_ranks, group=group)
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of this rank's parameters."""
        states = [
            without_others(state, optimizer)
            for optimizer, state in zip(
                self.optimizers, checkpoint["optimizer_states"], strict=True
            )
        ]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})

    # ---- end -------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Report the error to all ranks; the sums in flight are given up."""
        if self._cut is not None:
            own = " and ".join(map(str, self.pipeline_ranks.stages))
            add_cause(exception, stages=f"stage {own} of {self.pipeline_ranks.num_stages}")
        super().on_exception(exception)
        if self._comm.engine is not None:
            self._comm.engine.abort(f"{type(exception).__name__}: {exception}")

    def _put_back(self) -> None:
        """Make the module whole again on every rank, unless the run has failed."""
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
            self._stages = self._training = self._groups = None

    def _release(self, stages: Stages) -> None:
        for metric in single_metrics(stages.module):
            if metric.process_group is stages.groups.data:
                metric.process_group = None
        if not stages.watchdog.is_stuck:
            stages.groups.destroy(are_aborted=stages.watchdog.has_aborted)
