"""Documentation page for users of other libraries: code in its tables trains, and their checkpoints resume."""

import ast
import re
from contextlib import chdir
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

import lightning_hybrid
from lightning_hybrid import Comm, DynamicLossScale, HybridAllReduceStrategy, MasterWeightPrecision
from lightning_hybrid.callbacks import MasterWeightAveraging
from lightning_hybrid.optim import LAMB, LARS, param_groups
from recipes.datasets.images.imagenet import ImageNetDataModule
from tests import toy
from tests.recipes.datasets.images.pictures import write_root
from tests.scenes import Saves, at, fit, same
from tests.toy import Toy

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "lightning_hybrid" / "strategy" / "migration.md"


def our_cells() -> list[str]:
    """Return the second cells of all tables, which contain the code for this package."""
    text = README.read_text().partition("## Checkpoints of other libraries")[0]
    cells = []
    for section in text.split("\n## ")[1:]:
        rows = [
            line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")
        ]
        cells += [row[1] for row in rows[1:]]
    return cells


def calls_in(cell: str) -> list[str]:
    """Return the code fragments of a cell that are calls."""
    calls = []
    for code in re.findall(r"`([^`]+)`", cell):
        try:
            tree = ast.parse(code, mode="eval")
        except SyntaxError:
            continue
        if isinstance(tree.body, ast.Call):
            calls.append(code)
    return calls


CODES = dict.fromkeys(code for cell in our_cells() for code in calls_in(cell))


class Pictures(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 3))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1])

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def small_imagenet(**options):
    if dist.get_rank() == 0:
        write_root(Path("pictures"))
    dist.barrier()
    small = {
        "root": "pictures",
        "num_classes": 3,
        "global_batch_size": 4,
        "image_size": 8,
        "eval_resize": 8,
    }
    assert options.keys() <= {*small, "seed"}
    return ImageNetDataModule(**{**options, **small, "num_threads": 1})


def trained_with(code: str, folder: str):
    """Train two steps with the object that the code creates, on ranks with different initial weights.

    Return the number of steps, the names of weights that did not move, the sums of all weights, and the written files.
    """
    module = toy.Toy(seed=dist.get_rank())
    settings = {}
    data = {"train_dataloaders": toy.loader()}
    names = {name: getattr(lightning_hybrid, name) for name in lightning_hybrid.__all__}
    names |= {
        "torch": torch,
        "groups": param_groups(module, weight_decay=1e-4),
        "LARS": LARS,
        "LAMB": LAMB,
        "MasterWeightAveraging": MasterWeightAveraging,
        "ImageNetDataModule": small_imagenet,
        "Trainer": dict,
    }
    with chdir(folder):  # the directory of files that a cell names
        match eval(code, names):
            case dict() as settings:
                # Lightning would warn and use bf16 on a CPU.
                if settings.get("precision") == "16-mixed":
                    settings["precision"] = "bf16-mixed"
            case HybridAllReduceStrategy() as strategy:
                settings = {"strategy": strategy, "precision": "32-true"}
                if "loss_scale" in code:
                    settings["precision"] = "16-true"
            case MasterWeightPrecision() as plugin:
                settings = {"plugins": [plugin]}
            case torch.optim.Optimizer() as optimizer:
                module.configure_optimizers = lambda: optimizer
            case pl.Callback() as callback:
                settings = {"callbacks": [callback]}
            case pl.LightningDataModule() as datamodule:
                module = Pictures()
                data = {"datamodule": datamodule}
        if "plugins" not in settings:
            settings = {"precision": "16-true", **settings}
        first = {name: value.detach().clone() for name, value in module.named_parameters()}
        trainer = toy.trainer(**{"max_epochs": 8, **settings, "max_steps": 2})
        trainer.fit(module, **data)
        after = {name: value.detach() for name, value in module.named_parameters()}
        unmoved = [name for name, value in after.items() if torch.equal(value, first[name])]
        sums = [float(value.double().sum()) for value in after.values()]
        return trainer.global_step, unmoved, sums, sorted(path.name for path in Path().iterdir())


@pytest.mark.sampled(7)
@pytest.mark.filterwarnings("ignore:`between_nodes` .=.* all ranks are on one node")
@pytest.mark.parametrize("code", CODES)
def test_the_code_of_the_tables_trains_on_two_ranks(two_ranks, tmp_path, code):
    rank_0, rank_1 = two_ranks.run(trained_with, code, str(tmp_path))
    num_steps, unmoved, sums, files = rank_0
    assert (num_steps, unmoved) == (2, [])
    assert sums == rank_1[2]
    if "trace_dir" in code:
        assert files == ["timeline"]


class Slope(pl.LightningModule):
    """Module whose gradients are drawn from 1 to 2 on each rank, so their halves are not subnormal in fp16."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000))

    def training_step(self, batch, batch_idx):
        drawn = torch.rand(1000, generator=torch.Generator().manual_seed(dist.get_rank()))
        return (self.weight * (1 + drawn)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def compress_as_torch(trainer, module):
    trainer.strategy.model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def test_comm_dtype_equals_the_compression_hook_of_torch_bit_for_bit(two_ranks):
    compresses = at(on_train_start=compress_as_torch)
    hooked = fit(two_ranks, Slope, max_steps=1, strategy="ddp", callbacks=[compresses])
    uncompressed = fit(two_ranks, Slope, max_steps=1, strategy="ddp")
    ours = fit(two_ranks, Slope, max_steps=1, comm=Comm(dtype="float16"), ranks_per_node=1)
    for rank, seen in enumerate(ours):
        assert same(seen.weights, hooked[rank].weights), f"rank {rank}"
        assert not same(seen.weights, uncompressed[rank].weights), f"rank {rank}"


@pytest.mark.parametrize(
    ("option", "cure"),
    [
        ({"ddp_comm_hook": default_hooks.fp16_compress_hook}, "by comm=Comm\\(dtype='float16'"),
        ({"ddp_comm_hook": powerSGD_hook.powerSGD_hook}, "such as PowerSGD, use strategy='ddp'"),
        ({"ddp_comm_state": object()}, "use strategy='ddp'"),
        ({"model_averaging_period": 4}, "model averaging by between_nodes=LocalSteps"),
    ],
    ids=["fp16", "PowerSGD", "state", "local SGD"],
)
def test_hooks_of_ddp_are_refused_by_name_with_the_cure(option, cure):
    (name,) = option
    with pytest.raises(ValueError, match=rf"`{name}` \(=.*{cure}"):
        HybridAllReduceStrategy(**option)


def changes(scales: list[int], is_change) -> list[int]:
    return [step for step in range(1, len(scales)) if is_change(scales[step], scales[step - 1])]


def test_the_scale_grows_a_step_earlier_than_deepspeeds_and_falls_with_it():
    """DeepSpeed's values are those of `DynamicLossScaler` 0.19.8 with window 4 and hysteresis 2, in units of 1024."""
    deepspeed = [64] * 4 + [128] * 3 + [64] * 5 + [128] * 4 + [256] * 7 + [512] * 2
    scale = lightning_hybrid.DynamicLossScale(init_scale=2.0**16, growth_interval=4, hysteresis=2)
    ours = []
    for overflow in [False] * 6 + [True] * 2 + [False] * 10 + [True] + [False] * 6:
        scale.update(torch.tensor(overflow))
        ours.append(int(scale.value) // 1024)
    falls = changes(deepspeed, int.__lt__)
    assert falls == [7]
    assert changes(ours, int.__lt__) == falls
    rises = changes(deepspeed, int.__gt__)
    assert rises == [4, 12, 16, 23]
    assert changes(ours, int.__gt__) == [step - 1 for step in rises]


DEEPSPEED = Path(__file__).parents[1] / "checkpoint" / "deepspeed_0_19_8"
"""Conversions of two ranks' ZeRO-1 checkpoint of a `toy.Toy` in bf16 under DeepSpeed 0.19.8: `pytorch_model.bin` by its
`zero_to_fp32.py`, `lightning_model.pt` by Lightning 2.6.6's converter, with the keys of its DeepSpeed strategy."""


def held_at_start(trainer, module):
    """Return the weights and optimizer state at the start of training in the format of a checkpoint."""
    weights = trainer.strategy.lightning_module_state_dict()
    states = trainer.optimizers[0].state_dict()["state"]
    return {name: value.clone() for name, value in weights.items()}, as_floats(states)


def as_floats(states):
    """Return copies of optimizer states with all values as float32 tensors."""
    floats = {}
    for index, state in states.items():
        values = {name: torch.as_tensor(value) for name, value in state.items()}
        floats[index] = {name: value.clone().float() for name, value in values.items()}
    return floats


def test_a_checkpoint_of_stock_ddp_resumes_to_its_bits_and_in_half_precision_from_its_master_weights(
    two_ranks, tmp_path
):
    """The plugin itself is passed because `precision="16-mixed"` would become bf16, without a loss scale, on a CPU."""
    path = tmp_path / "ddp.ckpt"
    settings = {"plugins": [MixedPrecision("16-mixed", "cpu")]}
    adam = {"optimizer": "AdamW", "lr": 1e-2}
    saves = {"strategy": "ddp", "callbacks": [Saves(path, epoch=0)]}
    whole = fit(two_ranks, partial(Toy, **adam), **saves, **settings)
    resumes = {
        "module": partial(Toy, seed=5, **adam),
        "ckpt_path": path,
        "callbacks": [at(on_train_start=held_at_start)],
    }
    for rank, seen in enumerate(fit(two_ranks, **resumes, **settings)):
        assert same(seen.weights, whole[rank].weights), f"rank {rank}"
        assert len(seen.losses) == 4, "the first epoch must not have run again"
    saved = torch.load(path)
    assert "MixedPrecision" in saved
    for rank, seen in enumerate(fit(two_ranks, precision="16-true", **resumes)):
        ((masters, states),) = seen.looks["on_train_start"]
        assert len(seen.losses) == 4, f"rank {rank}"
        assert same(masters, dict(saved["state_dict"])), f"rank {rank}"
        assert same(states, as_floats(saved["optimizer_states"][0]["state"])), f"rank {rank}"
        assert not same(seen.weights, masters), f"rank {rank}"


def masters_of(one_rank, module):
    scene = {
        "precision": "16-true",
        "max_steps": 1,
        "callbacks": [at(on_train_start=held_at_start)],
    }
    (seen,) = fit(one_rank, module, **scene)
    ((masters, _),) = seen.looks["on_train_start"]
    return masters


def test_weights_from_deepspeeds_zero_to_fp32_and_from_lightnings_converter_are_the_master_weights(
    one_rank,
):
    saved = torch.load(DEEPSPEED / "pytorch_model.bin")
    weight = saved["net.5.weight"]
    assert not torch.equal(weight, weight.bfloat16().float()), "more digits than bf16"
    module = Toy()
    state = {f"module.{name}": value for name, value in saved.items()}
    # in files of older versions or of a wrapper
    consume_prefix_in_state_dict_if_present(state, "module.")
    module.load_state_dict(state)
    converted = Toy.load_from_checkpoint(DEEPSPEED / "lightning_model.pt")
    assert converted.lr == 0.5
    for loaded in (module, converted):
        masters = masters_of(one_rank, loaded)
        assert same(masters, {name: saved[name] for name in masters})


(APEX,) = (
    block
    for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    if "apex" in block
)


def saved_by_apex_o2():
    """Return a checkpoint as in apex's README, and the master weights, after two O2 steps on random gradients.

    O2 of apex's amp casts everything except BatchNorm to fp16. It replaces fp16 parameters in `param_groups` by fp32
    master weights, steps on the master weights and copies them back. Its state dict hook saves fp16 tensors as fp32
    tensors.
    """
    model = Toy()
    generator = torch.Generator().manual_seed(1)
    for child in model.net:
        if not isinstance(child, nn.BatchNorm1d):
            child.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (group,) = optimizer.param_groups
    master_of = {}
    for index, parameter in enumerate(group["params"]):
        if parameter.dtype is torch.float16:
            master = parameter.detach().clone().float().requires_grad_()
            master_of[parameter] = master
            group["params"][index] = master
    masters = group["params"]
    for _ in range(2):
        for master in masters:
            master.grad = torch.randn(master.shape, generator=generator) / 8
        optimizer.step()
    with torch.no_grad():
        for parameter, master in master_of.items():
            parameter.copy_(master)
    weights = model.state_dict()
    for name, value in weights.items():
        if value.dtype is torch.float16:
            weights[name] = value.float()
    return {
        "model": dict(weights),
        "optimizer": optimizer.state_dict(),
        "amp": {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 2}},
        "masters": [master.detach() for master in masters],  # list(amp.master_params(optimizer))
    }


def start_as_the_page_says(folder):
    names = {
        "torch": torch,
        "Classifier": Toy,
        "DynamicLossScale": DynamicLossScale,
        "__name__": "readme",
    }
    with chdir(folder):
        exec(APEX, names)
    scene = {"loss_scale": names["scale"], "callbacks": [at(on_train_start=held_at_start)]}
    return fit(None, names["module"], precision="16-true", max_epochs=1, **scene)


def test_the_pages_code_resumes_from_the_master_weights_of_apex(one_rank, tmp_path):
    saved = saved_by_apex_o2()
    torch.save(saved, tmp_path / "apex.pt")
    (seen,) = one_rank.run(start_as_the_page_says, str(tmp_path))
    ((masters, states),) = seen.looks["on_train_start"]
    parameter_names = [name for name, _ in Toy().named_parameters()]
    expected = saved["model"] | dict(zip(parameter_names, saved["masters"], strict=True))
    assert same(masters, {name: expected[name] for name in masters})
    assert same(states, as_floats(saved["optimizer"]["state"]))
    assert seen.loss_scale == 65536.0


def test_the_step_of_a_group_of_apexs_fused_optimizers_is_loaded_and_other_groups_are_refused():
    names = {"torch": torch}
    # Define only the function of the page.
    exec(ast.unparse(ast.parse(APEX).body[0]), names)
    optimizer = LAMB([nn.Parameter(torch.zeros(3))], lr=0.01)
    moments = {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    saved = {"state": {7: moments}, "param_groups": [{"params": [7], "step": 2}]}
    names["load_apex_state_"](optimizer, saved, [torch.ones(3)])
    assert same(as_floats(optimizer.state_dict()["state"]), as_floats({0: moments | {"step": 2}}))
    with pytest.raises(ValueError, match="Build the optimizer from the same groups as under apex"):
        names["load_apex_state_"](optimizer, saved, [torch.ones(4)])
