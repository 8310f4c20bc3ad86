"""The files of `conf/data` say what the data modules' own defaults say, key for key; and a recipe trains on them."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest
from hydra.utils import get_class
from omegaconf import OmegaConf

from tests.programs import run_program

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


@pytest.mark.long
@pytest.mark.slow
def test_the_recipe_trains_on_noise_in_one_command(tmp_path):
    options = ["data=synthetic", "data.image_size=16", "data.num_train_images=64", "data.num_val_images=16"]
    options += ["data.num_stored_images=8", "model.in_channels=3", "global_batch_size=16", "trainer.devices=1"]
    options += ["trainer.max_epochs=1", "logger=csv", "trainer.enable_progress_bar=false", f"hydra.run.dir={tmp_path}"]
    done = run_program(str(ROOT / "recipes" / "train.py"), *options, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "summary.json").is_file()
