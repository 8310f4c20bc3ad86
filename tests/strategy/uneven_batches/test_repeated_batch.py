"""Effect of a repeated batch, which contributes nothing to gradients, statistics, logs and metrics."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from torch import nn

from lightning_hybrid.callbacks import TrainingMetrics
from lightning_hybrid.run_status import run_status
from lightning_hybrid.strategy.uneven_batches.repeated_batch import zero_gradients
from tests.scenes import Keeps
from tests.strategy.uneven_batches import support
from tests.strategy.uneven_batches.support import Network, fits, largest_error, same_weights


@pytest.mark.parametrize("factor", [1.0, float("inf"), float("nan")])
def test_a_backward_adds_zero_whatever_the_loss_is(factor):
    layer = nn.Linear(3, 1)
    layer(torch.ones(3)).sum().backward()
    before = layer.weight.grad.clone()
    with zero_gradients(layer.parameters()):
        (layer(torch.ones(3)).sum() * factor).backward()
    assert torch.equal(layer.weight.grad, before)
    layer(torch.ones(3)).sum().backward()
    assert torch.equal(layer.weight.grad, 2 * before)


class Penalised(Network):
    """Module with a penalty on the fp32 weights, which a hook computes before the forward pass."""

    def on_train_batch_start(self, *args):
        self.penalty = self.net[0].weight.square().sum()

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 0.01 * self.penalty


class BadWhenRepeated(Penalised):
    """Module whose loss is nan for a repeated batch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if run_status(self.trainer).repeats_batch:
            return loss * float("nan")
        return loss


@pytest.mark.parametrize("precision", ["32-true", "16-true"])
def test_a_bad_loss_of_a_repeated_batch_changes_nothing(two_ranks, precision):
    scene = {"train": two_loaders, "precision": precision, "accumulate_grad_batches": 2}
    results = fits(two_ranks, BadWhenRepeated, **scene)
    usual = fits(two_ranks, Penalised, **scene)
    assert same_weights(results + usual)
    assert results[0]["num_skipped"] == 0


def two_loaders():
    """Return loaders with two batches on rank zero and three on rank one.

    The number of samples is even, because Lightning averages it over the ranks as an integer.
    """
    numbers = support.Numbered(dist.get_rank(), (8, 10))
    return torch.utils.data.DataLoader(numbers, batch_size=4)


class WithStatistics(Network):
    """Network with BatchNorm that records its running mean after each batch."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(support.NUM_FEATURES, momentum=0.5)
        self.means = []

    def training_step(self, batch, batch_idx):
        numbers, features, targets = batch
        return super().training_step((numbers, self.norm(features), targets), batch_idx)

    def on_train_batch_end(self, *args):
        self.batch_indices[-1] = self.norm.running_mean.clone()


def test_statistics_of_batch_norm_do_not_move(two_ranks):
    """Rank zero's loader ends first, and DDP broadcasts its statistics to rank one before each forward pass."""
    first, second = (
        rank["batch_indices"] for rank in fits(two_ranks, WithStatistics, train=two_loaders)
    )
    assert not torch.equal(first[1], first[0])
    assert torch.equal(first[2], first[1])
    batch = torch.stack([support.sample(number)[1] for number in range(16, 18)])
    assert torch.allclose(second[2], (first[1] + batch.mean(0)) / 2)


def swapped_loaders():
    """Return loaders with three batches on rank zero and two on rank one."""
    numbers = support.Numbered(dist.get_rank(), (10, 8))
    return torch.utils.data.DataLoader(numbers, batch_size=4)


def test_statistics_of_a_rank_that_has_joined_are_those_of_rank_zero_before_the_step(two_ranks):
    results = fits(two_ranks, WithStatistics, train=swapped_loaders)
    first, second = (rank["batch_indices"] for rank in results)
    assert not torch.equal(second[1], first[1])
    assert torch.equal(second[2], first[1])


class Logs(Network):
    """Module that logs its loss and counts correct answers."""

    def __init__(self):
        super().__init__(lr=0.0)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(
            support.NUM_CLASSES, average="micro"
        )

    def training_step(self, batch, batch_idx):
        numbers, features, targets = batch
        self.numbers += numbers.tolist()
        logits = self.net(features)
        loss = F.cross_entropy(logits, targets)
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        self.log("batches", 1.0, on_epoch=True, on_step=False, sync_dist=True, reduce_fx="sum")
        if batch_idx == 2:
            self.log("late", loss, on_epoch=True, on_step=False, sync_dist=True)
        self.accuracy(logits, targets)
        self.log("accuracy", self.accuracy, on_epoch=True, on_step=False)
        return loss


def exact_metrics(numbers):
    exact = Network().net.double()
    samples = [support.sample(number) for number in numbers]
    logits = exact(torch.stack([features for _, features, _ in samples]).double())
    targets = torch.tensor([target for *_, target in samples])
    loss = F.cross_entropy(logits, targets)
    return loss.item(), float((logits.argmax(1) == targets).float().mean())


def test_logs_and_metrics_of_an_epoch_are_those_of_its_samples(two_ranks):
    loss, accuracy = exact_metrics(range(18))
    late_loss, _ = exact_metrics(range(16, 18))
    for rank in fits(two_ranks, Logs, train=two_loaders):
        assert rank["metrics"]["loss"] == pytest.approx(loss, rel=1e-6)
        assert rank["metrics"]["accuracy"] == pytest.approx(accuracy, rel=1e-6)
        assert rank["metrics"]["batches"] == 5
        assert rank["metrics"]["late"] == pytest.approx(late_loss, rel=1e-6)


def test_the_logged_loss_of_a_step_is_that_of_ranks_with_batches(two_ranks):
    callbacks = [TrainingMetrics(skip_steps=0)]
    scene = {"train": two_loaders, "callbacks": callbacks, "log_every_n_steps": 1}
    loss, _ = exact_metrics(range(16, 18))
    for rank in fits(two_ranks, Frozen, logger=Keeps(), **scene):
        assert rank["metrics"]["train/loss"] == pytest.approx(loss, rel=1e-6)


class Frozen(Network):
    def __init__(self):
        super().__init__(lr=0.0)


class CountsTokens(Network):
    """Module that counts only samples with an even index, and uses their mean loss."""

    def count_samples(self, batch):
        return int((batch[0] % 2 == 0).sum())

    def training_step(self, batch, batch_idx):
        numbers, features, targets = batch
        even = numbers % 2 == 0
        return super().training_step((numbers[even], features[even], targets[even]), batch_idx)


def odd_batches():
    """Return batches with 1, 2 and 0 even indices on rank zero, and two batches on rank one."""
    batches = ([0, 1, 3], [2, 4], [5, 7, 9]), ([6, 8], [10, 12])
    samples = support.Numbered(0, (13,))
    return torch.utils.data.DataLoader(samples, batch_sampler=batches[dist.get_rank()])


def test_a_module_counts_what_its_loss_is_a_mean_of(two_ranks):
    """A batch with a count of zero contributes nothing, although its mean loss is nan."""
    results = fits(two_ranks, CountsTokens, train=odd_batches)
    for rank in results:
        rank["steps"] = rank["steps"][:2]  # the last step has no samples at all
    assert largest_error(results) < 1e-6
    assert all(bool(value.isfinite().all()) for value in results[0]["weights"].values())
