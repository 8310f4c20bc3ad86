"""Extension for `node_slices`, which applies tensor parallelism within a node during training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.averaged_models import unwrapped_averages_of
from lightning_hybrid.comm.norm_clipping import clip_by_norm_over_ranks
from lightning_hybrid.comm.topology import ReplicaSets
from lightning_hybrid.run_status import has_grad_scaler
from lightning_hybrid.strategy.compatibility import in_nodes, in_optimizers, refuse_excluded
from lightning_hybrid.strategy.extension import FitContext, FitExtension, RunningFit
from lightning_hybrid.strategy.node_slices.first_step import FirstStep
from lightning_hybrid.strategy.node_slices.layer_plans import requested_layers
from lightning_hybrid.strategy.node_slices.refusals import pruned_layers, refuse_layers
from lightning_hybrid.strategy.node_slices.sliced_fit import SlicedFit
from lightning_hybrid.strategy.user_code_checks import refuse_what_is_not_averaged


def node_slices_for(fit: FitContext, options: Mapping[str, str]) -> NodeSlicesExtension | None:
    """Return the extension that slices layers, or warn and return None if every node has one rank.

    Args:
        fit: Description of the training run that is about to start.
        options: Features that the strategy's options request, with their descriptions.

    Raises:
        ValueError: The options, callbacks, nodes or layers do not allow slicing.
    """
    module = fit.module
    topology = fit.topology
    layers = requested_layers(module)
    description = f"`node_slices` (={layers!r:.90})"
    refuse_excluded({**options, "node slices": description} | in_nodes(topology))
    if topology.ranks_per_node == 1:
        rank_zero_warn(
            f"{description} has no effect, because every node has one rank. Leave it out, or run several "
            "ranks on each node (`ranks_per_node` sets which ranks share a node)."
        )
        return None

    pruned = pruned_layers(fit.trainer.callbacks)
    refuse_layers(module, layers, num_slices=len(topology.node), pruned=pruned)
    layers_of_stage = [names for names in layers if not _are_of_other_stages(module, names)]
    return NodeSlicesExtension(layers_of_stage, is_adasum="adasum" in options)


class NodeSlicesExtension(FitExtension):
    """Extension that slices the layers listed in `node_slices` over the ranks of a node.

    Validation during training uses full weights, from the start of the validation epoch to its last hook. Ranks may
    then have different numbers of samples and batches, and one rank may run the module alone. Other runs of the
    trainer, such as `trainer.test`, use full layers.

    Args:
        layers: Groups of layer names that are sliced together. They include layers of this rank's pipeline stage only.
        is_adasum: Whether nodes combine gradients by Adasum.
    """

    def __init__(self, layers: list[tuple[str, ...]], *, is_adasum: bool) -> None:
        self._layers = layers
        self._is_adasum = is_adasum
        self._slices: SlicedFit | None = None  # set from `before_optimizers` to the end of the run
        self._is_first_step_compared = False
        self._averaged: set[int] = set()  # `id`s of the parameters whose gradients are averaged

    @property
    def _sliced_fit(self) -> SlicedFit:
        assert self._slices is not None
        return self._slices

    def before_optimizers(self, fit: FitContext) -> None:
        """Slice the layers over the ranks of each node.

        Collective: every rank must call it, in the same order.
        """
        # No broadcast is needed between the replicas of a pipeline stage, or if the user has turned DDP's broadcast
        # off: their weights are equal already.
        is_stage = isinstance(fit.topology, ReplicaSets)
        is_synced = is_stage or not fit.ddp_options.get("init_sync", True)
        self._slices = SlicedFit(
            fit.module,
            self._layers,
            averaged_models=unwrapped_averages_of(fit.trainer.callbacks),
            topology=fit.topology,
            timeout=fit.timeout,
            is_synced=is_synced,
        )
        names = ", ".join(self._slices.names)
        rank_zero_info(f"slices: {names} over the {len(fit.topology.node)} ranks of each node")

    def after_setup(self, fit: RunningFit) -> None:
        """Extend optimizer steps, overflow checks and gradient clipping to the slices on all ranks of a node.

        From now on optimizer steps, the overflow check and clipping by norm are collective within the node.
        """
        slices = self._sliced_fit
        wrapped = fit.wrapped
        refuse_excluded({"node slices": "`node_slices`"} | in_optimizers(fit.optimizers, of=slices))
        parameters = {id(parameter) for parameter in fit.module.parameters()}
        self._averaged = parameters - slices.frozen
        slices.connect(
            fit.optimizers,
            comm_dtype=fit.hook_state.comm_dtype,
            # DDP's flag is False in all backward passes of an accumulation step except the last one.
            is_last_backward=lambda: bool(wrapped.require_backward_grad_sync),
            is_adasum=self._is_adasum,
            window=getattr(fit.precision, "window", None),
        )
        if has_grad_scaler(fit.precision):
            slices.agree_on_overflow(fit.precision.scaler)
        _connect_stages(fit, slices.largest)
        fit.precision.clip_grad_by_norm = partial(
            clip_by_norm_over_ranks, device=fit.device, slices=slices, slice_group=slices.node
        )

    def before_training_step(
        self, fit: RunningFit, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Check before the first step that sliced layers compute the same values as full layers.

        The first call is collective.

        Raises:
            ValueError: Code between two layers, or code that reads a weight, computes another function on slices.
        """
        is_first_step = not self._is_first_step_compared
        self._is_first_step_compared = True
        # A pipeline has a check of its own: it compares the loss of its stages with the loss of the full network.
        if is_first_step and not isinstance(fit.topology, ReplicaSets):
            FirstStep(fit, self._sliced_fit, args, kwargs).compare()

    def step(self, fit: RunningFit, optimizer: Optimizer, run: Callable[[], Any]) -> Any:
        """Check that gradients of all trained parameters are averaged, then run the optimizer step.

        DDP ignores slices, so it would not notice a slice that was unfrozen after training started.
        """
        refuse_what_is_not_averaged(optimizer, self._averaged, fit.module)
        return run()

    def in_validation(self, fit: RunningFit) -> None:
        """Gather the full weights of sliced layers for validation.

        While an averaged model is swapped in, these are its weights.

        Collective: every rank must call it, in the same order.
        """
        self._sliced_fit.use_whole_layers()

    def after_validation(self, fit: RunningFit) -> None:
        """Switch the layers back to their slices after validation."""
        self._sliced_fit.use_slices()

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    @contextmanager
    def reading_module(self, fit: RunningFit) -> Iterator[None]:
        """Return a context in which the module's state dict contains full tensors on every rank.

        Collective: every rank must call it, in the same order.
        """
        fit.failures.refuse_to_save_alone(
            "`node_slices`", "layers are sliced over the ranks of the node"
        )
        self._sliced_fit.is_saving = True
        try:
            yield
        finally:
            self._sliced_fit.is_saving = False

    def optimizer_state(
        self, fit: RunningFit, optimizer: Optimizer, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Return an optimizer's state dict with full tensors on every rank.

        Collective: every rank must call it, in the same order.
        """
        return self._sliced_fit.whole_state(state, optimizer)

    def loading(
        self, fit: RunningFit, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> AbstractContextManager[Mapping[str, Any]]:
        """Return a context that yields this rank's slices of a full optimizer state dict, which are then loaded."""
        return nullcontext(self._sliced_fit.cut_state(state, optimizer))

    def status(self) -> dict[str, Any]:
        """Return the `RunStatus` field through which callbacks read this rank's slices without communication."""
        if self._slices is None:
            return {}
        return {"own_state": self._slices.own_state}

    # ---- end -------------------------------------------------------------------------------------------------------

    def end(self, fit: RunningFit, error: BaseException | None) -> None:
        """Record whether a failure has aborted the process groups, so that cleanup does not wait for them."""
        self._sliced_fit.is_aborted = fit.device.type == "cuda" and bool(fit.engine.failure)

    def put_back(self, fit: FitContext, error: BaseException | None) -> None:
        """Restore full layers and full optimizer state on every rank, unless the run has failed."""
        slices = self._slices
        self._slices = None
        vars(fit.precision).pop("clip_grad_by_norm", None)
        _connect_stages(fit, None)
        if slices is not None:
            slices.end(fit.optimizers, is_whole=error is None)


def _are_of_other_stages(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Return whether these layers belong to another pipeline stage, with parameters on the meta device.

    The result is True if at least one parameter is on the meta device. A rank of a pipeline has the layers of other
    stages there.
    """
    for name in names:
        for parameter in module.get_submodule(name).parameters():
            if parameter.is_meta:
                return True
    return False


def _connect_stages(fit: FitContext, largest: Callable[[Any], Any] | None) -> None:
    if hasattr(fit.precision, "connect_stages"):
        fit.precision.connect_stages(largest, is_of_slices=True)
