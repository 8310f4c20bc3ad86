"""Checks, before training, that layers can be cut over the ranks of a node."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn


def refuse_unknown_names(module: nn.Module, layers: Sequence[tuple[str, ...]]) -> None:
    """Check that every name is that of a layer.

    Raises:
        ValueError: with the names that there are.
    """
    known = {name for name, _ in module.named_modules(remove_duplicate=False)}
    for name in (name for names in layers for name in names):
        if name not in known:
            linear = [each for each, layer in module.named_modules() if isinstance(layer, nn.Linear)]
            raise ValueError(
                f"`{name}` in `node_slices` (={list(layers)}) must be the name of a layer, as the network registers "
                f"it, and {type(module).__name__} has none of this name. Its linear layers are "
                f"{', '.join(linear) or 'none'}: write one of these, or leave the name out."
            )


def without_odd_heads(
    module: nn.Module, layers: Sequence[tuple[str, ...]], *, num_slices: int
) -> list[tuple[str, ...]]:
    """Leave out heads whose classes do not divide, with a warning: the data decides on their number."""
    found = []
    for names in layers:
        classes = getattr(module.get_submodule(names[0]), "out_features", 0) if len(names) == 1 else 0
        if classes % num_slices:
            rank_zero_warn(
                f"`{names[0]}` has {classes} classes, which do not divide by the {num_slices} ranks of a node: every "
                "rank has it whole. Other layers of `node_slices` are cut."
            )
        else:
            found.append(names)
    return found


def refuse_layers(module: nn.Module, layers: Sequence[tuple[str, ...]], *, num_slices: int) -> None:
    """Check that each layer is a linear one of its own, whose features divide.

    Raises:
        ValueError: names the layer.
    """
    uses = [id(layer) for _, layer in module.named_modules(remove_duplicate=False)]
    owners = [id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)]
    for names in layers:
        if len(names) not in (1, 2):
            raise ValueError(
                f"`node_slices` (={names}) must have groups of two names, which are a pair, or of one, a head: the "
                'first and the second layer of a pair are cut in different ways. Write (("fc6", "fc7"), ("fc8",)).'
            )
        for place, name in enumerate(names):
            layer = module.get_submodule(name)
            if type(layer) is not nn.Linear:
                raise ValueError(
                    f"`{name}` (={type(layer).__name__}) must be a torch.nn.Linear to be cut by `node_slices`, and "
                    "exactly that: a subclass may use its weight in other ways. Leave its name out."
                )
            if not {"weight"} <= (held := dict(layer.named_parameters())).keys() <= {"weight", "bias"}:
                raise ValueError(
                    f"`{name}` (with the parameters {', '.join(held) or 'none'}) must have its weight and bias as "
                    "plain parameters to be cut by `node_slices`: pruning, `weight_norm` and `spectral_norm` compute "
                    "them anew from whole tensors. Remove these from the layer, or leave its name out."
                )
            parameters = list(held.values())
            if uses.count(id(layer)) > 1 or any(owners.count(id(one)) > 1 for one in parameters):
                raise ValueError(
                    f"`{name}` must be in one place to be cut by `node_slices`: the layer or its weight is used in "
                    "another as well, which would compute with a slice. Untie it, or leave its name out."
                )
            kind = ("in_features", "out_features")[place == 0]
            if (features := getattr(layer, kind)) % num_slices:
                raise ValueError(
                    f"`{kind}` of `{name}` (={features}) must be a multiple of the {num_slices} ranks of a node: each "
                    f"holds as many. The next that fits is {-(-features // num_slices) * num_slices}."
                )
        if len(names) == 2:
            first, second = (module.get_submodule(name) for name in names)
            if first.out_features != second.in_features:
                raise ValueError(
                    f"`out_features` of `{names[0]}` (={first.out_features}) must be `in_features` of `{names[1]}` "
                    f"(={second.in_features}): each rank computes on with the features that it has."
                )
