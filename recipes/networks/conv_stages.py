"""Division of convolutional networks into stages, for pipelines and for activation checkpointing."""

from torch import Tensor, nn

from lightning_hybrid.models.activation_checkpointing import checkpointed


def stages_of(features: nn.Sequential) -> list[nn.Module]:
    """Split a sequence of layers into stages that each begin with a convolution."""
    starts = [index for index, layer in enumerate(features) if isinstance(layer, nn.Conv2d)]
    return [
        features[start:end] for start, end in zip(starts, [*starts[1:], len(features)], strict=True)
    ]


def run_stages(features: nn.Sequential, x: Tensor, *, checkpoint_activations: bool) -> Tensor:
    """Apply a sequence of layers to `x`, optionally with activation checkpointing of each stage."""
    if not checkpoint_activations:
        return features(x)
    for stage in stages_of(features):
        x = checkpointed(stage, x, norms=stage)
    return x
