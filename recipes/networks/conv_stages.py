"""A network's convolutions as stages: for cuts of a pipeline, and for one activation checkpoint each."""

from torch import Tensor, nn

from lightning_hybrid.models.activation_checkpointing import checkpointed


def stages_of(features: nn.Sequential) -> list[nn.Module]:
    """Cut layers before each convolution but the first."""
    starts = [index for index, layer in enumerate(features) if isinstance(layer, nn.Conv2d)]
    return [
        features[start:end] for start, end in zip(starts, [*starts[1:], len(features)], strict=True)
    ]


def run_stages(features: nn.Sequential, x: Tensor, *, checkpoint_activations: bool) -> Tensor:
    """Compute `features(x)`, if asked with one checkpoint per convolution and what follows it."""
    if not checkpoint_activations:
        return features(x)
    for stage in stages_of(features):
        x = checkpointed(stage, x, norms=stage)
    return x
