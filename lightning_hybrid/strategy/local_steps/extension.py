"""Steps of each node on its own, and the average of the nodes after them, for the strategy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lightning_hybrid.averaged_models import averages_of
from lightning_hybrid.comm import CommEngine, CommPlan
from lightning_hybrid.comm.engine.process_groups import end_group, new_node_group
from lightning_hybrid.comm.topology import ReplicaSets
from lightning_hybrid.lightning_names import is_overridden
from lightning_hybrid.placement import broadcast_first_
from lightning_hybrid.precision.schedule_guard import release_schedule
from lightning_hybrid.strategy.compatibility import (
    in_callbacks,
    in_module,
    in_nodes,
    in_precision,
    refuse_excluded,
)
from lightning_hybrid.strategy.extension import FitContext, FitExtension, RunningFit
from lightning_hybrid.strategy.local_steps.independent_nodes import IndependentNodes, OuterStep
from lightning_hybrid.strategy.local_steps.optimizer_agreement import (
    agree_on_state_,
    average_momentum_,
)
from lightning_hybrid.strategy.options import LocalSteps

# The entry of a checkpoint with the momentum of the outer step, by name of a parameter.
OUTER_MOMENTUM = "outer_momentum"


# torch's, where the first step of an optimizer was skipped: nodes go on with the rates of the others.
TOO_EARLY = r"Detected call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`"


def local_steps_for(fit: FitContext, steps: LocalSteps) -> LocalStepsExtension | None:
    """Make the extension; on one node None, with a warning."""
    if fit.topology.num_nodes > 1:
        return LocalStepsExtension(fit, steps)
    rank_zero_warn(
        f"`between_nodes` (={steps!r}) has nothing to do: all ranks share one node, and each step averages their "
        "gradients. Leave it out, or say by `ranks_per_node` what a node is."
    )
    return None


class LocalStepsExtension(FitExtension):
    """Averages weights over nodes every so many steps, with `between_nodes=LocalSteps(...)`."""

    def __init__(self, fit: FitContext, steps: LocalSteps) -> None:
        refuse_excluded(
            {"local steps": f"`between_nodes` (={steps!r})"}
            | in_nodes(fit.topology)
            | in_module(fit.module)
            | in_callbacks(fit.trainer.callbacks)
            | in_precision(fit.precision)
        )
        self.steps = steps
        self._nodes: IndependentNodes | None = None  # from set-up to end
        self._loaded_momentum: dict[str, Tensor] | None = None  # of a checkpoint, until nodes part
        self._ignored: Any = None  # of Python's warnings

    # ---- setup -----------------------------------------------------------------------------------------------------

    def engine_options(self, fit: FitContext, plan: CommPlan) -> dict[str, Any]:
        """Return the options, to be compared between ranks."""
        return {"compared": {"between_nodes": self.steps}}

    def after_setup(self, fit: RunningFit) -> None:
        """Make the groups of the nodes. Collective."""
        self._nodes = _new_nodes(fit)
        # One node may leave a step out that another takes; all come to the next batch.
        self._nodes.ends_in_step = not is_overridden(
            "optimizer_step", fit.module, "pytorch.LightningModule"
        )
        for config in fit.trainer.lr_scheduler_configs:
            # A node that skips a step would fall behind the others' rate for good.
            release_schedule(config)
        warnings.filterwarnings("ignore", TOO_EARLY, UserWarning)
        self._ignored = warnings.filters[0]
        rank_zero_info(
            f"comm: gradients are averaged in each of {fit.topology.num_nodes} nodes from step "
            f"{self.steps.from_step} on, weights and momentum between them every "
            f"{self.steps.every} steps"
        )

    # ---- step ------------------------------------------------------------------------------------------------------

    def before_batch(self, fit: RunningFit, batch_idx: int) -> None:
        """From the step on from which nodes train on their own, let them. Collective where a period ends."""
        nodes = self._nodes
        steps = self.steps
        if nodes is None:
            return
        fit.engine.raise_if_failed()  # another node may have failed, for which nothing here waits
        num_steps = fit.trainer.global_step
        if not nodes.is_apart and num_steps >= steps.from_step:
            nodes.part(fit.wrapped)
            nodes.num_periods = steps.num_periods(num_steps)
            nodes.versions = [one._version for one in _frozen(fit)]
            if steps.has_outer_step or nodes.average.is_narrow:
                nodes.outer = self._new_outer_step(fit)
        if nodes.is_apart:
            if not nodes.ends_in_step and steps.num_periods(num_steps) > nodes.num_periods:
                self._average(fit)
            nodes.num_periods = steps.num_periods(num_steps)
            nodes.note_step()  # user code may step past Lightning
            if (
                batch_idx == steps.every
                and num_steps == 0
                and not fit.module.automatic_optimization
            ):
                rank_zero_warn(
                    f"`between_nodes.every` (={steps.every}) counts `trainer.global_step`, which is still 0 after "
                    f"{batch_idx} batches: nodes do not average their weights. Step the optimizers of "
                    "`self.optimizers()`, not those inside of them."
                )

    def step(self, fit: RunningFit, optimizer: Optimizer, run: Callable[[], Any]) -> Any:
        """Average over nodes where a period ends, which is then collective."""
        outputs = run()
        if self._nodes is not None and self._nodes.is_apart:
            self._nodes.note_step()
            num_steps = fit.trainer.global_step + 1  # Lightning counts this one later
            if self._nodes.ends_in_step and self.steps.end_at(num_steps):
                with fit.outside_of_steps():
                    self._average(fit, num_steps)
        return outputs

    # ---- averages --------------------------------------------------------------------------------------------------

    def _average(self, fit: RunningFit, num_steps: int | None = None) -> None:
        # Collective. What the next steps begin with: weights, statistics and momentum. `num_steps`: taken so far.
        nodes = self._nodes
        if nodes is None or not nodes.has_own_weights:
            return
        nodes.average.begin_step(fit.trainer.global_step if num_steps is None else num_steps)
        weights = list(_weights(fit).values())
        if nodes.outer is None:
            nodes.average.average_(weights)
        else:  # weights stay what they are until all of it has arrived
            moved = nodes.outer.moved(weights)
            nodes.average.average_(moved, is_narrow=True)
            nodes.outer.step_(weights, moved)
        nodes.average.average_(_statistics(fit))
        average_momentum_(fit.optimizers, nodes.average)
        if others := _other_buffers(fit):
            broadcast_first_(others)
        nodes.has_own_weights = False

    def _average_all(self, fit: RunningFit) -> None:
        # Collective. All ranks then hold the same, of which one file has all.
        self._average(fit)
        self._average_moving_averages(fit)
        if self._nodes is not None and self._nodes.has_own_state:
            agree_on_state_(fit.optimizers, fit.optimizer_steps, self._nodes.average)
            self._nodes.has_own_state = False

    def _average_moving_averages(self, fit: RunningFit) -> None:
        # Collective. Each node's has followed its own weights; the steps do not need them.
        nodes = self._nodes
        if nodes is not None and nodes.has_own_moving_averages:
            frozen = _frozen(fit)
            if frozen:  # a teacher's weights, which user code writes; most are as they were loaded
                pairs = zip(frozen, nodes.versions, strict=True)
                is_new = torch.tensor(
                    [one._version != seen for one, seen in pairs], device=nodes.average.device
                )
                is_new = is_new.to(torch.int32)
                dist.all_reduce(is_new, dist.ReduceOp.MAX)
                written = [
                    one for one, is_one in zip(frozen, is_new.tolist(), strict=True) if is_one
                ]
                nodes.average.average_(written)
            nodes.average.average_(_moving_averages(fit))
            nodes.versions = [one._version for one in frozen]
            nodes.has_own_moving_averages = False

    # ---- outer step ------------------------------------------------------------------------------------------------

    def _new_outer_step(self, fit: RunningFit) -> OuterStep:
        weights = _weights(fit)
        outer = OuterStep(
            list(weights.values()), lr=self.steps.outer_lr, momentum=self.steps.outer_momentum
        )
        saved = self._loaded_momentum
        self._loaded_momentum = None
        for name, momentum in zip(
            weights, outer.momenta, strict=False
        ):  # there is none without momentum
            if saved is not None and name in saved:
                momentum.copy_(saved[name])
        return outer

    def save(self, fit: FitContext, checkpoint: dict[str, Any]) -> None:
        """Add the momentum of the outer step."""
        outer = None if self._nodes is None else self._nodes.outer
        if outer is not None and outer.momenta:
            checkpoint[OUTER_MOMENTUM] = dict(
                zip(_trained_by_name(fit), outer.momenta, strict=True)
            )
        elif self._loaded_momentum is not None:  # resumed, and not yet trained
            checkpoint[OUTER_MOMENTUM] = self._loaded_momentum

    def load(self, fit: RunningFit, checkpoint: Mapping[str, Any]) -> None:
        """Keep the momentum of the outer step until training begins; all nodes have loaded the same."""
        self._loaded_momentum = checkpoint.get(OUTER_MOMENTUM)
        if self._nodes is not None:  # within a fit, as LearningRateFinder does
            self._nodes.join(fit.wrapped, fit.engine)

    @contextmanager
    def reading_module(self, fit: RunningFit) -> Iterator[None]:
        """Read the state of the average. Collective while nodes train on their own."""
        if (
            fit.failures.ending_error is None
        ):  # else others do not come: what this node has is better than nothing
            self._average_all(fit)
        yield

    # ---- hooks of the loop -----------------------------------------------------------------------------------------

    def before_validation(self, fit: RunningFit) -> None:
        """Validate the average. Collective."""
        self._average(fit)
        self._average_moving_averages(fit)

    def before_train_end(self, fit: RunningFit) -> None:
        """Let hooks at the end of training see the average. Collective."""
        self._average_all(fit)

    def status(self) -> dict[str, Any]:
        """Return the ranks that skip the same steps, and those that hold the same now, where not all do."""
        nodes = self._nodes
        if nodes is None:
            return {}
        return {
            "verdict_group": nodes.group,
            "node_group": nodes.group if nodes.has_own_state else None,
        }

    # ---- end -------------------------------------------------------------------------------------------------------

    def failed(self, fit: FitContext, error: BaseException) -> None:
        """Let the ranks of this node know."""
        if self._nodes is not None and self._nodes.is_apart:
            failure = self._nodes.node_engine.failure
            self._nodes.node_engine.abort(f"{type(error).__name__}: {error}")
            if failure and failure in str(error):
                error.add_note(
                    f"In sums within a node its ranks, here {list(fit.topology.node)}, count from 0."
                )

    def end(self, fit: RunningFit, error: BaseException | None) -> None:
        """Free the groups of the nodes."""
        nodes = self._nodes
        self._nodes = None
        self._loaded_momentum = None
        filters: Any = warnings.filters
        if self._ignored in filters:
            filters.remove(self._ignored)
        if nodes is not None:
            nodes.node_engine.close()
            failure = nodes.node_engine.failure or fit.engine.failure
            end_group(nodes.group, is_aborted=fit.device.type == "cuda" and bool(failure))


def _new_nodes(fit: RunningFit) -> IndependentNodes:
    group = new_node_group(fit.topology, timeout=fit.timeout, desc="nodes")
    replicas = ReplicaSets(world=fit.topology, sets=fit.topology.nodes)
    node_engine = CommEngine(
        topology=replicas.own,
        plan=fit.plan,
        timeout=fit.timeout,
        device=fit.device,
        trace=fit.engine.trace,
        replicas=replicas,
        group=group,
    )
    return IndependentNodes(
        engine=fit.engine, node_engine=node_engine, group=group, hook_state=fit.hook_state
    )


# ---- what is averaged ------------------------------------------------------------------------------------------------


def _trained_by_name(fit: FitContext) -> dict[str, Tensor]:
    # The parameters that DDP averages, by name.
    return {name: one for name, one in _known_to_ddp(fit) if one.requires_grad}


def _frozen(fit: RunningFit) -> list[Tensor]:
    return [
        one.detach()
        for _, one in _known_to_ddp(fit)
        if not one.requires_grad and one.is_floating_point()
    ]


def _known_to_ddp(fit: FitContext) -> Iterator[tuple[str, Tensor]]:
    ignored = set(getattr(fit.module, "_ddp_params_and_buffers_to_ignore", ()))
    return (named for named in fit.module.named_parameters() if named[0] not in ignored)


def _weights(fit: RunningFit) -> dict[str, Tensor]:
    """Return the fp32 values that optimizers change, by name."""
    return {name: parameter.detach() for name, parameter in _trained_by_name(fit).items()}


def _broadcasts_buffers(fit: RunningFit) -> bool:
    # Else each rank keeps its own, as under DDP. torch 2.15 has another name for the option.
    broadcasts = fit.ddp_options.get("broadcast_buffers", True)
    return bool(fit.ddp_options.get("forward_sync_buffers", broadcasts))


def _statistics(fit: RunningFit) -> list[Tensor]:
    return _statistics_of(fit.module) if _broadcasts_buffers(fit) else []


def _other_buffers(fit: RunningFit) -> list[Tensor]:
    if not _broadcasts_buffers(fit):
        return []
    averaged = {id(one) for one in _statistics(fit)}
    buffers: list[Tensor] = fit.wrapped.modules_buffers
    return [one for one in buffers if id(one) not in averaged]


def _moving_averages(fit: RunningFit) -> list[Tensor]:
    averages = averages_of(fit.trainer.callbacks)
    tensors = chain.from_iterable((*one.parameters(), *_statistics_of(one)) for one in averages)
    return [one.detach() for one in tensors if one.is_floating_point()]


def _statistics_of(module: nn.Module) -> list[Tensor]:
    layers = (
        layer
        for layer in module.modules()
        if isinstance(layer, _BatchNorm) and layer.track_running_stats
    )
    return [
        one
        for layer in layers
        for one in (layer.running_mean, layer.running_var)
        if one is not None
    ]
