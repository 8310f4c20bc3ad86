"""The strategy `hybrid_pipeline`: wiring of stages, schedules and checkpoints into `hybrid_allreduce`."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_hybrid.comm import CommEngine, CommTrace, HookState, average_bucket
from lightning_hybrid.comm.health.diagnosis import differing
from lightning_hybrid.comm.topology import ReplicaSets
from lightning_hybrid.lightning_names import lightning_types
from lightning_hybrid.pipeline.arguments import (
    STAGES_PER_RANK,
    Schedule,
    blocks_of,
    check_options,
    check_ranks,
    check_trainer,
    cut_places,
)
from lightning_hybrid.pipeline.norm_clipping import clip_by_norm_over_stages
from lightning_hybrid.pipeline.outputs import forward_replaced, single_metrics
from lightning_hybrid.pipeline.placement import OtherStages, PipelineGroups, PipelineRanks
from lightning_hybrid.pipeline.shapes import costs_of
from lightning_hybrid.pipeline.stage_watchdog import StageWatchdog
from lightning_hybrid.pipeline.training import Stages, TrainingStep
from lightning_hybrid.pipeline.whole_state import gather_checkpoint, share_, without_others
from lightning_hybrid.precision.plugin import MasterWeightMixin
from lightning_hybrid.run_status import RunStatus
from lightning_hybrid.strategy.arguments import bucket_caps_for_ddp
from lightning_hybrid.strategy.comm_setup import trained_parameters
from lightning_hybrid.strategy.hybrid_allreduce import HybridAllReduceMixin
from lightning_hybrid.strategy.registration import PIPELINE_NAME, register_names

if TYPE_CHECKING:
    import lightning.pytorch as pl


class HybridPipelineMixin(HybridAllReduceMixin):
    """A pipeline: the network of a module in stages, each on a rank of its own; `training_step` stays as it is.

        ranks = num_stages * (data ranks)         batch of a data rank = num_microbatches * (micro-batch)
        waiting part of a step = (num_stages - 1) / (v * num_microbatches + num_stages - 1)         v: stages per rank

    It trains what `hybrid_allreduce` trains on the data ranks with `accumulate_grad_batches = num_microbatches`, to the
    bit. Checkpoints are the same files: any number of stages, and plain `ddp`, can load them. More in this folder's
    `README.md`.

    Args:
        num_stages: ranks of a pipeline; divides the ranks.
        num_microbatches: parts into which the batch of a rank is cut, at least `num_stages`; four times as many and
            more keep the waiting part below 20 %.
        schedule: `"gpipe"`: all forwards, then all backwards; keeps `num_microbatches` micro-batches in memory.
            `"1f1b"`: backward as soon as it can; stage j keeps `num_stages - j`. `"interleaved"`: 1F1B with two stages
            on each rank: half the waiting, twice the messages.
        of: name of the network in the module: an `nn.Sequential`, or a module with `pipeline_blocks()`.
        cuts: first block of each stage after the first; None balances the stages, by operations where the module has
            an `example_input_array` (the network's input), else by parameters.
        checkpoint_activations: whether to store only the input of each block and to compute its inside again in
            backward: GPipe's second half, for about a third more arithmetic.
        **options: as in `HybridAllReduceStrategy`, for the data ranks; `tune` is off.

    Raises:
        ValueError: an option cannot work; before any process group exists where it can be known by then.

    Source: Huang et al. 2018 (arXiv:1811.06965); Narayanan et al. 2021 (arXiv:2104.04473).
    """

    def __init__(
        self,
        num_stages: int = 2,
        num_microbatches: int = 8,
        schedule: Schedule = "1f1b",
        of: str = "net",
        cuts: Sequence[int] | None = None,
        checkpoint_activations: bool = False,
        **options: Any,
    ) -> None:
        check_options(num_stages=num_stages, num_microbatches=num_microbatches, schedule=schedule, cuts=cuts)
        self.num_stages, self.num_microbatches, self.schedule = num_stages, num_microbatches, schedule
        self.of, self.cuts, self.checkpoint_activations = of, cuts, checkpoint_activations
        self._ranks: PipelineRanks | None = None
        self._groups: PipelineGroups | None = None
        self._stages: Stages | None = None
        self._training: TrainingStep | None = None
        self._data_engine: CommEngine | None = None
        self._others: list[OtherStages] = []
        self._gradients: list[Tensor | None] = []
        super().__init__(**{"tune": "off", **options})

    # ---- ranks -----------------------------------------------------------------------------------------------------

    def set_world_ranks(self) -> None:
        """Set ranks and world size, and refuse a world that does not divide into pipelines."""
        super().set_world_ranks()
        if self.cluster_environment is not None:
            check_ranks(num_stages=self.num_stages, world_size=self.world_size)

    @property
    def pipeline_ranks(self) -> PipelineRanks:
        """The place of this rank."""
        per_rank = STAGES_PER_RANK[self.schedule]
        return PipelineRanks(
            rank=self.global_rank, world_size=self.world_size, num_ranks=self.num_stages, stages_per_rank=per_rank
        )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All ranks of a pipeline read the same batches."""
        return {"num_replicas": self.pipeline_ranks.num_data_ranks, "rank": self.pipeline_ranks.data_rank}

    @property
    def comm_trace(self) -> CommTrace | None:
        """Counters of the communication between data ranks, while a fit runs."""
        return None if self._data_engine is None else self._data_engine.trace

    @property
    def run_status(self) -> RunStatus:
        """What callbacks may know of the run."""
        return dataclasses.replace(super().run_status, replica_group=self._data_group)

    def _new_watchdog(self) -> StageWatchdog:
        assert self._timeout is not None
        return StageWatchdog(timeout=self._timeout, device=self.root_device)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data ranks: those of a pipeline hold the same values."""
        return super().reduce(tensor, self._data_group if group is None else group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather from the data ranks: those of a pipeline hold the same values."""
        return super().all_gather(tensor, self._data_group if group is None else group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide over all ranks."""
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes)

    @property
    def _data_group(self) -> Any:
        return None if self._groups is None else self._groups.data

    # ---- setup -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """Keep this rank's stages, put the others on the meta device, and set up as `hybrid_allreduce`."""
        module, is_fit = self.lightning_module, trainer.state.fn == "fit"
        assert module is not None and self._timeout is not None
        if is_fit:
            check_trainer(trainer, module, self.precision_plugin.precision)
        ranks = self._ranks = self.pipeline_ranks
        blocks = blocks_of(module, self.of)
        costs = costs_of(blocks, module.example_input_array)
        places = cut_places(costs, self.cuts, ranks.num_stages)
        with self._waiting_for_ranks():
            self._compare(blocks, places)
            self._groups = PipelineGroups(ranks, timeout=self._timeout)
            # Every rank begins with the values of rank zero, as under DDP.
            share_(_tensors(blocks), owner=0, device=self.root_device)
        owners = [ranks.pipelines[0][stage % ranks.num_ranks] for stage in range(ranks.num_stages)]
        self._owners = [rank for stage, rank in enumerate(owners) for _ in range(places[stage], places[stage + 1])]
        mine = owners[ranks.position]
        self._others = [
            OtherStages([each for block, owner in zip(some, self._owners, strict=True) if owner != mine
                         for each in block.modules()])
            for some in (blocks, *_averages_of(trainer, self.of))
        ]  # fmt: skip
        bodies = {stage: self._body_of(blocks[places[stage] : places[stage + 1]]) for stage in ranks.stages}
        watchdog = self._setup_watchdog
        assert isinstance(watchdog, StageWatchdog)
        self._stages = Stages(
            module=module,
            net=module.get_submodule(self.of),
            bodies=bodies,
            wrapped=bodies,
            ranks=ranks,
            groups=self._groups,
            watchdog=watchdog,
            device=self.root_device,
            num_microbatches=self.num_microbatches,
        )
        self._blocks = blocks
        with nullcontext() if is_fit else _ignored_by_ddp(module, blocks):
            super().setup(trainer)
        for metric in single_metrics(module):
            if metric.process_group is None:
                metric.process_group = self._groups.data
        if is_fit:
            self.precision_plugin.clip_grad_by_norm = partial(  # type: ignore[method-assign]
                clip_by_norm_over_stages, group=self._groups.pipe, ranks=ranks
            )
        rank_zero_info(
            f"pipeline: {ranks.num_stages} stages on {ranks.num_ranks} ranks, {ranks.num_data_ranks} data ranks; "
            f"{self.schedule}, {self.num_microbatches} micro-batches; cuts {places[1:-1]} of {len(blocks)} blocks"
        )

    def _body_of(self, blocks: Sequence[nn.Module]) -> nn.Module:
        from lightning_hybrid.pipeline.stage import StageBody  # here: it imports torch's schedules

        return StageBody(blocks, checkpoint_activations=self.checkpoint_activations)

    def _compare(self, blocks: Sequence[nn.Module], places: Sequence[int]) -> None:
        shapes = [[(name, tuple(p.shape), str(p.dtype)) for name, p in block.named_parameters()] for block in blocks]
        own = {
            "num_stages": self.num_stages,
            "num_microbatches": self.num_microbatches,
            "schedule": self.schedule,
            "cuts": list(places[1:-1]),
            "checkpoint_activations": self.checkpoint_activations,
            "precision": self.precision_plugin.precision,
            "blocks": f"{len(blocks)} of {hashlib.sha256(repr(shapes).encode()).hexdigest()[:12]}",
        }
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, own)
        if difference := differing(found):
            raise ValueError(
                f"The plan of a pipeline must be the same on all ranks: {difference}. Stages would send what others do "
                "not expect. Give every rank the same `strategy` options and the same network."
            )

    def _move_module(self) -> None:
        with self._hidden():
            super()._move_module()

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        if not self._others:
            yield
            return
        with self._others[0].hidden():
            yield

    def configure_ddp(self) -> None:
        """Wrap each stage in DDP over its data ranks, and remember which parameters are trained."""
        assert self._stages is not None and self._ranks is not None and self._groups is not None
        assert isinstance(self.model, nn.Module) and self._timeout is not None
        self._averaged_parameters, _ = trained_parameters(self.model)
        ranks, stages = self._ranks, self._stages
        if ranks.num_data_ranks > 1:
            replicas = ReplicaSets(world=self._discover_topology(), sets=ranks.replicas)
            self._topology = replicas.own
            self._data_engine = CommEngine(
                topology=replicas.own,
                plan=self._plan,
                timeout=self._timeout,
                device=self.root_device,
                trace=CommTrace(keep_events=self._trace_dir is not None),
                dtype_across_nodes=self._dtype_across_nodes,
                replicas=replicas,
                group=self._groups.data,
            )
            stages.watchdog.on_failure = self._data_engine.abort
            self._note_plan(self._plan)
            rank_zero_info(self.communication_plan)
            stages.wrapped = {index: self._wrapped(body) for index, body in stages.bodies.items()}
        if self._half is not None:
            self._half.connect_stages(self._largest_of_stages)
        seed = [int(torch.initial_seed()) % 2**32]
        dist.broadcast_object_list(seed, src=0)
        self._training = TrainingStep(stages, schedule=self.schedule, masters=self._masters, seed=seed[0])

    def _wrapped(self, body: nn.Module) -> nn.Module:
        assert self._data_engine is not None and self._groups is not None
        if not any(parameter.requires_grad for parameter in body.parameters()):
            return body
        caps = bucket_caps_for_ddp(body, self._plan, self._ddp_kwargs, num_nodes=self._topology.num_nodes)
        options = self._ddp_kwargs | caps | {"process_group": self._groups.data, "init_sync": False}
        wrapped = DistributedDataParallel(body, device_ids=self.determine_ddp_device_ids(), **options)
        state = HookState(engine=self._data_engine, comm_dtype=self._comm_dtype)
        wrapped.register_comm_hook(state, average_bucket)
        return wrapped

    def _largest_of_stages(self, found_inf: Tensor) -> Tensor:
        assert self._groups is not None and self._stages is not None
        group = self._groups.pipe
        self._stages.watchdog.wait_for(lambda: dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group))
        return found_inf

    # ---- step ------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the schedule, then the user's `training_step` on the whole batch with the outputs, without gradients."""
        assert self._training is not None and self._stages is not None and self.lightning_module is not None
        trainer = self.lightning_module.trainer
        check_trainer(trainer, self.lightning_module, self.precision_plugin.precision)
        (batch, *rest), parameters = (*args, *kwargs.values()), self._training.parameters
        if self._half is not None:
            scale = self._half.begin_microbatches(parameters)
        else:
            scale = None
            for parameter in parameters:
                parameter.grad = None
        place = (trainer.current_epoch, trainer.fit_loop.batch_idx)
        with self.precision_plugin.train_step_context():
            output = self._training.run(batch, tuple(rest), scale=scale, place=place)
        # Lightning sets gradients to None between here and `backward`, which puts these back.
        self._gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        with torch.no_grad(), forward_replaced(self._stages.net, lambda *_, **__: output):
            result = super().training_step(batch, *rest)
        if self._half is not None:
            self._half.end_microbatches(result["loss"] if isinstance(result, Mapping) else result)
        return result

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Call the hooks around backward, which the schedule has run; give the parameters their gradients."""
        assert self._training is not None and self.lightning_module is not None
        # The half-precision plugin would scale the loss and sum gradients: the stages have done it.
        hooks: Any = self.precision_plugin if self._half is None else super(MasterWeightMixin, self._half)
        closure_loss = hooks.pre_backward(closure_loss, self.lightning_module)
        for parameter, gradient in zip(self._training.parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._gradients = []
        result: Tensor = hooks.post_backward(closure_loss, self.lightning_module)
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Validate with the network's output from all stages."""
        with self._over_stages():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Test with the network's output from all stages."""
        with self._over_stages():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict with the network's output from all stages."""
        with self._over_stages():
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _over_stages(self) -> Iterator[None]:
        assert self._stages is not None
        with forward_replaced(self._stages.net, self._stages.evaluate):
            yield

    def on_validation_start(self) -> None:
        """Give every data rank the running statistics of the first, as DDP does before a forward."""
        super().on_validation_start()
        self._share_buffers()

    def _share_buffers(self) -> None:
        if self._stages is None or self._ranks is None or self._ranks.num_data_ranks == 1 or self._groups is None:
            return
        # The stages run under `no_sync`, where DDP shares none.
        owner = self._ranks.replicas[self._ranks.position][0]
        for body in self._stages.bodies.values():
            share_(body.buffers(), owner=owner, device=self.root_device, group=self._groups.data)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save what all stages hold, in one file. Collective: every rank must call it, as Lightning does."""
        if self._data_engine is not None and self._data_engine.device.type == "cuda":
            self._data_engine.raise_if_failed()
        with self._waiting_for_ranks():
            gather_checkpoint(checkpoint, self.pipeline_ranks)
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of this rank's parameters."""
        states = [
            without_others(state, [p for group in optimizer.param_groups for p in group["params"]])
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
        ]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})

    # ---- end -------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Report the error to all ranks; the sums in flight are given up."""
        super().on_exception(exception)
        if self._data_engine is not None:
            self._data_engine.abort(f"{type(exception).__name__}: {exception}")

    def teardown(self) -> None:
        """Make the module whole again on every rank, unless the run has failed."""
        has_failed = self._ended_by is not None
        self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
        engine, self._data_engine = self._data_engine, None
        try:
            if engine is not None:
                engine.close()
                if self._trace_dir is not None:
                    engine.trace.write_if_possible(self._trace_dir, rank=self.global_rank)
            if self._masters is not None:
                self._masters.restore()
            if self._others and not has_failed:
                self._make_whole()
        finally:
            if self._half is not None:
                self._half.connect_stages(None)
            if self._groups is not None and self.lightning_module is not None:
                for metric in single_metrics(self.lightning_module):
                    if metric.process_group is self._groups.data:
                        metric.process_group = None
                if self._stages is None or not self._stages.watchdog.is_stuck:
                    self._groups.destroy()
            self._stages = self._training = self._groups = None
            # After a failure blocks of other ranks stay on the meta device: nothing could fill them.
            with self._hidden():
                super().teardown()
            self._others = []

    def _make_whole(self) -> None:
        others, *averages = self._others
        for place in (others, *averages):
            place.restore([torch.empty_like(meta, device="cpu") for meta in place.tensors], self.optimizers)
        assert self.lightning_module is not None
        for blocks in (self._blocks, *_averages_of(self.lightning_module.trainer, self.of)):
            for block, owner in zip(blocks, self._owners, strict=True):
                share_(_tensors([block]), owner=owner, device=self.root_device)
        self._others = []

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register `hybrid_pipeline` and the variants that `ddp` has."""
        register_names(strategy_registry, cls, name=PIPELINE_NAME)


def _tensors(blocks: Sequence[nn.Module]) -> list[Tensor]:
    return [tensor for block in blocks for tensor in (*block.parameters(), *block.buffers())]


def _averages_of(trainer: Any, of: str) -> list[list[nn.Module]]:
    # Averages of the weights that callbacks keep are cut as the module is.
    kinds = lightning_types("pytorch.callbacks.WeightAveraging")
    models = [getattr(one, "_average_model", None) for one in trainer.callbacks if isinstance(one, kinds)]
    return [blocks_of(model.module, of) for model in models if model is not None]


@contextmanager
def _ignored_by_ddp(module: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[None]:
    # Lightning gives every rank the values of rank zero before it evaluates, and each has other blocks than rank zero.
    own = set(map(id, _tensors(blocks)))
    names = [name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if id(tensor) in own]
    before = getattr(module, "_ddp_params_and_buffers_to_ignore", None)
    module._ddp_params_and_buffers_to_ignore = [*(before or ()), *names]  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is None:
            del module._ddp_params_and_buffers_to_ignore
        else:
            module._ddp_params_and_buffers_to_ignore = before
