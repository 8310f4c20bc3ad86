"""Overflow detection for gradients that user code removes or writes between backward and the optimizer step."""

from dataclasses import dataclass

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.optim import LARS
from lightning_hybrid.precision.loss_scale import DynamicLossScale
from tests import toy

OVERFLOWING_SCALE = 2.0**24


def fit(module, *, first_scale=OVERFLOWING_SCALE, **ddp_options):
    strategy = HybridAllReduceStrategy(loss_scale=DynamicLossScale(first_scale), **ddp_options)
    trainer = toy.trainer(strategy=strategy, precision="16-true")
    before = toy.weights(module)
    trainer.fit(module, toy.loader())
    plugin = trainer.precision_plugin
    return {
        "num_skipped": plugin.num_skipped_steps,
        "scale": plugin.loss_scale.value,
        "has_trained": not toy.same_bits(before, toy.weights(module)),
    }


class LargeLoss(toy.Toy):
    """Module whose gradients overflow at the first loss scale."""

    def loss(self, batch):
        return 1000 * super().loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-5)


class ZeroesBadGradients(LargeLoss):
    """Module that drops gradients which are inf or nan."""

    def on_after_backward(self):
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if not all(gradient.isfinite().all() for gradient in gradients):
            self.zero_grad()


class ReplacesBadGradients(LargeLoss):
    """Module that sets new gradients, in which inf and nan are zero."""

    def on_after_backward(self):
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.nan_to_num(0.0, 0.0, 0.0)


class WritesBadGradients(LargeLoss):
    """Module that replaces inf and nan in place."""

    def on_after_backward(self):
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)


@pytest.mark.parametrize("module", [ZeroesBadGradients, ReplacesBadGradients, WritesBadGradients])
def test_the_loss_scale_decreases_even_if_user_code_hides_an_overflow(one_rank, module):
    [state] = one_rank.run(fit_of, module)
    assert state["num_skipped"] > 0
    assert state["scale"] < OVERFLOWING_SCALE
    assert state["has_trained"]


def fit_of(module):
    return fit(module())


class UsesABranchOnce(pl.LightningModule):
    """Module whose second layer is used in the first step only, and overflows there. Gradients are zeroed in place."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(toy.NUM_FEATURES, 1)
        self.branch = nn.Linear(toy.NUM_FEATURES, 1)

    def training_step(self, batch, batch_idx):
        images, _ = batch
        optimizer = self.optimizers()
        optimizer.zero_grad(set_to_none=False)
        outputs = self.layer(images).float()
        if self.trainer.global_step == 0 and batch_idx == 0:
            outputs = outputs + 1e4 * self.branch(images).float()
        self.manual_backward(outputs.square().mean())
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_a_gradient_that_is_zeroed_in_place_is_checked_again(one_rank):
    [state] = one_rank.run(fit_with_a_branch)
    assert state["has_trained"]
    assert state["num_skipped"] == 1


def fit_with_a_branch():
    return fit(UsesABranchOnce(), first_scale=2.0**10, find_unused_parameters=True)


class SharesParameters(toy.Toy):
    """Module with two optimizers of the same parameters, of which the second one takes the later steps."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(loss.item())

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


def test_a_parameter_of_two_optimizers_is_unscaled_once(one_rank):
    half, single = one_rank.run(losses_of_two_precisions)[0]
    assert half[-1] < 0.9 * half[0]
    assert half == pytest.approx(single, rel=0.05)


def losses_of_two_precisions():
    losses = []
    for precision in ("16-true", "32-true"):
        module = SharesParameters()
        toy.trainer(precision=precision).fit(module, toy.loader())
        losses.append(module.losses)
    return losses


class SkipsTheLastBatch(toy.Toy):
    """Module that returns no loss for the last batch of each step of two batches."""

    def training_step(self, batch, batch_idx):
        if batch_idx % 2 == 1:
            return None
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_one_rank_steps_with_the_gradients_before_a_batch_without_loss(one_rank):
    half, single = one_rank.run(fit_without_a_last_batch)[0]
    for name, value in single.items():
        torch.testing.assert_close(half[name], value, rtol=0.02, atol=0.002)


def fit_without_a_last_batch():
    weights = []
    for precision in ("16-true", "32-true"):
        module = SkipsTheLastBatch()
        before = toy.weights(module)
        toy.trainer(precision=precision, accumulate_grad_batches=2).fit(module, toy.loader())
        after = toy.weights(module)
        assert not toy.same_bits(before, after)
        weights.append(after)
    return weights


class PredictsADataclass(toy.Toy):
    def predict_step(self, batch, batch_idx):
        return Prediction(logits=super().predict_step(batch, batch_idx))


@dataclass
class Prediction:
    logits: torch.Tensor


def test_predictions_in_a_dataclass_are_fp32(one_rank):
    assert one_rank.run(dtype_of_prediction) == [torch.float32]


def dtype_of_prediction():
    trainer = toy.trainer(precision="16-true")
    [prediction, *_] = trainer.predict(PredictsADataclass(), toy.loader())
    return prediction.logits.dtype


def test_a_lambda_callback_sees_gradients_after_the_step(one_rank):
    [dtypes] = one_rank.run(dtypes_in_a_lambda_callback)
    assert dtypes == {torch.float32}


def dtypes_in_a_lambda_callback():
    dtypes = set()

    def look(trainer, module, *args):
        for parameter in module.parameters():
            dtypes.add(None if parameter.grad is None else parameter.grad.dtype)

    callback = LambdaCallback(on_train_batch_end=look)
    toy.trainer(precision="16-true", callbacks=[callback]).fit(FusedLARS(), toy.loader())
    return dtypes


class FusedLARS(toy.Toy):
    def configure_optimizers(self):
        return LARS(self.parameters(), lr=0.1, fused=True)


class OverflowsInTheFourthStep(toy.Toy):
    """Module that halves its learning rate after every four steps, of which the fourth one is skipped."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 3:
            loss = loss * 1e20
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 4}]


def test_a_schedule_of_several_steps_advances_after_a_skipped_step(one_rank):
    [(rate, num_skipped)] = one_rank.run(rate_after_a_skipped_step)
    assert num_skipped >= 1
    assert rate == 0.5**2


def rate_after_a_skipped_step():
    trainer = toy.trainer(precision="16-true", max_epochs=1)
    trainer.fit(OverflowsInTheFourthStep(), toy.loader())
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return rate, trainer.precision_plugin.num_skipped_steps
