"""Channels-last images stay channels-last from the first convolution to the head."""

import pytest
import torch
from torch import nn

from recipes.networks.alexnet import AlexNetBN
from recipes.networks.resnet import ResNet

NETWORKS = {
    "ResNet-18": lambda **options: ResNet(depth=18, num_classes=4, width=0.125, **options),
    "ResNet-50": lambda **options: ResNet(depth=50, num_classes=4, width=0.125, **options),
    "AlexNetBN": lambda **options: AlexNetBN(num_classes=4, in_channels=3, image_size=64, width=0.125, **options),
}


def is_channels_last_only(tensor):
    """Pixels of more than one channel: with one pixel or one channel both formats are the same strides."""
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


@pytest.mark.parametrize("checkpoint_activations", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_layer_keeps_channels_last_forward_and_backward(name, checkpoint_activations):
    network = NETWORKS[name](checkpoint_activations=checkpoint_activations).to(memory_format=torch.channels_last)
    seen, wrong = 0, []

    def look(layer, inputs, output):
        nonlocal seen
        before = inputs[0]  # a copy in between would not show in the output: channels-last weights bring it back
        if before.dim() == 4 and before.shape[2] > 1 and not is_channels_last_only(before):
            wrong.append(layer)
        if output.dim() == 4 and output.shape[2] > 1:
            seen += 1
            wrong.extend([layer] * (not is_channels_last_only(output)))
            if isinstance(layer, nn.Conv2d):  # the head hands the last layer a gradient in a layout of its own
                output.register_hook(lambda grad: wrong.extend([layer] * (not is_channels_last_only(grad))))

    for layer in network.modules():
        layer.register_forward_hook(look)
    images = torch.randn(2, 3, 64, 64).to(memory_format=torch.channels_last)
    network(images).sum().backward()
    assert seen >= 12  # as many as AlexNet has before its last pooling, which leaves one pixel
    assert not wrong
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1):
            assert is_channels_last_only(layer.weight.grad)
