"""Sharded optimizer update during one training run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.comm import HookState
from lightning_hybrid.placement import BLOCK, has_gaps, is_split, spans, with_entries
from lightning_hybrid.precision.gradient_observers import grads_are_observed
from lightning_hybrid.precision.half_window import HalfPrecisionWindow
from lightning_hybrid.precision.optimizer_protocol import parameters_of, temporary_attributes
from lightning_hybrid.strategy.extension import RunningFit
from lightning_hybrid.strategy.shard_update.direct_steps import DirectSteps
from lightning_hybrid.strategy.shard_update.gradient_scatter import GradientScatter
from lightning_hybrid.strategy.shard_update.late_gather import LateGather
from lightning_hybrid.strategy.shard_update.shard_exchange import ShardExchange
from lightning_hybrid.strategy.shard_update.shard_pairs import (
    MasterShard,
    ParameterShard,
    WeightShard,
    write_wholes_,
)
from lightning_hybrid.strategy.shard_update.state_dict_hooks import StateDictHooks
from lightning_hybrid.strategy.shard_update.whole_averages import averaging_whole_values


class ShardedFit:
    """State of a sharded optimizer update, with the parameter shards and their collectives.

    Some parameters are not sharded: those of fewer blocks than the ranks of a node (`placement.is_split`), those of one
    block if all ranks share the update, and those with gaps in memory. Which rank owns which shard depends on the order
    and sizes of the parameters in the optimizers, and not on DDP's buckets.

    With half precision, sharded parameters leave the half-precision window. They hold their half-precision copies for
    the whole run, and each rank keeps the fp32 master weights of its shard. Before each use of either, this rank's
    shard of the copy is compared with the master weights, to find values that user code has written.

    Args:
        fit: Description of the training run. Its optimizers get `parts` and `add_up_`, if they have these attributes.
        is_late: Whether the all-gather of weights continues during the next forward pass.
    """

    def __init__(self, fit: RunningFit, *, is_late: bool) -> None:
        self.exchange = ShardExchange(fit.engine)
        self.scatter: GradientScatter | None = None
        self.shards: dict[int, ParameterShard] = {}
        self._optimizers: list[Optimizer] = list(fit.optimizers)
        self._module = fit.module
        self._precision = fit.precision
        self._window: HalfPrecisionWindow | None = getattr(fit.precision, "window", None)
        self._late = LateGather(fit.engine.trace) if is_late else None
        self._is_updating = False
        self._are_whole = False
        self._lent = ExitStack()

        # Number of ranks sharing the update that hold the same slice of a layer of `node_slices`.
        self._num_holders = fit.engine.topology.num_nodes
        if self.exchange.is_in_node:
            self._num_holders = 1

        self._cut_parameters(fit.module)
        for optimizer in self._optimizers:
            self._prepare_optimizer(optimizer)
        self._add_hooks(fit.module)
        if self._late is not None:
            self._lent.enter_context(self._late)

    @property
    def is_half(self) -> bool:
        """True if training is in half precision with fp32 master weights."""
        return self._window is not None

    # ---- cutting ---------------------------------------------------------------------------------------------------

    def _cut_parameters(self, module: nn.Module) -> None:
        """Create a shard of each parameter that can be sharded."""
        rank = self.exchange.rank
        parameters = list(self._parameters_to_cut())
        numels = [parameter.numel() for parameter in parameters]
        all_spans = spans_by_rank(numels, self.exchange.num_ranks)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for parameter, parameter_spans in zip(parameters, all_spans, strict=True):
            key = id(parameter)
            shard: ParameterShard
            if self._window is None:
                name = names.get(key, "parameter")
                shard = WeightShard(name, parameter, parameter_spans, rank)
            else:
                pair = self._window.pairs.pop(key)
                shard = MasterShard(pair, parameter_spans, rank)
            self.shards[key] = shard

    def _parameters_to_cut(self) -> Iterator[nn.Parameter]:
        seen: set[int] = set()
        for optimizer in self._optimizers:
            for parameter in parameters_of(optimizer):
                if id(parameter) not in seen and self._can_be_cut(parameter):
                    assert isinstance(parameter, nn.Parameter)
                    seen.add(id(parameter))
                    yield parameter

    def _can_be_cut(self, parameter: Tensor) -> bool:
        # Parameters that DDP ignores, such as slices of layers, differ between ranks and cannot be sharded.
        if getattr(parameter, "_ddp_ignored", False):
            return False
        if parameter.is_meta:  # a parameter of another pipeline stage
            return False

        # With `"world"` most tensors have fewer blocks than there are ranks. Some ranks then have an empty shard.
        min_parts = 2
        if self.exchange.is_in_node:
            min_parts = self.exchange.num_ranks
        if not is_split(parameter.numel(), min_parts, BLOCK) or has_gaps(parameter):
            return False
        return self._window is None or self._window.pair_of(parameter) is not None

    def _prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Shard an optimizer's existing state, and make the optimizer work with shards."""
        # Some optimizers create state in their constructor.
        for parameter in parameters_of(optimizer):
            shard = self.shard_of(parameter)
            if shard is not None and parameter in optimizer.state:
                optimizer.state[parameter] = cut(optimizer.state[parameter], shard)

        self._lend_parts(optimizer)
        before = optimizer.register_load_state_dict_pre_hook(self._before_loading)
        after = optimizer.register_load_state_dict_post_hook(self._after_loading)
        self._lent.callback(before.remove)
        self._lent.callback(after.remove)

    def _take_in(self, optimizer: Optimizer) -> None:
        """Prepare a new optimizer that user code has put in place of another one during training."""
        is_known = any(optimizer is known_optimizer for known_optimizer in self._optimizers)
        if not is_known and self._shards_of(optimizer):
            self._prepare_optimizer(optimizer)
            self._optimizers.append(optimizer)

    def _lend_parts(self, optimizer: Optimizer) -> None:
        if not hasattr(optimizer, "parts"):
            return
        parts = {}
        # These are slices of layers (`node_slices`), which ranks of all nodes hold.
        for parameter, part in (optimizer.parts or {}).items():
            parts[parameter] = replace(part, num_holders=self._num_holders)
        for shard in self._shards_of(optimizer):
            parts[shard.parameter] = shard.part
        attributes = temporary_attributes(optimizer, parts=parts, add_up_=self.exchange.add_up_)
        self._lent.enter_context(attributes)

    def _add_hooks(self, module: Any) -> None:
        if self._window is None:
            steps = DirectSteps(self._updates, self.updating, is_ignored=lambda: self._is_updating)
            self._lent.callback(steps.remove)
            return
        self._precision.update_context = self.updating
        self._precision.largest_of_parts = self._largest_gradient
        self._window.before_open.append(self._before_open)
        self._lent.callback(self._leave_precision)
        master_shards = {id(shard.parameter): shard for shard in self._master_shards}
        hooks = StateDictHooks(module, master_shards)
        self._lent.callback(hooks.remove)
        weight_averaging = averaging_whole_values(module.trainer.callbacks, self.whole_values)
        self._lent.enter_context(weight_averaging)

    def _leave_precision(self) -> None:
        self._precision.update_context = nullcontext
        self._precision.largest_of_parts = None
        if self._window is not None and self._before_open in self._window.before_open:
            self._window.before_open.remove(self._before_open)

    def shard_of(self, parameter: Tensor) -> ParameterShard | None:
        """Return the shard of a parameter, or None if the parameter is not sharded."""
        return self.shards.get(id(parameter))

    def _updates(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer updates sharded parameters."""
        return len(self._shards_of(optimizer)) > 0

    def _shards_of(self, optimizer: Optimizer) -> list[ParameterShard]:
        keys = [id(parameter) for parameter in parameters_of(optimizer)]
        return [self.shards[key] for key in keys if key in self.shards]

    @property
    def _master_shards(self) -> list[MasterShard]:
        return [shard for shard in self.shards.values() if isinstance(shard, MasterShard)]

    # ---- gradients -------------------------------------------------------------------------------------------------

    def _largest_gradient(self, parameters: Iterable[Tensor]) -> Tensor:
        scaled = self._precision.gradients.scaled
        gradients = []
        for parameter in parameters:
            gradient = scaled.get(id(parameter), parameter.grad)
            if gradient is None:
                continue
            # Outside this rank's shard, the gradient may not be averaged.
            shard = self.shard_of(parameter)
            if shard is not None:
                gradient = shard.part_of(gradient)
            gradients.append(gradient)
        return self.exchange.largest(gradients)

    def scatter_gradients(self, state: HookState, *, is_possible: bool) -> None:
        """Enable the reduce-scatter of gradients for steps in which no user code reads them.

        Args:
            state: State of DDP's communication hook.
            is_possible: Whether other options of the run allow it.
        """
        engine = state.engine
        assert engine is not None
        has_codec = not isinstance(engine.dtype_across_nodes, torch.dtype | None)
        if state.comm_dtype is not None or has_codec:
            is_possible = False
        self.scatter = GradientScatter(engine, self.shard_of, is_possible=is_possible)
        state.scatter = self.scatter

    def is_unobserved(self, module: Any) -> bool:
        """Return whether only the optimizer update reads gradients.

        The update needs only this rank's shards of the gradients.
        """
        if self.is_half:
            is_unobserved: bool = self._precision.steps_on_scaled(module)
            return is_unobserved
        return module.automatic_optimization and not grads_are_observed(self._optimizers, module)

    def refuse_late_observers(self, module: Any) -> None:
        """Raise if user code may read gradients that this step has reduce-scattered.

        Raises:
            RuntimeError: A hook, callback or option that reads gradients was added after the batch began.
        """
        if self.scatter is not None and self.scatter.is_on and not self.is_unobserved(module):
            raise RuntimeError(
                "`shard_update` averaged the gradients of this step only on the ranks that update them, but gradient "
                "clipping, a hook or an optimizer step hook that reads gradients was added after the batch began. "
                "Register it before training starts, or between two batches."
            )

    # ---- update ----------------------------------------------------------------------------------------------------

    @contextmanager
    def updating(self, optimizer: Optimizer) -> Iterator[None]:
        """Return a context for an optimizer step on this rank's shards. On exit, it gathers the new weights.

        Collective: every rank must enter it, in the same order.
        """
        self._take_in(optimizer)
        shards = self._shards_of(optimizer)
        self.refuse_late_observers(self._module)  # again, because the closure runs user code
        self._is_updating = True
        try:
            with self.parts_shown(optimizer):
                yield
        finally:
            self._is_updating = False
        with torch.no_grad(), torch._C.DisableTorchFunction():
            write_wholes_(shards)
            self.exchange.gather_(shards, [shard.whole for shard in shards], late=self._late)

    @contextmanager
    def parts_shown(self, optimizer: Optimizer) -> Iterator[None]:
        """Return a context in which an optimizer's parameters hold this rank's shards and their gradients."""
        shards = self._shards_of(optimizer)
        self._wait()
        self._take_writes(shards)
        # Autocast keeps references to parameters, which would prevent swapping their tensors.
        torch.clear_autocast_cache()
        try:
            for shard in shards:
                shard.show_part()
            yield
        finally:
            for shard in shards:
                shard.show_whole()

    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """Run an optimizer step on shards without master weights, and gather the new weights.

        Collective: every rank must call it, in the same order.
        """
        with self.updating(optimizer):
            optimizer.step(**kwargs)

    def _wait(self) -> None:
        if self._late is not None:
            self._late.wait()

    def _take_writes(self, shards: Iterable[ParameterShard]) -> None:
        # A late gather writes other ranks' shards only, so this rank's shard can be read before it is complete.
        with torch._C.DisableTorchFunction():
            for shard in shards:
                shard.take_writes_()

    def _before_open(self) -> None:
        self._show_wholes()
        self._take_writes(self.shards.values())

    def _show_wholes(self) -> None:
        # An optimizer step that raised an error may have left shards in the parameters.
        with torch._C.DisableTorchFunction():
            for shard in self.shards.values():
                shard.show_whole()

    @property
    def placement(self) -> dict[str, Any]:
        """Description of this rank's parameter shards for `RunStatus`."""
        with torch._C.DisableTorchFunction():  # no wait for weights that are being gathered
            master_parts = {id(shard.parameter): shard.values for shard in self._master_shards}
        return {
            "parts": {key: shard.part for key, shard in self.shards.items()},
            "master_parts": master_parts,
            "place_in_node": (self.exchange.rank, self.exchange.num_ranks),
            "update_context": self.parts_shown,
        }

    # ---- whole values ----------------------------------------------------------------------------------------------

    def collect_masters(self) -> None:
        """Gather the full master weights on rank zero, and keep them there until `drop_masters` is called.

        Collective: every rank must call it, in the same order.
        """
        shards = self._master_shards
        self._wait()
        self._take_writes(shards)
        wholes = self.exchange.collect(shards, [shard.values for shard in shards])
        if wholes is None:
            # Other ranks save nothing, so they use their half-precision copy and need no memory.
            wholes = [shard.whole for shard in shards]
        for shard, whole in zip(shards, wholes, strict=True):
            shard.collected = whole

    def drop_masters(self) -> None:
        """Free the full master weights that `collect_masters` has gathered."""
        for shard in self._master_shards:
            shard.collected = None

    @contextmanager
    def whole_values(self) -> Iterator[None]:
        """Return a context in which parameters hold full fp32 values, which user code may modify.

        Collective: every rank must enter it, in the same order.
        """
        if self._are_whole or self._window is None:
            yield
            return
        with self._window.shut():
            self._show_whole_values()
            self._are_whole = True
            try:
                yield
            finally:
                self._are_whole = False
                for shard in self._master_shards:
                    shard.take_fp32_()

    def _show_whole_values(self) -> None:
        shards = self._master_shards
        self._wait()
        self._take_writes(shards)
        values = [torch.empty_like(shard.whole, dtype=torch.float32) for shard in shards]
        for shard, value in zip(shards, values, strict=True):
            shard.part_of(value).copy_(shard.values)
        self.exchange.gather_(shards, values)
        for shard, value in zip(shards, values, strict=True):
            shard.show_fp32(value)

    # ---- optimizer state -------------------------------------------------------------------------------------------

    def state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state dict with full tensors on rank zero.

        Collective: every rank must call it, in the same order.
        """
        return collected_state_dict(state, optimizer, self.shard_of, self.exchange)

    def _before_loading(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's shards of a full optimizer state dict.

        The parameters hold their shards until `_after_loading`, because torch casts the state to the parameter's dtype.
        """
        self._wait()
        for shard in self._shards_of(optimizer):
            shard.show_part()

        def cut_entry(parameter: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
            return cut(entry, self.shard_of(parameter))

        return with_entries(state, optimizer, cut_entry)

    def _after_loading(self, optimizer: Optimizer) -> None:
        for shard in self._shards_of(optimizer):
            shard.show_whole()

    # ---- end -------------------------------------------------------------------------------------------------------

    def end(self, *, is_whole: bool) -> None:
        """Restore the optimizers, the precision plugin and the parameters.

        Args:
            is_whole: Whether to gather full master weights and optimizer state, which is collective. If False, the
                module gets the half-precision weights of this rank.
        """
        try:
            self._show_wholes()
            if is_whole:
                self._wait()
                self._make_state_whole()
                self._show_whole_values()
        finally:
            self._lent.close()
            for shard in self._master_shards:
                shard.show_rounded()

    def _make_state_whole(self) -> None:
        # Only rank zero needs the full state, because `trainer.save_checkpoint` may still write it there.
        for optimizer in self._optimizers:
            state = self.state_dict(optimizer, optimizer.state_dict())
            if not self.exchange.is_first:
                continue
            for parameter, entry in zip(parameters_of(optimizer), _entries(state), strict=True):
                if self.shard_of(parameter) is not None and entry:
                    optimizer.state[parameter] = entry


def spans_by_rank(numels: Sequence[int], num_parts: int) -> list[list[tuple[int, int]]]:
    """Divide each tensor among the ranks, so that all ranks have about the same number of elements.

    Each tensor is split into one range per rank. The rank that has the fewest elements so far gets the longest range.

    >>> spans_by_rank([3 * BLOCK, 3 * BLOCK], 2)  # one and two blocks: the ranks swap lengths for the second tensor
    [[(16384, 49152), (0, 16384)], [(0, 16384), (16384, 49152)]]
    """
    num_held = [0] * num_parts  # number of elements that each rank has so far
    spans_of_tensors = []
    for numel in numels:
        longest_first = sorted(spans(numel, num_parts, BLOCK), key=_length, reverse=True)
        ranks = sorted(range(num_parts), key=num_held.__getitem__)  # fewest elements first
        spans_of_ranks = [(0, 0)] * num_parts
        for rank, span in zip(ranks, longest_first, strict=True):
            spans_of_ranks[rank] = span
            num_held[rank] += _length(span)
        spans_of_tensors.append(spans_of_ranks)
    return spans_of_tensors


def _length(span: tuple[int, int]) -> int:
    begin, end = span
    return end - begin


def _entries(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entry of each parameter in an optimizer state dict. An entry is empty if there is no state yet."""
    entries = []
    for group in state["param_groups"]:
        for index in group["params"]:
            entry = state["state"].get(index, {})
            entries.append(entry)
    return entries


def cut(entry: Mapping[str, Any], shard: ParameterShard | None) -> dict[str, Any]:
    """Return a parameter's optimizer state with each full tensor replaced by this rank's shard."""
    cut_entry = dict(entry)
    if shard is None:
        return cut_entry
    for name, value in entry.items():
        if isinstance(value, Tensor) and value.shape == shard.whole.shape:
            cut_entry[name] = shard.part_of(value).clone()
    return cut_entry


def collected_state_dict(
    state: Mapping[str, Any],
    optimizer: Optimizer,
    shard_of: Callable[[Tensor], ParameterShard | None],
    exchange: ShardExchange,
) -> dict[str, Any]:
    """Return an optimizer state dict with full tensors on rank zero, and with shards on other ranks.

    Collective: every rank must call it, in the same order.
    """
    shards: list[ParameterShard] = []
    values: list[Tensor] = []

    def list_parts(parameter: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
        shard = shard_of(parameter)
        if shard is not None:
            for name in _names_of_parts(entry, shard):
                shards.append(shard)
                values.append(entry[name])
        return entry

    with_entries(state, optimizer, list_parts)
    wholes = exchange.collect(shards, values)
    if wholes is None:
        return dict(state)
    next_wholes = iter(wholes)  # in the order of `values`, in which the entries are visited again

    def with_wholes(parameter: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
        whole_entry = dict(entry)
        shard = shard_of(parameter)
        if shard is not None:
            for name in _names_of_parts(entry, shard):
                whole_entry[name] = next(next_wholes)
        return whole_entry

    return with_entries(state, optimizer, with_wholes)


def _names_of_parts(entry: Mapping[str, Any], shard: ParameterShard) -> list[str]:
    """Return the names of the tensors in a parameter's optimizer state that have the shape of its shard."""
    names = []
    for name, value in entry.items():
        if isinstance(value, Tensor) and value.shape == shard.values.shape:
            names.append(name)
    return names
