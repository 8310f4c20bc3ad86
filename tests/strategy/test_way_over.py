"""The tables of the page for users of other libraries: what stands in their middle column trains."""

from __future__ import annotations

import ast
import re
from contextlib import chdir
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import lightning_hybrid
from lightning_hybrid import Comm, HybridAllReduceStrategy, MasterWeightPrecision
from lightning_hybrid.callbacks import MasterWeightAveraging
from lightning_hybrid.data.images.imagenet import ImageNetDataModule
from lightning_hybrid.optim import LAMB, LARS, param_groups
from tests import toy
from tests.data.images.pictures import write_root

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "lightning_hybrid" / "strategy" / "migration.md"

# Rows whose middle column is no Python: the file that proves them, and a word of it. `test_readme_commands.py` checks
# the keys of commands.
PROVED_BY = {
    "`horovodrun": ("tests/strategy/test_launch.py", "torch.distributed.run"),
    "`gradient_predivide_factor": ("tests/comm/test_hook.py", "split_divisor"),
    "`hvd.elastic": ("tests/netlab/elastic.py", "--max-restarts"),
    "`autoresume": ("tests/recipes/training/test_resume.py", "resume=auto"),
    "`device_train_microbatch_size": ("tests/recipes/training/test_recipes.py", "max_batch_size_per_rank"),
    "`LabelSmoothing": ("tests/recipes/training/test_classifier.py", "channels_last"),
    "`DatasetWriter": ("tests/recipes/datasets/test_packing.py", "short_side"),
}


def rows() -> dict[str, list[tuple[str, str]]]:
    """The first two columns of each table, by the name of the library."""
    text = README.read_text().partition("## Checkpoints of other libraries")[0]
    found = {}
    for section in text.split("\n## ")[1:]:
        lines = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
        found[section.splitlines()[0]] = [(had.strip(), write.strip()) for had, write, *_ in lines[1:]]
    return found


def expressions(cell: str) -> list[str]:
    """What of a cell's code is a call in Python.

    >>> expressions('`LARS(groups, lr=1.0)`, or `torchrun a.py`; `strategy="ddp"` has it')
    ['LARS(groups, lr=1.0)']
    """
    found = []
    for code in re.findall(r"`([^`]+)`", cell):
        try:
            tree = ast.parse(code, mode="eval")
        except SyntaxError:
            continue
        found += [code] if isinstance(tree.body, ast.Call) else []
    return found


CODES = dict.fromkeys(code for table in rows().values() for _, cell in table for code in expressions(cell))


def test_each_library_has_its_table_and_each_row_a_proof():
    assert [len(table) for table in rows().values()] == [8, 12, 10, 11, 10]
    for table in rows().values():
        for had, write in table:
            proofs = [proof for start, proof in PROVED_BY.items() if had.startswith(start)]
            assert expressions(write) or write.startswith("not here") or len(proofs) == 1, had
            assert all(word in (ROOT / path).read_text() for path, word in proofs)
    everything = [had for table in rows().values() for had, _ in table]
    assert not [start for start in PROVED_BY if not any(had.startswith(start) for had in everything)]


# ---- every expression trains -----------------------------------------------------------------------------------------


class Pictures(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 3))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1])

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def small_imagenet(**given):
    """The data module of the cell, on a few pictures."""
    if dist.get_rank() == 0:
        write_root(Path("pictures"))
    dist.barrier()
    small = {"root": "pictures", "num_classes": 3, "global_batch_size": 4, "image_size": 8, "eval_resize": 8}
    assert given.keys() <= {*small, "seed"}
    return ImageNetDataModule(**{**given, **small, "num_threads": 1})


def trained_with(code: str, folder: str):
    """Two steps with what the code gives, on ranks that begin with other weights: steps, what stayed, sums, files."""
    module, settings, data = toy.Toy(seed=dist.get_rank()), {}, {"train_dataloaders": toy.loader()}
    names = {name: getattr(lightning_hybrid, name) for name in lightning_hybrid.__all__}
    names |= {"torch": torch, "groups": param_groups(module, weight_decay=1e-4), "LARS": LARS, "LAMB": LAMB}
    names |= {"MasterWeightAveraging": MasterWeightAveraging, "ImageNetDataModule": small_imagenet, "Trainer": dict}
    with chdir(folder):  # for those that a cell names
        match eval(code, names):
            case dict() as given:
                # Lightning would warn and take bf16 on a CPU.
                settings = given | ({"precision": "bf16-mixed"} if given.get("precision") == "16-mixed" else {})
            case HybridAllReduceStrategy() as strategy:
                settings = {"strategy": strategy, "precision": "16-true" if "loss_scale" in code else "32-true"}
            case MasterWeightPrecision() as plugin:
                settings = {"plugins": [plugin]}
            case torch.optim.Optimizer() as optimizer:
                module.configure_optimizers = lambda: optimizer
            case pl.Callback() as callback:
                settings = {"callbacks": [callback]}
            case pl.LightningDataModule() as datamodule:
                module, data = Pictures(), {"datamodule": datamodule}
        if "plugins" not in settings:
            settings = {"precision": "16-true", **settings}
        first = {name: value.detach().clone() for name, value in module.named_parameters()}
        trainer = toy.trainer(**{"max_epochs": 8, **settings, "max_steps": 2})
        trainer.fit(module, **data)
        after = {name: value.detach() for name, value in module.named_parameters()}
        unmoved = [name for name, value in after.items() if torch.equal(value, first[name])]
        sums = [float(value.double().sum()) for value in after.values()]
        return trainer.global_step, unmoved, sums, sorted(path.name for path in Path().iterdir())


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:`between_nodes` .=.* all ranks share one node")
@pytest.mark.parametrize("code", CODES)
def test_what_the_tables_say_trains_on_two_ranks(two_ranks, tmp_path, code):
    one, other = two_ranks.run(trained_with, code, str(tmp_path))
    num_steps, unmoved, sums, files = one
    assert (num_steps, unmoved) == (2, [])
    assert sums == other[2]
    if "trace_dir" in code:
        assert files == ["timeline"]


# ---- what differs ----------------------------------------------------------------------------------------------------


class CompressesAsTorch(pl.Callback):
    """Lightning registers hooks on CUDA only."""

    def __init__(self, hook):
        self.hook = hook

    def on_train_start(self, trainer, module):
        trainer.strategy.model.register_comm_hook(None, self.hook)


class Slope(pl.LightningModule):
    """Its gradient is what the rank drew, from 1 to 2: after a division by 2 no number is subnormal in fp16."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000))

    def training_step(self, batch, batch_idx):
        drawn = torch.rand(1000, generator=torch.Generator().manual_seed(dist.get_rank()))
        return (self.weight * (1 + drawn)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def averages():
    """The average by torch's hook, by ours, and without compression."""
    hooked, found = CompressesAsTorch(default_hooks.fp16_compress_hook), []
    ours = HybridAllReduceStrategy(comm=Comm(dtype="float16"), ranks_per_node=1)
    for strategy, callbacks in (("ddp", [hooked]), (ours, []), ("ddp", [])):
        module = Slope()
        toy.trainer(strategy=strategy, callbacks=callbacks, max_steps=1).fit(module, toy.loader())
        found.append(-module.weight.detach())
    return found


def test_comm_dtype_is_the_compression_hook_of_torch_bit_for_bit(two_ranks):
    for hook, ours, uncompressed in two_ranks.run(averages):
        assert torch.equal(ours, hook)
        assert not torch.equal(ours, uncompressed)


@pytest.mark.parametrize(
    ("option", "cure"),
    [
        (
            {"ddp_comm_hook": default_hooks.fp16_compress_hook},
            "give comm=Comm\\(dtype='float16'",
        ),
        ({"ddp_comm_hook": powerSGD_hook.powerSGD_hook}, "such as PowerSGD, use strategy='ddp'"),
        ({"ddp_comm_state": object()}, "use strategy='ddp'"),
        ({"ddp_comm_wrapper": default_hooks.fp16_compress_wrapper}, "use strategy='ddp'"),
        ({"model_averaging_period": 4}, "in place of averages of models between_nodes=LocalSteps"),
    ],
    ids=["fp16", "PowerSGD", "state", "wrapper", "local SGD"],
)
def test_hooks_of_ddp_are_refused_by_name_with_the_cure(option, cure):
    (name,) = option
    with pytest.raises(ValueError, match=rf"`{name}` \(=.*{cure}"):
        HybridAllReduceStrategy(**option)


def test_lightnings_own_default_of_no_hook_is_accepted():
    names = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")
    assert toy.error_of(HybridAllReduceStrategy, **dict.fromkeys(names)) == ""


def changes(scales: list[int], is_change) -> list[int]:
    return [step for step in range(1, len(scales)) if is_change(scales[step], scales[step - 1])]


def test_the_scale_grows_a_step_earlier_than_deepspeeds_and_falls_with_it():
    """DeepSpeed's is what `DynamicLossScaler` of 0.19.8 gave with window 4 and hysteresis 2, in units of 1024."""
    deepspeed = [64] * 4 + [128] * 3 + [64] * 5 + [128] * 4 + [256] * 7 + [512] * 2
    scale, ours = lightning_hybrid.DynamicLossScale(init_scale=2.0**16, growth_interval=4, hysteresis=2), []
    for overflow in [False] * 6 + [True] * 2 + [False] * 10 + [True] + [False] * 6:
        scale.update(torch.tensor(overflow))
        ours.append(int(scale.value) // 1024)
    assert changes(ours, int.__lt__) == changes(deepspeed, int.__lt__) == [7]
    assert changes(ours, int.__gt__) == [step - 1 for step in changes(deepspeed, int.__gt__)] == [3, 11, 15, 22]
