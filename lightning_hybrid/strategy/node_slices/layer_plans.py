"""Which layers are cut together: what networks ask for, and the plans of layers that come from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

# By the name of the class, as `transformers` need not be there.
READY_PLANS: dict[str, Sequence[tuple[str, ...]]] = {
    "MultiheadAttention": (("", "out_proj"),),
    "TransformerEncoderLayer": (("self_attn",), ("linear1", "linear2")),
    "BertEmbeddings": (("word_embeddings",),),
    "BertLayer": (("attention.self", "attention.output.dense"), ("intermediate", "output.dense")),
    "BertLMPredictionHead": (("decoder",),),
}


def requested_layers(module: nn.Module) -> list[tuple[str, ...]]:
    """Return what networks in `module` ask to be cut by `node_slices`: names in `module`, pairs and vocabularies.

    Raises:
        ValueError: with the names that there are.
    """
    return [
        group
        for prefix, network in module.named_modules()
        for names in getattr(network, "node_slices", ())
        for group in _groups(network, names, prefix)
    ]


def _groups(network: nn.Module, names: tuple[str, ...], prefix: str) -> Iterator[tuple[str, ...]]:
    try:
        layers = [network.get_submodule(name) for name in names]
    except AttributeError as error:
        linear = ", ".join(
            each for each, layer in network.named_modules() if isinstance(layer, nn.Linear)
        )
        raise ValueError(
            f"`node_slices` (={names}) must be names of layers, as the network registers them, and {error}. Its linear "
            f"layers are {linear or 'none'}: write one of these, or leave the name out."
        ) from None
    names = tuple(".".join(filter(None, (prefix, name))) for name in names)
    if len(names) > 1 or isinstance(layers[0], nn.Linear | nn.Embedding):
        yield names
        return
    if not (found := list(_planned(layers[0], names[0]))):
        raise ValueError(
            f"`{names[0]}` (={type(layers[0]).__name__}) in `node_slices` must say how it is cut: it has no "
            f"`tensor_plan()`, and none of its layers is one of {', '.join(READY_PLANS)}. Name pairs of its layers."
        )
    yield from found


def _planned(layer: nn.Module, prefix: str) -> Iterator[tuple[str, ...]]:
    # The plan of a module goes before those of its layers.
    plan = layer.tensor_plan() if hasattr(layer, "tensor_plan") else None  # type: ignore[operator]
    if plan is None:
        plan = next(
            (READY_PLANS[one.__name__] for one in type(layer).mro() if one.__name__ in READY_PLANS),
            None,
        )
    if plan is not None:
        for names in plan:
            yield from _groups(layer, names, prefix)
        return
    for name, child in layer.named_children():
        yield from _planned(child, f"{prefix}.{name}")
