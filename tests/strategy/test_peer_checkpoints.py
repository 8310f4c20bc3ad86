"""Checkpoints of the peers: of stock ddp and DeepSpeed as these wrote them, of apex in the layout that it documents.

`tests/checkpoint/deepspeed_0_19_8` is what DeepSpeed 0.19.8 made of two ranks' ZeRO-1 checkpoint of a `toy.Toy` in
bf16: `pytorch_model.bin` its own `zero_to_fp32.py`, `lightning_model.pt` Lightning 2.6.6's converter, where the client
state had the keys of Lightning's DeepSpeed strategy.
"""

from __future__ import annotations

import ast
import re
from contextlib import chdir
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from lightning_hybrid import DynamicLossScale, HybridAllReduceStrategy
from lightning_hybrid.optim import LAMB, LARS
from tests import toy

README = Path(__file__).parents[2] / "lightning_hybrid" / "strategy" / "migration.md"
DEEPSPEED = Path(__file__).parents[1] / "checkpoint" / "deepspeed_0_19_8"


class LooksAtStart(pl.Callback):
    """Keeps weights and optimizer state with which training starts, as a checkpoint would have them."""

    def on_train_start(self, trainer, module):
        self.weights = {name: value.clone() for name, value in trainer.strategy.lightning_module_state_dict().items()}
        states = trainer.optimizers[0].state_dict()["state"]
        self.states = {i: {name: torch.as_tensor(v).clone() for name, v in s.items()} for i, s in states.items()}


def same_states(one, other):
    return one.keys() == other.keys() and all(
        one[i].keys() == other[i].keys()
        and all(
            torch.equal(torch.as_tensor(v).float(), torch.as_tensor(other[i][k]).float()) for k, v in one[i].items()
        )
        for i in one
    )


# ---- stock ddp -------------------------------------------------------------------------------------------------------


class SavesMidway(pl.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def trainer_in(precision, **settings):
    """With `precision="16-mixed"` Lightning would take bf16 on a CPU; its plugin, given as such, has its loss scale."""
    if precision == "16-mixed":
        return toy.trainer(plugins=[MixedPrecision("16-mixed", "cpu")], **settings)
    return toy.trainer(precision=precision, **settings)


def fit_stock_ddp(path, precision):
    module = toy.Toy(optimizer="AdamW", lr=1e-2)
    trainer_in(precision, strategy="ddp", callbacks=[SavesMidway(path)]).fit(module, toy.loader())
    return toy.weights(module)


def go_on_from(path, precision):
    module, look = toy.Toy(optimizer="AdamW", lr=1e-2, seed=5), LooksAtStart()
    trainer_in(precision, callbacks=[look]).fit(module, toy.loader(), ckpt_path=path)
    return toy.weights(module), len(module.losses), look.weights, look.states


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_checkpoint_of_stock_ddp_goes_on_to_the_bits_of_stock_ddp(two_ranks, tmp_path, precision):
    path = str(tmp_path / "ddp.ckpt")
    whole = two_ranks.run(fit_stock_ddp, path, precision)
    for expected, (weights, num_steps, _, _) in zip(whole, two_ranks.run(go_on_from, path, precision), strict=True):
        assert num_steps == 4, "the first epoch must not have run again"
        assert toy.same_bits(weights, expected)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_checkpoint_of_stock_ddp_goes_on_in_half_precision_from_the_same_masters_and_moments(
    two_ranks, tmp_path, precision
):
    path = str(tmp_path / "ddp.ckpt")
    two_ranks.run(fit_stock_ddp, path, precision)
    saved = torch.load(path)
    assert ("MixedPrecision" in saved) is (precision == "16-mixed"), "its loss scale"
    for weights, num_steps, masters, states in two_ranks.run(go_on_from, path, "16-true"):
        assert num_steps == 4
        assert toy.same_bits(masters, saved["state_dict"])
        assert same_states(states, saved["optimizer_states"][0]["state"])
        assert not toy.same_bits(weights, masters)


# ---- DeepSpeed -------------------------------------------------------------------------------------------------------


def masters_at_start_of(module):
    look = LooksAtStart()
    toy.trainer(precision="16-true", callbacks=[look], max_steps=1).fit(module, toy.loader())
    return look.weights


def start_from_deepspeed(prefix):
    module, state = toy.Toy(), torch.load(DEEPSPEED / "pytorch_model.bin")
    state = {f"{prefix}{name}": value for name, value in state.items()}
    consume_prefix_in_state_dict_if_present(state, prefix)  # of older versions, or of a wrapper
    module.load_state_dict(state)
    return masters_at_start_of(module)


@pytest.mark.parametrize("prefix", ["", "_forward_module.", "module."])
def test_weights_from_deepspeeds_zero_to_fp32_are_the_masters(one_rank, prefix):
    saved = torch.load(DEEPSPEED / "pytorch_model.bin")
    assert not torch.equal(saved["net.5.weight"], saved["net.5.weight"].bfloat16().float()), "more digits than bf16"
    (masters,) = one_rank.run(start_from_deepspeed, prefix)
    assert toy.same_bits(masters, {name: saved[name] for name in masters})


def start_from_lightnings_deepspeed():
    module = toy.Toy.load_from_checkpoint(DEEPSPEED / "lightning_model.pt")
    return module.lr, masters_at_start_of(module)


def test_a_deepspeed_checkpoint_after_lightnings_converter_loads_with_its_hyper_parameters(one_rank):
    ((lr, masters),) = one_rank.run(start_from_lightnings_deepspeed)
    saved = torch.load(DEEPSPEED / "pytorch_model.bin")
    assert lr == 0.5
    assert toy.same_bits(masters, {name: saved[name] for name in masters})


# ---- apex ------------------------------------------------------------------------------------------------------------


(APEX,) = (block for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if "apex" in block)
exec(ast.unparse(ast.parse(APEX).body[0]), names := {"torch": torch})  # the README's function alone
load_apex_state_ = names["load_apex_state_"]


def groups_of(module):
    """Two groups, in another order than that of the module's parameters."""
    flat = [parameter for parameter in module.parameters() if parameter.ndim < 2]
    return [{"params": flat, "weight_decay": 0.0}, {"params": [p for p in module.parameters() if p.ndim > 1]}]


def saved_by_apex_o2(make_optimizer, groups=groups_of):
    """A checkpoint as apex's README has it, and the masters, after two steps of amp's O2 on random gradients.

    O2 casts all but BatchNorm to fp16, puts fp32 masters into `param_groups` in the place of fp16 parameters, steps on
    them, copies them back; its state dict hook saves fp16 tensors as fp32 ones.
    """
    model, generator = toy.Toy(), torch.Generator().manual_seed(1)
    for child in model.net:
        child.float() if isinstance(child, nn.BatchNorm1d) else child.half()
    optimizer, of = make_optimizer(groups(model)), {}
    for group in optimizer.param_groups:
        for i, parameter in enumerate(group["params"]):
            if parameter.dtype is torch.float16:
                of[parameter] = group["params"][i] = parameter.detach().clone().float().requires_grad_()
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    for _ in range(2):
        for master in masters:
            master.grad = torch.randn(master.shape, generator=generator) / 8
        optimizer.step()
    with torch.no_grad():
        for parameter, master in of.items():
            parameter.copy_(master)
    return {
        "model": {n: v.float() if v.dtype is torch.float16 else v for n, v in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "amp": {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 2}},
        "masters": [master.detach() for master in masters],  # list(amp.master_params(optimizer))
    }


def sgd(groups):
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


class FromApex(toy.Toy):
    def __init__(self, saved, make_optimizer):
        super().__init__(seed=5)
        self.saved, self.make_optimizer = saved, make_optimizer
        self.load_state_dict(saved["model"])

    def configure_optimizers(self):
        optimizer = self.make_optimizer(groups_of(self))
        load_apex_state_(optimizer, self.saved["optimizer"], self.saved["masters"])
        return optimizer


def go_on_from_apex(saved, make_optimizer):
    module, look = FromApex(saved, make_optimizer), LooksAtStart()
    trainer = toy.trainer(precision="16-true", callbacks=[look], max_epochs=1)
    trainer.fit(module, toy.loader())
    step = [float(state["step"]) for state in trainer.optimizers[0].state.values() if "step" in state]
    return look.weights, look.states, step, [group["lr"] for group in trainer.optimizers[0].param_groups]


def lars(groups):
    return LARS(groups, lr=0.1, momentum_form="lr_outside", trust_clip=1.0)


@pytest.mark.parametrize("ours", [sgd, lars])
def test_apex_o2_goes_on_from_its_masters_and_its_momentum(one_rank, ours):
    saved = saved_by_apex_o2(sgd)
    names = [name for flat in (True, False) for name, p in toy.Toy().named_parameters() if (p.ndim < 2) is flat]
    expected = saved["model"] | dict(zip(names, saved["masters"], strict=True))
    assert not toy.same_bits(expected, saved["model"]), "the model's own weights are rounded"
    ((masters, states, _, rates),) = one_rank.run(go_on_from_apex, saved, ours)
    assert toy.same_bits(masters, {name: expected[name] for name in masters})
    assert same_states(states, saved["optimizer"]["state"])
    assert rates == [0.1, 0.1]


def lamb(groups):
    return LAMB(groups, lr=0.01)


def adamw(groups):
    return torch.optim.AdamW(groups, lr=0.01)


@pytest.mark.parametrize("ours", [lamb, adamw])
def test_fused_optimizers_of_apex_hand_over_their_moments_and_the_step_of_each_group(one_rank, ours):
    """FusedLAMB and FusedAdam save `step` in the group, beside options that no optimizer here has."""
    saved = saved_by_apex_o2(adamw)
    for state in saved["optimizer"]["state"].values():
        del state["step"]
    fused = {"lr": 3.0, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "step": 2}
    fused |= {"grad_averaging": True, "max_grad_norm": 1.0}
    numbers = [group["params"] for group in saved["optimizer"]["param_groups"]]
    saved["optimizer"]["param_groups"] = [{**fused, "params": params} for params in numbers]
    ((_, states, steps, rates),) = one_rank.run(go_on_from_apex, saved, ours)
    expected = {i: {**state, "step": torch.tensor(2.0)} for i, state in saved["optimizer"]["state"].items()}
    assert same_states(states, expected)
    assert set(steps) == {10.0}, "two of apex, eight of this run"
    assert rates == [0.01, 0.01]


def fit_as_the_readme_says(folder):
    names = {"torch": torch, "Classifier": toy.Toy, "DynamicLossScale": DynamicLossScale, "__name__": "readme"}
    with chdir(folder):
        exec(APEX, names)
    strategy, look = HybridAllReduceStrategy(loss_scale=names["scale"]), LooksAtStart()
    trainer = toy.trainer(strategy=strategy, precision="16-true", callbacks=[look], max_epochs=1)
    trainer.fit(names["module"], toy.loader())
    return look.weights, look.states, names["scale"].value


def test_the_readmes_way_from_apex_is_right(one_rank, tmp_path):
    saved = saved_by_apex_o2(sgd, groups=lambda module: module.parameters())
    torch.save(saved, tmp_path / "apex.pt")
    ((masters, states, scale),) = one_rank.run(fit_as_the_readme_says, str(tmp_path))
    names = [name for name, _ in toy.Toy().named_parameters()]
    expected = saved["model"] | dict(zip(names, saved["masters"], strict=True))
    assert toy.same_bits(masters, {name: expected[name] for name in masters})
    assert same_states(states, saved["optimizer"]["state"])
    assert scale == 65536.0


def test_keys_of_old_torch_are_mapped_by_order():
    saved = saved_by_apex_o2(sgd)
    keys = [7 * (20 - i) for i in range(20)]
    state = {keys[i]: tensors for i, tensors in saved["optimizer"]["state"].items()}
    groups = [{"params": [keys[i] for i in group["params"]]} for group in saved["optimizer"]["param_groups"]]
    optimizer = sgd(groups_of(toy.Toy()))
    load_apex_state_(optimizer, {"state": state, "param_groups": groups}, saved["masters"])
    assert same_states(optimizer.state_dict()["state"], saved["optimizer"]["state"])


def test_an_optimizer_of_other_groups_than_apexs_is_refused():
    saved = saved_by_apex_o2(sgd)
    with pytest.raises(ValueError, match="Build the optimizer from the same groups as under apex"):
        load_apex_state_(sgd(toy.Toy().parameters()), saved["optimizer"], saved["masters"])
