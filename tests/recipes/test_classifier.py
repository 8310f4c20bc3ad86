"""The recipe's module: fp32 loss, schedule over the whole run, one network judged by all ranks."""

from __future__ import annotations

from functools import partial

import lightning.pytorch as pl
import pytest
import torch

from lightning_hybrid import metrics as m
from lightning_hybrid.data.digits import DigitsDataModule
from lightning_hybrid.models import AlexNetBN
from lightning_hybrid.optim import LARS, WarmupPolynomialDecay
from recipes.classifier import Classifier
from tests import toy


def classifier(warmup_epochs=0.5):
    torch.manual_seed(0)
    return Classifier(
        model=AlexNetBN(num_classes=10, in_channels=1, image_size=16, width=0.05),
        optimizer=partial(LARS, lr=4.0),
        weight_decay=5e-4,
        schedule=partial(WarmupPolynomialDecay, end_lr=0.0, power=1.0),
        warmup_epochs=warmup_epochs,
        num_classes=10,
    )


class Watches(pl.Callback):
    def __init__(self):
        self.rates, self.dtypes = [], set()

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_before_backward(self, trainer, module, loss):
        self.dtypes.add(loss.dtype)


def fit(warmup_epochs=0.5, **settings):
    module, watches = classifier(warmup_epochs), Watches()
    trainer = toy.trainer(callbacks=[watches], **{"precision": "16-true", "max_epochs": 2} | settings)
    trainer.fit(module, DigitsDataModule(global_batch_size=300, seed=0))
    return trainer, module, watches


def test_every_rank_tests_the_network_of_rank_zero(two_ranks):
    """BatchNorm statistics are each rank's own after a step of training; all must judge the ones that are saved."""
    (trained_one, one, accuracy_one), (trained_other, other, accuracy_other) = two_ranks.run(statistics_of_a_test)
    assert not torch.equal(trained_one, trained_other)
    assert torch.equal(one, trained_one)
    assert torch.equal(other, trained_one)
    assert accuracy_one == accuracy_other


def statistics_of_a_test():
    class Keeps(pl.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            kept["trained"] = module.model.features[1].running_mean.clone()

        def on_test_end(self, trainer, module):
            kept["tested"] = module.model.features[1].running_mean.clone()

    kept, module, data = {}, classifier(), DigitsDataModule(global_batch_size=300, seed=0)
    trainer = toy.trainer(callbacks=[Keeps()], precision="16-true", max_epochs=1, limit_val_batches=0)
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
    return kept["trained"], kept["tested"], trainer.callback_metrics[m.TEST_ACC].item()


def test_validation_with_unequal_shares_ends_and_is_exact(three_ranks):
    """178 images on three ranks: in batches of 59 they would be 2, 1 and 1.

    Top-1 and top-5 are the counts over all images, in float64, of the logits that the ranks really saw; the quotient
    is float32, so the whole numbers come back exactly.
    """
    (accuracies, *_), counts = zip(*three_ranks.run(validated), strict=True)
    num_images, *right = (sum(column) for column in zip(*counts, strict=True))
    assert len({count[0] for count in counts}) > 1
    assert num_images == 178
    assert 0 < right[0] < right[1] < num_images
    assert [round(accuracy * num_images, 3) for accuracy in accuracies] == right


def test_all_ranks_hold_the_same_accuracies(three_ranks):
    assert len({told for told, _ in three_ranks.run(validated)}) == 1


def validated():
    class Odd(DigitsDataModule):
        def setup(self, stage):
            super().setup(stage)
            self.image_sets["val"] = type(self.image_sets["val"])(*(part[:178] for part in self.image_sets["val"]))

    class Counts(pl.Callback):
        def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
            """By sorting, from the logits that the module gave; not by torchmetrics."""
            order = seen.pop().double().argsort(dim=1, descending=True)
            is_right = order == batch[1][:, None]
            for index, count in enumerate((len(order), is_right[:, :1].sum().item(), is_right[:, :5].sum().item())):
                counts[index] += count

    seen, counts, module = [], [0, 0, 0], classifier()
    module.model.register_forward_hook(lambda _, __, logits: seen.append(logits.detach()))
    data = Odd(global_batch_size=300, seed=0, eval_batch_size_per_rank=59)
    trainer = toy.trainer(precision="16-true", max_epochs=1, callbacks=[Counts()], num_sanity_val_steps=0)
    trainer.fit(module, data)
    return tuple(trainer.callback_metrics[name].item() for name in (m.VAL_ACC, m.VAL_ACC_TOP5)), counts


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, [0, 2, 4, 4 * 5 / 6, 4 * 4 / 6, 4 * 3 / 6, 4 * 2 / 6, 4 / 6]),  # 2 epochs of 4 steps, 2 of them warm-up
        ({"accumulate_grad_batches": 2}, [0, 2, 4, 4 * 5 / 6, 4 * 4 / 6, 4 * 3 / 6, 4 * 2 / 6, 4 / 6]),
        ({"limit_train_batches": 2}, [0, 4, 4 * 2 / 3, 4 / 3]),  # 2 epochs of 2 steps, 1 of them warm-up
        ({"max_steps": 4}, [0, 2, 4, 2]),
    ],
    ids=str,
)
def test_the_schedule_spans_the_run(two_ranks, settings, rates):
    assert two_ranks.run(rates_of, settings)[0] == pytest.approx(rates)


def rates_of(settings):
    return fit(**settings)[2].rates


def test_logits_are_fp32_whatever_the_network_computes_in():
    module = classifier().to(torch.bfloat16)
    assert module(torch.zeros(2, 1, 16, 16, dtype=torch.bfloat16)).dtype is torch.float32


def test_the_loss_is_fp32_and_weight_decay_is_for_weights(two_ranks):
    dtypes, decays = two_ranks.run(dtypes_and_decays)[0]
    assert dtypes == {torch.float32}
    assert decays == {True: {5e-4}, False: {0.0}}


def dtypes_and_decays():
    trainer, _, watches = fit(max_epochs=1)
    decays = {True: set(), False: set()}
    for group in trainer.optimizers[0].param_groups:
        for parameter in group["params"]:
            decays[parameter.dim() > 1].add(group["weight_decay"])
    return watches.dtypes, decays
