"""conf/model and conf/data: the keys are exactly the constructor's arguments, and all data files say its defaults."""

import inspect

import pytest
from hydra.utils import get_class
from omegaconf import OmegaConf

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
