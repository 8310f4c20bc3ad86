"""The update shared within a node: to the bit what every rank would do by itself, in a part of the memory."""

from __future__ import annotations

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.callbacks import MasterWeightAveraging
from lightning_hybrid.optim import LAMB, LARS
from lightning_hybrid.placement import BLOCK
from tests import toy

SIZES = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5, 3 * BLOCK + 1)


class Sizes(pl.LightningModule):
    """One parameter of each size and a convolution that is channels last; gradients differ between ranks and steps."""

    def __init__(self, optimizer, overflows=(), overflow_in=-1):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        weights = [torch.randn(size, generator=generator) / 8 for size in SIZES]
        weights.append((torch.randn(64, 128, 3, 3, generator=generator) / 8).to(memory_format=torch.channels_last))
        self.weights = nn.ParameterList(weights)
        self.norm = nn.LayerNorm(4)
        self.make_optimizer, self.overflows, self.overflow_in = optimizer, overflows, overflow_in
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = self.norm(batch[:, :4]).square().mean()
        generator = torch.Generator().manual_seed(1000 * batch_idx + (dist.get_rank() if dist.is_initialized() else 0))
        for index, weight in enumerate(self.weights):
            factor = torch.randn(weight.shape, generator=generator)
            if batch_idx in self.overflows and index == self.overflow_in and dist.get_rank() == 0:
                factor.view(-1)[-1] = float("inf")  # in the last part alone
            loss = loss + (weight.float() * factor).sum() * batch[0, 0].abs() / 64
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append([weight.detach().float().clone() for weight in self.weights])

    def configure_optimizers(self):
        return self.make_optimizer(self)


def batches(num=4):
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)
    return torch.utils.data.DataLoader(torch.randn(2 * num, 4, generator=generator), batch_size=2)


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def fit(optimizer, precision, shard_update, num=4, options=None, module_options=None, **settings):
    """Weights after the fit, those in each step, whole optimizer state on rank zero, and skipped steps."""
    module = Sizes(optimizer, **(module_options or {}))
    scale = {"loss_scale": 1024} if precision == "16-true" else {}
    strategy = HybridAllReduceStrategy(shard_update=shard_update, tune="off", **scale, **(options or {}))
    trainer = toy.trainer(
        strategy=strategy, precision=precision, max_epochs=1, use_distributed_sampler=False, **settings
    )
    trainer.fit(module, batches(num))
    state = trainer.optimizers[0].state_dict()["state"]
    return {
        "weights": toy.weights(module),
        "seen": module.seen,
        "state": state if dist.get_rank() == 0 else None,
        "skipped": getattr(trainer.precision_plugin, "num_skipped_steps", 0),
    }


def same(one, other):
    """Whether nested tensors hold the same bits; the first place where they do not."""
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def both(optimizer, precision, kwargs=None):
    """Whether a fit with the update shared has the bits of one without, for each thing that is compared."""
    whole, shared = (fit(optimizer, precision, setting, **(kwargs or {})) for setting in ("off", "node"))
    return {name: same(whole[name], shared[name]) for name in whole}, shared["skipped"]


ALL_SAME = {"weights": True, "seen": True, "state": True, "skipped": True}


@pytest.mark.parametrize("precision", ["16-true", "bf16-true", "32-true"])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_a_shared_update_has_the_bits_of_a_whole_one(two_ranks, optimizer, precision):
    for found, _ in two_ranks.run(both, optimizer, precision):
        assert found == ALL_SAME


def numels_held(precision, ranks_per_node):
    """Elements of masters and of momentum on this rank, in training and after it; and of the weights."""
    seen = {}

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            masters = trainer.precision_plugin.masters if precision == "16-true" else None
            seen["masters"] = sum(pair.master.numel() for pair in masters.pairs.values()) if masters else 0
            seen["momentum"] = sum(one["momentum_buffer"].numel() for one in trainer.optimizers[0].state.values())

    module = Sizes(sgd)
    scale = {"loss_scale": 1024} if precision == "16-true" else {}
    strategy = HybridAllReduceStrategy(shard_update="node", ranks_per_node=ranks_per_node, **scale)
    trainer = toy.trainer(strategy=strategy, precision=precision, max_epochs=1, callbacks=[Looks()])
    trainer.fit(module, batches(2))
    weights = sum(weight.numel() for weight in module.parameters())
    after = sum(one["momentum_buffer"].numel() for one in trainer.optimizers[0].state.values())
    return seen, weights, after


@pytest.mark.parametrize("precision", ["16-true", "32-true"])
def test_each_rank_of_a_node_holds_a_part_of_the_large_tensors(two_ranks, precision):
    small = sum(size for size in SIZES if size <= BLOCK)
    found = two_ranks.run(numels_held, precision, 2)
    large = found[0][1] - small - 8  # the layer normalisation has 8
    for kind, others in (("masters", 0 if precision == "16-true" else None), ("momentum", 8)):
        held = [seen[kind] for seen, _, _ in found]
        if others is None:
            assert held == [0, 0]
            continue
        assert sum(held) == large + 2 * (small + others), kind
        assert max(held) - min(held) <= 2 * BLOCK, kind
    assert found[0][2] == found[0][1]  # rank zero can still save whole state after the fit


def test_overflow_in_one_part_skips_the_step_on_every_rank(two_ranks):
    kwargs = {"num": 5, "module_options": {"overflows": (1, 2), "overflow_in": 4}}
    for found, skipped in two_ranks.run(both, sgd, "16-true", kwargs):
        assert (found, skipped) == (ALL_SAME, 2)


SETTINGS = {
    "accumulation": {"accumulate_grad_batches": 2},
    "clipping by norm": {"gradient_clip_val": 0.01},
    "clipping by value": {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("precision", ["16-true", "32-true"])
def test_the_trainer_s_options_keep_their_bits(two_ranks, precision, settings):
    for found, _ in two_ranks.run(both, adamw, precision, SETTINGS[settings]):
        assert found == ALL_SAME


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(3, 3), (4, 4), (4, 2)])
def test_more_ranks_and_nodes_keep_the_bits(rank_pool, world_size, ranks_per_node):
    kwargs = {"options": {"ranks_per_node": ranks_per_node}}
    for found, _ in rank_pool.ranks(world_size).run(both, sgd, "16-true", kwargs):
        assert found == ALL_SAME


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def saved(path, precision, shard_update, *, resume=None):
    """Train for two epochs of two batches, save after each; what the files hold, and the weights."""
    module = Sizes(adamw)
    scale = {"loss_scale": 1024} if precision == "16-true" else {}
    strategy = HybridAllReduceStrategy(shard_update=shard_update, **scale)
    trainer = toy.trainer(strategy=strategy, precision=precision, use_distributed_sampler=False)
    module.on_train_epoch_end = lambda: trainer.current_epoch or trainer.save_checkpoint(f"{path}/two.ckpt")
    trainer.fit(module, batches(2), ckpt_path=resume)
    trainer.save_checkpoint(f"{path}/four.ckpt")
    files = [
        torch.load(f"{path}/{name}.ckpt", weights_only=True) for name in ("two", "four") if not resume or name == "four"
    ]
    keys = ("state_dict", "optimizer_states", "MasterWeightPrecision", "global_step")
    return toy.weights(module), [{key: file.get(key) for key in keys} for file in files]


def files_of_both(path, precision):
    whole, shared = (saved(f"{path}/{setting}", precision, setting) for setting in ("off", "node"))
    return same(whole, shared)


@pytest.mark.parametrize("precision", ["16-true", "32-true"])
def test_checkpoints_are_those_of_a_whole_update(two_ranks, precision, tmp_path):
    assert two_ranks.run(files_of_both, str(tmp_path), precision) == [True, True]


def resumed(path, precision, first, then):
    """A run of four batches in one go, and one that is resumed after two."""
    weights, (_, file) = saved(f"{path}/straight", precision, "off")
    saved(f"{path}/begun", precision, first)
    again, (after,) = saved(f"{path}/again", precision, then, resume=f"{path}/begun/two.ckpt")
    return same(weights, again), same(file, after)


@pytest.mark.parametrize(("first", "then"), [("node", "node"), ("node", "off"), ("off", "node")])
@pytest.mark.parametrize("precision", ["16-true", "32-true"])
def test_a_run_goes_on_to_the_bit_shared_or_not(two_ranks, precision, first, then, tmp_path):
    assert two_ranks.run(resumed, str(tmp_path), precision, first, then) == [(True, True)] * 2


# ---- LARS and LAMB -------------------------------------------------------------------------------------------------


def layerwise(module, kind, fused, options):
    # Every third tensor, and the normalisation, is excluded.
    weights = list(module.weights)
    groups = [
        {"params": [weight for index, weight in enumerate(weights) if index % 3 != 1]},
        {"params": [*weights[1::3], *module.norm.parameters()], "trust_ratio": False, "weight_decay": 0.0},
    ]
    return kind(groups, lr=0.1, weight_decay=1e-3, fused=fused, **options)


LAYERWISE = {
    "LARS": partial(layerwise, kind=LARS, fused=True, options={"nesterov": True}),
    "LARS, joint": partial(layerwise, kind=LARS, fused=True, options={"denominator": "joint", "trust_clip": 1.0}),
    "LARS, lists": partial(layerwise, kind=LARS, fused=False, options={"momentum_form": "ratio_outside"}),
    "LAMB": partial(layerwise, kind=LAMB, fused=True, options={"max_grad_norm": 0.5}),
    "LAMB, lists": partial(layerwise, kind=LAMB, fused=False, options={"max_grad_norm": 0.5}),
}


@pytest.mark.parametrize("precision", ["16-true", "bf16-true", "32-true"])
@pytest.mark.parametrize("optimizer", LAYERWISE)
def test_trust_ratios_are_those_of_whole_tensors(two_ranks, optimizer, precision):
    for found, _ in two_ranks.run(both, LAYERWISE[optimizer], precision):
        assert found == ALL_SAME


@pytest.mark.parametrize("optimizer", ["LARS", "LAMB"])
def test_the_verdict_on_overflow_travels_with_the_norms(two_ranks, optimizer):
    kwargs = {"num": 5, "module_options": {"overflows": (1, 2), "overflow_in": 5}}
    for found, skipped in two_ranks.run(both, LAYERWISE[optimizer], "16-true", kwargs):
        assert (found, skipped) == (ALL_SAME, 2)


# ---- callbacks -----------------------------------------------------------------------------------------------------


class AsIsThere(pl.callbacks.EMAWeightAveraging):
    """Lightning's own average."""


def averages(shard_update, ema, path):
    """Weights after the fit, what validation saw, and the weights in a file."""
    seen = []

    class Looks(pl.Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            seen.append([weight.detach().clone() for weight in pl_module.parameters()])

    module = Sizes(sgd)
    module.validation_step = lambda batch, batch_idx: None
    strategy = HybridAllReduceStrategy(shard_update=shard_update, loss_scale=1024)
    trainer = toy.trainer(
        strategy=strategy, precision="16-true", callbacks=[Looks(), ema(decay=0.75)], num_sanity_val_steps=0
    )
    module.on_train_epoch_end = lambda: trainer.save_checkpoint(f"{path}/ema.ckpt")
    trainer.fit(module, batches(2), batches(1))
    file = torch.load(f"{path}/ema.ckpt", weights_only=True)
    return toy.weights(module), seen, file["state_dict"], file["current_model_state"]


def averages_of_both(ema, path):
    return [same(*pair) for pair in zip(averages("off", ema, path), averages("node", ema, path), strict=True)]


@pytest.mark.filterwarnings("ignore:The 'val_dataloader' does not have many workers")
@pytest.mark.parametrize("ema", [MasterWeightAveraging, AsIsThere])
def test_averages_of_parts_are_those_of_whole_masters(two_ranks, ema, tmp_path):
    assert two_ranks.run(averages_of_both, ema, str(tmp_path)) == [[True] * 4] * 2
