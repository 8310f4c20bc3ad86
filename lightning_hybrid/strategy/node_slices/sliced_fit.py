"""Slicing of layers over the ranks of a node during one training run, with full state in checkpoints."""

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
from lightning_hybrid.comm.engine.process_groups import end_group, own_group
from lightning_hybrid.comm.health.diagnosis import name_ranks
from lightning_hybrid.comm.health.watchdog import private_store
from lightning_hybrid.placement import Part, broadcast_first_, ignored_by_ddp, with_entries
from lightning_hybrid.precision.half_window import HalfPrecisionWindow
from lightning_hybrid.precision.optimizer_protocol import parameters_of, temporary_attributes
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

# Maximum time in seconds between the first and the last call of `state_dict()` on the ranks of a node. The value is our
# choice: work between two collectives takes less time, and a call on one rank alone should raise an error before the
# user looks for another cause.
STATE_LIMIT_S = 20.0


def cut_(
    module: nn.Module, layers: Sequence[tuple[str, ...]], ranks: NodeRanks
) -> list[SlicedLayer]:
    """Slice layers of `module` in place, and return a `SlicedLayer` for each layer that holds slices.

    Args:
        module: Network whose layers are sliced.
        layers: Groups of names of layers that are sliced together, as `requested_layers` returns them.
        ranks: Ranks that share the layers.
    """
    sliced_layers: dict[nn.Module, SlicedLayer] = {}
    for names in layers:
        sliced_layers.update(_replacements_of_group(module, names, ranks))
    slices = _cut_parameters(sliced_layers, ranks)

    for layer in module.modules():
        slices_of_layer = {}
        for name, parameter in layer._parameters.items():
            if id(parameter) in slices:
                slices_of_layer[name] = slices[id(parameter)]
        if not slices_of_layer:
            continue
        if layer not in sliced_layers:
            # A layer with a tied weight holds a slice, but computes as before.
            sliced_layers[layer] = SlicedLayer(layer, Entrance(ranks))
        sliced_layers[layer].slices = slices_of_layer

    for sliced in sliced_layers.values():
        sliced.install()
    return list(sliced_layers.values())


def _replacements_of_group(
    module: nn.Module, names: tuple[str, ...], ranks: NodeRanks
) -> dict[nn.Module, SlicedLayer]:
    """Create the `SlicedLayer` of each layer in a pair, or of a single embedding or output layer."""
    first = module.get_submodule(names[0])
    last = module.get_submodule(names[-1])
    entrance = Entrance(ranks)
    if len(names) == 1:
        if isinstance(first, nn.Embedding):
            return {first: VocabularyEmbedding(first, entrance)}
        return {first: VocabularyHead(first, entrance)}

    replacements: dict[nn.Module, SlicedLayer] = {}
    if isinstance(first, nn.MultiheadAttention):
        replacements[first] = HeadsAttention(first, entrance)
    else:
        for layer in first.modules():
            if type(layer) is nn.Linear:
                replacements[layer] = ColumnLinear(layer, entrance)
        ranks.handles.append(first.register_forward_pre_hook(entrance, with_kwargs=True))
    replacements[last] = RowLinear(last, entrance)
    return replacements


def _cut_parameters(
    sliced_layers: Mapping[nn.Module, SlicedLayer], ranks: NodeRanks
) -> dict[int, Slice]:
    """Replace the data of parameters by this rank's slices, and return the slices by parameter `id`."""
    slices: dict[int, Slice] = {}
    for layer, sliced in sliced_layers.items():
        for name, dim in sliced.dims.items():
            parameter = layer._parameters[name]
            if parameter is None or id(parameter) in slices:
                continue
            tensor_slice = Slice.of(parameter, dim, ranks, num_blocks=sliced.num_blocks)
            slices[id(parameter)] = tensor_slice
            parameter.data = tensor_slice.cut_from(parameter.detach())
    return slices


class SlicedFit:
    """Sliced layers of one training run, with their process groups and sliced optimizer state.

    Full layers are broadcast from rank zero before they are sliced, as DDP does.

    Collective: every rank must construct it, in the same order.

    Args:
        module: Network whose layers are sliced. Its parameters stay the same objects.
        layers: Groups of layer names in `module`, as `requested_layers` returns them.
        averaged_models: Copies of `module` that are sliced in the same way.
        topology: Topology with nodes of equal size.
        timeout: Timeout of every collective.
        is_synced: Whether all ranks have equal weights already. If so, nothing is broadcast.

    Attributes:
        node: Process group of the ranks of this node, which together hold all slices.
        across: Process group of the ranks with the same slices, one on each node. None: there is one node.
        is_aborted: Whether a failure has ended the process groups.
        is_saving: Whether the strategy is saving a checkpoint. Every rank then takes a state dict, so the time limit
            `STATE_LIMIT_S` does not apply.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[tuple[str, ...]],
        *,
        averaged_models: Sequence[nn.Module],
        topology: Topology,
        timeout: timedelta | None,
        is_synced: bool,
    ) -> None:
        self.topology = topology
        self.groups: Sequence[tuple[str, ...]] = layers
        self.names = [name for group in layers for name in group]
        self.is_aborted = False
        self.is_saving = False
        self._gradients: SliceGradients | None = None
        self._num_states = 0
        self._lent = ExitStack()  # undoes changes of other objects at the end

        if not is_synced:
            self._broadcast_layers(module)
        self.node = own_group(topology.partition("node"), timeout=timeout, desc="slices")
        self.across: Any = None
        if topology.num_nodes > 1:
            self.across = own_group(
                topology.partition("across"), timeout=timeout, desc="equal slices"
            )

        self._ranks = NodeRanks(self.node)
        self._layers = cut_(module, layers, self._ranks)
        self._all_layers = list(self._layers)
        for averaged_model in averaged_models:
            self._all_layers += cut_(averaged_model, layers, self._ranks)

        self._parameters: dict[int, Any] = {}
        self._slices: dict[int, Slice] = {}
        for parameter, tensor_slice in _parameters_with_slices(self._layers):
            self._parameters[id(parameter)] = parameter
            self._slices[id(parameter)] = tensor_slice

        names_of_slices = []
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in self._slices:
                names_of_slices.append(name)
        self._lent.enter_context(ignored_by_ddp(module, names_of_slices))

        # Every training run of the process has its own prefix in the store.
        fit_number = private_store("lightning_hybrid/slices").add(str(topology.rank), 1)
        self._store = private_store(f"lightning_hybrid/slices/{fit_number}")
        self._ranks.wait_for_ranks = self._wait_for_ranks

    def _broadcast_layers(self, module: nn.Module) -> None:
        parameters: dict[int, nn.Parameter] = {}  # by `id`: tied weights are sent once
        for name in self.names:
            for parameter in module.get_submodule(name).parameters():
                parameters[id(parameter)] = parameter
        broadcast_first_([parameter.detach() for parameter in parameters.values()])

    @property
    def num_whole_bytes(self) -> int:
        """Size in bytes of the full weights of all sliced layers."""
        num_bytes = 0
        for key, parameter in self._parameters.items():
            num_bytes += self._slices[key].whole_shape.numel() * parameter.element_size()
        return num_bytes

    def __contains__(self, key: object) -> bool:
        """Return whether the parameter with the given `id` is sliced."""
        return key in self._slices

    # ---- step ------------------------------------------------------------------------------------------------------

    def connect(
        self,
        optimizers: Sequence[Optimizer],
        *,
        comm_dtype: torch.dtype | None,
        is_last_backward: Callable[[], bool],
        is_adasum: bool,
        window: HalfPrecisionWindow | None,
    ) -> None:
        """Start averaging slice gradients between nodes, and let optimizers compute norms over all slices.

        LARS and LAMB then compute norms over all slices of a tensor.

        Args:
            optimizers: Optimizers of the run.
            comm_dtype: Dtype of gradients on the wire. None: their own dtype.
            is_last_backward: Function that returns whether the current backward pass is the last one of its step.
            is_adasum: Whether nodes combine gradients by Adasum instead of the mean.
            window: Half-precision window. None: there is none.
        """
        self._ranks.window = window
        adasum_group = None
        if is_adasum:
            adasum_group = self.node
        self._gradients = SliceGradients(
            self._parameters.values(),
            across=self.across,
            comm_dtype=comm_dtype,
            is_last_backward=is_last_backward,
            adasum_group=adasum_group,
        )

        for optimizer in optimizers:
            parts: dict[Tensor, Part] = {}
            for parameter in parameters_of(optimizer):
                if id(parameter) in self._slices:
                    # To the optimizer the slice is a complete tensor, whose sums of squares are added over ranks.
                    numel = parameter.numel()
                    parts[parameter] = Part(numel=numel, begin=0, end=numel)
            if parts and hasattr(optimizer, "parts"):
                attributes = temporary_attributes(optimizer, parts=parts, add_up_=self.add_up_)
                self._lent.enter_context(attributes)

    @property
    def frozen(self) -> set[int]:
        """Set of the `id`s of sliced parameters that do not require gradients.

        Gradients of parameters that are frozen when training starts are not averaged in this run.
        """
        return {key for key, parameter in self._parameters.items() if not parameter.requires_grad}

    def add_up_(self, table: Tensor) -> None:
        """All-reduce a tensor over the ranks of the node, in place.

        Collective: every rank of the node must call it, in the same order.
        """
        dist.all_reduce(table, group=self.node)

    def largest(self, value: Tensor) -> Tensor:
        """Return the elementwise maximum of `value` over the ranks of the node.

        All nodes get the same result, because they have the same gradients. The tensor is overwritten.

        Collective: every rank of the node must call it, in the same order.
        """
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.node)
        return value

    def agree_on_overflow(self, scaler: Any) -> None:
        """Make all ranks of the node agree on whether Lightning's gradient scaler skips a step."""
        unscale = scaler._unscale_grads_

        def unscale_on_node(*args: Any) -> Any:
            found_inf_by_device = unscale(*args)
            return {device: self.largest(value) for device, value in found_inf_by_device.items()}

        vars(scaler)["_unscale_grads_"] = unscale_on_node
        self._lent.callback(vars(scaler).pop, "_unscale_grads_")

    # ---- validation and state --------------------------------------------------------------------------------------

    def use_whole_layers(self) -> None:
        """Gather the full weights and let each rank compute with them until `use_slices` is called.

        Collective: every rank of the node must call it, in the same order.
        """
        self.use_slices()  # frees earlier full weights first, so that memory holds one copy
        for layer in self._layers:
            layer.use_whole_tensors()
        self._ranks.is_whole = True

    def use_slices(self) -> None:
        """Switch the layers back to their slices."""
        self._ranks.is_whole = False
        for layer in self._layers:
            layer.use_slices()

    @contextmanager
    def own_state(self) -> Iterator[None]:
        """Return a context in which state dicts hold only this rank's slices and need no communication."""
        self._ranks.is_own_state = True
        try:
            yield
        finally:
            self._ranks.is_own_state = False

    def _wait_for_ranks(self) -> None:
        """Wait until all ranks of the node have called `state_dict()`.

        Without this check, a call that a user makes on one rank alone would block.

        Raises:
            RuntimeError: A rank did not call `state_dict()` within `STATE_LIMIT_S`.
        """
        if self.is_saving:
            return
        self._num_states += 1
        self._store.set(f"{self._num_states}/{self.topology.rank}", "")
        end_s = monotonic() + STATE_LIMIT_S
        missing = self._ranks_without_state(self.topology.node)
        while missing:
            if monotonic() > end_s:
                raise RuntimeError(
                    f"`state_dict()` must be called on all ranks, because the layers in `node_slices` (={self.names}) "
                    f"are sliced over the ranks of a node, but {name_ranks(missing)} did not call it within "
                    f"{STATE_LIMIT_S:g} s. Call `state_dict()` outside of `if self.trainer.is_global_zero:`, or use "
                    "`trainer.save_checkpoint`."
                )
            sleep(0.005)
            missing = self._ranks_without_state(missing)

    def _ranks_without_state(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if not self._store.check([f"{self._num_states}/{rank}"])]

    def whole_state(self, state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state dict with full tensors on every rank.

        Collective: every rank of the node must call it, in the same order.
        """
        return with_entries(state, optimizer, self._whole_entry)

    def cut_state(self, state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state dict with this rank's slices in place of full tensors."""
        return with_entries(state, optimizer, self._cut_entry)

    def _whole_entry(self, parameter: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
        tensor_slice = self._slices.get(id(parameter))
        if tensor_slice is None:
            return entry
        return _with_tensors_of_shape(entry, parameter.shape, tensor_slice.gather_whole)

    def _cut_entry(self, parameter: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
        tensor_slice = self._slices.get(id(parameter))
        if tensor_slice is None:
            return entry
        return _with_tensors_of_shape(entry, tensor_slice.whole_shape, tensor_slice.cut_from)

    # ---- end -------------------------------------------------------------------------------------------------------

    def end(self, optimizers: Sequence[Optimizer], *, is_whole: bool) -> None:
        """Restore the module and the optimizers, and destroy the process groups.

        Args:
            optimizers: Optimizers of the run.
            is_whole: Whether to gather full parameters and optimizer state, which is collective. If False, the module
                keeps its slices.
        """
        if self._gradients is not None:
            self._gradients.remove()
        for handle in self._ranks.handles:
            handle.remove()
        self.use_slices()
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
                    whole_entry = self._whole_entry(parameter, optimizer.state[parameter])
                    optimizer.state[parameter] = whole_entry

        # A tied parameter is gathered once.
        slice_by_parameter = {}
        for parameter, tensor_slice in _parameters_with_slices(self._all_layers):
            slice_by_parameter[id(parameter)] = (parameter, tensor_slice)
        for parameter, tensor_slice in slice_by_parameter.values():
            parameter.grad = None
            parameter.data = tensor_slice.gather_whole(parameter.detach())
        for layer in self._all_layers:
            layer.remove()


def _parameters_with_slices(layers: Sequence[SlicedLayer]) -> Iterator[tuple[Any, Slice]]:
    for sliced in layers:
        for name, tensor_slice in sliced.slices.items():
            yield getattr(sliced.layer, name), tensor_slice


def _with_tensors_of_shape(
    entry: Mapping[str, Any], shape: torch.Size, change: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """Return an optimizer-state entry with `change` applied to each tensor of the given shape."""
    changed_entry = {}
    for name, value in entry.items():
        if isinstance(value, Tensor) and value.shape == shape:
            value = change(value)
        changed_entry[name] = value
    return changed_entry
