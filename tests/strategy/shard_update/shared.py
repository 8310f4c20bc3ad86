"""Module with parameters of many sizes, and fits with and without `shard_update`."""

from functools import partial
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_hybrid.placement import BLOCK
from lightning_hybrid.strategy.shard_update import shard_exchange
from tests import scenes
from tests.scenes import at, same, this_rank

# The last size is in DDP's first bucket.
SIZES = (
    1,
    BLOCK - 1,
    BLOCK,
    BLOCK + 1,
    2 * BLOCK + 5,
    3 * BLOCK + 1,
    7,
)


class Sizes(pl.LightningModule):
    """Module with one parameter of each size and a channels-last convolution. Gradients differ by rank and step."""

    def __init__(self, optimizer, overflows=(), overflow_in=-1, reads=False):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        weights = [torch.randn(size, generator=generator) / 8 for size in SIZES]
        convolution = torch.randn(64, 128, 3, 3, generator=generator) / 8
        weights.insert(-1, convolution.to(memory_format=torch.channels_last))
        self.weights = nn.ParameterList(weights)
        self.norm = nn.LayerNorm(4)
        self.make_optimizer = optimizer
        self.overflows = overflows
        self.overflow_in = overflow_in
        if reads:
            self.on_train_batch_end = self.read_gradients

    def training_step(self, batch, batch_idx):
        loss = self.norm(batch[:, :4]).square().mean()
        generator = torch.Generator().manual_seed(1000 * batch_idx + this_rank())
        for index, weight in enumerate(self.weights):
            factor = torch.randn(weight.shape, generator=generator)
            if index == self.overflow_in and this_rank() == 0:  # only in the last part
                factor.view(-1)[-1] = float("inf") if batch_idx in self.overflows else 32.0
            loss = loss + (weight.float() * factor).sum() * batch[0, 0].abs() / 64
        return loss

    def read_gradients(self, outputs, batch, batch_idx):
        assert all(weight.grad is not None for weight in self.weights)

    def validation_step(self, batch, batch_idx):
        return None

    def configure_optimizers(self):
        return self.make_optimizer(self)


def batches(num=4):
    generator = torch.Generator().manual_seed(this_rank())
    return torch.utils.data.DataLoader(torch.randn(2 * num, 4, generator=generator), batch_size=2)


def sgd(module):
    return torch.optim.SGD(
        module.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3
    )


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def weights_of(trainer, module, *args):
    """Return the weights used in forward. In half precision a rank has fp32 values only of its own shards."""
    window = trainer.strategy.run_status.window
    dtype = torch.float32 if window is None else window.dtype
    return [weight.detach().to(dtype, copy=True) for weight in module.weights]


def fit(
    ranks, optimizer, precision="16-true", shard_update="node", *, num=4, special=None, **scene
):
    """Fit one epoch and return the observations. `special` holds arguments of the module."""
    options = {
        "max_epochs": 1,
        "use_distributed_sampler": False,
        "module": partial(Sizes, optimizer, **(special or {})),
        "train": partial(batches, num),
    }
    if precision == "16-true":
        options["loss_scale"] = 1024
    return scenes.fit(ranks, shard_update=shard_update, precision=precision, **options | scene)


def fit_in_chunks(numel, optimizer, precision, setting, scene):
    with patch.object(shard_exchange, "CHUNK_NUMEL", numel or shard_exchange.CHUNK_NUMEL):
        return fit(None, optimizer, precision, setting, **scene)


def assert_same(
    ranks,
    optimizer,
    precision,
    *,
    shard_update="node",
    num_skipped=0,
    chunk_numel=0,
    callbacks=(),
    **scene,
):
    """Assert that a fit with a sharded update has the same bits as a fit without, and return the sharded fit."""
    # Record at the start of a batch. A hook at its end may read gradients, which would disable the reduce-scatter.
    looks = at(on_train_batch_start=weights_of, on_train_epoch_end=weights_of)
    scene["callbacks"] = [*callbacks, looks]
    whole = ranks.run(fit_in_chunks, chunk_numel, optimizer, precision, "off", scene)
    shared = ranks.run(fit_in_chunks, chunk_numel, optimizer, precision, shard_update, scene)
    for rank, seen in enumerate(shared):
        expected = whole[rank]
        assert same(seen.weights, expected.weights), f"rank {rank}"
        for hook in ("on_train_batch_start", "on_train_epoch_end"):
            assert same(seen.looks[hook], expected.looks[hook]), f"{hook} on rank {rank}"
        assert seen.num_skipped == num_skipped, f"rank {rank}"
        assert expected.num_skipped == num_skipped, f"rank {rank}"
    # After a fit, only rank zero has the whole optimizer state.
    assert same(shared[0].states, whole[0].states)
    return shared
