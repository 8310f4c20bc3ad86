"""conf/model and conf/data: the keys are exactly the constructor's arguments, and all data files say its defaults."""

import inspect

import pytest
from hydra.utils import get_class
from omegaconf import OmegaConf

from recipes.benchmarks.gradient_sets import alexnet_shapes, resnet50_shapes
from tests.checkout import ROOT

FROM_THE_RECIPE = {"root", "global_batch_size", "seed", "num_classes", "batch_decoders"}
MODELS = ("alexnet_bn_imagenet", "alexnet", "resnet50")


@pytest.mark.parametrize("name", [*(f"model/{name}" for name in MODELS), "data/imagenet", "data/synthetic"])
def test_a_file_holds_exactly_the_arguments_and_for_data_their_defaults(name):
    conf = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / f"{name}.yaml"))
    arguments = inspect.signature(get_class(conf.pop("_target_"))).parameters
    assert conf.keys() == arguments.keys()
    for key in arguments.keys() - FROM_THE_RECIPE if name.startswith("data") else ():
        default = arguments[key].default
        assert conf[key] == (list(default) if isinstance(default, tuple) else default), key


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
