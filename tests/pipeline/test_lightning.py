"""Pipelines as users of Lightning see them: logged values, metrics, evaluation, and the module after a run."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_hybrid.callbacks import ReplicaCheck
from lightning_hybrid.pipeline.local_stages import Stages
from recipes.networks.resnet import ResNet
from tests import toy
from tests.pipeline import cases
from tests.pipeline.cases import Validated, in_stages, loader_of
from tests.pipeline.test_bit_equality import assert_equal
from tests.scenes import at, fit, play, same


class Measured(toy.Toy):
    def __init__(self):
        super().__init__()
        self.num_seen = SumMetric()
        acc = MulticlassAccuracy(toy.NUM_CLASSES, average="micro")
        self.both = MetricCollection({"acc": acc, "mean": MeanMetric()})

    def training_step(self, batch, batch_idx):
        images = batch["images"] * 2
        targets = batch["targets"]
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
        images = batch["images"] * 2
        targets = batch["targets"]
        twice = (self(images) + self(images)) / 2  # as in test-time augmentation
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
    scene["module"] = module
    scene["callbacks"] = [ReplicaCheck(), at(on_fit_start=lambda t, _: trainers.append(t))]
    seen = play(scene)
    assert list(map(id, module.parameters())) == parameters  # the user's original objects
    alone = module.net(torch.ones(2, toy.NUM_FEATURES))
    predictions = trainers[0].predict(module, cases.loader_of(Named(20), 6))
    (tested,) = trainers[0].validate(module, cases.loader_of(Named(20), 6), verbose=False)
    return seen.metrics, torch.cat(predictions), tested, alone.detach()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_metrics_count_each_sample_once_and_every_rank_sees_the_same(one_rank, two_ranks, schedule):
    scene = {"data": Named(64), "batch_size": 16, "raises": False, "warns": False}
    results = two_ranks.run(fit_and_predict, cases.in_stages(schedule=schedule, **scene))
    (expected,) = one_rank.run(fit_and_predict, cases.accumulated(**scene))
    expected_metrics, expected_predictions, expected_tested, expected_output = expected
    for rank, (metrics, predictions, tested, output) in enumerate(results):
        assert metrics == results[0][0], f"rank {rank}"
        assert metrics["num_seen"] == 64, f"rank {rank}"
        assert metrics["sum"] == 64, f"rank {rank}"
        assert metrics.keys() == expected_metrics.keys(), f"rank {rank}"
        # fp16 products depend on the batch size.
        assert metrics == pytest.approx(expected_metrics, abs=1e-3), f"rank {rank}"
        assert torch.allclose(predictions, expected_predictions, atol=1e-2), f"rank {rank}"
        assert predictions.dtype is torch.float32, f"rank {rank}"
        assert torch.equal(output, expected_output), f"the module is not whole on rank {rank}"
        assert tested == pytest.approx(expected_tested, abs=1e-3), f"rank {rank}"


class Photographer(toy.Toy):
    def __init__(self):
        super().__init__(lr=0.01)
        torch.manual_seed(3)
        self.net = ResNet(depth=18, num_classes=10, width=0.125, stem="small")


def test_a_network_of_the_recipes_offers_its_blocks(one_rank, four_ranks):
    data = cases.Photos(64, 64)
    assert_equal(
        four_ranks, one_rank, Photographer, options={"num_stages": 4}, data=data, max_epochs=1
    )


class SameInputs(toy.Toy):
    """Module that records each validation loss, with equal inputs on all ranks."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        images = torch.linspace(-2, 2, 8 * toy.NUM_FEATURES).view(8, toy.NUM_FEATURES)
        self.losses.append(self.loss((images, torch.arange(8) % toy.NUM_CLASSES)).item())


def test_data_ranks_validate_with_the_running_statistics_of_the_first_as_under_ddp(
    two_ranks, four_ranks
):
    scene = {"val": partial(toy.loader, 16, 8), "num_sanity_val_steps": 0}
    expected = fit(two_ranks, SameInputs, **cases.accumulated(val_check_interval=4, **scene))
    assert expected[0].losses == expected[1].losses
    for rank, seen in enumerate(
        fit(four_ranks, SameInputs, **cases.in_stages(val_check_interval=1, **scene))
    ):
        assert len(seen.losses) == 8  # four steps in each of two epochs
        # A batch is split, and a matrix product of the parts may round differently.
        assert seen.losses == pytest.approx(expected[rank // 2].losses, rel=1e-5)
        assert same(seen.weights, expected[0].weights)


class Undecoded(toy.Blobs):
    """Blobs with their labels, and with zeros instead of images that are not needed."""

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
    results = fit(
        two_ranks, DecodesWhereItMatters, **{**cases.in_stages(max_epochs=1), "train": None}
    )
    assert all(same(result.weights, expected.weights) for result in results)
    assert results[0].losses[-1] == results[1].losses[-1]


def parts_in_validation(schedule):
    """Return the number of parts in which each validation batch passes through the stages."""
    counts = []
    forward = Stages._forward

    def noted(self, parts, boundaries):
        counts.append(len(parts))
        return forward(self, parts, boundaries)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stages, "_forward", noted)
        val = partial(loader_of, toy.Blobs(16), 8)
        fit(
            None,
            Validated,
            **in_stages(schedule=schedule, val=val, max_epochs=1, num_sanity_val_steps=0),
        )
    return counts


@pytest.mark.parametrize(("schedule", "num_parts"), [("1f1b", 4), ("interleaved", 1)])
def test_stages_that_share_a_rank_validate_whole_batches(two_ranks, schedule, num_parts):
    """With several parts, NCCL would have to order the messages of two stages of a rank."""
    assert two_ranks.run(parts_in_validation, schedule) == [[num_parts] * 2] * 2


class Swaps(nn.Module):
    def forward(self, x):
        return x.transpose(0, 1)


class MixesTokens(nn.Module):
    """Attention over the first dimension, as in torch's transformers without `batch_first`."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class TokensFirst(toy.Toy):
    """Network over `[tokens, samples, features]`, which only `loss` or only blocks transpose."""

    def __init__(self, is_input_swapped):
        super().__init__()
        self.is_input_swapped = is_input_swapped
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(
                nn.Unflatten(1, (toy.NUM_FEATURES, 1)), nn.Linear(1, 4), Swaps(), MixesTokens()
            )
            if is_input_swapped:
                self.net = nn.Sequential(nn.Linear(1, 4), MixesTokens())

    def validation_step(self, batch, batch_idx):
        images, targets = batch
        if self.is_input_swapped:
            images = images.t()[:8, :, None]
        logits = self.net(images).transpose(0, 1).flatten(1)
        self.log("val_loss", F.cross_entropy(logits, targets), sync_dist=True)


@pytest.mark.parametrize("is_input_swapped", [True, False])
def test_samples_in_another_dimension_than_the_first_are_validated_as_one_batch(
    one_rank, two_ranks, is_input_swapped
):
    """Stages once split and joined the tokens, and `val_loss` was that of another network without an error."""
    module = partial(TokensFirst, is_input_swapped)
    data = partial(loader_of, toy.Blobs(8), 4)
    (expected,) = fit(one_rank, module, call="validate", train=data)
    for seen in fit(two_ranks, module, call="validate", **in_stages(train=data)):
        assert seen.metrics == pytest.approx(expected.metrics, rel=1e-5)
