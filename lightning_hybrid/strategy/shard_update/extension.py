"""The strategy's side of `shard_update="node"`: when the update is shared, its step, and whole checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_hybrid.comm import CommEngine, CommPlan, HookState, Topology
from lightning_hybrid.comm.codec.coded_plan import plan_for_owners
from lightning_hybrid.lightning_names import lightning_function
from lightning_hybrid.precision.master_weights import MasterWeights
from lightning_hybrid.strategy.compatibility import in_nodes, in_optimizers, in_precision, refuse_excluded
from lightning_hybrid.strategy.shard_update.sharded_fit import ShardedFit


class SharedUpdateMixin:
    """Strategy mixin: let the ranks of a node share the update, with `shard_update="node"`."""

    # It derives from nothing: `super()` is the strategy that stands after it in the class line, `DDPStrategy`.

    _shard_update = "off"
    _shared: ShardedFit | None = None
    _topology: Topology
    _engine: CommEngine | None
    optimizers: list[Optimizer]
    precision_plugin: Any
    lightning_module: Any
    _refuse_to_save_alone: Any
    _ddp_kwargs: dict[str, Any]
    _hook_state: HookState
    root_device: torch.device
    _plan: CommPlan

    def _check_sharing(self) -> bool:
        # Whether the update is shared. Where the topology is known, before anything is built.
        if self._shard_update == "off":
            return False
        asked = {"shard update": "`shard_update` (='node')"}
        refuse_excluded(asked | in_precision(self.precision_plugin) | in_nodes(self._topology))
        if self._topology.ranks_per_node == 1:
            rank_zero_warn(
                "`shard_update` (='node') shares nothing: every node has one rank. Leave `strategy.shard_update` "
                "out, or run several ranks on each node (`strategy.ranks_per_node` says which ranks share one)."
            )
            return False
        self._plan = plan_for_owners(self._plan, on_cuda=self.root_device.type == "cuda")
        return True

    def _begin_sharing(self, masters: MasterWeights | None) -> None:
        refuse_excluded({"shard update": "`shard_update` (='node')"} | in_optimizers(self.optimizers))
        assert self._engine is not None
        self._shared = ShardedFit(self._engine, masters, self.optimizers, self.root_device)
        # It looks for unused parameters on its own, in gradients that are then not averages everywhere.
        is_possible = not self._ddp_kwargs.get("find_unused_parameters", False)
        self._shared.scatter_gradients(self._hook_state, is_possible=is_possible)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Start a batch as DDP; decide whether gradients are averaged for their owners alone."""
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]
        if self._shared is not None and self._shared.scatter is not None:
            self._shared.scatter.turn(self._shared.is_unobserved(self.lightning_module))

    def _end_sharing(self, ended_by: BaseException | None) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            # After an error other ranks do not come: the weights are then those of the step, rounded.
            shared.end(is_whole=ended_by is None)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Step as DDP; where parameters have no masters, on their parts."""
        if self._shared is not None:
            self._shared.refuse_late_observers(self.lightning_module)
        if self._shared is None or self._shared.has_masters:
            return super().optimizer_step(optimizer, closure, model, **kwargs)  # type: ignore[misc]
        # The closure has whole parameters and gradients, as clipping and hooks; only the update itself has parts.
        result = closure()
        self.precision_plugin._after_closure(model or self.lightning_module, optimizer)
        self._shared.step(optimizer, **kwargs)
        return result

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state: whole masters on rank zero. Collective where the update is shared."""
        if self._shared is None:
            state: dict[str, Any] = super().lightning_module_state_dict()  # type: ignore[misc]
            return state
        self._refuse_to_save_alone(
            "`shard_update` (='node')", "masters and optimizer state are in parts on the ranks of the node"
        )
        self._shared.collect_masters()
        try:
            state = super().lightning_module_state_dict()  # type: ignore[misc]
        finally:
            self._shared.drop_masters()
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state as DDP: whole on rank zero. Collective where the update is shared."""
        state: dict[str, Any] = super().optimizer_state(optimizer)  # type: ignore[misc]
        return state if self._shared is None else self._shared.state_dict(optimizer, state)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load as DDP; where the update is shared, this rank's parts."""
        if self._shared is None:
            super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
            return
        to_device = lightning_function("fabric.utilities.optimizer._optimizer_to_device")
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parts = self._shared.cut_state_dict(optimizer, state)
            with self._shared.weights.swapped_in(optimizer):
                optimizer.load_state_dict(parts)
                to_device(optimizer, self.root_device)
