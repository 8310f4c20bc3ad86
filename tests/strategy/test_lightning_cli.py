"""`LightningCLI` with the strategy by name and by `class_path`, including the unchanged example of `README.md`."""

import re
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from lightning_hybrid import (
    Adasum,
    HybridAllReduceStrategy,
    LocalSteps,
    MasterWeightPrecision,
    Mean,
)
from tests import toy

pytest.importorskip(
    "jsonargparse", reason="LightningCLI needs the package jsonargparse[signatures]"
)

from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI

README = Path(__file__).resolve().parents[2] / "lightning_hybrid" / "strategy" / "README.md"
STEPS = LocalSteps(every=8, outer_lr=0.7)
QUIET = (
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.max_steps=2",
    "--trainer.logger=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.enable_checkpointing=false",
)


class ToyWithoutOptimizer(toy.Toy):
    """Module whose optimizer is built by the command line."""

    configure_optimizers = LightningModule.configure_optimizers

    def __init__(self) -> None:
        super().__init__()


@pytest.fixture(autouse=True)
def called_from_a_program(monkeypatch):
    # Lightning would warn about pytest's arguments.
    monkeypatch.setattr(sys, "argv", ["train.py"])
    # Lightning's own code calls deprecated functions.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def parsed(*arguments, module=toy.Toy):
    return LightningCLI(
        module,
        args=[*arguments, *QUIET],
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
    )


def fitted(*arguments):
    cli = parsed(*arguments)
    cli.trainer.fit(cli.model, toy.loader())
    return cli.trainer


def test_the_yaml_of_the_page_trains_with_its_options(tmp_path):
    example = re.search(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)[1]
    path = tmp_path / "config.yaml"
    path.write_text(example)
    trainer = fitted("--config", str(path))
    assert type(trainer.strategy) is HybridAllReduceStrategy
    assert type(trainer.precision_plugin) is MasterWeightPrecision
    assert trainer.strategy._options.plan.algorithm == "hierarchical"
    assert trainer.precision_plugin.loss_scale.value == 1024.0
    assert trainer.global_step == 2


STRATEGY = "--trainer.strategy=lightning_hybrid.HybridAllReduceStrategy"


@pytest.mark.parametrize("timeout", ["60", "0:01:00"])
def test_a_timeout_may_be_seconds_or_a_duration(timeout):
    trainer = fitted(STRATEGY, f"--trainer.strategy.timeout={timeout}")
    assert trainer.strategy._timeout == timedelta(minutes=1)


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("timeout=soon", "timeout"),
        ("report.trace_dir=[5]", "trace_dir"),
        ("comm.algorithm=sometimes", "algorithm"),
        ("between_nodes.every=8", "every"),
    ],
)
def test_a_wrong_value_or_option_is_refused_by_name(capsys, option, name):
    with pytest.raises(SystemExit):
        fitted(STRATEGY, f"--trainer.strategy.{option}")
    assert name in capsys.readouterr().err


CLASS = "--trainer.strategy.class_path=lightning_hybrid.HybridAllReduceStrategy"
BETWEEN = "--trainer.strategy.init_args.between_nodes"


@pytest.mark.parametrize(
    ("arguments", "between_nodes"),
    [
        ([], Mean()),
        ([f"{BETWEEN}=Adasum"], Adasum()),
        ([f"{BETWEEN}.dtype=int8"], Mean(dtype="int8")),
        (
            [
                f"{BETWEEN}=lightning_hybrid.LocalSteps",
                f"{BETWEEN}.every=8",
                f"{BETWEEN}.outer_lr=0.7",
            ],
            STEPS,
        ),
    ],
)
def test_the_requested_class_is_built_also_from_a_saved_configuration(
    tmp_path, arguments, between_nodes
):
    """The parser builds the requested class. With plain dataclasses it would use the first one whose fields fit."""
    cli = parsed(CLASS, *arguments)
    path = tmp_path / "saved.yaml"
    path.write_text(cli.parser.dump(cli.config, skip_none=False))
    cli_of_saved = parsed("--config", str(path))
    expected = HybridAllReduceStrategy(between_nodes)._options.features()
    for any_cli in (cli, cli_of_saved):
        assert any_cli.trainer.strategy._options.features() == expected
        class_path = any_cli.config.trainer.strategy.init_args.between_nodes.class_path
        assert class_path.endswith(type(between_nodes).__name__)


@pytest.mark.parametrize("value", ["1024", "1024.0", "dynamic"])
def test_a_loss_scale_on_the_command_line_is_a_number_or_dynamic(value):
    options = (f"--trainer.strategy.loss_scale={value}", "--trainer.precision=16-true")
    scale = fitted(STRATEGY, *options).precision_plugin.loss_scale
    if value == "dynamic":
        assert type(scale).__name__ == "DynamicLossScale"
    else:
        assert type(scale).__name__ == "StaticLossScale"
        assert scale.value == 1024.0


def test_an_optimizer_on_the_command_line_accepts_pairs_of_numbers():
    lamb = (
        "--optimizer=lightning_hybrid.optim.LAMB",
        "--optimizer.lr=1e-2",
        "--optimizer.betas=[0.9, 0.99]",
        "--optimizer.weight_norm_bounds=[0.0, 10.0]",
    )
    cli = parsed(*lamb, CLASS, module=ToyWithoutOptimizer)
    cli.trainer.fit(cli.model, toy.loader())
    group = cli.trainer.optimizers[0].param_groups[0]
    assert group["lr"] == 0.01
    assert group["betas"] == (0.9, 0.99)
    assert group["weight_norm_bounds"] == (0.0, 10.0)


def test_the_name_is_enough():
    trainer = fitted("--trainer.strategy=hybrid_allreduce", "--trainer.precision=bf16-true")
    assert type(trainer.strategy) is HybridAllReduceStrategy
    assert type(trainer.precision_plugin) is MasterWeightPrecision
