"""`shard_update` as an extension: when the update is shared, its step, and whole checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_hybrid.comm import CommPlan
from lightning_hybrid.comm.codec.coded_plan import plan_for_owners
from lightning_hybrid.comm.topology import ReplicaSets
from lightning_hybrid.strategy.compatibility import (
    in_nodes,
    in_optimizers,
    in_precision,
    refuse_excluded,
)
from lightning_hybrid.strategy.extension import FitContext, FitExtension, RunningFit
from lightning_hybrid.strategy.shard_update.late_gather import is_compiled
from lightning_hybrid.strategy.shard_update.sharded_fit import ShardedFit

Scope = Literal["node", "world"]


def shard_update_for(fit: FitContext, scope: Scope) -> ShardUpdateExtension | None:
    """Make the extension; None, with a warning, where no rank has another one to share with.

    Raises:
        ValueError: precision or nodes do not fit.
    """
    asked = {"shard update": f"`shard_update` (={scope!r})"}
    refuse_excluded(asked | in_precision(fit.precision) | in_nodes(fit.topology))
    if len(fit.topology.sharers(scope)) > 1:
        return ShardUpdateExtension(scope)
    rank_zero_warn(
        f"`shard_update` (={scope!r}) shares nothing: every {scope} has one rank. Leave `shard_update` "
        "out, or run several ranks on each node (`ranks_per_node` says which ranks share one), or, where "
        'there are several nodes, write shard_update="world".'
    )
    return None


class ShardUpdateExtension(FitExtension):
    """Lets the ranks of a node, or of the world, share the update."""

    _shared: ShardedFit | None = None  # from set-up to end

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._name = f"`shard_update` (={scope!r})"

    def engine_options(self, fit: FitContext, plan: CommPlan) -> dict[str, Any]:
        """Return the plan with which owners of parts get their sums."""
        # On CUDA, and with one rank on each node, `auto` averages everything on all ranks.
        is_flat = fit.device.type == "cuda" or fit.topology.ranks_per_node == 1
        return {"plan": plan_for_owners(plan, is_flat=is_flat), "shares_update": self._scope}

    def after_setup(self, fit: RunningFit) -> None:
        """Cut masters and optimizer state."""
        refuse_excluded({"shard update": self._name} | in_optimizers(fit.optimizers))
        # In the node links are fast, and memory is the reason; a compiled forward would not wait for its weights.
        is_late = self._scope == "world" and not is_compiled(fit.module)
        self._shared = ShardedFit(fit, is_late=is_late)
        # In stages of a pipeline tied weights and the verdict look at all gradients.
        if not isinstance(fit.topology, ReplicaSets):
            # It looks for unused parameters on its own, in gradients that are then not averages everywhere.
            is_possible = not fit.ddp_options.get("find_unused_parameters", False)
            self._shared.scatter_gradients(fit.hook_state, is_possible=is_possible)

    @property
    def _parts(self) -> ShardedFit:
        assert self._shared is not None
        return self._shared

    def before_batch(self, fit: RunningFit, batch_idx: int) -> None:
        """Decide whether gradients are averaged for their owners alone."""
        if self._parts.scatter is not None:
            self._parts.scatter.turn(self._parts.is_unobserved(fit.module))

    def step(self, fit: RunningFit, optimizer: Optimizer, run: Callable[[], Any]) -> Any:
        """Step, unless something looks at gradients now that are those of owners."""
        self._parts.refuse_late_observers(fit.module)
        return run()

    def update(
        self,
        fit: RunningFit,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        run: Callable[[], Any],
        **options: Any,
    ) -> Any:
        """Update parts, where parameters have no masters."""
        if self._parts.is_half:
            return run()
        # The closure has whole parameters and gradients, as clipping and hooks; only the update itself has parts.
        result = closure()
        fit.precision._after_closure(fit.module, optimizer)
        self._parts.step(optimizer, **options)
        return result

    @contextmanager
    def reading_module(self, fit: RunningFit) -> Iterator[None]:
        """Bring whole masters to rank zero. Collective."""
        fit.failures.refuse_to_save_alone(
            self._name, "masters and optimizer state are in parts on several ranks"
        )
        self._parts.collect_masters()
        try:
            yield
        finally:
            self._parts.drop_masters()

    def optimizer_state(
        self, fit: RunningFit, optimizer: Optimizer, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Bring the whole state to rank zero. Collective."""
        return self._parts.state_dict(optimizer, state)

    def status(self) -> Mapping[str, Any]:
        """Return what this rank has of each parameter."""
        return {} if self._shared is None else self._shared.placement

    def end(self, fit: RunningFit, error: BaseException | None) -> None:
        """Make masters and state whole. After an error others do not come: weights are those of the step, rounded."""
        shared = self._shared
        self._shared = None
        if shared is not None:
            shared.end(is_whole=error is None)
