"""Lightning's `ModelParallelStrategy` with LARS and LAMB: FSDP2, tensor parallelism and both train as `ddp` does."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_hybrid.checkpoint.param_names import state_by_name
from lightning_hybrid.optim import LAMB, LARS, param_groups
from recipes.training.fully_sharded import FullyShardedStrategy
from tests import toy

OPTIMIZERS = {
    "lars": (LARS, {"lr": 2.0}),
    "lars fused": (LARS, {"lr": 2.0, "fused": True}),
    "lamb": (LAMB, {"lr": 0.02}),
    "lamb fused": (LAMB, {"lr": 0.02, "fused": True}),
}

BOUND = {"lars": 0, "lars fused": 2e-6, "lamb": 0, "lamb fused": 1e-5}


class Layerwise(toy.Toy):
    """A toy whose optimizer is one of ours, on parameter groups."""

    def __init__(self, optimizer, net=None):
        super().__init__()
        self.optimizer_name = optimizer
        # Biases before BatchNorm have gradients of rounding alone, which LAMB divides by their own size.
        if net is not None or "lamb" in optimizer:
            self.net = net or pair_net()

    def configure_optimizers(self):
        rule, options = OPTIMIZERS[self.optimizer_name]
        return rule(param_groups(self.net, weight_decay=0.01), **options)


class Sharded(Layerwise):
    """As a user writes it: blocks, then the rest."""

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for block in self.net:
            if any(True for _ in block.parameters()):
                fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


def pair_net():
    """Two matrices between which no tensor is needed whole."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Sequential(nn.Linear(toy.NUM_FEATURES, 16), nn.ReLU(), nn.Linear(16, 8)),
            nn.LayerNorm(8),
            nn.Linear(8, toy.NUM_CLASSES),
        )


class Sliced(Layerwise):
    """Tensor parallelism, and `fully_shard` over it where there are data-parallel ranks too."""

    def configure_model(self):
        parallelize_module(
            self.net[0], self.device_mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
        if self.device_mesh["data_parallel"].size() > 1:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def fit_on_rank(module, strategy, **settings):
    """Weights at the end, whole, and what kinds of tensors they were."""
    _clear_sharding_prop_cache()  # of an earlier world of the pool: see `tests.optim.makers.mesh_of`
    trainer = toy.trainer(strategy=strategy, **settings)
    trainer.fit(module, toy.loader())
    kinds = {type(param).__name__ for param in module.net.parameters()}
    return {name: whole(param) for name, param in module.net.named_parameters()}, kinds


def ddp_on_rank(optimizer, net=None):
    return fit_on_rank(Layerwise(optimizer, net), "ddp")[0]


def fsdp_on_rank(optimizer):
    return fit_on_rank(Sharded(optimizer), ModelParallelStrategy(2, 1))


def ddp_pair_on_rank(optimizer):
    return ddp_on_rank(optimizer, pair_net())


def sliced_on_rank(optimizer, data_size):
    return fit_on_rank(Sliced(optimizer, pair_net()), ModelParallelStrategy(data_size, 2))


def distance(one, other):
    assert one.keys() == other.keys()
    return max(((one[name] - other[name]).norm() / one[name].norm()).item() for name in one)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fully_shard_trains_as_ddp(optimizer, two_ranks):
    """To the bit: with two ranks both add two gradients. The fused sums of squares of a shard round otherwise.

    LAMB divides by roots of squares of gradients, so that its weights amplify that.
    """
    expected, _ = two_ranks.run(ddp_on_rank, optimizer)
    for found, kinds in two_ranks.run(fsdp_on_rank, optimizer):
        assert kinds == {"DTensor"}
        assert distance(expected, found) <= BOUND[optimizer]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("data_size", [1, 2], ids="data={}".format)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_tensor_parallelism_trains_as_ddp_on_the_data_parallel_ranks(
    optimizer, data_size, one_rank, two_ranks, four_ranks
):
    """Sums over slices are made in another order; LAMB divides by roots of squares of small gradients."""
    expected = (one_rank if data_size == 1 else two_ranks).run(ddp_pair_on_rank, optimizer)[0]
    for found, kinds in (two_ranks if data_size == 1 else four_ranks).run(sliced_on_rank, optimizer, data_size):
        assert "DTensor" in kinds
        assert distance(expected, found) <= 1e-5


# ---- checkpoints in one file -----------------------------------------------------------------------------------------


class SavesMidway(pl.Callback):
    """After the first of two epochs; then the rest of the run is there to be compared with."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def save_on_rank(kind, optimizer, path):
    module, strategy = of_kind(kind, optimizer)
    return fit_on_rank(module, strategy, callbacks=[SavesMidway(path)], **precision_of(kind))[0]


def resume_on_rank(kind, optimizer, path, is_named=False):
    module, strategy = of_kind(kind, optimizer)
    if is_named and dist.get_rank() == 0:
        plain = Layerwise(optimizer)
        checkpoint = torch.load(path)
        states = zip(checkpoint["optimizer_states"], [plain.configure_optimizers()], strict=True)
        checkpoint["optimizer_states"] = [state_by_name(state, one, plain) for state, one in states]
        torch.save(checkpoint, path)
    _clear_sharding_prop_cache()
    trainer = toy.trainer(strategy=strategy, **precision_of(kind))
    trainer.fit(module, toy.loader(), ckpt_path=path)
    assert trainer.global_step == 8
    return {name: whole(param) for name, param in module.net.named_parameters()}


def of_kind(kind, optimizer):
    if kind == "fsdp":
        return Sharded(optimizer), ModelParallelStrategy(2, 1, save_distributed_checkpoint=False)
    if kind == "recipe":
        module = ByStrategy(optimizer)
        return module, FullyShardedStrategy()
    return Layerwise(optimizer), "ddp" if kind == "ddp" else "hybrid_allreduce"


class ByStrategy(Layerwise):
    """As the module of the recipes."""

    def configure_model(self):
        self.trainer.strategy.shard_(self.net)


def precision_of(kind):
    return {"precision": "16-true"} if kind == "hybrid 16-true" else {}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("optimizer", ["lars", "lamb fused"])
@pytest.mark.parametrize("reader", ["hybrid", "recipe", "ddp"])
@pytest.mark.parametrize("writer", ["fsdp", "hybrid", "recipe"])
def test_one_file_goes_on_in_any_strategy(writer, reader, optimizer, two_ranks, tmp_path):
    path = str(tmp_path / "midway.ckpt")
    expected, _ = two_ranks.run(save_on_rank, writer, optimizer, path)
    for found in two_ranks.run(resume_on_rank, reader, optimizer, path):
        assert distance(expected, found) <= max(1e-7, BOUND[optimizer])


def test_a_file_of_hybrid_allreduce_goes_on_under_lightnings_own_strategy_once_its_state_has_names(two_ranks, tmp_path):
    """Without names the state of one parameter would go to another."""
    path = str(tmp_path / "midway.ckpt")
    expected, _ = two_ranks.run(save_on_rank, "hybrid", "lars", path)
    for found in two_ranks.run(resume_on_rank, "fsdp", "lars", path, True):
        assert distance(expected, found) <= 1e-7


def test_masters_of_half_precision_go_on_as_shards(two_ranks, tmp_path):
    """The file has fp32 masters, and the shards are the new ones."""
    path = str(tmp_path / "midway.ckpt")
    two_ranks.run(save_on_rank, "hybrid 16-true", "lars", path)
    resumed = two_ranks.run(resume_on_rank, "recipe", "lars", path)
    as_ddp = two_ranks.run(resume_on_rank, "ddp", "lars", path)
    assert distance(as_ddp[0], resumed[0]) <= 1e-7
