"""What Lightning's users see of a pipeline: logged values, metrics, evaluation, and the module after a run."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_hybrid.callbacks import ReplicaCheck
from recipes.networks.resnet import ResNet
from tests import toy
from tests.pipeline import cases
from tests.scenes import at, fit, play, same


class Measured(toy.Toy):
    def __init__(self):
        super().__init__()
        self.num_seen = SumMetric()
        acc = MulticlassAccuracy(toy.NUM_CLASSES, average="micro")
        self.both = MetricCollection({"acc": acc, "mean": MeanMetric()})

    def training_step(self, batch, batch_idx):
        images, targets = batch["images"] * 2, batch["targets"]
        logits = self(images)
        loss = F.cross_entropy(logits.float(), targets)
        self.num_seen(len(targets))
        self.both["acc"](logits, targets)
        self.log("num_seen", self.num_seen, on_step=False, on_epoch=True)
        self.log("acc", self.both["acc"], on_step=False, on_epoch=True)
        counted = torch.tensor(float(len(targets)))
        self.log("sum", counted, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        return {"loss": loss, "logits": logits.detach()}

    def forward(self, images):
        return self.net(images)

    def validation_step(self, batch, batch_idx):
        images, targets = batch["images"] * 2, batch["targets"]
        twice = (self(images) + self(images)) / 2  # as test-time augmentation calls it
        self.log("val_loss", F.cross_entropy(twice.float(), targets), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self(batch["images"] * 2)


class Named(toy.Blobs):
    def __getitem__(self, index):
        images, targets = super().__getitem__(index)
        return {"images": images, "targets": targets}


def fit_and_predict(scene):
    module = Measured()
    parameters = list(map(id, module.parameters()))
    trainers = []
    scene = {**scene, "val": cases.loader_of(Named(20), 6), "precision": "16-true", "max_epochs": 1}
    seen = play(
        {"module": module, "callbacks": [ReplicaCheck(), at(on_fit_start=lambda t, _: trainers.append(t))], **scene}
    )
    assert list(map(id, module.parameters())) == parameters  # the user's own objects
    alone = module.net(torch.ones(2, toy.NUM_FEATURES))
    predictions = trainers[0].predict(module, cases.loader_of(Named(20), 6))
    (tested,) = trainers[0].validate(module, cases.loader_of(Named(20), 6), verbose=False)
    return seen.metrics, torch.cat(predictions), tested, alone.detach()


def through_stages(schedule="1f1b"):
    return cases.in_stages(data=Named(64), batch_size=16, schedule=schedule, raises=False, warns=False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_metrics_count_each_sample_once_and_every_rank_sees_the_same(one_rank, two_ranks, schedule):
    one, two = two_ranks.run(fit_and_predict, through_stages(schedule))
    alone = cases.accumulated(data=Named(64), batch_size=16, raises=False, warns=False)
    (expected,) = one_rank.run(fit_and_predict, alone)
    assert one[0] == two[0]
    assert one[0]["num_seen"] == one[0]["sum"] == 64
    assert one[0].keys() == expected[0].keys()
    assert one[0] == pytest.approx(expected[0], abs=1e-3)  # fp16 products of other batch sizes
    for own in (one, two):
        assert torch.allclose(own[1], expected[1], atol=1e-2)
        assert own[1].dtype is torch.float32
        assert torch.equal(own[3], expected[3])  # the module is whole on every rank
        assert own[2] == pytest.approx(expected[2], abs=1e-3)


class Photos(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.rand(3, 64, 64, generator=generator), index % 10


class Photographer(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = ResNet(depth=18, num_classes=10, width=0.125, stem="small")

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def test_a_network_of_the_recipes_offers_its_blocks(one_rank, four_ranks):
    scene = {"data": Photos(), "max_epochs": 1}
    (expected,) = fit(one_rank, Photographer, **cases.accumulated(**scene))
    piped = fit(four_ranks, Photographer, **cases.in_stages(num_stages=4, **scene))
    assert all(same(own.weights, expected.weights) for own in piped)


class Undecoded(toy.Blobs):
    """Blobs with their labels, and zeros where no image is asked for."""

    def __init__(self, decodes):
        super().__init__()
        self.decodes = decodes

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return (image if self.decodes else torch.zeros_like(image)), target


class DecodesWhereItMatters(toy.Toy):
    def train_dataloader(self):
        return cases.loader_of(Undecoded(self.trainer.strategy.pipeline_ranks.is_first), 8)

    def val_dataloader(self):
        return self.train_dataloader()


def test_only_the_first_stage_needs_the_images(one_rank, two_ranks):
    (expected,) = fit(one_rank, **cases.accumulated(max_epochs=1))
    found = fit(two_ranks, DecodesWhereItMatters, **{**cases.in_stages(max_epochs=1), "train": None})
    assert all(same(own.weights, expected.weights) for own in found)
    assert found[0].losses[-1] == found[1].losses[-1]
