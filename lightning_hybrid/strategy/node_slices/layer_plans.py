"""Selection of the layers to slice, with slicing plans for layers of torch and `transformers`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

# The keys are class names, because `transformers` may not be installed.
READY_PLANS: dict[str, Sequence[tuple[str, ...]]] = {
    "MultiheadAttention": (("", "out_proj"),),
    "TransformerEncoderLayer": (("self_attn",), ("linear1", "linear2")),
    "BertEmbeddings": (("word_embeddings",),),
    "BertLayer": (("attention.self", "attention.output.dense"), ("intermediate", "output.dense")),
    "BertLMPredictionHead": (("decoder",),),
}


def requested_layers(module: nn.Module) -> list[tuple[str, ...]]:
    """Return the groups of layers that `module` and its submodules list in their `node_slices` attributes.

    Each group holds the names in `module` of a layer pair, or of a single embedding or output layer.

    Raises:
        ValueError: A name is not a layer of its network, or a layer has no plan.
    """
    groups: list[tuple[str, ...]] = []
    for prefix, network in module.named_modules():
        for names in getattr(network, "node_slices", ()):
            groups.extend(_groups(network, names, prefix))
    return groups


def _groups(network: nn.Module, names: tuple[str, ...], prefix: str) -> Iterator[tuple[str, ...]]:
    """Expand one entry of `node_slices` or of a slicing plan, and yield its groups of layer names."""
    try:
        layers = [network.get_submodule(name) for name in names]
    except AttributeError as error:
        linear_layers = []
        for name, layer in network.named_modules():
            if isinstance(layer, nn.Linear):
                linear_layers.append(name)
        raise ValueError(
            f"`node_slices` (={names}) contains a name that is not a layer of the network: {error}. Use the name of "
            f"one of its linear layers ({', '.join(linear_layers) or 'none'}), or leave the name out."
        ) from None

    full_names = tuple(_joined(prefix, name) for name in names)
    if len(full_names) > 1 or isinstance(layers[0], nn.Linear | nn.Embedding):
        yield full_names
        return
    planned_groups = list(_planned(layers[0], full_names[0]))
    if not planned_groups:
        raise ValueError(
            f"`{full_names[0]}` (={type(layers[0]).__name__}) cannot be sliced by `node_slices`, because it has no "
            f"`tensor_plan()` and contains none of {', '.join(READY_PLANS)}. List pairs of its layers instead."
        )
    yield from planned_groups


def _joined(prefix: str, name: str) -> str:
    if prefix and name:
        return f"{prefix}.{name}"
    return prefix or name


def _planned(layer: nn.Module, prefix: str) -> Iterator[tuple[str, ...]]:
    """Yield the groups of layer names from a layer's slicing plan, or from the plans of its sublayers."""
    plan = _plan_of(layer)
    if plan is not None:
        for names in plan:
            yield from _groups(layer, names, prefix)
        return
    for name, child in layer.named_children():
        yield from _planned(child, f"{prefix}.{name}")


def _plan_of(layer: nn.Module) -> Sequence[tuple[str, ...]] | None:
    # The plan of a layer, even an inherited one, takes precedence over the plans of its sublayers.
    if hasattr(layer, "tensor_plan"):
        plan: Sequence[tuple[str, ...]] | None = layer.tensor_plan()  # type: ignore[operator]
        if plan is not None:
            return plan
    for base in type(layer).mro():
        if base.__name__ in READY_PLANS:
            return READY_PLANS[base.__name__]
    return None
