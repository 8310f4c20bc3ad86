"""What Lightning's users see of a pipeline: logged values, metrics, evaluation, and the module after a run."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_hybrid import HybridAllReduceStrategy, HybridPipelineStrategy
from lightning_hybrid.callbacks import ReplicaCheck
from recipes.networks.alexnet import AlexNetBN
from recipes.networks.resnet import ResNet
from tests import toy
from tests.pipeline import cases


class Measured(toy.Toy):
    """Counts samples and accuracy, in training and validation, with a preprocessing step outside the network."""

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


def fit_and_predict(strategy, size, accumulate):
    module, parameters = Measured(), None
    parameters = list(map(id, module.parameters()))
    trainer = toy.trainer(
        strategy=strategy,
        accumulate_grad_batches=accumulate,
        max_epochs=1,
        precision="16-true",
        callbacks=[ReplicaCheck()],
    )
    trainer.fit(module, cases.loader_of(Named(64), size), cases.loader_of(Named(20), 6))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert list(map(id, module.parameters())) == parameters  # the user's own objects
    alone = module.net(torch.ones(2, toy.NUM_FEATURES))
    predictions = trainer.predict(module, cases.loader_of(Named(20), 6))
    (tested,) = trainer.validate(module, cases.loader_of(Named(20), 6), verbose=False)
    return logged, torch.cat(predictions), tested, alone.detach()


def through_stages(schedule="1f1b"):
    return fit_and_predict(HybridPipelineStrategy(num_stages=2, num_microbatches=4, schedule=schedule), 16, 1)


def without_stages():
    return fit_and_predict(HybridAllReduceStrategy(), 4, 4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_metrics_count_each_sample_once_and_every_rank_sees_the_same(one_rank, two_ranks, schedule):
    one, two = two_ranks.run(through_stages, schedule)
    (expected,) = one_rank.run(without_stages)
    assert one[0] == two[0]
    assert one[0]["num_seen"] == one[0]["sum"] == 64
    assert one[0].keys() == expected[0].keys()
    assert one[0] == pytest.approx(expected[0], abs=1e-3)  # fp16 products of other batch sizes
    for own in (one, two):
        assert torch.allclose(own[1], expected[1], atol=1e-2)
        assert own[1].dtype is torch.float32
        assert torch.equal(own[3], expected[3])  # the module is whole on every rank
        assert own[2] == pytest.approx(expected[2], abs=1e-3)


@pytest.mark.long
def test_metrics_count_once_over_data_ranks_as_well(four_ranks):
    found = four_ranks.run(through_stages)
    assert {each[0]["num_seen"] for each in found} == {64.0}
    assert {each[0]["sum"] for each in found} == {64.0}
    assert len({str(each[0]) for each in found}) == 1


class Photos(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.rand(3, 64, 64, generator=generator), index % 10


NETS = {
    "resnet": lambda: ResNet(depth=18, num_classes=10, width=0.125, stem="small"),
    "alexnet": lambda: AlexNetBN(num_classes=10, in_channels=3, width=0.125, image_size=64, dropout=0.0),
}


class Photographer(pl.LightningModule):
    def __init__(self, net):
        super().__init__()
        torch.manual_seed(3)
        self.net = NETS[net]()

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def photograph(net, strategy, size, accumulate):
    module = Photographer(net)
    trainer = toy.trainer(strategy=strategy, accumulate_grad_batches=accumulate, max_epochs=1)
    trainer.fit(module, cases.loader_of(Photos(), size))
    return toy.weights(module)


def photograph_in_stages(net, num_stages):
    return photograph(net, HybridPipelineStrategy(num_stages=num_stages, num_microbatches=4), 8, 1)


def photograph_alone(net):
    return photograph(net, HybridAllReduceStrategy(), 2, 4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("net", NETS)
def test_the_networks_of_the_recipes_offer_their_blocks(one_rank, four_ranks, net):
    (expected,) = one_rank.run(photograph_alone, net)
    for own in four_ranks.run(photograph_in_stages, net, 4):
        assert toy.same_bits(own, expected)


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


def fit_undecoded():
    module = DecodesWhereItMatters()
    strategy = HybridPipelineStrategy(num_stages=2, num_microbatches=4)
    toy.trainer(strategy=strategy, max_epochs=1).fit(module)
    return toy.weights(module), module.losses[-1]


def test_only_the_first_stage_needs_the_images(one_rank, two_ranks):
    (expected,) = one_rank.run(cases.by_accumulation, 4, {"max_epochs": 1})
    found = two_ranks.run(fit_undecoded)
    for weights, _ in found:
        assert toy.same_bits(weights, expected["weights"])
    assert found[0][1] == found[1][1]
