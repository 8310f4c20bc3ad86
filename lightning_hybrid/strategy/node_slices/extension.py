"""The strategy's side of `node_slices`: from the cut, before optimizers are made, to whole layers at the end."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_hybrid.comm import Topology
from lightning_hybrid.lightning_names import lightning_types
from lightning_hybrid.strategy.compatibility import (
    in_callbacks,
    in_module,
    in_nodes,
    in_optimizers,
    in_precision,
    refuse_excluded,
)
from lightning_hybrid.strategy.node_slices.norm_clipping import clip_by_norm_over_slices
from lightning_hybrid.strategy.node_slices.refusals import refuse_layers, refuse_unknown_names, without_odd_heads
from lightning_hybrid.strategy.node_slices.sliced_fit import SlicedFit, requested_layers


class SlicesMixin:
    """Strategy mixin: in a fit, cut the layers that a network names in `node_slices` over the ranks of a node.

    Validation within the fit computes with whole weights, from the start of its epoch to its last hook: ranks may have
    any number of images and batches, and one may run the module alone. Other runs of the trainer find whole layers.
    """

    # It derives from nothing: `super()` is the strategy that stands after it in the class line, `DDPStrategy`.

    _slices: SlicedFit | None = None
    _whole_in_validation: Any = None
    _has_failed = False
    _asked: dict[str, str]
    _comm_dtype: torch.dtype | None
    _averaged_parameters: set[int] | None
    _ddp_kwargs: dict[str, Any]
    _timeout: Any
    _masters: Any
    _half: Any
    _discover_topology: Any
    model: Any
    optimizers: list[Optimizer]
    precision_plugin: Any
    lightning_module: Any
    _refuse_to_save_alone: Any

    def model_to_device(self) -> None:
        """Move the module; in a fit, cut layers before optimizers are made of them."""
        super().model_to_device()  # type: ignore[misc]
        if self.lightning_module is not None and self.lightning_module.trainer.state.fn == "fit":
            self._begin_slicing()

    def _begin_slicing(self) -> None:
        module = self.lightning_module
        if not (layers := requested_layers(module)):
            return
        callbacks = module.trainer.callbacks
        asked = {**self._asked, "node slices": f"`node_slices` (={layers})"}
        refuse_excluded(asked | in_precision(self.precision_plugin) | in_module(module))
        refuse_unknown_names(module, layers)
        cut = [module.get_submodule(name) for names in layers for name in names]
        refuse_excluded(asked | in_callbacks(callbacks, cut=cut))
        topology: Topology = self._discover_topology()
        refuse_excluded(asked | in_nodes(topology))
        if topology.ranks_per_node == 1:
            rank_zero_warn(
                f"`node_slices` (={layers}) cuts nothing: every node has one rank. Leave it out (in recipes "
                "`model.slice_fc`), or run several ranks on each node (`strategy.ranks_per_node` says which ranks "
                "share one)."
            )
            return
        if not (layers := without_odd_heads(module, layers, num_slices=len(topology.node))):
            return
        refuse_layers(module, layers, num_slices=len(topology.node))
        averaging = lightning_types("pytorch.callbacks.WeightAveraging")
        averages = [one._average_model for one in callbacks if isinstance(one, averaging)]
        self._slices = SlicedFit(
            module,
            layers,
            averages=[average.module for average in averages if average is not None],
            topology=topology,
            timeout=self._timeout,
            is_synced=not self._ddp_kwargs.get("init_sync", True),
        )
        rank_zero_info(f"slices: {', '.join(self._slices.names)} over the {len(topology.node)} ranks of each node")
        self._whole_in_validation = _whole_in_validation(self._slices)
        callbacks.append(self._whole_in_validation)  # last: an average is swapped in where validation begins

    def _connect_slices(self) -> None:
        """Let optimizers, the verdict on overflow and clipping see all slices. Collective steps follow."""
        if self._slices is None:
            return
        refuse_excluded({"node slices": "`node_slices`"} | in_optimizers(self.optimizers, of=self._slices))
        if self._averaged_parameters is not None:
            self._averaged_parameters -= self._slices.frozen  # DDP ignores all: what is unfrozen later is to be refused
        self._slices.connect(
            self.optimizers,
            self._masters,
            comm_dtype=self._comm_dtype,
            # DDP's own flag: False between the batches of one step.
            averages=lambda: bool(getattr(self.model, "require_backward_grad_sync", True)),
        )
        if self._half is not None:
            self._half.connect_stages(self._slices.largest)
        clip = partial(clip_by_norm_over_slices, slices=self._slices, group=self._slices.node)
        self.precision_plugin.clip_grad_by_norm = clip

    def on_validation_end(self) -> None:
        """Compute with slices again: here, as this hook comes after those of callbacks and module."""
        if self._slices is not None:
            self._slices.drop()
        super().on_validation_end()  # type: ignore[misc]

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state, with whole layers on every rank. Collective where layers are cut."""
        if self._slices is not None:
            self._refuse_to_save_alone("`node_slices`", "layers are cut over the ranks of the node")
            self._slices.is_saving = True
        try:
            state: dict[str, Any] = super().lightning_module_state_dict()  # type: ignore[misc]
        finally:
            if self._slices is not None:
                self._slices.is_saving = False
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state as DDP, whole on every rank. Collective where layers are cut."""
        state: dict[str, Any] = super().optimizer_state(optimizer)  # type: ignore[misc]
        return state if self._slices is None else self._slices.whole_state(state, optimizer)

    def _with_own_slices(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a checkpoint with this rank's slices of optimizer state."""
        if self._slices is None:
            return checkpoint
        each = zip(checkpoint["optimizer_states"], self.optimizers, strict=True)
        return {**checkpoint, "optimizer_states": [self._slices.cut_state(*one) for one in each]}

    # ---- end -------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Note that other ranks do not come any more."""
        self._has_failed = True
        super().on_exception(exception)  # type: ignore[misc]

    def teardown(self) -> None:
        """Make layers and optimizer state whole again on every rank, unless the run has failed."""
        slices, self._slices, has_failed, self._has_failed = self._slices, None, self._has_failed, False
        try:
            if slices is not None:
                self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
                if self._half is not None:
                    self._half.connect_stages(None)
                if (callbacks := self.lightning_module.trainer.callbacks).count(self._whole_in_validation):
                    callbacks.remove(self._whole_in_validation)
                self._whole_in_validation = None
                slices.end(self.optimizers, is_whole=not has_failed)
        finally:
            super().teardown()  # type: ignore[misc]


def _whole_in_validation(slices: SlicedFit) -> Any:
    # A callback of whichever Lightning runs, and the last: it gathers once an average has been swapped in, and again
    # once it is swapped out, as the module's own hook and those at the end of validation find the weights of the fit.
    kinds: tuple[Any, ...] = lightning_types("pytorch.callbacks.Callback")
    methods = {
        "on_validation_epoch_start": lambda self, trainer, pl_module: slices.gather(),
        "on_validation_epoch_end": lambda self, trainer, pl_module: slices.gather(),
    }
    return type("WholeLayersInValidation", kinds, methods)()
