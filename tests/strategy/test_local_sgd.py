"""`sync_across_nodes_every`: what each node trains on its own, what is averaged and when, resumed runs, errors."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.callbacks import MasterWeightAveraging, ReplicaCheck
from tests import toy


class Toy(toy.Toy):
    """With a loss of inf on rank 1 in the batches `overflows`, and a rate that falls in each step."""

    overflows = ()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        is_bad = self.trainer.global_step in self.overflows and self.global_rank == 1
        return loss * torch.inf if is_bad else loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Seen(Callback):
    """The weights after each batch and in each validation, and the learning rates."""

    def __init__(self):
        self.after, self.validated, self.rates = [], [], []

    def on_train_batch_end(self, trainer, module, *_):
        self.after.append(values_of(module))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_batch_start(self, trainer, module, *_):
        if not trainer.sanity_checking:
            self.validated.append(values_of(module))


def values_of(module):
    """Parameters and running statistics in one row."""
    return torch.cat([value.detach().float().reshape(-1) for _, value in sorted(module.state_dict().items())])


def fit(
    every, *, optimizer="SGD", precision="32-true", ranks_per_node=1, overflows=(), resume=None, options=None, **settings
):
    module, seen = Toy(lr=0.05, optimizer=optimizer), Seen()
    module.overflows = overflows
    strategy = HybridAllReduceStrategy(
        sync_across_nodes_every=every, ranks_per_node=ranks_per_node, **{"tune": "off", **(options or {})}
    )
    callbacks = [seen, *settings.pop("callbacks", ())]
    trainer = toy.trainer(strategy=strategy, precision=precision, callbacks=callbacks, **settings)
    trainer.fit(module, toy.loader(), ckpt_path=resume)
    return trainer, seen


def final(trainer):
    """Weights, statistics and optimizer state."""
    state = trainer.optimizers[0].state_dict()["state"]
    moments = [value.reshape(-1).float() for one in state.values() for value in one.values() if value is not None]
    return torch.cat([values_of(trainer.lightning_module), *moments])


def test_try(two_ranks):
    found = two_ranks.run(tried)
    print(found)


def tried():
    trainer, seen = fit(3)
    return [float(one.sum()) for one in seen.after], final(trainer).sum()
