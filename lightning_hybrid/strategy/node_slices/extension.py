"""`node_slices` as an extension: layers are cut before optimizers are created and whole again at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.averaged_models import averages_of
from lightning_hybrid.comm.norm_clipping import clip_by_norm_over_ranks
from lightning_hybrid.comm.topology import ReplicaSets
from lightning_hybrid.run_status import has_grad_scaler
from lightning_hybrid.strategy.arguments import refuse_what_is_not_averaged
from lightning_hybrid.strategy.compatibility import in_nodes, in_optimizers, refuse_excluded
from lightning_hybrid.strategy.extension import FitContext, FitExtension, RunningFit
from lightning_hybrid.strategy.node_slices.first_step import FirstStep
from lightning_hybrid.strategy.node_slices.layer_plans import requested_layers
from lightning_hybrid.strategy.node_slices.refusals import pruned_layers, refuse_layers
from lightning_hybrid.strategy.node_slices.sliced_fit import SlicedFit


def node_slices_for(fit: FitContext, options: Mapping[str, str]) -> NodeSlicesExtension | None:
    """Return the extension, or None with a warning if there is nothing to cut.

    Args:
        fit: The fit to come.
        options: Features that the strategy's options request, with their descriptions.

    Raises:
        ValueError: Options, callbacks, nodes or layers do not allow cutting.
    """
    module = fit.module
    topology = fit.topology
    layers = requested_layers(module)
    description = f"`node_slices` (={layers!r:.90})"
    refuse_excluded({**options, "node slices": description} | in_nodes(topology))
    if topology.ranks_per_node == 1:
        rank_zero_warn(
            f"{description} has no effect, because every node has one rank. Leave it out, or run several "
            "ranks on each node (`ranks_per_node` sets which ranks share one)."
        )
        return None

    pruned = pruned_layers(fit.trainer.callbacks)
    refuse_layers(module, layers, num_slices=len(topology.node), pruned=pruned)
    layers_of_stage = [names for names in layers if not _are_of_other_stages(module, names)]
    return NodeSlicesExtension(layers_of_stage, is_adasum="adasum" in options)


class NodeSlicesExtension(FitExtension):
    """Cut of the layers that a network names in `node_slices`, over the ranks of a node.

    Validation during the fit computes with whole weights, from the start of its epoch to its last hook. Ranks may then
    have different numbers of images and batches, and one rank may run the module alone. Other runs of the trainer, such
    as `trainer.test`, find whole layers.

    Args:
        layers: Names of the layers of this rank's stage that are cut together.
        is_adasum: Whether nodes are combined by Adasum.
    """

    def __init__(self, layers: list[tuple[str, ...]], *, is_adasum: bool) -> None:
        self._layers = layers
        self._is_adasum = is_adasum
        self._slices: SlicedFit | None = None  # from the cut to the end of the fit
        self._is_first_step_compared = False
        self._averaged: set[int] = set()  # `id`s of the parameters that are averaged in this fit

    @property
    def _sliced_fit(self) -> SlicedFit:
        assert self._slices is not None
        return self._slices

    def before_optimizers(self, fit: FitContext) -> None:
        """Cut the layers.

        Collective: every rank must call it, in the same order.
        """
        # The ranks of a pipeline's stage, and ranks without DDP's broadcast, begin with the same weights.
        is_stage = isinstance(fit.topology, ReplicaSets)
        is_synced = is_stage or not fit.ddp_options.get("init_sync", True)
        self._slices = SlicedFit(
            fit.module,
            self._layers,
            averaged_models=averages_of(fit.trainer.callbacks),
            topology=fit.topology,
            timeout=fit.timeout,
            is_synced=is_synced,
        )
        names = ", ".join(self._slices.names)
        rank_zero_info(f"slices: {names} over the {len(fit.topology.node)} ranks of each node")

    def after_setup(self, fit: RunningFit) -> None:
        """Connect optimizers, overflow check and clipping to all slices of the node. Their steps are collective."""
        slices = self._sliced_fit
        wrapped = fit.wrapped
        refuse_excluded({"node slices": "`node_slices`"} | in_optimizers(fit.optimizers, of=slices))
        parameters = {id(parameter) for parameter in fit.module.parameters()}
        self._averaged = parameters - slices.frozen
        slices.connect(
            fit.optimizers,
            comm_dtype=fit.hook_state.comm_dtype,
            # DDP's own flag: False between the batches of one step.
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
        """Compare the first step with the same step on whole layers. The first call is collective.

        Raises:
            ValueError: Code between two layers, or code that reads a weight, computes another function on slices.
        """
        is_first_step = not self._is_first_step_compared
        self._is_first_step_compared = True
        # A pipeline compares the loss of its stages with that of the whole network.
        if is_first_step and not isinstance(fit.topology, ReplicaSets):
            FirstStep(fit, self._sliced_fit, args, kwargs).compare()

    def step(self, fit: RunningFit, optimizer: Optimizer, run: Callable[[], Any]) -> Any:
        """Step, after a check that no slice was unfrozen: DDP ignores slices, so it would not notice."""
        refuse_what_is_not_averaged(optimizer, self._averaged, fit.module)
        return run()

    def in_validation(self, fit: RunningFit) -> None:
        """Compute with whole layers, or with those of an averaged model while it is swapped in.

        Collective: every rank must call it, in the same order.
        """
        self._sliced_fit.use_whole_layers()

    def after_validation(self, fit: RunningFit) -> None:
        """Compute with slices again."""
        self._sliced_fit.use_slices()

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    @contextmanager
    def reading_module(self, fit: RunningFit) -> Iterator[None]:
        """Provide whole layers in the module's state on every rank.

        Collective: every rank must call it, in the same order.
        """
        fit.failures.refuse_to_save_alone(
            "`node_slices`", "layers are cut over the ranks of the node"
        )
        self._sliced_fit.is_saving = True
        try:
            yield
        finally:
            self._sliced_fit.is_saving = False

    def optimizer_state(
        self, fit: RunningFit, optimizer: Optimizer, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the optimizer state with whole tensors on every rank.

        Collective: every rank must call it, in the same order.
        """
        return self._sliced_fit.whole_state(state, optimizer)

    def loading(
        self, fit: RunningFit, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> AbstractContextManager[Mapping[str, Any]]:
        """Return a context with this rank's slices of the optimizer state."""
        return nullcontext(self._sliced_fit.cut_state(state, optimizer))

    def status(self) -> dict[str, Any]:
        """Return the field of `RunStatus` with which this rank's slices are read alone."""
        if self._slices is None:
            return {}
        return {"own_state": self._slices.own_state}

    # ---- end -------------------------------------------------------------------------------------------------------

    def end(self, fit: RunningFit, error: BaseException | None) -> None:
        """Record whether a failure has ended the process groups, so that nothing waits for them."""
        self._sliced_fit.is_aborted = fit.device.type == "cuda" and bool(fit.engine.failure)

    def put_back(self, fit: FitContext, error: BaseException | None) -> None:
        """Make layers and optimizer state whole again on every rank, unless the run has failed."""
        slices = self._slices
        self._slices = None
        vars(fit.precision).pop("clip_grad_by_norm", None)
        _connect_stages(fit, None)
        if slices is not None:
            slices.end(fit.optimizers, is_whole=error is None)


def _are_of_other_stages(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Return whether a parameter of these layers is on the meta device, as on ranks of other stages."""
    for name in names:
        for parameter in module.get_submodule(name).parameters():
            if parameter.is_meta:
                return True
    return False


def _connect_stages(fit: FitContext, largest: Callable[[Any], Any] | None) -> None:
    if hasattr(fit.precision, "connect_stages"):
        fit.precision.connect_stages(largest, is_of_slices=True)
