"""Mistakes of newcomers: each error names the value, the rule and the remedy before any work starts."""

import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_hybrid import Comm, HybridAllReduceStrategy, HybridPipelineStrategy, LocalSteps, Mean
from lightning_hybrid.checkpoint.file import DamagedCheckpointError
from lightning_hybrid.comm import CommPlan
from lightning_hybrid.strategy.user_code_checks import warn_of_unused_loss_scale
from tests import toy


class LaunchedByOthers(LightningEnvironment):
    """Environment in which something else starts the other rank, so that this process starts none."""

    creates_processes_externally = True


class Work(Callback):
    """Callback that fails as soon as the fit starts to work."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        raise AssertionError("work has started")


def train(**settings: Any) -> None:
    """Start a fit in this process."""
    settings = {"strategy": HybridAllReduceStrategy(), "callbacks": [Work()], **settings}
    checkpoint = settings.pop("ckpt_path", None)
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **{"devices": 1, "max_epochs": 1, **settings},
    )
    trainer.fit(toy.Toy(), toy.loader(), ckpt_path=checkpoint)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a misspelt strategy": (
        lambda: train(strategy="hybrid_allreduse"),
        "`strategy` (='hybrid_allreduse') is not a known name. Did you mean 'hybrid_allreduce'?",
    ),
    "ranks per node that do not divide the ranks": (
        lambda: train(strategy=HybridAllReduceStrategy(ranks_per_node=2), devices=3),
        "`ranks_per_node` (=2) must divide `world_size` (=3)",
    ),
    "a misspelt codec": (
        lambda: Mean(dtype="int9"),
        "`between_nodes.dtype` (='int9') must be None or one of float32, fp32, float16, fp16, bfloat16, bf16, int8, "
        "int4. Did you mean 'int8'?",
    ),
    "a codec of no known name": (
        lambda: Mean(dtype="zstd"),
        "bf16, int8, int4. Leave it out to send gradients in their own dtype.",
    ),
    "a misspelt algorithm": (
        lambda: Comm(algorithm="hierachical"),
        "Set algorithm='auto' to choose it by bucket size and topology. Did you mean 'hierarchical'?",
    ),
    "a size with a unit": (
        lambda: CommPlan(bucket_bytes="25MB"),
        "`bucket_bytes` (='25MB') must be a whole number of bytes, 1 or more: gradients are fused into "
        "buckets of up to this size. Set 26214400, for example, the default of DDP",
    ),
    "accumulation by epochs": (
        lambda: train(accumulate_grad_batches={0: 2, 4: 4}),
        "`accumulate_grad_batches` (={0: 2, 4: 4}) must be a whole number of batches per step, 1 or more. "
        "To change the number in later epochs, set callbacks=[GradientAccumulationScheduler("
        "{0: 2, 4: 4})] from `lightning.pytorch.callbacks`",
    ),
    "accumulation by epochs from Hydra": (
        lambda: train(
            accumulate_grad_batches=pytest.importorskip("omegaconf").OmegaConf.create({0: 2})
        ),
        "callbacks=[GradientAccumulationScheduler({0: 2})]",
    ),
    "accumulation as text": (
        lambda: train(accumulate_grad_batches="2"),
        "`accumulate_grad_batches` (='2') must be a whole number of batches per step, 1",
    ),
    "accumulation by epochs in a pipeline": (
        lambda: train(
            strategy=HybridPipelineStrategy(num_stages=2, num_microbatches=2),
            accumulate_grad_batches={0: 2},
            devices=2,
            plugins=[LaunchedByOthers()],
        ),
        "`accumulate_grad_batches` (={0: 2}) must be",
    ),
    "an option of other strategies": (
        lambda: HybridAllReduceStrategy(find_unused_parameter=True),
        "Did you mean `find_unused_parameters`?",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_error_names_value_rule_and_cure_before_work_starts(mistake):
    make, words = MISTAKES[mistake]
    with pytest.raises(ValueError, match=re.escape(words)):
        make()


@pytest.mark.parametrize("value", [1_000_000, 1e6, "1e6", "1000000"])
def test_numbers_that_configuration_tools_hand_over_are_taken(value):
    assert CommPlan(bucket_bytes=value).bucket_bytes == 1_000_000
    assert Comm(bucket_bytes=value).bucket_bytes == 1_000_000
    assert isinstance(Comm(bucket_bytes=value).bucket_bytes, int)


def test_a_fraction_of_a_byte_is_none():
    with pytest.raises(ValueError, match=r"`bucket_bytes` \(=0.5\) must be a whole number"):
        CommPlan(bucket_bytes=0.5)


def test_text_and_lists_of_hydra_are_taken_for_numbers():
    options = pytest.importorskip("omegaconf").OmegaConf.create({"every": "8"})
    assert LocalSteps(**options).every == 8
    HybridAllReduceStrategy(ranks_per_node="2", loss_scale="1024", timeout="60")


@pytest.mark.parametrize(
    ("precision", "advice"),
    [
        ("32-true", "it applies only to precision='16-true'."),
        ("bf16-true", "it applies only to precision='16-true'."),
        ("16-mixed", "and Lightning's own scaler scales the loss of '16-mixed'."),
    ],
)
def test_a_loss_scale_that_the_precision_does_not_use_is_named(precision, advice):
    strategy = HybridAllReduceStrategy(loss_scale=1024)
    plugin = type("Plugin", (), {"precision": precision})()
    words = f"`loss_scale` (=StaticLossScale) has no effect with precision={precision!r}, because "
    with pytest.warns(UserWarning, match=f"^{re.escape(words)}.*{re.escape(advice)}"):
        warn_of_unused_loss_scale(strategy._options.loss_scale, plugin)


def test_a_fit_warns_of_a_loss_scale_that_it_does_not_use():
    strategy = HybridAllReduceStrategy(loss_scale=1024)
    with (
        pytest.warns(UserWarning, match=r"`loss_scale` .* has no effect with precision='32-true'"),
        pytest.raises(AssertionError, match="work has started"),
    ):
        train(strategy=strategy)


def test_no_warning_without_a_loss_scale(recwarn):
    with pytest.raises(AssertionError, match="work has started"):
        train()
    assert not [warning for warning in recwarn if "loss_scale" in str(warning.message)]


# ---- missing checkpoints -------------------------------------------------------------------------


def test_a_missing_checkpoint_is_answered_with_those_of_its_folder(tmp_path):
    torch.save({}, tmp_path / "last.ckpt")
    with pytest.raises(FileNotFoundError) as caught:
        load(tmp_path / "lost.ckpt")
    assert str(caught.value) == (
        f"Checkpoint file not found: {tmp_path}/lost.ckpt. The newest checkpoints in {tmp_path} are last.ckpt. "
        "Set the path of one of them."
    )


def test_a_folder_in_place_of_a_checkpoint_is_answered_with_its_checkpoints(tmp_path):
    torch.save({}, tmp_path / "last.ckpt")
    with pytest.raises(FileNotFoundError, match=r"is a folder, not a file\. .*last\.ckpt"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["nowhere/lost.ckpt", "lost.ckpt"])
def test_a_missing_checkpoint_without_others_is_said_to_be_so(tmp_path, name):
    with pytest.raises(
        FileNotFoundError, match="Set the path of a checkpoint that a run has written"
    ):
        load(tmp_path / name)


def test_a_file_that_is_no_checkpoint_is_not_advised_to_be_run(tmp_path):
    """Torch's own error would suggest weights_only=False, which does not help here."""
    path = tmp_path / "notes.ckpt"
    path.write_text("import this\n")
    with pytest.raises(DamagedCheckpointError) as caught:
        load(path)
    assert "it is not a file written by `torch.save`" in str(caught.value)
    assert "weights_only" not in str(caught.value)


def load(path: Any) -> Any:
    return HybridAllReduceStrategy().checkpoint_io.load_checkpoint(path)
