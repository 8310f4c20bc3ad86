"""Classifier module of the recipes: fp32 loss, a schedule over the whole run, and equal evaluation on all ranks."""

import logging
import logging.handlers
import re
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from lightning_hybrid.callbacks import TrainingMetrics
from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.optim import LARS, WarmupPolynomialDecay
from recipes.datasets.digits import DigitsDataModule
from recipes.networks.alexnet import AlexNetBN
from recipes.training import mfu
from recipes.training.classifier import Classifier
from tests import toy
from tests.scenes import at


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


def fit(options=None, data=DigitsDataModule, looks=None, **settings):
    """Fit on this rank and return trainer, module and the return values of the hooks `looks`."""
    module = classifier(**options or {})
    looks = at(**looks or {})
    settings = {"precision": "16-true", "max_epochs": 2, "limit_val_batches": 0} | settings
    trainer = toy.trainer(callbacks=[looks], **settings)
    trainer.fit(module, data(global_batch_size=300, seed=0))
    return trainer, module, looks.kept


def rate(trainer, module, optimizer):
    return optimizer.param_groups[0]["lr"]


def resumed_rates(ckpt_path, *, max_epochs):
    module = classifier(warmup_epochs=1.0)
    looks = at(on_train_batch_start=rate_of_step)
    trainer = toy.trainer(
        callbacks=[looks], max_epochs=max_epochs, limit_val_batches=0, precision="32-true"
    )
    trainer.fit(module, DigitsDataModule(global_batch_size=300, seed=0), ckpt_path=ckpt_path)
    return trainer, looks.kept["on_train_batch_start"]


def rate_of_step(trainer, module, *_):
    return trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"]


def test_a_run_that_resumes_to_a_greater_length_follows_its_own_schedule_and_warns(tmp_path):
    """A run with `max_epochs=2` resumes from its checkpoint with `max_epochs=3`."""
    trainer, _ = resumed_rates(None, max_epochs=2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    _, whole = resumed_rates(None, max_epochs=3)
    handler = logging.handlers.BufferingHandler(100)
    logger = logging.getLogger("recipes.training.classifier")
    logger.addHandler(handler)
    try:
        _, resumed = resumed_rates(tmp_path / "two.ckpt", max_epochs=3)
    finally:
        logger.removeHandler(handler)
    assert resumed == whole[-4:]
    logged = [record.getMessage() for record in handler.buffer]
    (message,) = [line for line in logged if "schedule now has" in line]
    assert "12 steps instead of 8, and 4 steps of warm-up instead of 4" in message
    assert "the learning rate jumps from 0 to 2 after step 8" in message


def test_every_rank_tests_the_network_of_rank_zero(two_ranks):
    """After a training step, BatchNorm statistics differ between ranks. All ranks must test those that are saved."""
    rank_0, rank_1 = two_ranks.run(statistics_of_a_test)
    assert not torch.equal(rank_0.trained, rank_1.trained)
    assert torch.equal(rank_0.tested, rank_0.trained)
    assert torch.equal(rank_1.tested, rank_0.trained)
    assert rank_0.accuracy == rank_1.accuracy


@dataclass
class RankResult:
    """Running means after training and after the test, and the accuracy of the test."""

    trained: torch.Tensor
    tested: torch.Tensor
    accuracy: float


def statistics_of_a_test():
    looks = dict.fromkeys(
        ("on_train_end", "on_test_end"),
        lambda trainer, module: module.model.features[1].running_mean.clone(),
    )
    trainer, module, kept = fit(looks=looks, max_epochs=1)
    trainer.test(module, DigitsDataModule(global_batch_size=300, seed=0), verbose=False)
    return RankResult(
        trained=kept["on_train_end"][0],
        tested=kept["on_test_end"][0],
        accuracy=trainer.callback_metrics[m.TEST_ACC].item(),
    )


class Odd(DigitsDataModule):
    """Data module with 178 validation images in batches of 59."""

    def __init__(self, **options):
        super().__init__(eval_batch_size_per_rank=59, **options)

    def setup(self, stage):
        super().setup(stage)
        whole = self.image_sets["val"]
        self.image_sets["val"] = type(whole)(*(column[:178] for column in whole))


def test_validation_with_unequal_shares_ends_and_is_exact_and_alike_on_all_ranks(three_ranks):
    """178 images on three ranks, in batches of 59, give 2, 1 and 1 batches.

    Top-1 and top-5 are float64 counts over all images, from the logits that the ranks computed. The quotient is
    float32, so the integers can be recovered exactly.
    """
    accuracies, counts = zip(*three_ranks.run(validated), strict=True)
    num_images, *right = (sum(column) for column in zip(*counts, strict=True))
    assert len({count[0] for count in counts}) > 1
    assert num_images == 178
    assert 0 < right[0] < right[1] < num_images
    assert set(accuracies) == {accuracies[0]}
    assert [round(accuracy * num_images, 3) for accuracy in accuracies[0]] == right


def validated():
    """Count correct answers by sorting the logits of the network, without torchmetrics."""
    logits = []

    def count(trainer, module, outputs, batch, *_):
        order = logits[-1].double().argsort(dim=1, descending=True)
        is_right = order == batch[1][:, None]
        return len(order), is_right[:, :1].sum().item(), is_right[:, :5].sum().item()

    looks = {
        "on_fit_start": lambda trainer, module: module.model.register_forward_hook(
            lambda _, __, output: logits.append(output.detach())
        ),
        "on_validation_batch_end": count,
    }
    settings = {"max_epochs": 1, "limit_val_batches": 1.0, "num_sanity_val_steps": 0}
    trainer, _, kept = fit(data=Odd, looks=looks, **settings)
    counts = [sum(column) for column in zip(*kept["on_validation_batch_end"], strict=True)]
    accuracies = [trainer.callback_metrics[name].item() for name in (m.VAL_ACC, m.VAL_ACC_TOP5)]
    return tuple(accuracies), counts


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        # 2 epochs of 4 steps, of which 2 are warm-up.
        (
            {"accumulate_grad_batches": 2},
            [0, 2, 4, 4 * 5 / 6, 4 * 4 / 6, 4 * 3 / 6, 4 * 2 / 6, 4 / 6],
        ),
        ({"max_steps": 4}, [0, 2, 4, 2]),
    ],
    ids=str,
)
def test_the_schedule_spans_the_run(two_ranks, settings, rates):
    assert two_ranks.run(rates_of, settings)[0] == pytest.approx(rates)


def rates_of(settings):
    looks = {"on_before_optimizer_step": rate}
    _, _, kept = fit(looks=looks, precision="32-true", **settings)
    return kept["on_before_optimizer_step"]


@pytest.mark.parametrize(("max_steps", "is_told"), [(4, True), (5, False)])
def test_a_run_that_ends_within_its_warmup_is_told_so(one_rank, max_steps, is_told):
    (messages,) = one_rank.run(warnings_of, max_steps)
    expected = f"`warmup_steps` (=4) is 4 steps, but the run has only {max_steps} steps, so"
    about_warmup = [message for message in messages if "is 4 steps" in message]
    assert [expected in message for message in about_warmup] == [True] * is_told
    short_run = re.compile(rf"An epoch has only \d steps and the run only {max_steps}, ")
    assert any(short_run.match(message) for message in messages)


def warnings_of(max_steps):
    handler = logging.handlers.BufferingHandler(100)
    handler.setLevel(logging.WARNING)
    log = logging.getLogger("recipes.training.classifier")
    log.addHandler(handler)
    try:
        fit({"warmup_steps": 4}, max_steps=max_steps)
    finally:
        log.removeHandler(handler)
    return [record.getMessage() for record in handler.buffer]


def test_label_smoothing_is_for_training_alone_and_a_nan_of_one_batch_of_validation_shows():
    """The smoothed loss is (1 - s) times the plain loss plus s times the mean over all classes, in float64."""
    torch.manual_seed(1)
    batch = torch.randn(5, 1, 16, 16), torch.arange(5)
    plain = classifier().eval()
    smoothing = classifier(label_smoothing=0.25).eval()
    log_probs = smoothing(batch[0]).double().log_softmax(dim=1)
    expected = -(0.75 * log_probs[range(5), batch[1]] + 0.25 * log_probs.mean(dim=1)).mean()
    # fp32 log-softmax: a few units in the last place.
    assert smoothing.training_step(batch, 0).item() == pytest.approx(expected.item(), rel=1e-6)
    smoothing.log = plain.log = lambda *_, **__: None
    for module in (plain, smoothing):
        module.validation_step(batch, 0)
        unsmoothed = -log_probs[range(5), batch[1]].mean().item()
        assert module.val_loss.compute().item() == pytest.approx(unsmoothed, rel=1e-6)
    for images in (torch.full((5, 1, 16, 16), torch.nan), batch[0]):
        plain.validation_step((images, batch[1]), 1)
    assert plain.val_loss.compute().isnan()


@pytest.mark.parametrize(
    ("options", "adapted", "excluded"),
    [
        ({}, (5e-4, True), (0.0, False)),
        ({"trust_ratio": False}, (5e-4, False), (0.0, False)),
        ({"decay_excluded": True}, (5e-4, True), (5e-4, False)),
    ],
    ids=str,
)
def test_weight_decay_is_for_weights_and_an_ablation_changes_its_group_and_no_other(
    one_rank, options, adapted, excluded
):
    (result,) = one_rank.run(groups_of, options)
    loss_dtypes, groups, dims = result
    assert loss_dtypes == [torch.float32]
    assert groups == [adapted, excluded]
    assert dims == [{True}, {False}]


def groups_of(options):
    looks = {"on_before_backward": lambda _, __, loss: loss.dtype}
    trainer, _, kept = fit(options, looks=looks, max_steps=1)
    groups = []
    dims = []
    for group in trainer.optimizers[0].param_groups:
        groups.append((group["weight_decay"], group["trust_ratio"]))
        dims.append({parameter.dim() > 1 for parameter in group["params"]})
    return kept["on_before_backward"], groups, dims


@pytest.mark.parametrize("channels_last", [True, False])
def test_the_network_sees_images_in_its_own_layout(channels_last):
    module = classifier(channels_last=channels_last)
    seen = []
    module.model = torch.nn.Identity()
    module.model.register_forward_pre_hook(lambda _, args: seen.append(args[0].stride()))
    for memory_format in (torch.contiguous_format, torch.channels_last):
        module(torch.zeros(2, 3, 4, 5).contiguous(memory_format=memory_format))
    expected = (60, 1, 15, 3) if channels_last else (60, 20, 5, 1)
    assert seen == [expected, expected]


@pytest.mark.long
def test_a_compiled_network_keeps_its_names_in_checkpoints():
    """`torch.compile(network)` would prefix names with `_orig_mod`. Compilation is lazy and takes a minute."""
    plain = classifier()
    compiled = classifier(compile=True)
    assert plain.model._compiled_call_impl is None
    assert callable(compiled.model._compiled_call_impl)
    assert plain.state_dict().keys() == compiled.state_dict().keys()


WRONG_OPTIONS = {
    "warmup_epochs=1 warmup_steps=5": r"`warmup_epochs` \(=1\) and `warmup_steps` \(=5\) cannot both be set",
    "warmup_epochs=None": r"`warmup_epochs` \(=None\) and `warmup_steps` \(=None\).*cannot both be null",
    "warmup_steps=0.5": r"`warmup_steps` \(=0.5\) must be an integer of at least 0",
    "label_smoothing=1": r"`label_smoothing` \(=1\) must be at least 0 and below 1",
    "compile='max'": r"`compile` \(=max\) must be true or false",
}


@pytest.mark.parametrize("wrong", WRONG_OPTIONS)
def test_a_wrong_option_is_refused_by_name(wrong):
    options = eval(f"dict({', '.join(wrong.split())})")
    with pytest.raises(ValueError, match=WRONG_OPTIONS[wrong]):
        classifier(**options)


CONFIG = {
    "precision": "16-true",
    "data": {"image_size": 4},
    "model": {"in_channels": 2, "image_size": 9},
}
# A 1x1 convolution from 2 channels to 3: forward and the gradient of the weights, without that of the image.
FLOPS = 2 * 2 * (2 * 3) * 4 * 4


def filled(monkeypatch, *, device_name, options, config):
    """Return the callback's two numbers after a run on a device with this name has been built."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: device_name)
    callback = TrainingMetrics(**options)
    device = torch.device("cuda" if device_name else "cpu")
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(root_device=device), callbacks=[object(), callback]
    )
    mfu.fill_in(trainer, nn.Conv2d(2, 3, 1, bias=False), OmegaConf.create(config))
    return callback.flops_per_image, callback.peak_flops_per_s


GIVEN = {"flops_per_image": 5.0, "peak_flops_per_s": 7.0}


@pytest.mark.parametrize(
    ("device_name", "config", "options", "expected"),
    [
        ("NVIDIA H200", {}, {}, (FLOPS, 989.5e12)),
        ("NVIDIA H200", {"precision": "32-true"}, {}, (FLOPS, 67e12)),
        # The model gives the size of images.
        ("NVIDIA H200", {"data": {}}, {}, (FLOPS * 81 / 16, 989.5e12)),
        ("NVIDIA H200", {}, GIVEN, tuple(GIVEN.values())),
        ("Some other GPU", {}, {}, (None, None)),
    ],
    ids=str,
)
def test_a_known_device_gets_its_peak_and_counted_operations_and_what_is_given_stays(
    monkeypatch, device_name, config, options, expected
):
    result = filled(monkeypatch, device_name=device_name, config=CONFIG | config, options=options)
    assert result == expected
