"""The layers of one fit that are cut over the ranks of a node, and what of them others see whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.comm import Topology
from lightning_hybrid.comm.engine.process_groups import end_group, new_node_group, own_group
from lightning_hybrid.comm.health.diagnosis import name_ranks
from lightning_hybrid.comm.health.watchdog import private_store
from lightning_hybrid.placement import Part, broadcast_first_, ignored_by_ddp, with_entries
from lightning_hybrid.precision.master_weights import MasterWeights
from lightning_hybrid.precision.optimizer_protocol import parameters_of, temporary_attributes
from lightning_hybrid.strategy.node_slices.gradient_average import SliceGradients

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
    """Put cut layers in the place of those of `module`, over a group; return them."""
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
        for name, layer, kind in zip(names, some, kinds, strict=True):
            found.append(cut := kind.cut_(layer, group=group))
            cut.numbers = numbers
            module.set_submodule(name, cut)
    return found


class SlicedFit:
    """The slices of one fit: their layers, the ranks that share them, and their part in steps and checkpoints.

    Collective: every rank must construct it. Whole layers become those of rank zero first, as DDP makes them.

    Args:
        module: Its layers are replaced; parameters stay the same objects.
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
            broadcast_first_(wholes)
        self.topology, self.names = topology, names
        self.node = new_node_group(topology, timeout=timeout, desc="slices")
        self.across: Any = None
        if topology.num_nodes > 1:
            self.across = own_group(topology.partition("across"), timeout=timeout, desc="equal slices")
        self.is_aborted = False  # whether a failure has ended the groups
        self._wholes = [(each, name, each.get_submodule(name)) for each in (module, *averages) for name in names]
        self._all_layers = [one for each in (module, *averages) for one in cut_(each, layers, self.node)]
        self._layers = self._all_layers[: len(names)]
        self._cut: dict[int, tuple[Any, str]] = {}  # by id of a parameter: its layer, and its name there
        ignored = []
        for prefix, layer in zip(names, self._layers, strict=True):
            for name in layer.sliced:
                if (parameter := getattr(layer, name)) is not None:
                    self._cut[id(parameter)] = layer, name
                    ignored.append(f"{prefix}.{name}")
        self._lent = ExitStack()
        self._lent.enter_context(ignored_by_ddp(module, ignored))
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
            self._lent.enter_context(temporary_attributes(optimizer, parts=parts, add_up_=self.add_up_))

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
        return with_entries(state, optimizer, self._whole_entry)

    def cut_state(self, state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Return a whole state dict with the slices of this rank."""
        return with_entries(state, optimizer, self._own_entry)

    def _whole_entry(self, parameter: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
        if id(parameter) not in self._cut:
            return entry
        layer, name = self._cut[id(parameter)]
        return {
            key: layer.whole_of(name, value) if isinstance(value, Tensor) and value.shape == parameter.shape else value
            for key, value in entry.items()
        }

    def _own_entry(self, parameter: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
        if id(parameter) not in self._cut:
            return entry
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
            self._lent.close()
            for group in (self.node, self.across):
                if group is not None:
                    end_group(group, is_aborted=self.is_aborted)

    def _make_whole(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            for parameter in parameters_of(optimizer):
                if id(parameter) in self._cut and parameter in optimizer.state:
                    optimizer.state[parameter] = self._whole_entry(parameter, optimizer.state[parameter])
        for layer in self._all_layers:
            for parameter in layer.parameters():
                parameter.grad = None
            layer.make_whole_()
        for module, name, layer in self._wholes:
            module.set_submodule(name, layer)
