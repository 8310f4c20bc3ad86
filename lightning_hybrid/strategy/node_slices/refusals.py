"""Checks, before training, that layers can be cut over the ranks of a node: of options, layers and optimizers."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.comm import Topology
from lightning_hybrid.lightning_names import lightning_types
from lightning_hybrid.strategy.shard_update.refusals import ELEMENTWISE, PRECISIONS


def refuse_options(asked: object, *, precision: object, module: nn.Module, **options: tuple[object, object]) -> None:
    """Check what the run has set besides slices; `options`: value and the only one that can be.

    Raises:
        ValueError: names the option.
    """
    for name, (value, accepted) in options.items():
        if value != accepted:
            raise ValueError(
                f"`{name}` (={value!r}) and `node_slices` (={asked}) exclude each other: it works on gradients and "
                f"weights that every rank has whole. Leave `strategy.{name}` out, or `node_slices` (in recipes "
                "`model.slice_fc`)."
            )
    if precision not in PRECISIONS:
        raise ValueError(
            f"`precision` (={precision!r}) and `node_slices` (={asked}) exclude each other: all slices get one verdict "
            f"on overflow with {', '.join(PRECISIONS)}. In place of 16-mixed take 16-true, in place of "
            "bf16-mixed bf16-true, or leave `node_slices` out."
        )
    for name, layer in module.named_modules():
        if hasattr(layer, "_orig_mod") or getattr(layer, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"`{name or 'the module'}` (={type(layer).__name__}) is compiled, which excludes `node_slices` "
                f"(={asked}): ranks talk in the middle of its forward. Leave torch.compile out (in recipes "
                "compile=false), or `node_slices`."
            )


def refuse_callbacks(callbacks: Iterable[Any], *, cut: Container[nn.Module] = ()) -> None:
    """Check that no callback averages weights in a way of its own, or prunes layers that are to be `cut`.

    Raises:
        ValueError: names it.
    """
    kinds = lightning_types("pytorch.callbacks.StochasticWeightAveraging")
    prunes = lightning_types("pytorch.callbacks.ModelPruning")
    for callback in callbacks:
        if isinstance(callback, prunes) and any(layer in cut for layer, _ in callback._parameters_to_prune or ()):
            raise ValueError(
                f"`callbacks` (={type(callback).__name__}) cannot prune layers of `node_slices`: its masks are as "
                "large as whole weights. Give it other layers by `parameters_to_prune`, or leave `node_slices` out."
            )
        if isinstance(callback, kinds):
            raise ValueError(
                f"`callbacks` (={type(callback).__name__}) cannot be combined with `node_slices`: its average is a "
                "copy with whole layers, and each rank would have slices to add to it. Use `MasterWeightAveraging` or "
                "Lightning's `EMAWeightAveraging`, or leave `node_slices` out."
            )


def refuse_topology(topology: Topology) -> None:
    """Check that every node has as many ranks.

    Raises:
        ValueError: with their numbers.
    """
    if topology.ranks_per_node is None:
        sizes = ", ".join(str(len(node)) for node in topology.nodes)
        raise ValueError(
            "`node_slices` needs nodes of equal size: a slice is the same on every node, and here nodes hold "
            f"{sizes} ranks. Launch equal nodes, or leave `node_slices` (in recipes `model.slice_fc`) out."
        )


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


def refuse_optimizers_with_norms(optimizers: Iterable[Optimizer], slices: Container[int]) -> None:
    """Check that each step is right on slices; `slices`: parameters by `id`.

    Raises:
        ValueError: names the optimizer.
    """
    for optimizer in optimizers:
        groups = [group for group in optimizer.param_groups if any(id(one) in slices for one in group["params"])]
        name: Any = type(optimizer).__name__
        # By the exact type: a subclass may look at norms.
        if groups and type(optimizer) not in ELEMENTWISE and not hasattr(optimizer, "parts"):
            raise ValueError(
                f"`optimizer` (={name}) cannot train slices (`node_slices`): its step may need whole tensors, as rules "
                "with norms, factors or line searches do. Use LARS, LAMB or one of torch's that treat elements one by "
                f"one ({', '.join(one.__name__ for one in ELEMENTWISE)}), or leave `node_slices` out."
            )
        if any(group.get("direction") == "orthogonal" for group in groups):
            raise ValueError(
                '`direction` (="orthogonal") and `node_slices` exclude each other: it needs whole matrices. Use '
                'direction="momentum", or leave `node_slices` (in recipes `model.slice_fc`) out.'
            )
