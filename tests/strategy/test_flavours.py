"""Strategy names in the registries of all four Lightning packages, and two-rank scripts under every launcher."""

import os
import subprocess
import sys

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry

import lightning_hybrid
from lightning_hybrid.strategy import registration
from tests import toy
from tests.programs import run_program

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]

# A user's script, `python train.py STRATEGY`. Rank 0 and rank 1 use the same seed.
SCRIPT = """
import sys
import PACKAGE as pl
import torch
import lightning_hybrid


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.losses = torch.nn.Linear(4, 2), []

    def training_step(self, batch, batch_idx):
        self.log("loss", loss := self.net(batch).float().square().mean())
        self.losses.append(loss.item())
        self.dtype_in_step = str(self.net.weight.dtype)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_train_end(self):
        trainer = self.trainer
        seen = {"losses": self.losses, "world_size": trainer.world_size}
        seen["dtypes"] = (self.dtype_in_step, str(self.net.weight.dtype))  # in a step, and after it
        seen["of"] = [type(one).__module__ for one in (trainer.strategy, trainer.precision_plugin)]
        seen["weights"] = trainer.strategy.lightning_module_state_dict()
        torch.save(seen, f"rank{trainer.global_rank}.pt")
        trainer.save_checkpoint("end.ckpt")


if __name__ == "__main__":
    pl.seed_everything(1)
    trainer = pl.Trainer(
        strategy=sys.argv[1], precision="16-true", accelerator="cpu", devices=2, max_steps=4, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[CALLBACKS],
    )
    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=4))
    if trainer.is_global_zero:
        torch.save(model.state_dict(), "after.pt")
"""


def train(folder, *arguments, package="pytorch_lightning", callbacks="", is_fresh=False):
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(
        SCRIPT.replace("CALLBACKS", callbacks).replace("PACKAGE", package)
    )
    where = {
        "cwd": folder,
        "env": {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    }
    if is_fresh:
        done = subprocess.run(
            [sys.executable, *arguments], **where, capture_output=True, text=True, timeout=180
        )
    else:
        done = run_program(*arguments, **where)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    ranks = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    assert {
        value.dtype for value in torch.load(folder / "after.pt", weights_only=True).values()
    } == {torch.float32}
    return ranks, torch.load(folder / "end.ckpt", weights_only=True)


def test_two_ranks_of_pytorch_lightning_train_half_precision_on_masters(tmp_path):
    """The forking process imports our package first, and the import registers the strategy names."""
    # Lightning calls the methods of callbacks that derive only from `lightning`'s `Callback`.
    ours = ("NumericsMonitor()", "ReplicaCheck(2)", "TrainingMetrics()")
    calls = [
        *(f"lightning_hybrid.callbacks.{our}" for our in ours),
        "pl.callbacks.EMAWeightAveraging()",
    ]
    ranks, checkpoint = train(
        tmp_path, "train.py", "hybrid_allreduce_fork", callbacks=", ".join(calls)
    )
    assert ranks[0]["of"] == ["lightning_hybrid.flavours.pytorch_lightning"] * 2
    assert {value.dtype for value in checkpoint["state_dict"].values()} == {torch.float32}
    assert not torch.equal(
        checkpoint["state_dict"]["net.weight"], checkpoint["state_dict"]["net.weight"].half()
    )
    precision = checkpoint["MasterWeightPrecision"]
    assert (precision["loss_scale"]["scale"] < 2.0**16) is (precision["num_skipped_steps"] > 0)
    assert checkpoint["global_step"] == 4


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["popen", "spawn", "torchrun"])
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_every_launcher_trains_the_same_model(package, launcher, tmp_path):
    expected, _ = train(tmp_path / "fork", "train.py", "hybrid_allreduce_fork")
    strategy = "hybrid_allreduce"
    if launcher == "spawn":
        strategy = "hybrid_allreduce_spawn"
    command = ["train.py", strategy]
    if launcher == "torchrun":
        command = [*TORCHRUN, *command]
    results, _ = train(tmp_path / "this", *command, package=package, is_fresh=True)
    for rank, seen in enumerate(results):
        assert seen["world_size"] == 2, f"rank {rank}"
        assert seen["dtypes"] == ("torch.float16", "torch.float32"), f"rank {rank}"
        assert seen["losses"] == expected[rank]["losses"], f"rank {rank}"
        assert toy.same_bits(seen["weights"], expected[0]["weights"]), f"rank {rank}"
    assert results[0]["losses"] != results[1]["losses"], "ranks must see different data"


# Makes a process that has imported torch forget all of these imports.
FORGET = """
import sys
ours = ("lightning", "lightning_fabric", "lightning_hybrid", "pytorch_lightning", "recipes", "tests")
for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
    del sys.modules[name]
sys.meta_path[:] = [each for each in sys.meta_path if type(each).__module__.partition(".")[0] not in ours]
"""

IMPORTS = """
import sys
{first}
{second}
from lightning_fabric import Fabric
from pytorch_lightning import Trainer
one = dict(strategy="hybrid_allreduce", precision="bf16-true", accelerator="cpu", devices=1)
trainer, fabric = Trainer(**one, logger=False), Fabric(**one)
for each in (trainer.strategy, trainer.precision_plugin, fabric.strategy, fabric.strategy.precision):
    print(type(each).__module__.removeprefix("lightning_hybrid.flavours."))
print("lightning" in sys.modules)
"""


@pytest.mark.parametrize("first", ["pytorch_lightning", "lightning_hybrid"])
def test_either_import_may_come_first_and_the_other_lightning_is_not_imported(first, tmp_path):
    if first == "pytorch_lightning":
        second = "lightning_hybrid"
    else:
        second = "pytorch_lightning"
    script = IMPORTS.format(first=f"import {first}", second=f"import {second}")
    (tmp_path / "imports.py").write_text(FORGET + script)
    done = run_program("imports.py", cwd=tmp_path)
    ours = ["pytorch_lightning"] * 2 + ["lightning_fabric"] * 2
    assert done.stdout.split() == [*ours, "False"], done.stderr[-2000:]


def test_a_lightning_that_is_not_as_we_know_it_is_imported_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "strange_lightning.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(
        registration._REGISTRIES, "strange_lightning", ("StrategyRegistry", "nowhere")
    )
    with pytest.warns(
        UserWarning, match="Could not register strategy='hybrid_allreduce' in strange_lightning"
    ):
        import strange_lightning
    assert strange_lightning.value == 3
    assert type(strange_lightning.__spec__.loader).__name__ == "SourceFileLoader"


@pytest.mark.parametrize("of", [Trainer, Fabric])
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("hybrid_allreduse", "hybrid_allreduce"),
        ("hybrid_all_reduce", "hybrid_allreduce"),
        ("hybrid-allreduce", "hybrid_allreduce"),
        ("HybridAllReduce", "hybrid_allreduce"),
        ("hybrid", "hybrid_allreduce"),
        ("hybird_allreduce_spwan", "hybrid_allreduce_spawn"),
        ("hybrid_allreduce_find_unused_parameters", "hybrid_allreduce_find_unused_parameters_true"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_most_similar_one(of, name, meant):
    with pytest.raises(
        ValueError, match=rf"^`strategy` \(='{name.lower()}'\) .* Did you mean '{meant}'\?$"
    ):
        of(strategy=name, accelerator="cpu", devices=1)


def test_a_misspelt_pipeline_is_answered_with_its_name():
    with pytest.raises(ValueError, match=r"Did you mean 'hybrid_pipeline'\?$"):
        Trainer(strategy="hybrid_pipline", accelerator="cpu", devices=1)


def test_the_name_of_the_elastic_strategy_makes_it_in_the_trainer_and_its_misspelling_is_answered(
    monkeypatch,
):
    monkeypatch.setenv("HYBRID_ELASTIC_MAX_HOSTS", "2")
    monkeypatch.setenv("HYBRID_ELASTIC_MEET", "127.0.0.1:29400")
    trainer = Trainer(strategy="hybrid_elastic", accelerator="cpu", devices=1, logger=False)
    assert type(trainer.strategy) is lightning_hybrid.HybridElasticStrategy
    with pytest.raises(ValueError, match=r"Did you mean 'hybrid_elastic'\?$"):
        Trainer(strategy="hybrid_elastik", accelerator="cpu", devices=1)


@pytest.mark.parametrize("of", [Trainer, Fabric])
def test_a_misspelt_name_of_lightning_stays_an_error_of_lightning(of):
    for name in ("ddp_find_unused_parameters_tru", "fsdpp", "horovod"):
        with pytest.raises(ValueError, match="invalid strategy name"):
            of(strategy=name, accelerator="cpu", devices=1)


def test_a_class_in_place_of_an_object_is_answered_with_the_call():
    with pytest.raises(
        TypeError,
        match=r"^`strategy` .* is a class.* Set strategy=HybridAllReduceStrategy\(\)\.$",
    ):
        Trainer(strategy=lightning_hybrid.HybridAllReduceStrategy, accelerator="cpu", devices=1)


def test_the_registry_lists_no_name_that_is_no_strategy():
    names = StrategyRegistry.available_strategies()
    assert "hybrid_allreduce" in names
    assert "ddp" in names
    assert {name.split("_")[1] for name in names if name.startswith("hybrid")} == {
        "allreduce",
        "elastic",
        "pipeline",
    }
