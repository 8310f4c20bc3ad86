"""Tensors go from stage to stage in whatever order their elements lie in memory."""

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.pipeline.cases import accumulated, in_stages, loader_of
from tests.scenes import fit, same


class Photos(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.rand(3, 17, 19, generator=torch.Generator().manual_seed(index)), index % 10


class ChannelsLast(pl.LightningModule):
    """Channels-last images in a network of channels-last weights, as tensor cores are faster with."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        ).to(memory_format=torch.channels_last)

    def loss_of(self, batch):
        images, labels = batch
        return F.cross_entropy(self.net(images.to(memory_format=torch.channels_last)).float(), labels)

    def training_step(self, batch, batch_idx):
        return self.loss_of(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Transposes(nn.Module):
    def forward(self, x):
        return x.flatten(2).transpose(1, 2)


class Turned(ChannelsLast):
    """A stage ends with a view whose strides descend in no order, as a transformer's tokens do."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            *self.net[:3], nn.AdaptiveAvgPool2d(2), Transposes(), nn.Linear(16, 8), nn.Flatten(), nn.Linear(32, 10)
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("module", "cuts", "precision"),
    [(ChannelsLast, [2], "bf16-true"), (ChannelsLast, [3], "32-true"), (Turned, [5], "32-true")],
)
def test_a_cut_between_tensors_that_are_not_contiguous_changes_nothing(one_rank, two_ranks, module, cuts, precision):
    val = partial(loader_of, Photos(), 8)
    scene = {"data": Photos(), "val": val, "precision": precision, "max_epochs": 1}
    (expected,) = fit(one_rank, module, **accumulated(num=2, **scene))
    for own in fit(two_ranks, module, **in_stages(num_microbatches=2, cuts=cuts, **scene)):
        assert same(own.weights, expected.weights)
        bound = 1e-2 if precision == "bf16-true" else 1e-5
        assert own.metrics["val_loss"] == pytest.approx(expected.metrics["val_loss"], abs=bound)
