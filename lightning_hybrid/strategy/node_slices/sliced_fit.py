"""The layers of one fit that are cut over the ranks of a node, and what of them others see whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_hybrid.comm import Topology
from lightning_hybrid.comm.health.diagnosis import name_ranks
from lightning_hybrid.comm.health.watchdog import private_store
from lightning_hybrid.placement import Part
from lightning_hybrid.precision.master_weights import MasterWeights
from lightning_hybrid.precision.skipped_steps import parameters_of
from lightning_hybrid.strategy.node_slices.gradient_average import SliceGradients

_BROADCAST_BYTES = 25 * 2**20

# How long the ranks of a node may come to a user's `state_dict()` one after another. Our choice: what they do between
# two collectives takes less, and a call on one rank alone is to be an error before its user looks for another cause.
STATE_LIMIT_S = 20.0


def requested_layers(module: nn.Module) -> list[tuple[str, ...]]:
    """Return the layers that networks in `module` ask to be cut by `node_slices`: names in `module`, pairs and heads.

    >>> module = nn.Sequential(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)))
    >>> module[0].node_slices = (("0", "2"),)
    >>> requested_layers(module)
    [('0.0', '0.2')]
    """
    return [
        tuple(f"{prefix}.{name}" if prefix else name for name in names)
        for prefix, network in module.named_modules()
        for names in getattr(network, "node_slices", ())
    ]


def cut_(module: nn.Module, layers: Sequence[tuple[str, ...]], group: dist.ProcessGroup) -> list[Any]:
    """Cut layers of `module` over a group, in place; return them."""
    from lightning_hybrid.strategy.node_slices.sliced_linear import (  # here: only a run that cuts needs it
        ColumnSlicedLinear,
        RankNumbers,
        RowSlicedLinear,
        SlicedHead,
    )

    found: list[Any] = []
    for names in layers:
        some: list[Any] = [module.get_submodule(name) for name in names]
        kinds = (SlicedHead,) if len(some) == 1 else (ColumnSlicedLinear, RowSlicedLinear)
        numbers = RankNumbers() if len(some) == 2 else None
        for layer, kind in zip(some, kinds, strict=True):
            kind.cut_(layer, group=group)
            layer.numbers = numbers
        found += some
    return found


class SlicedFit:
    """The slices of one fit: their layers, the ranks that share them, and their part in steps and checkpoints.

    Collective: every rank must construct it. Whole layers become those of rank zero first, as DDP makes them.

    Args:
        module: Its layers are cut in place; parameters stay the same objects.
        layers: Names in `module`, as of `requested_layers`.
        averages: Copies of `module`, cut in the same way.
        topology: With nodes of equal size.
        timeout: Of every collective.
        is_synced: Whether all ranks have begun with the same weights, so that none need be sent.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[tuple[str, ...]],
        *,
        averages: Sequence[nn.Module],
        topology: Topology,
        timeout: timedelta | None,
        is_synced: bool,
    ) -> None:
        names = [name for some in layers for name in some]
        if not is_synced:
            wholes = [p.detach() for name in names for p in module.get_submodule(name).parameters()]
            assert dist.group.WORLD is not None
            dist._broadcast_coalesced(dist.group.WORLD, wholes, _BROADCAST_BYTES, 0)
        self.topology, self.names = topology, names
        nodes = [list(node) for node in topology.nodes]
        self.node: Any = cast("Any", dist.new_subgroups_by_enumeration(nodes, timeout=timeout)[0])
        self.across: Any = None
        if topology.num_nodes > 1:
            places = [list(ranks) for ranks in topology.partition("across")]
            self.across = dist.new_subgroups_by_enumeration(places, timeout=timeout)[0]
        self._layers = cut_(module, layers, self.node)
        self._all_layers = [*self._layers, *(one for each in averages for one in cut_(each, layers, self.node))]
        self._cut: dict[int, tuple[Any, str]] = {}  # by id of a parameter: its layer, and its name there
        ignored = []
        for prefix, layer in zip(names, self._layers, strict=True):
            for name in layer.sliced:
                if (parameter := getattr(layer, name)) is not None:
                    self._cut[id(parameter)] = layer, name
                    ignored.append(f"{prefix}.{name}")
        self._module, self._ignored_before = module, getattr(module, "_ddp_params_and_buffers_to_ignore", None)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            module, [*(self._ignored_before or ()), *ignored]
        )
        self._gradients: SliceGradients | None = None
        self.is_saving = False  # the strategy, which does so on all ranks, however late one is
        self._num_states = 0
        fits = private_store("lightning_hybrid/slices").add(str(topology.rank), 1)
        self._store = private_store(f"lightning_hybrid/slices/{fits}")
        # Not bound methods, which a copy of a layer would copy with the groups that they hold.
        self._meetings = [
            layer.register_state_dict_pre_hook(lambda layer, *_: self._meet(layer)) for layer in self._all_layers
        ]

    def __contains__(self, key: object) -> bool:
        """Return whether the parameter of this `id` is cut."""
        return key in self._cut

    # ---- step ------------------------------------------------------------------------------------------------------

    def connect(
        self,
        optimizers: Sequence[Optimizer],
        masters: MasterWeights | None,
        *,
        comm_dtype: torch.dtype | None,
        averages: Callable[[], bool],
    ) -> None:
        """Average gradients over nodes from now on; give LARS and LAMB the ranks that hold the other slices."""
        self._gradients = SliceGradients(
            [getattr(layer, name) for layer, name in self._cut.values()],
            across=self.across,
            comm_dtype=comm_dtype,
            averages=averages,
        )
        for optimizer in optimizers:
            cut = [one for one in parameters_of(optimizer) if id(one) in self._cut]
            if not cut or not hasattr(optimizer, "parts"):
                continue
            parts = dict[Tensor, Part]()
            for parameter in cut:
                # For its sums of squares a slice is all of a tensor that other ranks add theirs to.
                part = Part(numel=parameter.numel(), begin=0, end=parameter.numel())
                pair = None if masters is None else masters.pair_of(parameter)
                parts |= {parameter: part} if pair is None else {parameter: part, pair.master: part}
            optimizer.parts, optimizer.add_up_ = parts, self.add_up_  # type: ignore[attr-defined]

    @property
    def frozen(self) -> set[int]:
        """The slices that do not train now, by `id`: no gradient of theirs is averaged in this fit."""
        return {key for key, (layer, name) in self._cut.items() if not getattr(layer, name).requires_grad}

    def add_up_(self, table: Tensor) -> None:
        """Add a tensor over the ranks of the node, in place. Collective."""
        dist.all_reduce(table, group=self.node)

    def largest(self, value: Tensor) -> Tensor:
        """Return the largest of the node, which is that of all nodes: they have the same gradients. Collective."""
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.node)
        return value

    # ---- validation and state --------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Let layers compute with whole weights, each rank by itself, until `drop`. Collective."""
        self.drop()  # those from before first: memory is to hold one copy
        for layer in self._layers:
            layer.gather()

    def drop(self) -> None:
        """Let layers compute with slices again."""
        for layer in self._layers:
            layer.drop()

    @contextmanager
    def own_state(self) -> Iterator[None]:
        """Let state dicts hold the slices of this rank, and ask no other."""
        for layer in self._all_layers:
            layer.is_own_state = True
        try:
            yield
        finally:
            for layer in self._all_layers:
                layer.is_own_state = False

    def _meet(self, layer: Any) -> None:
        # Before ranks gather a state for a user, who may have called it on one of them alone.
        if self.is_saving or layer.is_own_state:
            return
        self._num_states += 1
        self._store.set(f"{self._num_states}/{self.topology.rank}", "")
        missing, end_s = list(self.topology.node), monotonic() + STATE_LIMIT_S
        while missing := [rank for rank in missing if not self._store.check([f"{self._num_states}/{rank}"])]:
            if monotonic() > end_s:
                raise RuntimeError(
                    f"`state_dict()` must be called on all ranks: layers of `node_slices` (={self.names}) are cut over "
                    f"the ranks of a node, and {name_ranks(missing)} did not call it within {STATE_LIMIT_S:g} s. Call "
                    "it outside of `if self.trainer.is_global_zero:` and use it there, or `trainer.save_checkpoint`."
                )
            sleep(0.005)

    def whole_state(self, state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Return a state dict of `optimizer` with whole tensors, on every rank. Collective."""
        return self._changed(state, optimizer, self._whole_entry)

    def cut_state(self, state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Return a whole state dict with the slices of this rank."""
        return self._changed(state, optimizer, self._own_entry)

    def _changed(self, state: Mapping[str, Any], optimizer: Optimizer, change: Callable[..., Any]) -> dict[str, Any]:
        indices = [index for group in state["param_groups"] for index in group["params"]]
        parameters = dict(zip(indices, parameters_of(optimizer), strict=False))
        entries = {
            index: change(entry, parameters[index]) if id(parameters.get(index)) in self._cut else entry
            for index, entry in state["state"].items()
        }
        return {**state, "state": entries}

    def _whole_entry(self, entry: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
        layer, name = self._cut[id(parameter)]
        return {
            key: layer.whole_of(name, value) if isinstance(value, Tensor) and value.shape == parameter.shape else value
            for key, value in entry.items()
        }

    def _own_entry(self, entry: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
        layer, name = self._cut[id(parameter)]
        shape = (layer.out_features, layer.in_features) if name == "weight" else (layer.out_features,)
        return {
            key: layer.own_of(name, value) if isinstance(value, Tensor) and value.shape == shape else value
            for key, value in entry.items()
        }

    # ---- end -------------------------------------------------------------------------------------------------------

    def end(self, optimizers: Sequence[Optimizer], *, is_whole: bool) -> None:
        """Give module and optimizers back what was taken; with `is_whole` both are whole again. Collective then."""
        if self._gradients is not None:
            self._gradients.remove()
        for handle in self._meetings:
            handle.remove()
        self.drop()
        try:
            if is_whole:
                self._make_whole(optimizers)
        finally:
            for optimizer in optimizers:
                optimizer.__dict__.pop("parts", None)
                optimizer.__dict__.pop("add_up_", None)
            if self._ignored_before is None:
                del self._module._ddp_params_and_buffers_to_ignore
            else:
                self._module._ddp_params_and_buffers_to_ignore = self._ignored_before
            for layer, name in self._cut.values():
                getattr(layer, name).__dict__.pop("_ddp_ignored", None)
            for group in (self.node, self.across):
                if group is not None:
                    dist.destroy_process_group(group)

    def _make_whole(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            for parameter in parameters_of(optimizer):
                if id(parameter) in self._cut and parameter in optimizer.state:
                    optimizer.state[parameter] = self._whole_entry(optimizer.state[parameter], parameter)
        for layer in self._all_layers:
            for parameter in layer.parameters():
                parameter.grad = None
            layer.make_whole_()
