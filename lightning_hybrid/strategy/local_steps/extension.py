"""Extension for local SGD, in which nodes train independently and average their weights periodically."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lightning_hybrid.averaged_models import unwrapped_averages_of
from lightning_hybrid.comm import CommEngine, CommPlan
from lightning_hybrid.comm.engine.process_groups import end_group, new_node_group
from lightning_hybrid.comm.health.tensor_hash import Fingerprint
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
from lightning_hybrid.strategy.option_classes import LocalSteps

# Key of the checkpoint entry with the momentum of the outer step, which is keyed by parameter name.
OUTER_MOMENTUM = "outer_momentum"

# torch warns about a schedule whose optimizer skipped its first step. Here the schedule steps on purpose, so that a
# node that skips a step keeps the learning rate of the other nodes.
TOO_EARLY = r"Detected call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`"


def local_steps_for(fit: FitContext, steps: LocalSteps) -> LocalStepsExtension | None:
    """Return the extension for local SGD, or warn and return None if there is only one node."""
    if fit.topology.num_nodes > 1:
        return LocalStepsExtension(fit, steps)
    rank_zero_warn(
        f"`between_nodes` (={steps!r}) has no effect, because all ranks are on one node, where every step averages "
        "their gradients. Leave `between_nodes` out, or set `ranks_per_node`."
    )
    return None


class LocalStepsExtension(FitExtension):
    """Extension for local SGD, which averages weights over nodes every fixed number of steps.

    It implements `between_nodes=LocalSteps(...)`.

    Args:
        fit: Description of the training run that is about to start.
        steps: Options of the local steps.

    Raises:
        ValueError: Nodes, module, callbacks or precision cannot be combined with local steps.
    """

    def __init__(self, fit: FitContext, steps: LocalSteps) -> None:
        refuse_excluded(
            {"local steps": f"`between_nodes` (={steps!r})"}
            | in_nodes(fit.topology)
            | in_module(fit.module)
            | in_callbacks(fit.trainer.callbacks)
            | in_precision(fit.precision)
        )
        self.steps = steps
        self._nodes: IndependentNodes | None = None  # set from `after_setup` to the end of the run
        # Loaded from a checkpoint, and kept until nodes begin to train independently.
        self._loaded_momentum: dict[str, Tensor] | None = None
        self._warning_filter: Any = None

    # ---- setup -----------------------------------------------------------------------------------------------------

    def engine_options(self, fit: FitContext, plan: CommPlan) -> dict[str, Any]:
        """Return the value of `between_nodes`, which the engine compares between ranks."""
        return {"compared": {"between_nodes": self.steps}}

    def after_setup(self, fit: RunningFit) -> None:
        """Create a process group and an all-reduce engine for the ranks of each node.

        Learning-rate schedules step on all nodes from now on, even on a node that skips an optimizer step.

        Collective: every rank must call it, in the same order.
        """
        self._nodes = _new_nodes(fit)
        # With an overridden `optimizer_step` one node may skip a step that another node runs. All nodes reach the next
        # batch, so the period ends there.
        has_own_step = is_overridden("optimizer_step", fit.module, "pytorch.LightningModule")
        self._nodes.ends_in_step = not has_own_step
        for config in fit.trainer.lr_scheduler_configs:
            # Otherwise a node that skips a step would have a different learning rate from the other nodes.
            release_schedule(config)
        warnings.filterwarnings("ignore", TOO_EARLY, UserWarning)
        self._warning_filter = warnings.filters[0]
        rank_zero_info(
            f"comm: from step {self.steps.from_step} on, gradients are averaged within each of "
            f"{fit.topology.num_nodes} nodes, and weights and momentum are averaged between nodes every "
            f"{self.steps.every} steps"
        )

    # ---- step ------------------------------------------------------------------------------------------------------

    def before_batch(self, fit: RunningFit, batch_idx: int) -> None:
        """Let the nodes train independently once step `from_step` is reached.

        If periods cannot end within a step, weights are averaged here at the end of a period. The call is then
        collective.
        """
        nodes = self._nodes
        if nodes is None:
            return
        fit.engine.raise_if_failed()  # because no local step would notice the failure of another node
        num_steps = fit.trainer.global_step
        if not nodes.is_independent and num_steps >= self.steps.from_step:
            self._separate_nodes(fit, nodes)
        if not nodes.is_independent:
            return

        num_periods = self.steps.num_periods(num_steps)
        if not nodes.ends_in_step and num_periods > nodes.num_periods:
            self._average(fit)
        nodes.num_periods = num_periods
        nodes.mark_diverged()  # also here, because user code may step without Lightning
        is_uncounted = batch_idx == self.steps.every and num_steps == 0
        if is_uncounted and not fit.module.automatic_optimization:
            rank_zero_warn(
                f"`between_nodes.every` (={self.steps.every}) counts `trainer.global_step`, which is still 0 after "
                f"{batch_idx} batches, so nodes do not average their weights. Call `step` on the optimizers that "
                "`self.optimizers()` returns, not on the wrapped optimizers."
            )

    def _separate_nodes(self, fit: RunningFit, nodes: IndependentNodes) -> None:
        nodes.separate(fit.wrapped)
        nodes.num_periods = self.steps.num_periods(fit.trainer.global_step)
        if self.steps.has_outer_step or nodes.average.is_narrow:
            nodes.outer = self._new_outer_step(fit)

    def step(self, fit: RunningFit, optimizer: Optimizer, run: Callable[[], Any]) -> Any:
        """Run the optimizer step, and average over nodes if it is the last step of a period.

        Collective at the end of a period.
        """
        outputs = run()
        nodes = self._nodes
        if nodes is not None and nodes.is_independent:
            nodes.mark_diverged()
            num_steps = fit.trainer.global_step + 1  # Lightning has not counted this step yet
            if nodes.ends_in_step and self.steps.end_at(num_steps):
                with fit.outside_of_steps():
                    self._average(fit, num_steps)
        return outputs

    # ---- averages --------------------------------------------------------------------------------------------------

    def _average(self, fit: RunningFit, num_steps: int | None = None) -> None:
        """Average weights, BatchNorm statistics and momentum over nodes.

        Nodes continue from these averages.

        Collective: every rank must call it, in the same order.

        Args:
            fit: Description of the training run.
            num_steps: Number of steps taken so far. None: `trainer.global_step`.
        """
        nodes = self._nodes
        if nodes is None or not nodes.has_own_weights:
            return
        nodes.average.begin_step(num_steps if num_steps is not None else fit.trainer.global_step)
        weights = list(_weights(fit).values())
        if nodes.outer is None:
            nodes.average.average_(weights)
        else:
            # Weights are not written until all differences have arrived.
            differences = nodes.outer.differences(weights)
            nodes.average.average_(differences, is_narrow=True)
            nodes.outer.step_(weights, differences)
        nodes.average.average_(_statistics(fit))
        average_momentum_(fit.optimizers, nodes.average)
        buffers = _buffers_without_statistics(fit)
        if buffers:
            broadcast_first_(buffers)
        nodes.has_own_weights = False

    def _average_all(self, fit: RunningFit) -> None:
        """Make the training state equal on all ranks, so that a single checkpoint can hold it.

        Collective: every rank must call it, in the same order.
        """
        self._average(fit)
        self._average_moving_averages(fit)
        if self._nodes is not None and self._nodes.has_own_state:
            agree_on_state_(fit.optimizers, fit.optimizer_steps, self._nodes.average)
            self._nodes.has_own_state = False

    def _average_moving_averages(self, fit: RunningFit) -> None:
        """Average EMA and SWA weights, and frozen weights that user code has changed, over nodes.

        Between two calls, each node's moving averages follow its own weights. Training steps do not need their mean.

        Collective: every rank must call it, in the same order.
        """
        nodes = self._nodes
        if nodes is None or not nodes.has_own_moving_averages:
            return
        frozen = _frozen(fit)
        if frozen:
            # User code may write frozen parameters, such as the weights of a teacher. Only those that differ are
            # averaged, because most are never written after loading.
            nodes.average.average_(_differing(frozen, nodes.average.device))
        nodes.average.average_(_moving_averages(fit))
        nodes.has_own_moving_averages = False

    # ---- outer step ------------------------------------------------------------------------------------------------

    def _new_outer_step(self, fit: RunningFit) -> OuterStep:
        weights = _weights(fit)
        outer = OuterStep(
            list(weights.values()), lr=self.steps.outer_lr, momentum=self.steps.outer_momentum
        )
        loaded_momentum = self._loaded_momentum
        self._loaded_momentum = None
        if loaded_momentum is not None and outer.momenta:
            for name, momentum in zip(weights, outer.momenta, strict=True):
                if name in loaded_momentum:
                    momentum.copy_(loaded_momentum[name])
        return outer

    def save(self, fit: FitContext, checkpoint: dict[str, Any]) -> None:
        """Add the momentum of the outer optimizer step to a checkpoint."""
        outer = None
        if self._nodes is not None:
            outer = self._nodes.outer
        if outer is not None and outer.momenta:
            names = _trained_parameters(fit)
            checkpoint[OUTER_MOMENTUM] = dict(zip(names, outer.momenta, strict=True))
        elif self._loaded_momentum is not None:
            # The run was resumed and nodes do not train independently yet, so the loaded momentum is saved again.
            checkpoint[OUTER_MOMENTUM] = self._loaded_momentum

    def load(self, fit: RunningFit, checkpoint: Mapping[str, Any]) -> None:
        """Load the outer momentum from a checkpoint, and let all ranks train together until the next batch.

        This is possible because all nodes load the same state.
        """
        self._loaded_momentum = checkpoint.get(OUTER_MOMENTUM)
        if self._nodes is not None:
            # Callbacks such as LearningRateFinder load a checkpoint during training.
            self._nodes.join(fit.wrapped, fit.engine)

    @contextmanager
    def reading_module(self, fit: RunningFit) -> Iterator[None]:
        """Return a context in which the module's state can be read, after averaging it over nodes.

        Collective while nodes train independently, unless the run is failing.
        """
        # After an error the ranks of other nodes do not take part. This node's own state is better than none.
        if fit.failures.ending_error is None:
            self._average_all(fit)
        yield

    # ---- hooks of the loop -----------------------------------------------------------------------------------------

    def before_validation(self, fit: RunningFit) -> None:
        """Average the weights and their moving averages across nodes, so that validation uses the result.

        Collective: every rank must call it, in the same order.
        """
        self._average(fit)
        self._average_moving_averages(fit)

    def before_train_end(self, fit: RunningFit) -> None:
        """Average all training state over nodes, before callbacks run their end-of-training hooks.

        Collective: every rank must call it, in the same order.
        """
        self._average_all(fit)

    def status(self) -> dict[str, Any]:
        """Return the `RunStatus` fields that list ranks with equal skipped steps and ranks with equal state.

        `verdict_group` holds the ranks that skip the same steps. `node_group` holds the ranks whose state is currently
        equal, or is None if all ranks hold the same state.
        """
        nodes = self._nodes
        if nodes is None:
            return {}
        node_group = None
        if nodes.has_own_state:
            node_group = nodes.group
        return {"verdict_group": nodes.group, "node_group": node_group}

    # ---- end -------------------------------------------------------------------------------------------------------

    def failed(self, fit: FitContext, error: BaseException) -> None:
        """Report an error on this rank to the other ranks of its node."""
        if self._nodes is None or not self._nodes.is_independent:
            return
        engine = self._nodes.node_engine
        failure = engine.failure
        engine.abort(f"{type(error).__name__}: {error}")
        if failure and failure in str(error):
            error.add_note(
                "All-reduces within a node number its ranks from 0. The ranks of this node are "
                f"{list(fit.topology.node)}."
            )

    def end(self, fit: RunningFit, error: BaseException | None) -> None:
        """Close the engine of this rank's node and destroy its process group."""
        nodes = self._nodes
        self._nodes = None
        self._loaded_momentum = None
        filters: Any = warnings.filters
        if self._warning_filter in filters:
            filters.remove(self._warning_filter)
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


# ---- tensors to average ----------------------------------------------------------------------------------------------


def _trained_parameters(fit: FitContext) -> dict[str, Tensor]:
    """Return the trainable parameters whose gradients DDP averages, by name."""
    trained: dict[str, Tensor] = {}
    for name, parameter in _parameters_in_ddp(fit):
        if parameter.requires_grad:
            trained[name] = parameter
    return trained


def _frozen(fit: RunningFit) -> list[Tensor]:
    """Return frozen floating-point parameters, except those that DDP ignores."""
    frozen = []
    for _, parameter in _parameters_in_ddp(fit):
        if not parameter.requires_grad and parameter.is_floating_point():
            frozen.append(parameter.detach())
    return frozen


def _differing(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the given tensors whose values differ between ranks.

    Values are compared, because torch's version counters miss writes such as `parameter.data.mul_(0.99)`.

    Collective: every rank must call it, in the same order.
    """
    fingerprint = Fingerprint(device)
    fingerprints = torch.stack([fingerprint.of(tensor).to(device) for tensor in tensors])
    # The smallest value is the complement of the largest complement, which is exact for every integer.
    largest = torch.stack([fingerprints, ~fingerprints])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    differ = largest[0] != ~largest[1]
    return list(compress(tensors, differ.tolist()))


def _parameters_in_ddp(fit: FitContext) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and parameter of each parameter that DDP does not ignore."""
    ignored = set(getattr(fit.module, "_ddp_params_and_buffers_to_ignore", ()))
    for name, parameter in fit.module.named_parameters():
        if name not in ignored:
            yield name, parameter


def _weights(fit: RunningFit) -> dict[str, Tensor]:
    """Return the fp32 values of the trained parameters, by name."""
    return {name: parameter.detach() for name, parameter in _trained_parameters(fit).items()}


def _broadcasts_buffers(fit: RunningFit) -> bool:
    """Return whether DDP broadcasts buffers from one rank to all others.

    If not, each rank keeps its own buffers.
    """
    # torch 2.15 renames the option to `forward_sync_buffers`.
    broadcasts = fit.ddp_options.get("broadcast_buffers", True)
    return bool(fit.ddp_options.get("forward_sync_buffers", broadcasts))


def _statistics(fit: RunningFit) -> list[Tensor]:
    if not _broadcasts_buffers(fit):
        return []
    return _statistics_of(fit.module)


def _buffers_without_statistics(fit: RunningFit) -> list[Tensor]:
    if not _broadcasts_buffers(fit):
        return []
    averaged = {id(statistic) for statistic in _statistics(fit)}
    buffers: list[Tensor] = fit.wrapped.modules_buffers
    return [buffer for buffer in buffers if id(buffer) not in averaged]


def _moving_averages(fit: RunningFit) -> list[Tensor]:
    """Return the floating-point parameters and BatchNorm statistics of the averaged models in callbacks."""
    moving_averages = []
    for model in unwrapped_averages_of(fit.trainer.callbacks):
        for tensor in (*model.parameters(), *_statistics_of(model)):
            if tensor.is_floating_point():
                moving_averages.append(tensor.detach())
    return moving_averages


def _statistics_of(module: nn.Module) -> list[Tensor]:
    """Return the running means and variances of BatchNorm layers."""
    statistics = []
    for layer in module.modules():
        if isinstance(layer, _BatchNorm) and layer.track_running_stats:
            for statistic in (layer.running_mean, layer.running_var):
                if statistic is not None:
                    statistics.append(statistic)
    return statistics
