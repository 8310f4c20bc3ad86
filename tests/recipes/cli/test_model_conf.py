"""conf/model: the keys are exactly the constructor's arguments, and each file builds what its name says."""

import inspect

import pytest
import torch
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

from recipes.benchmarks.gradient_sets import alexnet_shapes, resnet50_shapes
from tests.checkout import ROOT, tracked_in

CONF = ROOT / "conf" / "model"
NUM_PARAMETERS = {"alexnet_bn_imagenet": 62_380_232, "alexnet": 61_100_840, "resnet50": 25_557_032}


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_keys_are_exactly_the_arguments_of_the_constructor(name):
    cfg = OmegaConf.load(CONF / f"{name}.yaml")
    assert set(cfg) - {"_target_"} == set(inspect.signature(get_class(cfg._target_)).parameters)


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_the_network_is_the_published_one(name):
    with torch.device("meta"):
        network = instantiate(OmegaConf.load(CONF / f"{name}.yaml"))
        logits = network(torch.empty(2, 3, 224, 224))
    assert logits.shape == (2, 1000)
    assert sum(parameter.numel() for parameter in network.parameters()) == NUM_PARAMETERS[name]


def test_every_file_is_known_here():
    assert {path.stem for path in tracked_in(CONF, "*.yaml")} == {*NUM_PARAMETERS, "alexnet_bn"}


def test_benchmarks_gradients_are_in_the_shapes_that_their_records_were_measured_with():
    """Written out here as the benchmarks had them before they took them from the networks."""
    convolutions = [(64, 3, 11, 11), (192, 64, 5, 5), (384, 192, 3, 3), (256, 384, 3, 3), (256, 256, 3, 3)]
    linears = [(4096, 9216), (4096, 4096), (1000, 4096)]
    assert alexnet_shapes() == [shape for weight in [*convolutions, *linears] for shape in (weight, weight[:1])]

    def convolution(num_out, num_in, kernel):
        return [(num_out, num_in, kernel, kernel), (num_out,), (num_out,)]

    shapes, num_in = convolution(64, 3, 7), 64
    for width, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            shapes += convolution(width, num_in, 1) + convolution(width, width, 3) + convolution(4 * width, width, 1)
            if block == 0:
                shapes += convolution(4 * width, num_in, 1)
            num_in = 4 * width
    assert resnet50_shapes() == [*shapes, (1000, 2048), (1000,)]
