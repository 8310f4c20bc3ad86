"""Gradients as user code sees them: fp32, unscaled, stored only in `p.grad`, and gone when the user drops them."""

from contextlib import nullcontext
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_hybrid.optim import LAMB, LARS
from tests.precision.user_code.support import (
    Manual,
    UserCode,
    code_of_users,
    copies_of_gradients,
    dtypes_of_gradients,
    dtypes_of_parameters,
    in_every_precision,
    in_half_precision,
    is_on_last_rank,
    this_rank,
)
from tests.toy import NUM_CLASSES, NUM_FEATURES

# ---- gradients of a step that the user ends or clears ----------------------------------------------------------------


class LeavesTheEpochWithinAStep(UserCode):
    """Module that ends an epoch within a step. The next epoch's first step must use only its own micro-batches."""

    settings = {"accumulate_grad_batches": 2}
    num_batches = 4

    def on_train_batch_start(self, batch, batch_idx):
        if self.current_epoch == 0 and batch_idx == 3:
            return -1
        return None


def zero_by_optimizer(module):
    module.trainer.optimizers[0].zero_grad()


def zero_by_module(module):
    module.zero_grad()


def zero_the_net(module):
    module.net.zero_grad()


def drop_gradients(module):
    for parameter in module.parameters():
        parameter.grad = None


def zero_in_place(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


class ZeroesWithinAStep(UserCode):
    """Module that drops the gradients of the first two of four micro-batches."""

    settings = {"accumulate_grad_batches": 4}
    num_batches = 4

    def __init__(self, zero):
        super().__init__()
        self.zero = zero

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.zero(self)


class DropsABadBatch(UserCode):
    """Module that drops gradients in `on_after_backward` for a bad batch, on one rank only."""

    settings = {"accumulate_grad_batches": 4}
    num_batches = 4

    def on_after_backward(self):
        is_bad = len(self.outcome.losses) % 4 == 2
        if is_bad and is_on_last_rank():
            self.zero_grad()


class LimitsABadBatch(UserCode):
    """Module that clips accumulated gradients in the middle of a step."""

    settings = {"accumulate_grad_batches": 3}

    def on_after_backward(self):
        nn.utils.clip_grad_value_(self.parameters(), 0.01)


class TakesTheIterator(UserCode):
    """Module that takes the iterator. Lightning then zeroes gradients between micro-batches, under `ddp` as well."""

    settings = {"accumulate_grad_batches": 2}
    ignored_warnings = ("Found `dataloader_iter` argument", "You are using the `dataloader_iter`")

    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.noted_loss(batch)


class SkipsABatch(UserCode):
    """Module that returns None for a batch within a step of three, which Lightning allows only in single-rank runs."""

    settings = {"accumulate_grad_batches": 3}
    num_batches = 6
    ignored_warnings = ("`training_step` returned `None`",)

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            return None
        return super().training_step(batch, batch_idx)


@pytest.mark.sampled(3)
@in_half_precision(usual_world_size=2)
@code_of_users(
    LeavesTheEpochWithinAStep,
    partial(ZeroesWithinAStep, zero_by_optimizer),
    partial(ZeroesWithinAStep, zero_by_module),
    partial(ZeroesWithinAStep, zero_the_net),
    partial(ZeroesWithinAStep, drop_gradients),
    partial(ZeroesWithinAStep, zero_in_place),
    DropsABadBatch,
    LimitsABadBatch,
    TakesTheIterator,
)
def test_gradients_that_the_user_drops_are_in_no_later_step(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


@in_half_precision(world_sizes=(1,))
@code_of_users(SkipsABatch)
def test_a_batch_without_loss_is_left_out_of_its_step(comparison, user_code, world_size, precision):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


# ---- gradients kept by reference, detached and replaced --------------------------------------------------------------


class AddsGradientsOfTwoLosses(Manual):
    """Module that keeps the gradients of two losses by reference and steps with their sum, as PCGrad does."""

    def losses_of(self, batch):
        images, targets = batch
        return F.cross_entropy(self(images).float(), targets), self(images).float().square().mean()

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        kept = []
        for number in range(2):
            optimizer.zero_grad()
            loss = self.losses_of(batch)[number]
            self.outcome.losses.append(loss.item())
            self.manual_backward(loss)
            kept.append([parameter.grad for parameter in self.parameters()])
        for parameter, first, second in zip(self.parameters(), *kept, strict=True):
            parameter.grad = first + second
        optimizer.step()


class KeepsGradientsOfAllSteps(UserCode):
    """Module that keeps gradients by reference from step to step, as measures of gradient noise do."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def on_after_backward(self):
        self.kept.extend(parameter.grad for parameter in self.parameters())

    def on_train_end(self):
        self.outcome.readings["gradients of all steps"] = [
            gradient.clone() for gradient in self.kept
        ]


class DetachesGradients(UserCode):
    """Module that zeroes gradients as older versions of `Optimizer.zero_grad` did."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_()
                parameter.grad.zero_()


@in_every_precision()
@code_of_users(AddsGradientsOfTwoLosses, KeepsGradientsOfAllSteps, DetachesGradients)
def test_a_gradient_that_the_user_holds_stays_what_it_is(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


class HalvesGradients(UserCode):
    """Module that writes gradients in place after backward, and replaces them before the step."""

    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}

    def on_after_backward(self):
        self.net[0].weight.grad.mul_(0.5)
        self.net[0].weight.grad[0] = 0.0

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.net[2].parameters():
            parameter.grad = parameter.grad * 0.5


class StartsFromAGradient(UserCode):
    """Module that sets gradients before each backward pass. They differ between ranks, and DDP averages the sum."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        for parameter in self.parameters():
            parameter.grad = 0.05 * (1 + this_rank()) * parameter.detach()


class KeepsHalfOfTheLastGradient(UserCode):
    """Module that never zeroes gradients but halves them, which gives momentum without extra memory."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class UsesALayerOnOneRank(UserCode):
    """Module with a branch that only the last rank uses, in some batches."""

    ddp_options = {"find_unused_parameters": True}
    settings = {"accumulate_grad_batches": 2}
    num_batches = 4

    def build(self):
        super().build()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.branch = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx != 2 and (is_on_last_rank() or batch_idx == 0):
            loss = loss + 0.5 * F.cross_entropy(self.branch(batch[0]), batch[1])
        return loss


class UsesHeadsInTurns(Manual):
    """Module with two backward passes before a step, each of which reaches another head."""

    ddp_options = {"find_unused_parameters": True}

    def build(self):
        super().build()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.heads = nn.ModuleList([nn.Linear(16, NUM_CLASSES), nn.Linear(16, NUM_CLASSES)])

    def training_step(self, batch, batch_idx):
        images, targets = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for head in self.heads:
            loss = F.cross_entropy(head(self.net[:2](images)), targets)
            self.outcome.losses.append(loss.item())
            self.manual_backward(loss)
        for head in self.heads:
            self.outcome.readings["gradients of heads"].extend(copies_of_gradients(head))
        optimizer.step()


def as_they_are(gradient):
    return gradient


def in_fp32(gradient):
    return gradient.float()


class ComputesGradientsByHand(Manual):
    """Module that sets `p.grad` from `torch.autograd.grad`, without `manual_backward`."""

    def __init__(self, convert):
        super().__init__()
        self.convert = convert

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        parameters = list(self.parameters())
        images, targets = batch
        logits = self(images)
        loss = F.cross_entropy(logits, targets)
        self.outcome.losses.append(loss.item())
        of_loss = torch.autograd.grad(loss, parameters, retain_graph=True)
        of_size = torch.autograd.grad(logits.float().square().mean(), parameters)
        optimizer.zero_grad()
        for parameter, first, second in zip(parameters, of_loss, of_size, strict=True):
            parameter.grad = self.convert(first) + 0.1 * self.convert(second)
        optimizer.step()


@in_half_precision(usual_world_size=2)
@code_of_users(
    HalvesGradients,
    StartsFromAGradient,
    KeepsHalfOfTheLastGradient,
    UsesALayerOnOneRank,
    UsesHeadsInTurns,
)
def test_gradients_that_the_user_writes_are_those_of_the_step(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


@in_half_precision(world_sizes=(1,))
@code_of_users(
    partial(ComputesGradientsByHand, as_they_are), partial(ComputesGradientsByHand, in_fp32)
)
def test_gradients_computed_by_hand_are_taken_in_their_own_dtype(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


# ---- gradients in hooks ----------------------------------------------------------------------------------------------


class SeesGradients(UserCode):
    """Module that records dtypes and copies of gradients in each hook from `on_after_backward` on."""

    num_batches = 4

    def __init__(self, accumulate=1, make_optimizer=None):
        super().__init__()
        self.make_optimizer = make_optimizer
        self.settings = {"accumulate_grad_batches": accumulate}

    def look(self, moment):
        self.outcome.facts[f"dtypes of gradients {moment}"] = dtypes_of_gradients(self)
        self.outcome.readings[f"gradients {moment}"].extend(copies_of_gradients(self))

    def on_after_backward(self):
        self.look("after backward")
        self.outcome.facts["dtypes of parameters after backward"] = dtypes_of_parameters(self)

    def on_before_optimizer_step(self, optimizer):
        self.look("before the step")
        self.outcome.facts["dtypes of parameters before the step"] = dtypes_of_parameters(self)

    def on_train_batch_end(self, *args):
        self.look("after the batch")
        self.outcome.facts["dtypes of parameters after the batch"] = dtypes_of_parameters(self)

    def on_train_batch_start(self, *args):
        self.look("before the next batch")

    def on_before_zero_grad(self, optimizer):
        self.look("before they are zeroed")

    def configure_optimizers(self):
        if self.make_optimizer is None:
            return super().configure_optimizers()
        return self.make_optimizer(self.parameters())


class LooksAfterTheStepOnly(UserCode):
    """Module that logs gradients in `on_train_batch_end`. No earlier hook shows that it will read them."""

    def __init__(self, make_optimizer):
        super().__init__()
        self.make_optimizer = make_optimizer

    def on_train_batch_end(self, *args):
        self.outcome.facts["dtypes of gradients"] = dtypes_of_gradients(self)
        self.outcome.readings["gradients"].extend(copies_of_gradients(self))

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def fused_lars(parameters):
    return LARS(parameters, lr=1.0, fused=True)


def fused_lamb(parameters):
    return LAMB(parameters, lr=0.01, fused=True)


@pytest.mark.sampled(3)
@in_half_precision(usual_world_size=2)
@code_of_users(
    SeesGradients,
    partial(SeesGradients, 2),
    partial(SeesGradients, 1, fused_lars),
    partial(LooksAfterTheStepOnly, sgd),
    partial(LooksAfterTheStepOnly, fused_lars),
    partial(LooksAfterTheStepOnly, fused_lamb),
)
def test_every_hook_after_backward_sees_fp32_unscaled_gradients(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


class LooksLater(UserCode):
    """Base class of modules that read gradients in a hook between a step and the next zeroing."""

    def __init__(self, make_optimizer):
        super().__init__()
        self.make_optimizer = make_optimizer

    def look(self):
        self.outcome.facts["dtypes of gradients"] = dtypes_of_gradients(self)
        self.outcome.readings["gradients"].extend(copies_of_gradients(self))

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class LooksBeforeTheNextBatch(LooksLater):
    def on_train_batch_start(self, batch, batch_idx):
        self.look()


class LooksInTheNextStep(LooksLater):
    def training_step(self, batch, batch_idx):
        self.look()
        return super().training_step(batch, batch_idx)


class LooksWhenTheScheduleSteps(LooksLater):
    def lr_scheduler_step(self, scheduler, metric):
        self.look()
        scheduler.step()


class LooksAfterAnEpoch(LooksLater):
    def on_train_epoch_end(self):
        self.look()


class LooksWhenTrainingEnds(LooksLater):
    def on_train_end(self):
        self.look()


class LogsBeforeABatch(pl.Callback):
    def on_train_batch_start(self, trainer, module, *args):
        module.look()


class LogsAfterAnEpoch(pl.Callback):
    def on_train_epoch_end(self, trainer, module):
        module.look()


class LooksInACallback(LooksLater):
    def __init__(self, make_optimizer, make_callback):
        super().__init__(make_optimizer)
        self.make_callback = make_callback

    def configure_callbacks(self):
        return [self.make_callback()]


LATE_LOOKS = [
    LooksBeforeTheNextBatch,
    LooksInTheNextStep,
    LooksWhenTheScheduleSteps,
    LooksAfterAnEpoch,
    LooksWhenTrainingEnds,
    partial(LooksInACallback, make_callback=LogsBeforeABatch),
    partial(LooksInACallback, make_callback=LogsAfterAnEpoch),
]


@in_half_precision(precisions=("16-true",))
@code_of_users(*[partial(look, make_optimizer=sgd) for look in LATE_LOOKS])
def test_gradients_stay_after_the_step_until_they_are_zeroed(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


@in_half_precision(world_sizes=(1,), precisions=("16-true",))
@code_of_users(*[partial(look, make_optimizer=fused_lars) for look in LATE_LOOKS])
def test_gradients_that_a_step_has_used_unseen_are_none_and_never_scaled(
    comparison, user_code, world_size, precision
):
    """LARS and LAMB use half-precision gradients if no hook up to `on_train_batch_end` can see them."""
    comparison.reference(user_code, world_size)
    (outcome,) = comparison.run(user_code, "hybrid_allreduce", world_size, precision)
    if outcome.facts != {"dtypes of gradients": []}:
        comparison.assert_as_under_ddp(user_code, world_size, precision)


class HooksOnParameters(UserCode):
    """Module with tensor hooks, set in the constructor and when training starts, one of which is removed."""

    def __init__(self):
        super().__init__()
        self.num_calls = {"gradient": 0, "accumulated": 0, "later": 0}
        self.net[0].weight.register_hook(self.halve)
        self.net[2].weight.register_post_accumulate_grad_hook(self.count_accumulated)

    def halve(self, gradient):
        self.num_calls["gradient"] += 1
        return gradient * 0.5

    def count_accumulated(self, parameter):
        self.num_calls["accumulated"] += 1

    def count_later(self, gradient):
        self.num_calls["later"] += 1

    def on_train_start(self):
        self.handle = self.net[0].bias.register_hook(self.count_later)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.handle.remove()

    def on_train_end(self):
        self.outcome.facts["calls"] = self.num_calls


@in_half_precision(usual_world_size=2)
@code_of_users(HooksOnParameters)
def test_hooks_on_parameters_run_once_in_each_backward(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


# ---- manual optimization ---------------------------------------------------------------------------------------------


class FailsInBackward(torch.autograd.Function):
    """Identity function whose backward fails, as if it ran out of memory."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("the sample is bad")


class AccumulatesByHand(Manual):
    """Module that accumulates gradients of three micro-batches, and averages over ranks in the last one."""

    def training_step(self, batch, batch_idx):
        is_last = batch_idx % 3 == 2
        if is_last:
            context = nullcontext()
        else:
            context = self.trainer.strategy.block_backward_sync()
        with context:
            self.backward_of(self.noted_loss(batch) / 3, batch_idx)
        if is_last:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def backward_of(self, loss, batch_idx):
        self.manual_backward(loss)


class CatchesAnErrorWithinAStep(AccumulatesByHand):
    """Module that drops the previous micro-batches if the backward pass of one fails."""

    def backward_of(self, loss, batch_idx):
        if batch_idx % 3 != 1:
            self.manual_backward(loss)
            return
        with pytest.raises(RuntimeError, match="the sample is bad"):
            self.manual_backward(FailsInBackward.apply(loss))
        self.optimizers().zero_grad()


class CatchesAnErrorOnOneRank(CatchesAnErrorWithinAStep):
    def backward_of(self, loss, batch_idx):
        if is_on_last_rank():
            super().backward_of(loss, batch_idx)
        else:
            self.manual_backward(loss)


class CatchesAnErrorAndKeepsTheRest(CatchesAnErrorWithinAStep):
    """Module that continues without the failed micro-batch and keeps the gradients of the others."""

    def backward_of(self, loss, batch_idx):
        if batch_idx % 3 != 1:
            self.manual_backward(loss)
            return
        with pytest.raises(RuntimeError, match="the sample is bad"):
            self.manual_backward(FailsInBackward.apply(loss))


class CatchesAnErrorOfTheWholeStep(Manual):
    """Module that skips a batch whose backward pass fails on all ranks."""

    def training_step(self, batch, batch_idx):
        if batch_idx != 1:
            super().training_step(batch, batch_idx)
            return
        self.optimizers().zero_grad()
        with pytest.raises(RuntimeError, match="the sample is bad"):
            self.manual_backward(FailsInBackward.apply(self.noted_loss(batch)))


class StaticGraphByHand(Manual):
    ddp_options = {"static_graph": True}


class SeesGradientsByHand(Manual):
    """Module that reads, clips and logs gradients right after `manual_backward`, within `training_step`."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.noted_loss(batch)
        for _ in range(2):
            self.manual_backward(0.5 * loss, retain_graph=True)
            self.outcome.facts["dtypes of gradients"] = dtypes_of_gradients(self)
            self.outcome.readings["gradients"].extend(copies_of_gradients(self))
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        self.outcome.readings["norm"].append(norm.detach().clone())
        optimizer.step()
        self.outcome.readings["gradients after the step"].extend(copies_of_gradients(self))


@pytest.mark.sampled(3)
@in_half_precision(usual_world_size=2)
@code_of_users(
    AccumulatesByHand,
    CatchesAnErrorWithinAStep,
    CatchesAnErrorOnOneRank,
    CatchesAnErrorAndKeepsTheRest,
    CatchesAnErrorOfTheWholeStep,
    StaticGraphByHand,
    SeesGradientsByHand,
)
def test_manual_optimization_steps_with_the_gradients_of_its_backwards(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)
