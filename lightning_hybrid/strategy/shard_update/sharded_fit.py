"""The parts of one fit with `shard_update`: from the first cut into parts to the whole module at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.comm import HookState
from lightning_hybrid.lightning_names import is_overridden
from lightning_hybrid.placement import BLOCK, has_gaps, is_split, spans, with_entries
from lightning_hybrid.precision.averaging import masters_of
from lightning_hybrid.precision.master_step import MasterStep
from lightning_hybrid.precision.master_weights import MasterPair
from lightning_hybrid.precision.optimizer_protocol import (
    DirectSteps,
    grads_are_observed,
    parameters_of,
    supports_fused_master_step,
    temporary_attributes,
)
from lightning_hybrid.strategy.extension import RunningFit
from lightning_hybrid.strategy.shard_update.gradient_scatter import GradientScatter
from lightning_hybrid.strategy.shard_update.late_gather import LateGather
from lightning_hybrid.strategy.shard_update.optimizer_state import collected_state_dict, cut
from lightning_hybrid.strategy.shard_update.shard_exchange import ShardExchange
from lightning_hybrid.strategy.shard_update.shard_pairs import MasterShard, WeightShard, WeightShards


class ShardedFit:
    """The parts of one fit: which elements of which parameters this rank updates, and the exchanges with the others.

    Parameters of fewer blocks than the ranks of a node (`placement.is_split`), where all ranks share of one block, and
    those with gaps in memory stay whole on all ranks.
    Who has which part follows from order and sizes of the parameters in the optimizers, and not from DDP's buckets.

    Args:
        fit: its optimizers get `parts` and `add_up_`, where they know these.
        is_late: whether the gather of weights goes on in the next forward.
    """

    def __init__(self, fit: RunningFit, *, is_late: bool) -> None:
        masters, engine = masters_of(fit.module), fit.engine
        self.exchange = ShardExchange(engine)
        self._late = LateGather(engine.trace) if is_late else None
        self.weights = WeightShards() if masters is None else masters
        self.has_masters = masters is not None
        self._optimizers, self._device = list(fit.optimizers), fit.device
        self._cut_parameters()
        self.weights.gather_, self.weights.largest = self._gather_, self._largest_gradient
        self.scatter: GradientScatter | None = None
        self._lent = ExitStack()
        for optimizer in self._optimizers:
            for parameter in parameters_of(optimizer):
                pair = self.part_pair_of(parameter)
                if pair is not None and parameter in optimizer.state:  # made by the constructor
                    optimizer.state[parameter] = cut(optimizer.state[parameter], pair)
            if hasattr(optimizer, "parts"):
                pairs = [pair for pair in self.weights.of(optimizer) if isinstance(pair, MasterShard | WeightShard)]
                # Slices of layers too, which ranks of all nodes hold.
                num = 1 if self.exchange.is_in_node else engine.topology.num_nodes
                given = {key: replace(part, num_holders=num) for key, part in (optimizer.parts or {}).items()}
                parts = {**given, **{pair.master: pair.part for pair in pairs}}
                self._lent.enter_context(temporary_attributes(optimizer, parts=parts, add_up_=self.exchange.add_up_))
        self._direct_steps: list[DirectSteps] = []
        self._step: MasterStep | None = None
        if masters is None:
            self._step = step = MasterStep(self.weights, fit.device)
            for optimizer in self._optimizers:
                self._direct_steps.append(DirectSteps(optimizer, self._called_by_user, lambda: step.is_running))
        if self._late is not None:
            self._lent.enter_context(self._late)

    def _cut_parameters(self) -> None:
        rank, num_parts = self.exchange.place
        found = dict.fromkeys(parameter for one in self._optimizers for parameter in parameters_of(one))
        # What DDP ignores, as slices of layers, differs between ranks: there is no whole to have parts of.
        same = [p for p in found if not getattr(p, "_ddp_ignored", False) and not p.is_meta]  # meta: of other stages
        # Of the world most tensors have fewer blocks than it has ranks: then some ranks have no part of them.
        num_least = num_parts if self.exchange.is_in_node else 2
        large = [p for p in same if is_split(p.numel(), num_least, BLOCK) and not has_gaps(p)]
        owned = [p for p in large if not self.has_masters or self.weights.pair_of(p) is not None]
        for parameter, own in zip(owned, spans_by_rank([p.numel() for p in owned], num_parts), strict=True):
            pair = self.weights.pair_of(parameter)
            if pair is not None:
                self.weights.pairs[id(parameter)] = MasterShard(pair, own, rank)
            else:
                self.weights.pairs[id(parameter)] = WeightShard(parameter, own, rank)

    def _gather_(self, pairs: list[MasterPair], tensors: list[Tensor]) -> None:
        late = self._late
        if late is not None:
            late.wait()  # for what no forward has read
        is_of_weights = all(tensor is pair.low for pair, tensor in zip(pairs, tensors, strict=True))
        self.exchange.gather_(pairs, tensors, late=late if is_of_weights else None)

    def _largest_gradient(self, parameters: Iterable[Tensor]) -> Tensor:
        # Gradients of others' parts may be this rank's own.
        each = ((one.grad, self.part_pair_of(one)) for one in parameters if one.grad is not None)
        return self.exchange.largest([grad if pair is None else pair.part_of(grad) for grad, pair in each])

    def part_pair_of(self, parameter: Tensor) -> MasterShard | WeightShard | None:
        """Return the pair of a parameter that is cut into parts; None for others."""
        pair = self.weights.pair_of(parameter)
        return pair if isinstance(pair, MasterShard | WeightShard) else None

    def scatter_gradients(self, state: HookState, *, is_possible: bool) -> None:
        """Let buckets be averaged for their owners alone, in steps in which nothing looks at gradients."""
        engine = state.engine
        assert engine is not None
        is_plain = state.comm_dtype is None and isinstance(engine.dtype_across_nodes, torch.dtype | None)
        self.scatter = GradientScatter(engine, self.part_pair_of, is_possible=is_possible and is_plain)
        state.scatter = self.scatter

    def is_unobserved(self, module: Any) -> bool:
        """Return whether nothing but the update looks at gradients, which then is right on parts of them."""
        # Beyond what is promised unscaled gradients: hooks that find those of `backward`. After the step the module's
        # alone: among callbacks every progress bar has that one.
        hooks = ("on_after_backward", "optimizer_step", "on_train_batch_end")
        if not module.automatic_optimization or any(
            is_overridden(hook, module, "pytorch.LightningModule") for hook in hooks
        ):
            return False
        callbacks = module.trainer.callbacks
        if any(is_overridden("on_after_backward", one, "pytorch.callbacks.Callback") for one in callbacks):
            return False
        return not any(
            grads_are_observed(one, module) or (self.has_masters and not supports_fused_master_step(one, self._device))
            for one in self._optimizers
        )

    def refuse_late_observers(self, module: Any) -> None:
        """Check before a step that nothing looks at gradients now that were averaged for their owners alone.

        Raises:
            RuntimeError: something does.
        """
        if self.scatter is not None and self.scatter.is_on and not self.is_unobserved(module):
            raise RuntimeError(
                "`shard_update` has averaged the gradients of this step for their owners alone, and since "
                "its batch began clipping, a hook or a step hook of the optimizer is there that looks at them. "
                "Register it before training starts, or between two batches."
            )

    @property
    def placement(self) -> dict[str, Any]:
        """The fields of `RunStatus` that say what this rank has of each parameter."""
        pairs = {key: pair for key, pair in self.weights.pairs.items() if isinstance(pair, MasterShard | WeightShard)}
        parts = {key: pair.part for key, pair in pairs.items()}
        return {"parts": parts, "place_in_node": self.exchange.place, "update_context": self.parts_with_gradients}

    @contextmanager
    def parts_with_gradients(self, optimizer: Optimizer) -> Iterator[None]:
        """Put what this rank updates into the optimizer, to be looked at."""
        pairs = self.weights.of(optimizer)
        for pair in pairs:
            pair.master.grad = None if pair.low.grad is None else pair.part_of(pair.low.grad)
        try:
            with self.weights.swapped_in(optimizer):
                yield
        finally:
            for pair in pairs:
                pair.master.grad = None

    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """Step on the parts of parameters without masters, and gather the parameters."""
        assert self._step is not None
        with self._step.on_masters(optimizer):
            optimizer.step(**kwargs)

    def _called_by_user(self, optimizer: Optimizer) -> AbstractContextManager[Any]:
        assert self._step is not None
        return self._step.on_masters(optimizer)

    @property
    def master_parts(self) -> list[MasterShard]:
        """The masters of which this rank has a part."""
        return [pair for pair in self.weights.pairs.values() if isinstance(pair, MasterShard)]

    def collect_masters(self, *, everywhere: bool = False) -> None:
        """Bring the masters together until `drop_masters`: on rank zero, or everywhere. Collective."""
        pairs = self.master_parts
        for pair in pairs:
            pair.absorb_outside_writes_()
        if everywhere:
            values = [torch.empty_like(pair.low, dtype=torch.float32) for pair in pairs]
            for pair, value in zip(pairs, values, strict=True):
                pair.part_of(value).copy_(pair.master.detach())
                pair.collected = value
            self.exchange.gather_(pairs, values)
            return
        wholes = self.exchange.collect(pairs, [pair.master.detach() for pair in pairs])
        for index, pair in enumerate(pairs):
            # On others nothing is saved, and no memory is to be spent on it.
            pair.collected = pair.low.detach() if wholes is None else wholes[index]

    def drop_masters(self) -> None:
        """Forget what `collect_masters` has brought."""
        for pair in self.master_parts:
            pair.collected = None

    def state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict of `optimizer` with whole tensors, on rank zero. Collective."""
        return collected_state_dict(state, optimizer, self.part_pair_of, self.exchange)

    @contextmanager
    def loading(self, optimizer: Optimizer, state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield this rank's parts of a whole state dict; parts without masters stand in the optimizer meanwhile."""
        parts = with_entries(state, optimizer, lambda parameter, entry: cut(entry, self.part_pair_of(parameter)))
        with nullcontext() if self.has_masters else self.weights.swapped_in(optimizer):
            yield parts

    def end(self, *, is_whole: bool) -> None:
        """Give the optimizers back what was taken; with `is_whole` masters and state are whole. Collective then."""
        try:
            if is_whole:
                if self._late is not None:
                    self._late.wait()
                self._make_whole()
        finally:
            self.weights.gather_ = None
            for steps in self._direct_steps:
                steps.remove()
            self._lent.close()

    def _make_whole(self) -> None:
        # State on rank zero alone, where `trainer.save_checkpoint` may still write it.
        self.collect_masters(everywhere=True)
        for optimizer in self._optimizers:
            whole = self.state_dict(optimizer, optimizer.state_dict())
            if self.exchange.is_first:
                for parameter, entry in zip(parameters_of(optimizer), _entries(whole), strict=True):
                    if self.part_pair_of(parameter) is not None and entry:
                        optimizer.state[parameter] = entry


def spans_by_rank(numels: Sequence[int], num_parts: int) -> list[list[tuple[int, int]]]:
    """Return for each tensor the span of each rank: the longest to the rank that has least so far.

    >>> spans_by_rank([3 * BLOCK, 3 * BLOCK], 2)  # three blocks are one and two: the second the other way round
    [[(16384, 49152), (0, 16384)], [(0, 16384), (16384, 49152)]]
    """
    held, found = [0] * num_parts, []
    for numel in numels:
        longest_first = sorted(spans(numel, num_parts, BLOCK), key=lambda span: span[0] - span[1])
        least_first = sorted(range(num_parts), key=held.__getitem__)
        of_rank = dict(zip(least_first, longest_first, strict=True))
        held = [sum_ + of_rank[rank][1] - of_rank[rank][0] for rank, sum_ in enumerate(held)]
        found.append([of_rank[rank] for rank in range(num_parts)])
    return found


def _entries(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [state["state"].get(index, {}) for group in state["param_groups"] for index in group["params"]]
