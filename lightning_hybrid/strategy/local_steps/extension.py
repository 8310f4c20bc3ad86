"""Steps of each node on its own, and the average of the nodes after them, for the strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from lightning_hybrid.comm import CommEngine, CommPlan, HookState, Topology
from lightning_hybrid.comm.engine.process_groups import own_group
from lightning_hybrid.comm.health.abort import destroy, forget
from lightning_hybrid.comm.topology import ReplicaSets
from lightning_hybrid.lightning_names import is_overridden, lightning_types
from lightning_hybrid.precision.averaging import masters_of
from lightning_hybrid.precision.master_weights import MasterPair, copy_to_low_
from lightning_hybrid.precision.schedule_guard import release_schedule
from lightning_hybrid.run_status import run_status
from lightning_hybrid.strategy.compatibility import in_callbacks, in_module, in_nodes, in_precision, refuse_excluded
from lightning_hybrid.strategy.local_steps.nodes_apart import BROADCAST_BYTES, IndependentNodes
from lightning_hybrid.strategy.local_steps.optimizer_agreement import agree_on_state_, average_momentum_
from lightning_hybrid.strategy.local_steps.outer_step import OuterStep
from lightning_hybrid.strategy.options import LocalSteps

# The entry of a checkpoint with the momentum of the outer step, by name of a parameter.
OUTER_MOMENTUM = "outer_momentum"


class LocalSGDMixin:
    """Strategy mixin: average weights over nodes every so many steps, with `between_nodes=LocalSteps(...)`."""

    # It derives from nothing: `super()` is the strategy that stands after it in the class line, `DDPStrategy`.

    _local_steps: LocalSteps | None = None
    _nodes: IndependentNodes | None = None
    _outer_momentum: dict[str, Tensor] | None = None  # of a checkpoint, until the fit begins
    _averages_first: Any = None  # the callback, while there are nodes
    _topology: Topology
    _plan: CommPlan
    _engine: CommEngine | None
    _hook_state: HookState
    _timeout: timedelta | None
    _ddp_kwargs: dict[str, Any]
    model: Any
    optimizers: list[Optimizer]
    lr_scheduler_configs: list[Any]
    precision_plugin: Any
    lightning_module: Any
    root_device: torch.device
    _ending_error: BaseException | None

    # ---- setup -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Set up as DDP; make the groups of the nodes."""
        super().setup(trainer)  # type: ignore[misc]
        if self._local_steps is None or self._engine is None:
            return
        if self._topology.num_nodes == 1:
            rank_zero_warn(
                f"`between_nodes` (={self._local_steps!r}) has nothing to do: all ranks share one node, and each step "
                "averages their gradients. Leave it out, or say by `strategy.ranks_per_node` what a node is."
            )
            return
        refuse_excluded(
            {"local steps": f"`between_nodes` (={self._local_steps!r})"}
            | in_nodes(self._topology)
            | in_module(self.lightning_module)
            | in_callbacks(trainer.callbacks)
            | in_precision(self.precision_plugin)
        )
        self._nodes = self._new_nodes(self._local_steps)
        # One node may leave a step out that another takes; all come to the next batch.
        self._nodes.ends_in_step = not is_overridden("optimizer_step", self.lightning_module, "pytorch.LightningModule")
        self._averages_first = _averages_first(self)
        trainer.callbacks.insert(0, self._averages_first)
        for config in self.lr_scheduler_configs:
            # A node that skips a step would fall behind the others' rate for good.
            release_schedule(config)
        for optimizer in self.optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # torch would warn where the first is skipped
        rank_zero_info(
            f"comm: gradients are averaged in each of {self._topology.num_nodes} nodes from step "
            f"{self._local_steps.from_step} on, weights and momentum between them every "
            f"{self._local_steps.every} steps"
        )

    def _new_nodes(self, steps: LocalSteps) -> IndependentNodes:
        assert self._engine is not None
        assert self._timeout is not None
        nodes = [list(node) for node in self._topology.nodes]
        group = own_group(nodes, timeout=self._timeout, desc="nodes")
        replicas = ReplicaSets(world=self._topology, sets=self._topology.nodes)
        node_engine = CommEngine(
            topology=replicas.own,
            plan=self._plan,
            timeout=self._timeout,
            device=self.root_device,
            trace=self._engine.trace,
            replicas=replicas,
            group=group,
        )
        return IndependentNodes(
            steps, engine=self._engine, node_engine=node_engine, group=group, hook_state=self._hook_state
        )

    # ---- step ------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Start a batch as DDP; from the step on from which nodes train on their own, let them."""
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]
        if self._nodes is None:
            return
        assert self._engine is not None
        self._engine.raise_if_failed()  # another node may have failed, for which nothing here waits
        num_steps = self.lightning_module.trainer.global_step
        steps = self._nodes.steps
        if not self._nodes.is_apart and num_steps >= steps.from_step:
            self._nodes.part(self.model)
            self._nodes.num_periods = steps.num_periods(num_steps)
            self._nodes.versions = [one._version for one in self._frozen()]
            if steps.has_outer_step or self._nodes.average.is_narrow:
                self._nodes.outer = self._new_outer_step(steps)
        if self._nodes.is_apart:
            if not self._nodes.ends_in_step and steps.num_periods(num_steps) > self._nodes.num_periods:
                self._average()
            self._nodes.num_periods = steps.num_periods(num_steps)
            self._nodes.note_step()  # user code may step past Lightning
            if batch_idx == steps.every and num_steps == 0 and not self.lightning_module.automatic_optimization:
                rank_zero_warn(
                    f"`between_nodes.every` (={steps.every}) counts `trainer.global_step`, which is still 0 after "
                    f"{batch_idx} batches: nodes do not average their weights. Step the optimizers of "
                    "`self.optimizers()`, not those inside of them."
                )

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Step as DDP; average over nodes where a period ends."""
        outputs = super().optimizer_step(optimizer, closure, model, **kwargs)  # type: ignore[misc]
        if self._nodes is not None and self._nodes.is_apart:
            self._nodes.note_step()
            num_steps = self.lightning_module.trainer.global_step + 1  # Lightning counts this one later
            if self._nodes.ends_in_step and self._nodes.steps.end_at(num_steps):
                self._average(num_steps)
        return outputs

    # ---- averages --------------------------------------------------------------------------------------------------

    def _average(self, num_steps: int | None = None) -> None:
        # Collective. What the next steps begin with: weights, statistics and momentum. `num_steps`: taken so far.
        nodes = self._nodes
        if nodes is None or not nodes.has_own_weights:
            return
        nodes.average.begin_step(self.lightning_module.trainer.global_step if num_steps is None else num_steps)
        pairs = self._pairs()
        for pair in pairs:
            pair.absorb_outside_writes_()
        weights = list(self._weights().values())
        if nodes.outer is None:
            nodes.average.average_(weights)
        else:  # weights stay what they are until all of it has arrived
            moved = nodes.outer.moved(weights)
            nodes.average.average_(moved, is_narrow=True)
            nodes.outer.step_(weights, moved)
        nodes.average.average_(self._statistics())
        average_momentum_(self.optimizers, nodes.average)
        copy_to_low_(pairs)
        for pair in pairs:
            pair.mark_clean()
        if others := self._other_buffers():
            assert dist.group.WORLD is not None
            dist._broadcast_coalesced(dist.group.WORLD, others, BROADCAST_BYTES, 0)
        nodes.has_own_weights = False

    def _average_all(self) -> None:
        # Collective. All ranks then hold the same, of which one file has all.
        self._average()
        self._average_moving_averages()
        if self._nodes is not None and self._nodes.has_own_state:
            step_states = run_status(self.lightning_module.trainer).optimizer_steps
            agree_on_state_(self.optimizers, step_states, self._nodes.average)
            self._nodes.has_own_state = False

    def _average_moving_averages(self) -> None:
        # Collective. Each node's has followed its own weights; the steps do not need them.
        nodes = self._nodes
        if nodes is not None and nodes.has_own_moving_averages:
            frozen = self._frozen()
            if frozen:  # a teacher's weights, which user code writes; most are as they were loaded
                pairs = zip(frozen, nodes.versions, strict=True)
                is_new = torch.tensor([one._version != seen for one, seen in pairs], device=nodes.average.device)
                is_new = is_new.to(torch.int32)
                dist.all_reduce(is_new, dist.ReduceOp.MAX)
                written = [one for one, is_one in zip(frozen, is_new.tolist(), strict=True) if is_one]
                nodes.average.average_(written)
            nodes.average.average_(self._moving_averages())
            nodes.versions = [one._version for one in frozen]
            nodes.has_own_moving_averages = False

    def _trained_by_name(self) -> dict[str, Tensor]:
        # The parameters that DDP averages, by name.
        return {name: one for name, one in self._known_to_ddp() if one.requires_grad}

    def _frozen(self) -> list[Tensor]:
        known = self._known_to_ddp()
        return [one.detach() for _, one in known if not one.requires_grad and one.is_floating_point()]

    def _known_to_ddp(self) -> Iterator[tuple[str, Tensor]]:
        ignored = set(getattr(self.lightning_module, "_ddp_params_and_buffers_to_ignore", ()))
        return (named for named in self.lightning_module.named_parameters() if named[0] not in ignored)

    def _pairs(self) -> list[MasterPair]:
        masters = masters_of(self.lightning_module)
        found = () if masters is None else map(masters.pair_of, self._trained_by_name().values())
        return [pair for pair in found if pair is not None]

    def _weights(self) -> dict[str, Tensor]:
        # What an optimizer changes, by name: masters where there are some.
        masters, found = masters_of(self.lightning_module), {}
        for name, parameter in self._trained_by_name().items():
            pair = None if masters is None else masters.pair_of(parameter)
            found[name] = (parameter if pair is None else pair.master).detach()
        return found

    def _statistics(self) -> list[Tensor]:
        return _statistics_of(self.lightning_module) if self._broadcasts_buffers else []

    def _other_buffers(self) -> list[Tensor]:
        if not self._broadcasts_buffers:
            return []
        averaged = {id(one) for one in self._statistics()}
        return [one for one in self.model.modules_buffers if id(one) not in averaged]

    @property
    def _broadcasts_buffers(self) -> bool:
        # Else each rank keeps its own, as under DDP.
        return bool(self._ddp_kwargs.get("broadcast_buffers", True))

    def _moving_averages(self) -> list[Tensor]:
        # Of callbacks such as EMA.
        kinds = ("pytorch.callbacks.WeightAveraging", "pytorch.callbacks.StochasticWeightAveraging")
        types = tuple(chain.from_iterable(map(lightning_types, kinds)))
        callbacks = [one for one in self.lightning_module.trainer.callbacks if isinstance(one, types)]
        averages = [getattr(one, "_average_model", None) for one in callbacks]
        models = [one.module if isinstance(one, AveragedModel) else one for one in averages if one is not None]
        tensors = chain.from_iterable((*one.parameters(), *_statistics_of(one)) for one in models)
        return [one.detach() for one in tensors if one.is_floating_point()]

    # ---- outer step ------------------------------------------------------------------------------------------------

    def _new_outer_step(self, steps: LocalSteps) -> OuterStep:
        weights = self._weights()
        outer = OuterStep(list(weights.values()), lr=steps.outer_lr, momentum=steps.outer_momentum)
        saved, self._outer_momentum = self._outer_momentum, None
        for name, momentum in zip(weights, outer.momenta, strict=False):  # there is none without momentum
            if saved is not None and name in saved:
                momentum.copy_(saved[name])
        return outer

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save as DDP, with the momentum of the outer step."""
        outer = None if self._nodes is None else self._nodes.outer
        if outer is not None and outer.momenta and "optimizer_states" in checkpoint:
            checkpoint[OUTER_MOMENTUM] = dict(zip(self._trained_by_name(), outer.momenta, strict=True))
        elif self._outer_momentum is not None and "optimizer_states" in checkpoint:  # resumed, and not yet trained
            checkpoint[OUTER_MOMENTUM] = self._outer_momentum
        super().save_checkpoint(checkpoint, *args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load as DDP; keep the momentum of the outer step until training begins."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        if self._local_steps is not None:
            self._outer_momentum = checkpoint.get(OUTER_MOMENTUM)
        if self._nodes is not None:  # within a fit, as LearningRateFinder does
            assert self._engine is not None
            self._nodes.join(self.model, self._engine)
        return checkpoint

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state, of the average. Collective while nodes train on their own."""
        if self._ending_error is None:  # else others do not come: what this node has is better than nothing
            self._average_all()
        state: dict[str, Any] = super().lightning_module_state_dict()  # type: ignore[misc]
        return state

    # ---- end -------------------------------------------------------------------------------------------------------

    @property
    def _equal_ranks(self) -> dist.ProcessGroup | None:
        # Those that hold the same now; None: all.
        return self._nodes.group if self._nodes is not None and self._nodes.has_own_state else None

    def on_exception(self, exception: BaseException) -> None:
        """Report as DDP; the ranks of this node learn of it as well."""
        if self._nodes is not None and self._nodes.is_apart:
            failure = self._nodes.node_engine.failure
            self._nodes.node_engine.abort(f"{type(exception).__name__}: {exception}")
            if failure and failure in str(exception):
                exception.add_note(f"In sums within a node its ranks, here {list(self._topology.node)}, count from 0.")
        super().on_exception(exception)  # type: ignore[misc]

    def teardown(self) -> None:
        """Tear down as DDP, and free the groups of the nodes."""
        nodes, self._nodes, self._outer_momentum = self._nodes, None, None
        try:
            if nodes is not None:
                if (callbacks := self.lightning_module.trainer.callbacks).count(self._averages_first):
                    callbacks.remove(self._averages_first)
                self._averages_first = None
                nodes.node_engine.close()
                # On CUDA a failure has aborted all communicators.
                has_aborted = self.root_device.type == "cuda" and bool(
                    nodes.node_engine.failure or (self._engine is not None and self._engine.failure)
                )
                (forget if has_aborted else destroy)(nodes.group)
        finally:
            super().teardown()  # type: ignore[misc]


def _averages_first(strategy: Any) -> Any:
    # A callback of whichever Lightning runs: hooks of a strategy come after those of callbacks, which swap weights, and
    # of the module, which may export them.
    def average(self: Any, trainer: Any, pl_module: Any) -> None:
        strategy._average()
        strategy._average_moving_averages()

    methods = {
        "on_validation_start": average,
        "on_train_end": lambda self, trainer, pl_module: strategy._average_all(),
    }
    return type("AveragesFirst", lightning_types("pytorch.callbacks.Callback"), methods)()


def _statistics_of(module: nn.Module) -> list[Tensor]:
    layers = (layer for layer in module.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats)
    return [one for layer in layers for one in (layer.running_mean, layer.running_var) if one is not None]
