"""A module with parameters of many sizes, and its fits with and without the update shared within a node."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid import Comm, HybridAllReduceStrategy
from lightning_hybrid.placement import BLOCK
from tests import toy
from tests.scenes import same

SIZES = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5, 3 * BLOCK + 1, 7)  # the last is in DDP's first bucket


class Sizes(pl.LightningModule):
    """One parameter of each size and a convolution that is channels last; gradients differ between ranks and steps."""

    def __init__(self, optimizer, overflows=(), overflow_in=-1, reads=False):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        weights = [torch.randn(size, generator=generator) / 8 for size in SIZES]
        convolution = torch.randn(64, 128, 3, 3, generator=generator) / 8
        weights.insert(-1, convolution.to(memory_format=torch.channels_last))
        self.weights = nn.ParameterList(weights)
        self.norm = nn.LayerNorm(4)
        self.make_optimizer, self.overflows, self.overflow_in = optimizer, overflows, overflow_in
        self.seen = []
        if reads:
            self.on_train_batch_end = self.read_gradients

    def training_step(self, batch, batch_idx):
        loss = self.norm(batch[:, :4]).square().mean()
        generator = torch.Generator().manual_seed(1000 * batch_idx + (dist.get_rank() if dist.is_initialized() else 0))
        for index, weight in enumerate(self.weights):
            factor = torch.randn(weight.shape, generator=generator)
            if batch_idx in self.overflows and index == self.overflow_in and dist.get_rank() == 0:
                factor.view(-1)[-1] = float("inf")  # in the last part alone
            loss = loss + (weight.float() * factor).sum() * batch[0, 0].abs() / 64
        return loss

    def read_gradients(self, outputs, batch, batch_idx):
        self.seen.append([weight.grad.detach().clone() for weight in self.weights])

    def configure_optimizers(self):
        return self.make_optimizer(self)


class SeesWeights(pl.Callback):
    """Not the module: a hook of its own after a step is taken for one that looks at gradients."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.seen.append([weight.detach().float().clone() for weight in pl_module.weights])


def batches(num=4):
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)
    return torch.utils.data.DataLoader(torch.randn(2 * num, 4, generator=generator), batch_size=2)


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def fit(optimizer, precision, shard_update, num=4, options=None, module_options=None, callbacks=(), **settings):
    """Weights after the fit, those in each step, whole optimizer state on rank zero, and skipped steps."""
    module = Sizes(optimizer, **(module_options or {}))
    scale = {"loss_scale": 1024} if precision == "16-true" else {}
    strategy = HybridAllReduceStrategy(
        **{"shard_update": shard_update, "comm": Comm(tune="off"), **scale, **(options or {})}
    )
    settings |= {"max_epochs": 1, "use_distributed_sampler": False, "callbacks": [*callbacks, SeesWeights()]}
    trainer = toy.trainer(strategy=strategy, precision=precision, **settings)
    trainer.fit(module, batches(num))
    state = trainer.optimizers[0].state_dict()["state"]
    return {
        "weights": toy.weights(module),
        "seen": module.seen,
        "state": state if dist.get_rank() == 0 else None,
        "skipped": getattr(trainer.precision_plugin, "num_skipped_steps", 0),
    }


def both(optimizer, precision, kwargs=None):
    """Whether a fit with the update shared has the bits of one without, for each thing that is compared."""
    whole, shared = (fit(optimizer, precision, setting, **(kwargs or {})) for setting in ("off", "node"))
    return {name: same(whole[name], shared[name]) for name in whole}, shared["skipped"]
