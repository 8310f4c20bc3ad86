"""Extension that shards the optimizer update over ranks, but keeps full state in checkpoints."""

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
    """Return the extension that shards the update, or warn and return None if there is only one shard.

    Raises:
        ValueError: The precision or the nodes cannot be combined with `shard_update`.
    """
    features = {"shard update": f"`shard_update` (={scope!r})"}
    refuse_excluded(features | in_precision(fit.precision) | in_nodes(fit.topology))
    if len(fit.topology.sharers(scope)) > 1:
        return ShardUpdateExtension(scope)
    rank_zero_warn(
        f"`shard_update` (={scope!r}) has no effect, because the {scope} has only one rank. Leave "
        "`shard_update` out, run several ranks on each node (`ranks_per_node` sets which ranks share "
        'a node), or set shard_update="world" on several nodes.'
    )
    return None


class ShardUpdateExtension(FitExtension):
    """Extension that shards the optimizer update over the ranks of a node or over all ranks.

    Args:
        scope: `"node"` or `"world"`.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._name = f"`shard_update` (={scope!r})"
        self._shared: ShardedFit | None = None  # set from `after_setup` to the end of the run

    def engine_options(self, fit: FitContext, plan: CommPlan) -> dict[str, Any]:
        """Return a communication plan with which gradients can be reduce-scattered to their owners."""
        # On CUDA, and with one rank on each node, `auto` all-reduces all gradients.
        is_flat = fit.device.type == "cuda" or fit.topology.ranks_per_node == 1
        return {"plan": plan_for_owners(plan, is_flat=is_flat), "shares_update": self._scope}

    def after_setup(self, fit: RunningFit) -> None:
        """Shard master weights and optimizer state over the ranks that share the update."""
        refuse_excluded({"shard update": self._name} | in_optimizers(fit.optimizers))
        # A late gather needs more memory, which is not worthwhile on the fast links of a node. A compiled forward
        # would not wait for weights.
        is_late = self._scope == "world" and not is_compiled(fit.module)
        self._shared = ShardedFit(fit, is_late=is_late)
        # In a pipeline stage, tied weights and the overflow check need all gradients.
        if not isinstance(fit.topology, ReplicaSets):
            # With `find_unused_parameters` DDP reads gradients as well, and needs averages of all elements.
            is_possible = not fit.ddp_options.get("find_unused_parameters", False)
            self._shared.scatter_gradients(fit.hook_state, is_possible=is_possible)

    @property
    def _sharded_fit(self) -> ShardedFit:
        assert self._shared is not None
        return self._shared

    def before_batch(self, fit: RunningFit, batch_idx: int) -> None:
        """Decide whether the next step reduce-scatters gradients or all-reduces them."""
        is_unobserved = self._sharded_fit.is_unobserved(fit.module)
        scatter = self._sharded_fit.scatter
        if scatter is not None:
            scatter.prepare_step(is_unobserved)
        # Each rank decides alone from its own hooks and callbacks, so ranks compare decisions that have an effect.
        has_effect = self._sharded_fit.is_half or (scatter is not None and scatter.is_possible)
        fit.engine.order_note = ""
        if has_effect and not is_unobserved:
            fit.engine.order_note = ", with gradients that a hook or callback may read"

    def step(self, fit: RunningFit, optimizer: Optimizer, run: Callable[[], Any]) -> Any:
        """Run the optimizer step, after checking that no user code reads reduce-scattered gradients."""
        self._sharded_fit.refuse_late_observers(fit.module)
        return run()

    def update(
        self,
        fit: RunningFit,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        run: Callable[[], Any],
        **options: Any,
    ) -> Any:
        """Run the closure and update this rank's shards of the parameters.

        With half precision, the precision plugin updates the shards of the master weights.
        """
        if self._sharded_fit.is_half:
            return run()
        # Closure, clipping and hooks use full parameters and gradients. Only the update itself uses shards.
        result = closure()
        fit.precision._after_closure(fit.module, optimizer)
        self._sharded_fit.step(optimizer, **options)
        return result

    @contextmanager
    def reading_module(self, fit: RunningFit) -> Iterator[None]:
        """Return a context in which the full master weights are available on rank zero.

        Collective: every rank must call it, in the same order.
        """
        fit.failures.refuse_to_save_alone(
            self._name, "fp32 master weights and optimizer state are sharded over several ranks"
        )
        self._sharded_fit.collect_masters()
        try:
            yield
        finally:
            self._sharded_fit.drop_masters()

    def optimizer_state(
        self, fit: RunningFit, optimizer: Optimizer, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Return an optimizer's state dict with full tensors on rank zero.

        Collective: every rank must call it, in the same order.
        """
        return self._sharded_fit.state_dict(optimizer, state)

    def status(self) -> Mapping[str, Any]:
        """Return the fields of `RunStatus` that describe this rank's parameter shards."""
        if self._shared is None:
            return {}
        return self._shared.placement

    def end(self, fit: RunningFit, error: BaseException | None) -> None:
        """Restore full master weights and optimizer state.

        After an error the other ranks do not take part, so the module keeps the half-precision weights of its
        last step.
        """
        shared = self._shared
        self._shared = None
        if shared is not None:
            shared.end(is_whole=error is None)
