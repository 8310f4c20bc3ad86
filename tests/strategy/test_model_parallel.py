"""Lightning's `ModelParallelStrategy` with LARS and LAMB: FSDP2, tensor parallelism and both train as `ddp` does."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_hybrid.optim import LAMB, LARS, param_groups
from tests import toy

OPTIMIZERS = {
    "lars": (LARS, {"lr": 2.0}),
    "lars fused": (LARS, {"lr": 2.0, "fused": True}),
    "lamb": (LAMB, {"lr": 0.02}),
    "lamb fused": (LAMB, {"lr": 0.02, "fused": True}),
}


class Layerwise(toy.Toy):
    """A toy whose optimizer is one of ours, on parameter groups."""

    def __init__(self, optimizer, net=None):
        super().__init__()
        self.optimizer_name = optimizer
        if net is not None:
            self.net = net

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
            for block in self.net:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def fit_on_rank(module, strategy, **settings):
    """Weights at the end, whole, and what kinds of tensors they were."""
    trainer = toy.trainer(strategy=strategy, **settings)
    trainer.fit(module, toy.loader())
    kinds = {type(param).__name__ for param in module.net.parameters()}
    return {name: whole(param) for name, param in module.net.named_parameters()}, kinds


def ddp_on_rank(optimizer, net=None):
    return fit_on_rank(Layerwise(optimizer, net), "ddp")[0]


def fsdp_on_rank(optimizer):
    return fit_on_rank(Sharded(optimizer), ModelParallelStrategy(2, 1))


def sliced_on_rank(optimizer, data_size):
    return fit_on_rank(Sliced(optimizer, pair_net()), ModelParallelStrategy(data_size, 2))


def distance(one, other):
    assert one.keys() == other.keys()
    return max(((one[name] - other[name]).norm() / one[name].norm()).item() for name in one)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fully_shard_trains_as_ddp(optimizer, two_ranks):
    """To the bit: with two ranks both add two gradients. The fused sums of squares of a shard round otherwise."""
    (expected, _) = two_ranks.run(ddp_on_rank, optimizer)
    for found, kinds in two_ranks.run(fsdp_on_rank, optimizer):
        assert kinds >= {"FSDPModule"} or kinds == {"DTensor"}
        assert distance(expected, found) <= (2e-6 if "fused" in optimizer else 0)
