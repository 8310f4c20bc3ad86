"""The recipe's module: fp32 loss, schedule over the whole run, one network judged by all ranks."""

from __future__ import annotations

import logging
from functools import partial

import lightning.pytorch as pl
import pytest
import torch

from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.optim import LARS, WarmupPolynomialDecay
from recipes.datasets.digits import DigitsDataModule
from recipes.networks.alexnet import AlexNetBN
from recipes.training.classifier import Classifier
from tests import toy


def classifier(**options):
    torch.manual_seed(0)
    if "warmup_steps" not in options:
        options = {"warmup_epochs": 0.5} | options
    return Classifier(
        model=AlexNetBN(num_classes=10, in_channels=1, image_size=16, width=0.05),
        optimizer=partial(LARS, lr=4.0),
        weight_decay=5e-4,
        schedule=partial(WarmupPolynomialDecay, end_lr=0.0, power=1.0),
        num_classes=10,
        **options,
    )


class Watches(pl.Callback):
    def __init__(self):
        self.rates, self.dtypes = [], set()

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_before_backward(self, trainer, module, loss):
        self.dtypes.add(loss.dtype)


def fit(options=None, **settings):
    module, watches = classifier(**options or {}), Watches()
    trainer = toy.trainer(callbacks=[watches], **{"precision": "16-true", "max_epochs": 2} | settings)
    trainer.fit(module, DigitsDataModule(global_batch_size=300, seed=0))
    return trainer, module, watches


@pytest.mark.parametrize(("max_steps", "is_told"), [(3, True), (4, True), (5, False)])
def test_a_run_that_ends_within_its_warmup_is_told_so(one_rank, max_steps, is_told):
    (found,) = one_rank.run(warnings_of, max_steps)
    expected = f"`warmup_steps` (=4) is 4 steps, and the run has {max_steps}: all of it is warm-up"
    assert [expected in words for words in found] == [True] * is_told


def warnings_of(max_steps):
    class Keeps(logging.Handler):
        def emit(self, record):
            found.append(record.getMessage())

    found, log = list[str](), logging.getLogger("recipes.training.classifier")
    log.addHandler(keeps := Keeps(level=logging.WARNING))
    try:
        fit({"warmup_steps": 4}, max_steps=max_steps, limit_val_batches=0)
    finally:
        log.removeHandler(keeps)
    return found


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
    assert len({metrics for metrics, _ in three_ranks.run(validated)}) == 1


def validated():
    class Odd(DigitsDataModule):
        def setup(self, stage):
            super().setup(stage)
            self.image_sets["val"] = type(self.image_sets["val"])(*(part[:178] for part in self.image_sets["val"]))

    class Counts(pl.Callback):
        def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
            """By sorting, from the logits that the module gave; not by torchmetrics."""
            if trainer.sanity_checking:
                return
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"options": {"warmup_steps": 1}}, [0, 4, 4 * 6 / 7, 4 * 5 / 7, 4 * 4 / 7, 4 * 3 / 7, 4 * 2 / 7, 4 / 7]),
        ({"options": {"warmup_steps": 9}, "max_steps": 3}, [0, 2, 4]),
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
    return fit(precision="32-true", **settings)[2].rates


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


def test_label_smoothing_is_for_training_alone():
    """Smoothed: (1 - s) times the plain loss and s times the mean over all classes, in float64."""
    torch.manual_seed(1)
    batch = torch.randn(5, 1, 16, 16), torch.arange(5)
    plain, smoothing = classifier().eval(), classifier(label_smoothing=0.25).eval()
    log_probs = smoothing(batch[0]).double().log_softmax(dim=1)
    expected = -(0.75 * log_probs[range(5), batch[1]] + 0.25 * log_probs.mean(dim=1)).mean()
    # fp32 log-softmax: a few units in the last place
    assert smoothing.training_step(batch, 0).item() == pytest.approx(expected.item(), rel=1e-6)
    smoothing.log = plain.log = lambda *_, **__: None
    for module in (plain, smoothing):
        module.validation_step(batch, 0)
    assert torch.equal(plain.val_loss.compute(), smoothing.val_loss.compute())
    assert plain.val_loss.compute().item() == pytest.approx(-log_probs[range(5), batch[1]].mean().item(), rel=1e-6)


def test_a_nan_in_one_batch_of_validation_shows_in_the_loss():
    module = classifier().eval()
    module.log = lambda *_, **__: None
    module.validation_step((torch.randn(5, 1, 16, 16), torch.arange(5)), 0)
    assert module.val_loss.compute().isfinite()
    module.validation_step((torch.full((5, 1, 16, 16), torch.nan), torch.arange(5)), 1)
    module.validation_step((torch.randn(5, 1, 16, 16), torch.arange(5)), 2)
    assert module.val_loss.compute().isnan()


@pytest.mark.parametrize(
    ("options", "adapted", "excluded"),
    [
        ({}, (5e-4, True), (0.0, False)),
        ({"trust_ratio": False}, (5e-4, False), (0.0, False)),
        ({"decay_excluded": True}, (5e-4, True), (5e-4, False)),
    ],
    ids=str,
)
def test_an_ablation_changes_its_group_of_parameters_and_no_other(two_ranks, options, adapted, excluded):
    assert two_ranks.run(groups_of, options)[0] == [adapted, excluded]


def groups_of(options):
    trainer, _, _ = fit(options, max_steps=1, limit_val_batches=0)
    return [(group["weight_decay"], group["trust_ratio"]) for group in trainer.optimizers[0].param_groups]


def test_without_trust_ratio_lars_makes_the_steps_of_plain_momentum(two_ranks):
    """With the same decay everywhere and a constant rate; 32-true, so that the reference is torch's own."""
    lars, sgd = two_ranks.run(weights_after_ablation)[0]
    for name, weight in lars.items():
        # v of "lr_inside" holds lr * d where torch's holds d: equal up to rounding, and lr is a power of two
        assert torch.equal(weight, sgd[name]), name


def weights_after_ablation():
    found = []
    for optimizer in (partial(LARS, lr=0.0625, momentum=0.9), partial(torch.optim.SGD, lr=0.0625, momentum=0.9)):
        module = classifier(warmup_steps=0, trust_ratio=False, decay_excluded=True)
        module.optimizer, module.schedule = optimizer, partial(WarmupPolynomialDecay, end_lr=0.0625, power=1.0)
        data = DigitsDataModule(global_batch_size=300, seed=0)
        toy.trainer(precision="32-true", max_steps=3, limit_val_batches=0).fit(module, data)
        found.append(toy.weights(module.model))
    return found


@pytest.mark.parametrize("precision", ["32-true", "16-true"])
def test_channels_last_changes_the_layout_and_not_the_training(two_ranks, precision):
    (losses, strides), (reference, plain_strides) = two_ranks.run(losses_by_layout, precision)[0]
    assert strides == {True}
    assert plain_strides == {False}
    # two steps in another order of summation: fp32 to 2e-5 of the loss; fp16 weights differ by units in the last place
    assert losses == pytest.approx(reference, rel=2e-5 if precision == "32-true" else 2e-3)


def losses_by_layout(precision):
    return [losses_of(channels_last, precision) for channels_last in (True, False)]


def losses_of(channels_last, precision):
    class Looks(pl.Callback):
        def on_before_backward(self, trainer, module, loss):
            losses.append(loss.item())
            weight = module.model.features[4].weight
            strides.add(weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous())

    losses, strides = [], set()
    module = classifier(channels_last=channels_last)
    trainer = toy.trainer(precision=precision, max_steps=2, limit_val_batches=0, callbacks=[Looks()])
    trainer.fit(module, DigitsDataModule(global_batch_size=300, seed=0))
    return losses, strides


@pytest.mark.parametrize("channels_last", [True, False])
def test_the_network_sees_images_in_its_own_layout(channels_last):
    module, seen = classifier(channels_last=channels_last), []
    module.model = torch.nn.Identity()
    module.model.register_forward_pre_hook(lambda _, args: seen.append(args[0].stride()))
    for memory_format in (torch.contiguous_format, torch.channels_last):
        module(torch.zeros(2, 3, 4, 5).contiguous(memory_format=memory_format))
    assert seen == [(60, 1, 15, 3) if channels_last else (60, 20, 5, 1)] * 2


@pytest.mark.long
def test_a_compiled_network_keeps_its_names_in_checkpoints():
    """`torch.compile(network)` would put `_orig_mod` before them. Compilation itself is lazy, and takes a minute."""
    plain, compiled = classifier(), classifier(compile=True)
    assert (plain.model._compiled_call_impl, callable(compiled.model._compiled_call_impl)) == (None, True)
    assert plain.state_dict().keys() == compiled.state_dict().keys()


WRONG_OPTIONS = {
    "warmup_epochs=1 warmup_steps=5": r"`warmup_epochs` \(=1\) and `warmup_steps` \(=5\) must be one number and one",
    "warmup_epochs=None": r"`warmup_epochs` \(=None\) and `warmup_steps` \(=None\).*nothing says how long",
    "warmup_epochs=-1": r"`warmup_epochs` \(=-1\) must be a number, at least 0",
    "warmup_steps=0.5": r"`warmup_steps` \(=0.5\) must be a whole number, at least 0",
    "label_smoothing=1": r"`label_smoothing` \(=1\) must be from 0 to less than 1",
    "label_smoothing=-0.1": r"`label_smoothing` \(=-0.1\) must be from 0 to less than 1",
    "trust_ratio='off'": r"`trust_ratio` \(=off\) must be true or false",
    "decay_excluded=2": r"`decay_excluded` \(=2\) must be true or false",
    "channels_last=None": r"`channels_last` \(=None\) must be true or false",
    "compile='max'": r"`compile` \(=max\) must be true or false",
}


@pytest.mark.parametrize("wrong", WRONG_OPTIONS)
def test_a_wrong_option_is_refused_by_name(wrong):
    options = eval(f"dict({', '.join(wrong.split())})")
    with pytest.raises(ValueError, match=WRONG_OPTIONS[wrong]):
        classifier(**options)
