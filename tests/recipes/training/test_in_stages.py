"""`strategy=pipeline` on the command line of a recipe."""

import os
from pathlib import Path

import pytest
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from recipes.cli import config_check
from recipes.cli.preflight import LAUNCH_VARIABLES
from recipes.training.keys import TRAIN_KEYS
from tests.programs import run_program

ROOT = Path(__file__).resolve().parents[3]
STAGES = ["strategy=pipeline", "trainer.accumulate_grad_batches=1"]


def train(*overrides, folder):
    env = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    words = ["recipes/train.py", *STAGES, "logger=none", f"hydra.run.dir={folder}", *overrides]
    return run_program(*words, cwd=ROOT, env=env | {"PYTHONPATH": str(ROOT)}, timeout_s=240)


def test_a_schedule_that_is_refused_says_why_in_a_recipe():
    cfg = OmegaConf.create({"strategy": OmegaConf.load(ROOT / "conf/strategy/pipeline.yaml")})
    cfg.strategy.schedule = "pipedream"
    config_check.check(cfg, {"strategy": TRAIN_KEYS["strategy"]})  # a list of choices here would hide the reason
    with pytest.raises(InstantiationException, match=r"weight stashing.*lightning_hybrid/pipeline/README.md"):
        instantiate(cfg.strategy)


@pytest.mark.long
def test_a_recipe_trains_in_stages_in_any_memory_format(tmp_path):
    quiet = ["trainer.enable_progress_bar=false", "trainer.enable_model_summary=false", "trainer.max_steps=4"]
    found = []
    for channels_last in ("true", "false"):
        folder = tmp_path / channels_last
        done = train(*quiet, "trainer.devices=2", f"channels_last={channels_last}", folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["state_dict"])
    for name, one in found[0].items():
        assert torch.allclose(one.float(), found[1][name].float(), atol=1e-2), name
