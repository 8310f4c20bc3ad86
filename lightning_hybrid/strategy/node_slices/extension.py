"""`node_slices` as an extension: from the cut, before optimizers are made, to whole layers at the end."""

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


def node_slices_for(fit: FitContext, asked: Mapping[str, str]) -> NodeSlicesExtension | None:
    """Make the extension; None, with a warning, where nothing is to be cut. `asked`: by options, as of `in_options`.

    Raises:
        ValueError: options, callbacks, nodes or layers do not fit.
    """
    module = fit.module
    topology = fit.topology
    layers = requested_layers(fit.module)
    refuse_excluded(
        {**asked, "node slices": f"`node_slices` (={layers!r:.90})"} | in_nodes(topology)
    )
    if topology.ranks_per_node == 1:
        rank_zero_warn(
            f"`node_slices` (={layers!r:.90}) cuts nothing: every node has one rank. Leave it out, or run "
            "several ranks on each node (`ranks_per_node` says which ranks share one)."
        )
        return None
    refuse_layers(
        module, layers, num_slices=len(topology.node), pruned=pruned_layers(fit.trainer.callbacks)
    )
    here = [names for names in layers if not any(one.is_meta for one in _parameters(module, names))]
    return NodeSlicesExtension(
        here, is_adasum="adasum" in asked
    )  # others are on the ranks of other stages


class NodeSlicesExtension(FitExtension):
    """Cuts the layers that a network names in `node_slices` over the ranks of a node.

    Validation within the fit computes with whole weights, from the start of its epoch to its last hook: ranks may have
    any number of images and batches, and one may run the module alone. Other runs of the trainer find whole layers.
    """

    def __init__(self, layers: list[tuple[str, ...]], *, is_adasum: bool) -> None:
        self._layers = layers
        self._is_adasum = is_adasum
        self._slices: SlicedFit | None = None  # from the cut to the end
        self._is_compared = False  # with whole layers, in the first step

    @property
    def _cut(self) -> SlicedFit:
        assert self._slices is not None
        return self._slices

    def before_optimizers(self, fit: FitContext) -> None:
        """Cut the layers. Collective."""
        self._slices = SlicedFit(
            fit.module,
            self._layers,
            averages=averages_of(fit.trainer.callbacks),
            topology=fit.topology,
            timeout=fit.timeout,
            is_synced=isinstance(fit.topology, ReplicaSets)
            or not fit.ddp_options.get("init_sync", True),
        )
        rank_zero_info(
            f"slices: {', '.join(self._cut.names)} over the {len(fit.topology.node)} ranks of each node"
        )

    def after_setup(self, fit: RunningFit) -> None:
        """Let optimizers, the verdict on overflow and clipping see all slices. Collective steps follow."""
        slices = self._cut
        wrapped = fit.wrapped
        refuse_excluded({"node slices": "`node_slices`"} | in_optimizers(fit.optimizers, of=slices))
        self._averaged = {id(parameter) for parameter in fit.module.parameters()} - slices.frozen
        slices.connect(
            fit.optimizers,
            comm_dtype=fit.hook_state.comm_dtype,
            # DDP's own flag: False between the batches of one step.
            averages=lambda: bool(wrapped.require_backward_grad_sync),
            is_adasum=self._is_adasum,
            window=getattr(fit.precision, "window", None),
        )
        if has_grad_scaler(fit.precision):
            slices.agree_on_overflow(fit.precision.scaler)
        _connect_stages(fit, slices.largest)
        clip = partial(
            clip_by_norm_over_ranks, device=fit.device, slices=slices, slice_group=slices.node
        )
        fit.precision.clip_grad_by_norm = clip

    def before_training_step(
        self, fit: RunningFit, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Compare the first step with that of whole layers. Collective then.

        Raises:
            ValueError: code between two layers, or one that reads a weight, computes something else on slices.
        """
        is_first_step = not self._is_compared
        self._is_compared = True
        # A pipeline compares the loss of its stages with that of the whole network.
        if is_first_step and not isinstance(fit.topology, ReplicaSets):
            FirstStep(fit, self._cut, args, kwargs).compare()

    def step(self, fit: RunningFit, optimizer: Optimizer, run: Callable[[], Any]) -> Any:
        """Step, unless a slice was unfrozen: DDP ignores all."""
        refuse_what_is_not_averaged(optimizer, self._averaged, fit.module)
        return run()

    def in_validation(self, fit: RunningFit) -> None:
        """Compute with whole layers, of the average while one is swapped in. Collective."""
        self._cut.gather()

    def after_validation(self, fit: RunningFit) -> None:
        """Compute with slices again."""
        self._cut.drop()

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    @contextmanager
    def reading_module(self, fit: RunningFit) -> Iterator[None]:
        """Let the module's state have whole layers on every rank. Collective."""
        fit.failures.refuse_to_save_alone(
            "`node_slices`", "layers are cut over the ranks of the node"
        )
        self._cut.is_saving = True
        try:
            yield
        finally:
            self._cut.is_saving = False

    def optimizer_state(
        self, fit: RunningFit, optimizer: Optimizer, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the state, whole on every rank. Collective."""
        return self._cut.whole_state(state, optimizer)

    def loading(
        self, fit: RunningFit, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> AbstractContextManager[Mapping[str, Any]]:
        """Load this rank's slices."""
        return nullcontext(self._cut.cut_state(state, optimizer))

    def status(self) -> dict[str, Any]:
        """Return how to read this rank's slices alone."""
        return {} if self._slices is None else {"own_state": self._slices.own_state}

    # ---- end -------------------------------------------------------------------------------------------------------

    def end(self, fit: RunningFit, error: BaseException | None) -> None:
        """Note whether the groups are there to be waited for."""
        self._cut.is_aborted = fit.device.type == "cuda" and bool(fit.engine.failure)

    def put_back(self, fit: FitContext, error: BaseException | None) -> None:
        """Make layers and optimizer state whole again on every rank, unless the run has failed."""
        slices = self._slices
        self._slices = None
        vars(fit.precision).pop("clip_grad_by_norm", None)
        _connect_stages(fit, None)
        if slices is not None:
            slices.end(fit.optimizers, is_whole=error is None)


def _parameters(module: nn.Module, names: tuple[str, ...]) -> list[nn.Parameter]:
    return [one for name in names for one in module.get_submodule(name).parameters()]


def _connect_stages(fit: FitContext, largest: Callable[[Any], Any] | None) -> None:
    if hasattr(fit.precision, "connect_stages"):
        fit.precision.connect_stages(largest, is_of_slices=True)
