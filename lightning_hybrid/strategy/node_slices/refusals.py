"""Checks before training that the requested layers can be sliced over the ranks of a node."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

from torch import nn

from lightning_hybrid.lightning_names import lightning_types

_TYPES = (
    nn.Linear,
    nn.Embedding,
    nn.MultiheadAttention,
    nn.modules.linear.NonDynamicallyQuantizableLinear,
)
_PLAIN_PARAMETERS = {"weight", "bias", "in_proj_weight", "in_proj_bias"}
# Options of layers that need full tensors.
_WHOLE_TENSOR_OPTIONS = ("max_norm", "scale_grad_by_freq", "sparse", "add_zero_attn")


def pruned_layers(callbacks: Iterable[Any]) -> set[nn.Module]:
    """Return the layers that `ModelPruning` callbacks will prune."""
    pruning_types = lightning_types("pytorch.callbacks.ModelPruning")
    layers: set[nn.Module] = set()
    for callback in callbacks:
        if isinstance(callback, pruning_types):
            for layer, _ in callback._parameters_to_prune or ():
                layers.add(layer)
    return layers


def refuse_layers(
    module: nn.Module,
    layers: Sequence[tuple[str, ...]],
    *,
    num_slices: int,
    pruned: Container[nn.Module] = (),
) -> None:
    """Raise if a requested layer cannot be sliced.

    Args:
        module: Network with the layers.
        layers: Groups of layer names in `module` that are sliced together, as `requested_layers` returns them.
        num_slices: Number of ranks of a node.
        pruned: Layers that callbacks will prune.

    Raises:
        ValueError: A layer cannot be sliced. The message names it.
    """
    names = {layer: name for name, layer in module.named_modules()}
    row_layers: list[nn.Module] = []  # sliced by input features: the last layers of pairs
    column_layers: list[nn.Module] = []  # all others
    for group in layers:
        if len(group) not in (1, 2):
            raise ValueError(
                f"`node_slices` contains the group {group}, but a group must be the name of one layer or a pair of "
                'two names. Set node_slices = (("fc6", "fc7"), ("fc8",)), for example.'
            )
        first = module.get_submodule(group[0])
        last = module.get_submodule(group[-1])
        columns: list[nn.Module] = []
        for layer in first.modules():
            if type(layer) is nn.Linear:
                columns.append(layer)
        if not columns:
            columns.append(first)
        column_layers += columns
        if len(group) == 2:
            row_layers.append(last)
            _refuse_pair(first, columns, last, group, num_slices)

    for layer in (*column_layers, *row_layers):
        _refuse_layer(layer, names[layer], is_pruned=layer in pruned)
    _refuse_ties(names, row_layers, column_layers)


def _refuse_layer(layer: nn.Module, name: str, *, is_pruned: bool) -> None:
    features = list(_parameters_of(layer))
    for option in _WHOLE_TENSOR_OPTIONS:
        if getattr(layer, option, None):
            features.append(option)
    if is_pruned:
        features.append("ModelPruning")

    is_plain = type(layer) in _TYPES and _PLAIN_PARAMETERS.issuperset(features)
    if not is_plain or "sliced" in vars(layer):
        raise ValueError(
            f"`{name}` (={type(layer).__name__} with {', '.join(features)}) cannot be sliced by `node_slices`, which "
            "supports only torch.nn.Linear, Embedding and MultiheadAttention with plain parameters. Subclasses, "
            "pruning, `weight_norm` and similar options need full tensors. Leave its name out."
        )


def _refuse_pair(
    first: nn.Module,
    columns: Sequence[nn.Module],
    last: nn.Module,
    group: tuple[str, ...],
    num_slices: int,
) -> None:
    cut_parameters = set()
    for layer in columns:
        cut_parameters |= {id(parameter) for parameter in layer.parameters()}
    if any(id(parameter) not in cut_parameters for parameter in first.parameters()):
        raise ValueError(
            f"`{group[0]}` (={type(first).__name__}) cannot be sliced by `node_slices`, because it has parameters "
            "outside its linear layers. Their gradients would be computed from the slice of only one rank. List a pair "
            "of layers inside it instead."
        )

    num_heads: Any = 0
    for attribute in ("num_heads", "num_attention_heads"):
        if hasattr(first, attribute):
            num_heads = getattr(first, attribute)
            break
    widths = set()
    for layer in columns:
        widths.add(getattr(layer, "out_features", getattr(layer, "embed_dim", 0)))
    num_features: Any = getattr(last, "in_features", 0)
    if widths != {num_features} or num_features % num_slices or num_heads % num_slices:
        out_features = ", ".join(map(str, widths))
        if num_heads:
            out_features += f" in {num_heads} heads"
        raise ValueError(
            f"`out_features` of `{group[0]}` (={out_features}) must equal `in_features` of `{group[1]}` "
            f"(={num_features}). Both, and the number of heads, must be a multiple of the {num_slices} ranks of a "
            "node, because each rank computes an equal slice of the features. Change these sizes, or remove the names "
            "from `node_slices`."
        )


def _refuse_ties(
    names: dict[nn.Module, str], row_layers: list[nn.Module], column_layers: list[nn.Module]
) -> None:
    cut_layers = [*row_layers, *column_layers]
    weights_of_cut_layers = [key for layer in cut_layers for key in _weight_ids(layer)]
    weights_of_rows = {key for layer in row_layers for key in _weight_ids(layer)}
    for layer, name in names.items():
        is_cut = layer in cut_layers
        for parameter in _parameters_of(layer).values():
            key = id(parameter)
            if key not in weights_of_cut_layers:
                continue
            is_cut_in_two_ways = key in weights_of_rows and weights_of_cut_layers.count(key) > 1
            if not is_cut or is_cut_in_two_ways:
                raise ValueError(
                    f"`{name}` (={type(layer).__name__}) must not share its weight with a layer that `node_slices` "
                    "slices differently or not at all, because that layer would use a slice instead of the full "
                    "weight. Untie the weight, or leave the names out."
                )


def _parameters_of(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Return a layer's own parameters by name, without those of its sublayers."""
    return {name: value for name, value in layer._parameters.items() if value is not None}


def _weight_ids(layer: nn.Module) -> list[int]:
    """Return the `id`s of the layer's own parameters that have at least two dimensions."""
    return [id(value) for value in _parameters_of(layer).values() if value.dim() > 1]
