"""The layers of one fit that are cut over the ranks of a node, and what of them others see whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.comm import Topology
from lightning_hybrid.comm.engine.process_groups import end_group, own_group
from lightning_hybrid.comm.health.diagnosis import name_ranks
from lightning_hybrid.comm.health.watchdog import private_store
from lightning_hybrid.placement import Part, broadcast_first_, ignored_by_ddp, with_entries
from lightning_hybrid.precision.optimizer_protocol import parameters_of, temporary_attributes
from lightning_hybrid.precision.window import HalfPrecisionWindow
from lightning_hybrid.strategy.node_slices.gradient_average import SliceGradients
from lightning_hybrid.strategy.node_slices.slice_exchange import NodeRanks
from lightning_hybrid.strategy.node_slices.sliced_layers import (
    ColumnLinear,
    Entrance,
    HeadsAttention,
    RowLinear,
    Slice,
    SlicedLayer,
)
from lightning_hybrid.strategy.node_slices.vocabulary import VocabularyEmbedding, VocabularyHead

# How long the ranks of a node may come to a user's `state_dict()` one after another. Our choice: what they do between
# two collectives takes less, and a call on one rank alone is to be an error before its user looks for another cause.
STATE_LIMIT_S = 20.0


def cut_(
    module: nn.Module, layers: Sequence[tuple[str, ...]], ranks: NodeRanks
) -> list[SlicedLayer]:
    """Cut layers of `module`, as of `requested_layers`, in place; return what each does that holds a slice."""
    found: dict[nn.Module, SlicedLayer] = {}
    for names in layers:
        first = module.get_submodule(names[0])
        last = module.get_submodule(names[-1])
        entrance = Entrance(ranks)
        if len(names) == 1:
            found[first] = (
                VocabularyEmbedding if isinstance(first, nn.Embedding) else VocabularyHead
            )(first, entrance)
            continue
        if isinstance(first, nn.MultiheadAttention):
            found[first] = HeadsAttention(first, entrance)
        else:
            found |= {
                one: ColumnLinear(one, entrance)
                for one in first.modules()
                if type(one) is nn.Linear
            }
            ranks.handles.append(first.register_forward_pre_hook(entrance, with_kwargs=True))
        found[last] = RowLinear(last, entrance)
    slices: dict[int, Slice] = {}
    for layer, sliced in found.items():
        for name, dim in sliced.dims.items():
            if (parameter := layer._parameters[name]) is not None and id(parameter) not in slices:
                one = Slice.of(parameter, dim, ranks, num_blocks=sliced.num_blocks)
                slices[id(parameter)] = one
                parameter.data = one.own_of(parameter.detach())
    for layer in module.modules():
        held = {
            name: slices[id(one)] for name, one in layer._parameters.items() if id(one) in slices
        }
        if held:
            found.setdefault(layer, SlicedLayer(layer, Entrance(ranks))).slices = held
    for sliced in found.values():
        sliced.begin()
    return list(found.values())


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
        self.topology = topology
        self.names = [name for some in layers for name in some]
        self.groups: Sequence[tuple[str, ...]] = layers
        if not is_synced:
            wholes = (
                p.detach() for name in self.names for p in module.get_submodule(name).parameters()
            )
            broadcast_first_(list({id(one): one for one in wholes}.values()))
        self.node = own_group(topology.partition("node"), timeout=timeout, desc="slices")
        self.across: Any = None
        if topology.num_nodes > 1:
            self.across = own_group(
                topology.partition("across"), timeout=timeout, desc="equal slices"
            )
        self.is_aborted = False  # whether a failure has ended the groups
        self._ranks = NodeRanks(self.node)
        self._layers = cut_(module, layers, self._ranks)
        self._all_layers = [
            *self._layers,
            *(one for each in averages for one in cut_(each, layers, self._ranks)),
        ]
        held = [
            (getattr(each.layer, name), one)
            for each in self._layers
            for name, one in each.slices.items()
        ]
        self._parameters = {id(parameter): parameter for parameter, _ in held}
        self._slices = {id(parameter): one for parameter, one in held}
        everywhere = module.named_parameters(remove_duplicate=False)
        self._lent = ExitStack()
        self._lent.enter_context(
            ignored_by_ddp(module, [name for name, one in everywhere if id(one) in self._slices])
        )
        self._gradients: SliceGradients | None = None
        self.is_saving = False  # the strategy, which does so on all ranks, however late one is
        self._num_states = 0
        fits = private_store("lightning_hybrid/slices").add(str(topology.rank), 1)
        self._store = private_store(f"lightning_hybrid/slices/{fits}")
        self._ranks.meet = self._meet

    @property
    def num_whole_bytes(self) -> int:
        """The bytes of all layers that are cut, whole."""
        num_bytes = 0
        for key, parameter in self._parameters.items():
            num_bytes += self._slices[key].shape.numel() * parameter.element_size()
        return num_bytes

    def __contains__(self, key: object) -> bool:
        """Return whether the parameter of this `id` is cut."""
        return key in self._slices

    # ---- step ------------------------------------------------------------------------------------------------------

    def connect(
        self,
        optimizers: Sequence[Optimizer],
        *,
        comm_dtype: torch.dtype | None,
        averages: Callable[[], bool],
        is_adasum: bool,
        window: HalfPrecisionWindow | None,
    ) -> None:
        """Average gradients over nodes from now on; give LARS and LAMB the ranks that hold the other slices."""
        self._ranks.window = window
        how: Any = {
            "comm_dtype": comm_dtype,
            "averages": averages,
            "adasum_in": self.node if is_adasum else None,
        }
        self._gradients = SliceGradients(self._parameters.values(), across=self.across, **how)
        for optimizer in optimizers:
            cut = [one for one in parameters_of(optimizer) if id(one) in self._slices]
            if not cut or not hasattr(optimizer, "parts"):
                continue
            parts = dict[Tensor, Part]()
            for parameter in cut:
                # For its sums of squares a slice is all of a tensor that other ranks add theirs to.
                parts[parameter] = Part(numel=parameter.numel(), begin=0, end=parameter.numel())
            self._lent.enter_context(
                temporary_attributes(optimizer, parts=parts, add_up_=self.add_up_)
            )

    @property
    def frozen(self) -> set[int]:
        """The slices that do not train now, by `id`: no gradient of theirs is averaged in this fit."""
        return {key for key, parameter in self._parameters.items() if not parameter.requires_grad}

    def add_up_(self, table: Tensor) -> None:
        """Add a tensor over the ranks of the node, in place. Collective."""
        dist.all_reduce(table, group=self.node)

    def largest(self, value: Tensor) -> Tensor:
        """Return the largest of the node, which is that of all nodes: they have the same gradients. Collective."""
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.node)
        return value

    def agree_on_overflow(self, scaler: Any) -> None:
        """Let Lightning's gradient scaler skip a step on all ranks of the node, or on none."""
        unscale = scaler._unscale_grads_

        def unscaled(*args: Any) -> Any:
            return {device: self.largest(found_inf) for device, found_inf in unscale(*args).items()}

        vars(scaler)["_unscale_grads_"] = unscaled
        self._lent.callback(vars(scaler).pop, "_unscale_grads_")

    # ---- validation and state --------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Let layers compute with whole weights, each rank by itself, until `drop`. Collective."""
        self.drop()  # those from before first: memory is to hold one copy
        for layer in self._layers:
            layer.gather()
        self._ranks.is_whole = True

    def drop(self) -> None:
        """Let layers compute with slices again."""
        self._ranks.is_whole = False
        for layer in self._layers:
            layer.drop()

    @contextmanager
    def own_state(self) -> Iterator[None]:
        """Let state dicts hold the slices of this rank, and ask no other."""
        self._ranks.is_own_state = True
        try:
            yield
        finally:
            self._ranks.is_own_state = False

    def _meet(self) -> None:
        # Before ranks gather a state for a user, who may have called it on one of them alone.
        if self.is_saving:
            return
        self._num_states += 1
        self._store.set(f"{self._num_states}/{self.topology.rank}", "")
        missing = list(self.topology.node)
        end_s = monotonic() + STATE_LIMIT_S
        while missing := [
            rank for rank in missing if not self._store.check([f"{self._num_states}/{rank}"])
        ]:
            if monotonic() > end_s:
                raise RuntimeError(
                    f"`state_dict()` must be called on all ranks: layers of `node_slices` (={self.names}) are cut over "
                    f"the ranks of a node, and {name_ranks(missing)} did not call it within {STATE_LIMIT_S:g} s. Call "
                    "it outside of `if self.trainer.is_global_zero:` and use it there, or `trainer.save_checkpoint`."
                )
            sleep(0.005)

    def whole_state(self, state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Return a state dict of `optimizer` with whole tensors, on every rank. Collective."""
        return with_entries(state, optimizer, partial(self._entry, to_whole=True))

    def cut_state(self, state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Return a whole state dict with the slices of this rank."""
        return with_entries(state, optimizer, partial(self._entry, to_whole=False))

    def _entry(self, parameter: Tensor, entry: dict[str, Any], *, to_whole: bool) -> dict[str, Any]:
        if (one := self._slices.get(id(parameter))) is None:
            return entry
        shape, change = (parameter.shape, one.whole_of) if to_whole else (one.shape, one.own_of)
        return {
            k: change(v) if isinstance(v, Tensor) and v.shape == shape else v
            for k, v in entry.items()
        }

    # ---- end -------------------------------------------------------------------------------------------------------

    def end(self, optimizers: Sequence[Optimizer], *, is_whole: bool) -> None:
        """Give module and optimizers back what was taken; with `is_whole` both are whole again. Collective then."""
        if self._gradients is not None:
            self._gradients.remove()
        for handle in self._ranks.handles:
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
                if parameter in optimizer.state:
                    optimizer.state[parameter] = self._entry(
                        parameter, optimizer.state[parameter], to_whole=True
                    )
        held = (
            (getattr(layer.layer, name), one)
            for layer in self._all_layers
            for name, one in layer.slices.items()
        )
        for parameter, one in {
            id(pair[0]): pair for pair in held
        }.values():  # each once, also where it is tied
            parameter.grad = None
            parameter.data = one.whole_of(parameter.detach())
        for layer in self._all_layers:
            layer.end()
