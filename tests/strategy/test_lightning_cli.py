"""`LightningCLI` with the strategy by name and by `class_path`. What `README.md` shows is run as it stands."""

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
QUIET = ("accelerator=cpu", "devices=1", "max_steps=2", "logger=false", "enable_progress_bar=false")


class ToyWithoutOptimizer(toy.Toy):
    """Module whose optimizer the command line builds."""

    configure_optimizers = LightningModule.configure_optimizers

    def __init__(self) -> None:
        super().__init__()


@pytest.fixture(autouse=True)
def called_from_a_program(monkeypatch):
    # Lightning warns where it finds pytest's arguments
    monkeypatch.setattr(sys, "argv", ["train.py"])
    # of what Lightning's own code calls
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def parsed(*arguments):
    quiet = [
        f"--trainer.{one}"
        for one in (*QUIET, "enable_model_summary=false", "enable_checkpointing=false")
    ]
    arguments = [*arguments, *quiet]
    return LightningCLI(
        toy.Toy, args=arguments, run=False, save_config_callback=None, seed_everything_default=False
    )


def fitted(*arguments):
    cli = parsed(*arguments)
    cli.trainer.fit(cli.model, toy.loader())
    return cli.trainer


def test_the_yaml_of_the_page_trains_with_its_options(tmp_path):
    (tmp_path / "config.yaml").write_text(
        re.search(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)[1]
    )
    trainer = fitted("--config", str(tmp_path / "config.yaml"))
    assert type(trainer.strategy) is HybridAllReduceStrategy
    assert type(trainer.precision_plugin) is MasterWeightPrecision
    assert trainer.strategy._options.plan.algorithm == "hierarchical"
    assert trainer.precision_plugin.loss_scale.value == 1024.0
    assert trainer.global_step == 2


def test_a_timeout_is_seconds_and_a_wrong_type_is_refused_by_name(capsys):
    strategy = "--trainer.strategy=lightning_hybrid.HybridAllReduceStrategy"
    for given in ("60", "0:01:00"):
        trainer = fitted(strategy, f"--trainer.strategy.timeout={given}")
        assert trainer.strategy._timeout == timedelta(minutes=1)
    for option in (
        "timeout=soon",
        "report.trace_dir=[5]",
        "comm.algorithm=sometimes",
        "between_nodes.every=8",
    ):
        with pytest.raises(SystemExit):
            fitted(strategy, f"--trainer.strategy.{option}")
        assert option.partition("=")[0].rpartition(".")[2] in capsys.readouterr().err


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
def test_the_class_that_is_asked_for_is_made_also_from_a_saved_configuration(
    tmp_path, arguments, between_nodes
):
    """Of plain dataclasses the parser would take the first whose fields fit, in silence."""
    cli = parsed(CLASS, *arguments)
    (tmp_path / "saved.yaml").write_text(cli.parser.dump(cli.config, skip_none=False))
    for made in (cli, parsed("--config", str(tmp_path / "saved.yaml"))):
        text = made.trainer.strategy._options.features()
        assert text == HybridAllReduceStrategy(between_nodes)._options.features()
        assert made.config.trainer.strategy.init_args.between_nodes.class_path.endswith(
            type(between_nodes).__name__
        )


@pytest.mark.parametrize("value", ["1024", "1024.0", "dynamic"])
def test_a_loss_scale_on_the_command_line_is_a_number_or_dynamic(value):
    short = "--trainer.strategy=lightning_hybrid.HybridAllReduceStrategy"
    trainer = fitted(short, f"--trainer.strategy.loss_scale={value}", "--trainer.precision=16-true")
    expected = {"dynamic": "DynamicLossScale"}.get(value, "StaticLossScale")
    assert type(trainer.precision_plugin.loss_scale).__name__ == expected
    assert value == "dynamic" or trainer.precision_plugin.loss_scale.value == 1024.0


def test_an_optimizer_on_the_command_line_takes_pairs_of_numbers():
    lamb = (
        "--optimizer=lightning_hybrid.optim.LAMB",
        "--optimizer.lr=1e-2",
        "--optimizer.betas=[0.9, 0.99]",
    )
    quiet = [
        f"--trainer.{one}"
        for one in (*QUIET, "enable_model_summary=false", "enable_checkpointing=false")
    ]
    cli = LightningCLI(
        ToyWithoutOptimizer,
        args=[*lamb, "--optimizer.weight_norm_bounds=[0.0, 10.0]", CLASS, *quiet],
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
    )
    cli.trainer.fit(cli.model, toy.loader())
    group = cli.trainer.optimizers[0].param_groups[0]
    assert (group["lr"], group["betas"], group["weight_norm_bounds"]) == (
        0.01,
        (0.9, 0.99),
        (0.0, 10.0),
    )


def test_the_name_is_enough():
    trainer = fitted("--trainer.strategy=hybrid_allreduce", "--trainer.precision=bf16-true")
    assert type(trainer.strategy) is HybridAllReduceStrategy
    assert type(trainer.precision_plugin) is MasterWeightPrecision
