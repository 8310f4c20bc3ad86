"""The files of `conf/data` say what the data modules' own defaults say, key for key; and a recipe trains on them."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from hydra.utils import get_class
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parents[3]
FROM_THE_RECIPE = {"root", "global_batch_size", "seed", "num_classes", "batch_decoders"}


@pytest.mark.parametrize("name", ["imagenet", "synthetic"])
def test_a_data_conf_holds_exactly_the_arguments_and_their_defaults(name):
    conf = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "data" / f"{name}.yaml"))
    arguments = inspect.signature(get_class(conf.pop("_target_"))).parameters
    assert conf.keys() == arguments.keys()
    for key in arguments.keys() - FROM_THE_RECIPE:
        default = arguments[key].default
        assert conf[key] == (list(default) if isinstance(default, tuple) else default), key
