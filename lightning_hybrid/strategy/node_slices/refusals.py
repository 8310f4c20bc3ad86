"""Checks, before training, that layers can be cut over the ranks of a node."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

from torch import nn

from lightning_hybrid.lightning_names import lightning_types

_KINDS = (
    nn.Linear,
    nn.Embedding,
    nn.MultiheadAttention,
    nn.modules.linear.NonDynamicallyQuantizableLinear,
)
_PLAIN = {"weight", "bias", "in_proj_weight", "in_proj_bias"}
_OPTIONS = ("max_norm", "scale_grad_by_freq", "sparse", "add_zero_attn")  # that need whole tensors


def pruned_layers(callbacks: Iterable[Any]) -> set[nn.Module]:
    """Return the layers that callbacks are to prune."""
    kind = lightning_types("pytorch.callbacks.ModelPruning")
    return {
        layer
        for one in callbacks
        if isinstance(one, kind)
        for layer, _ in one._parameters_to_prune or ()
    }


def refuse_layers(
    module: nn.Module,
    layers: Sequence[tuple[str, ...]],
    *,
    num_slices: int,
    pruned: Container[nn.Module] = (),
) -> None:
    """Check that all that is to be cut can be.

    Raises:
        ValueError: names the layer.
    """
    names = {layer: name for name, layer in module.named_modules()}
    rows = list[nn.Module]()
    others = list[nn.Module]()
    for group in layers:
        if len(group) not in (1, 2):
            raise ValueError(
                f"`node_slices` (={group}) must have groups of two names, which are a pair, or of one: the first and "
                'the second layer of a pair are cut in different ways. Write (("fc6", "fc7"), ("fc8",)).'
            )
        first = module.get_submodule(group[0])
        last = module.get_submodule(group[-1])
        columns: list[nn.Module] = [one for one in first.modules() if type(one) is nn.Linear]
        columns = columns or [first]
        others += columns
        if len(group) == 2:
            rows.append(last)
            _refuse_pair(first, columns, last, group, num_slices)
    for layer in (*others, *rows):
        _refuse_layer(layer, names[layer], is_pruned=layer in pruned)
    _refuse_ties(names, rows, others)


def _refuse_layer(layer: nn.Module, name: str, *, is_pruned: bool) -> None:
    held = [*_held(layer), *(option for option in _OPTIONS if getattr(layer, option, None))]
    held += ["ModelPruning"] * is_pruned
    if type(layer) not in _KINDS or not _PLAIN.issuperset(held) or "sliced" in vars(layer):
        raise ValueError(
            f"`{name}` (={type(layer).__name__} with {', '.join(held)}) must be a torch.nn.Linear, Embedding or "
            "MultiheadAttention to be cut by `node_slices`, exactly that, whole and with plain parameters: a subclass, "
            "pruning, `weight_norm` or such an option needs whole tensors. Leave its name out."
        )


def _refuse_pair(
    first: nn.Module,
    columns: Sequence[nn.Module],
    last: nn.Module,
    group: tuple[str, ...],
    num_slices: int,
) -> None:
    inside = {id(one) for layer in columns for one in layer.parameters()}
    if [one for one in first.parameters() if id(one) not in inside]:
        raise ValueError(
            f"`{group[0]}` (={type(first).__name__}) must have no parameters but those of its linear layers to be cut "
            "by `node_slices`: a rank would know of others only what its slice says. Name a pair within it."
        )
    heads: Any = next(
        (
            getattr(first, one)
            for one in ("num_heads", "num_attention_heads")
            if hasattr(first, one)
        ),
        0,
    )
    wide = {getattr(one, "out_features", getattr(one, "embed_dim", 0)) for one in columns}
    features: Any = getattr(last, "in_features", 0)
    if wide != {features} or features % num_slices or heads % num_slices:
        raise ValueError(
            f"`out_features` of `{group[0]}` (={', '.join(map(str, wide))}{f' in {heads} heads' * bool(heads)}) must "
            f"be a multiple of the {num_slices} ranks of a node, as its heads, and `in_features` of `{group[1]}` "
            f"(={features}): each rank computes on with what it has. Change them, or leave the names out."
        )


def _refuse_ties(
    names: dict[nn.Module, str], rows: list[nn.Module], others: list[nn.Module]
) -> None:
    places = [
        id(one) for layer in (*rows, *others) for one in _held(layer).values() if one.dim() > 1
    ]
    of_rows = {id(one) for layer in rows for one in _held(layer).values() if one.dim() > 1}
    for layer, name in names.items():
        for one in _held(layer).values():
            is_cut = layer in rows or layer in others
            if id(one) in places and (
                not is_cut or (id(one) in of_rows and places.count(id(one)) > 1)
            ):
                raise ValueError(
                    f"`{name}` (={type(layer).__name__}) must not share its weight with a layer that `node_slices` "
                    "cuts in another way, or not at all: it would compute with a slice. Untie it, or leave names out."
                )


def _held(layer: nn.Module) -> dict[str, nn.Parameter]:
    return {name: one for name, one in layer._parameters.items() if one is not None}
