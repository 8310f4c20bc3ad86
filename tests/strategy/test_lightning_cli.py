"""`LightningCLI` with the strategy by name and by `class_path`; what `README.md` shows is run as it stands."""

from __future__ import annotations

import re
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from lightning_hybrid import HybridAllReduceStrategy, MasterWeightPrecision
from tests import toy

pytest.importorskip("jsonargparse", reason="LightningCLI needs the package jsonargparse[signatures]")

from lightning.pytorch.cli import LightningCLI

README = Path(__file__).resolve().parents[2] / "lightning_hybrid" / "strategy" / "README.md"
QUIET = ("accelerator=cpu", "devices=1", "max_steps=2", "logger=false", "enable_progress_bar=false")


@pytest.fixture(autouse=True)
def called_from_a_program(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])  # Lightning warns where it finds pytest's arguments
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of what Lightning's own code calls


def fitted(*arguments):
    """The trainer after `python train.py fit ...`."""
    quiet = [f"--trainer.{one}" for one in (*QUIET, "enable_model_summary=false", "enable_checkpointing=false")]
    arguments = [*arguments, *quiet]
    cli = LightningCLI(toy.Toy, args=arguments, run=False, save_config_callback=None, seed_everything_default=False)
    cli.trainer.fit(cli.model, toy.loader())
    return cli.trainer


def test_the_yaml_of_the_page_trains_with_its_options(tmp_path):
    (tmp_path / "config.yaml").write_text(re.search(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)[1])
    trainer = fitted("--config", str(tmp_path / "config.yaml"))
    assert type(trainer.strategy) is HybridAllReduceStrategy
    assert type(trainer.precision_plugin) is MasterWeightPrecision
    assert trainer.strategy._plan.algorithm == "hierarchical"
    assert trainer.precision_plugin.loss_scale.value == 1024.0
    assert trainer.global_step == 2


def test_a_timeout_is_seconds_and_a_wrong_type_is_refused_by_name(capsys):
    strategy = "--trainer.strategy=lightning_hybrid.HybridAllReduceStrategy"
    for given in ("60", "0:01:00"):
        trainer = fitted(strategy, f"--trainer.strategy.timeout={given}")
        assert trainer.strategy._timeout == timedelta(minutes=1)
    for option in ("timeout=soon", "trace_dir=[5]"):
        with pytest.raises(SystemExit):
            fitted(strategy, f"--trainer.strategy.{option}")
        assert option.partition("=")[0] in capsys.readouterr().err


def test_the_name_is_enough():
    trainer = fitted("--trainer.strategy=hybrid_allreduce", "--trainer.precision=bf16-true")
    assert type(trainer.strategy) is HybridAllReduceStrategy
    assert type(trainer.precision_plugin) is MasterWeightPrecision
