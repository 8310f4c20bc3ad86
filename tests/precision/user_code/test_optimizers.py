"""Users' optimizers, and user code that changes optimizers, on fp32 parameters with fp32 gradients and state."""

import copy
import re
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.precision.loss_scale import DynamicLossScale
from tests.precision.user_code.support import (
    Manual,
    UserCode,
    Validated,
    code_of_users,
    in_half_precision,
    small_net,
)
from tests.scenes import fit
from tests.toy import Toy

# ---- state that is loaded, created and changed within a fit ----------------------------------------------------------


def adam(parameters):
    return Adam(parameters, lr=3e-3)


def adamw_fused(parameters):
    return AdamW(parameters, lr=3e-3, fused=True)


def momentum(parameters):
    return SGD(parameters, lr=0.05, momentum=0.9)


def adagrad(parameters):
    return Adagrad(parameters, lr=0.01)


def dtypes_of_state(optimizer):
    """Return the distinct dtypes of an optimizer's state."""
    dtypes = set()
    for state in optimizer.state.values():
        dtypes |= {value.dtype for value in state.values() if torch.is_tensor(value)}
    return sorted(dtypes, key=str)


class Optimized(UserCode):
    """Classifier with a chosen optimizer, whose state is fp32 and belongs to the module's parameters."""

    def __init__(self, make_optimizer):
        super().__init__()
        self.make_optimizer = make_optimizer

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())

    def on_train_end(self):
        optimizer = self.trainer.optimizers[0]
        self.outcome.facts["dtypes of state"] = dtypes_of_state(optimizer)
        ids = {id(parameter) for parameter in self.parameters()}
        self.outcome.facts["state belongs to parameters"] = {
            id(key) for key in optimizer.state
        } <= ids


class RollsBack(Optimized):
    """Module that restores the weights and optimizer state of an earlier epoch."""

    epochs = 3

    def on_train_epoch_end(self):
        optimizer = self.trainer.optimizers[0]
        if self.current_epoch == 0:
            self.kept_weights = copy.deepcopy(self.state_dict())
            self.kept_state = copy.deepcopy(optimizer.state_dict())
        if self.current_epoch == 1:
            self.load_state_dict(self.kept_weights)
            optimizer.load_state_dict(self.kept_state)
            self.outcome.facts["dtypes of loaded state"] = dtypes_of_state(optimizer)


class LoadsStateOfAnEarlierRun(Optimized):
    """Module that loads moments at the start of training, as a run that continues elsewhere does."""

    def on_train_start(self):
        optimizer = self.trainer.optimizers[0]
        earlier = copy.deepcopy(optimizer)
        for parameter in earlier.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, 0.01)
        earlier.step()
        optimizer.load_state_dict(earlier.state_dict())


class ReplacesTheOptimizer(Optimized):
    """Module that continues with Adagrad, which creates its accumulators in the constructor."""

    def __init__(self, hook):
        super().__init__(adam)
        self.hook = hook

    def replace(self):
        self.trainer.optimizers = [adagrad(self.parameters())]

    def on_fit_start(self):
        if self.hook == "on_fit_start":
            self.replace()

    def on_train_start(self):
        if self.hook == "on_train_start":
            self.replace()

    def on_train_epoch_start(self):
        if self.hook == "on_train_epoch_start" and self.current_epoch == 1:
            self.replace()


class ConfiguresOptimizersAgain(Optimized):
    """Module that lets Lightning create its optimizers again."""

    def __init__(self):
        super().__init__(adam)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.make_optimizer = adagrad
            self.trainer.strategy.setup_optimizers(self.trainer)


class ResetsMoments(Optimized):
    """Module that revives dead neurons by writing a row of a weight and of its moments."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        state = self.trainer.optimizers[0].state[self.net[0].weight]
        if self.current_epoch == 1 and batch_idx == 0:
            self.net[0].weight.data[3] = 1 / 3
            state["exp_avg"][3] = 0.0
            state["exp_avg_sq"][3] = 0.0


class UnfreezesALayer(UserCode):
    """Module that trains its first layer from the second epoch on, in a separate parameter group."""

    ddp_options = {"find_unused_parameters": True}

    def build(self):
        super().build()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.net[0].requires_grad_(True)
            self.trainer.optimizers[0].add_param_group(
                {"params": list(self.net[0].parameters()), "lr": 0.05}
            )

    def configure_optimizers(self):
        return SGD(self.net[2].parameters(), lr=0.1)


class FreezesALayer(UserCode):
    """Module that freezes a layer for an epoch, as in alternating training."""

    epochs = 3
    ddp_options = {"find_unused_parameters": True}

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.current_epoch != 1)


@in_half_precision()
@code_of_users(
    partial(RollsBack, adam),
    partial(RollsBack, momentum),
    partial(LoadsStateOfAnEarlierRun, adam),
    partial(LoadsStateOfAnEarlierRun, adamw_fused),
    partial(LoadsStateOfAnEarlierRun, momentum),
    partial(ReplacesTheOptimizer, "on_fit_start"),
    partial(ReplacesTheOptimizer, "on_train_start"),
    partial(ReplacesTheOptimizer, "on_train_epoch_start"),
    ConfiguresOptimizersAgain,
    partial(ResetsMoments, adam),
    FreezesALayer,
)
def test_state_of_optimizers_is_fp32_however_it_is_made(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


@in_half_precision(world_sizes=(1,))
@code_of_users(UnfreezesALayer)
def test_a_layer_that_is_unfrozen_trains(comparison, user_code, world_size, precision):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


# ---- optimizers that evaluate the loss -------------------------------------------------------------------------------


class Sam(Optimizer):
    """Sharpness-aware minimization (Foret et al. 2020, arXiv:2010.01412), as in its best known implementation."""

    def __init__(self, parameters, lr, rho=0.05):
        super().__init__(parameters, {"lr": lr, "rho": rho})
        self.base_optimizer = SGD(self.param_groups, lr=lr)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        norms = [p.grad.norm() for group in self.param_groups for p in group["params"]]
        norm = torch.stack(norms).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base_optimizer.step()

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()


class SamThatEvaluatesTwice(Sam):
    """SAM that makes both evaluations itself, so that it also works with automatic optimization."""

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.first_step()
        closure()
        self.second_step()
        return loss


class SamWithClosure(Manual):
    def __init__(self, use_pl_optimizer):
        super().__init__()
        self.use_pl_optimizer = use_pl_optimizer

    def configure_optimizers(self):
        return Sam(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=self.use_pl_optimizer)

        def closure():
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        self.outcome.losses.append(closure().item())
        optimizer.step(closure)
        optimizer.zero_grad()


class SamInTwoSteps(Manual):
    """Module that calls the optimizer's two halves, which bypass torch's optimizer hooks."""

    def configure_optimizers(self):
        return Sam(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.manual_backward(self.noted_loss(batch))
        optimizer.first_step()
        self.manual_backward(self.loss(batch))
        optimizer.second_step()
        optimizer.zero_grad()


class SamByHand(Manual):
    """Module that moves weights along the gradient, computes the gradient there, and restores the weights."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.noted_loss(batch))
        kept = []
        with torch.no_grad():
            norm = torch.stack([parameter.grad.norm() for parameter in self.parameters()]).norm()
            for parameter in self.parameters():
                kept.append(parameter.detach().clone())
                parameter.add_(0.05 * parameter.grad / norm)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for parameter, value in zip(self.parameters(), kept, strict=True):
                parameter.copy_(value)
        optimizer.step()


class SamAutomatic(UserCode):
    def configure_optimizers(self):
        return SamThatEvaluatesTwice(self.parameters(), lr=0.1)


class SteppedByAClosure(Manual):
    """Module that passes a closure to a torch optimizer, with or without Lightning's wrapper."""

    def __init__(self, use_pl_optimizer):
        super().__init__()
        self.use_pl_optimizer = use_pl_optimizer

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=self.use_pl_optimizer)

        def closure():
            optimizer.zero_grad()
            loss = self.noted_loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


@in_half_precision()
@code_of_users(
    partial(SamWithClosure, True),
    partial(SamWithClosure, False),
    SamInTwoSteps,
    SamByHand,
    SamAutomatic,
    partial(SteppedByAClosure, True),
    partial(SteppedByAClosure, False),
)
def test_an_optimizer_that_evaluates_the_loss_trains(comparison, user_code, world_size, precision):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


class QuasiNewton(UserCode):
    """Module that trains on one batch with LBFGS, which brings the loss close to zero."""

    num_batches = 1
    epochs = 6

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.3, max_iter=4, history_size=4)

    def on_train_end(self):
        self.outcome.facts["the loss is small"] = self.outcome.losses[-1] < 0.2


class QuasiNewtonByHand(QuasiNewton):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = self.noted_loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


@in_half_precision(usual_world_size=2)
@pytest.mark.parametrize("user_code", [QuasiNewton, QuasiNewtonByHand])
def test_lbfgs_reaches_a_small_loss(comparison, user_code, world_size, precision):
    """The steps of LBFGS depend on gradient differences, so weights differ after a few roundings, but not the loss."""
    comparison.reference(user_code, world_size)
    outcomes = comparison.run(user_code, "hybrid_allreduce", world_size, precision)
    for outcome in outcomes:
        assert not outcome.error
        assert outcome.facts == {"the loss is small": True}


# ---- optimizers outside of Lightning's control -----------------------------------------------------------------------


class ShardsState(Optimized):
    """Module with ZeRO stage 1, in which each rank has the moments of a part of the parameters."""

    def __init__(self):
        super().__init__(self.make)

    def make(self, parameters):
        return ZeroRedundancyOptimizer(parameters, Adam, lr=3e-3)

    def on_train_end(self):
        pass


@in_half_precision(usual_world_size=2, world_sizes=(2,))
@code_of_users(ShardsState)
def test_an_optimizer_that_shards_its_state_trains(comparison, user_code, world_size, precision):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


class ScheduleFree(Optimizer):
    """Schedule-free SGD (Defazio et al. 2024, arXiv:2405.15682). Its `train` and `eval` move the parameters."""

    def __init__(self, parameters, lr, beta=0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta})
        self.num_steps = 0
        self.is_training = True

    @torch.no_grad()
    def train(self):
        self.move(lambda beta: 1 - beta)
        self.is_training = True

    @torch.no_grad()
    def eval(self):
        self.move(lambda beta: 1 - 1 / beta)
        self.is_training = False

    def move(self, weight):
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight(group["beta"]))

    @torch.no_grad()
    def step(self, closure=None):
        assert self.is_training
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.num_steps += 1
        part = 1 / self.num_steps
        for group in self.param_groups:
            lr = group["lr"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, part)
                p.add_(p.grad, alpha=lr * (group["beta"] * (1 - part) - 1))
                z.sub_(p.grad, alpha=lr)
        return loss


class TrainsWithoutSchedule(Validated):
    epochs = 3
    settings = {"val_check_interval": 2}

    def configure_optimizers(self):
        return ScheduleFree(self.parameters(), lr=0.2)

    def on_validation_model_eval(self):
        super().on_validation_model_eval()
        self.trainer.optimizers[0].eval()

    def on_validation_model_train(self):
        super().on_validation_model_train()
        self.trainer.optimizers[0].train()


class KeepsOwnReferences(Optimizer):
    """Optimizer that steps through its own list of parameters."""

    def __init__(self, parameters, lr):
        parameters = list(parameters)
        super().__init__(parameters, {"lr": lr})
        self.own_list = parameters
        self.velocity = [torch.zeros_like(parameter) for parameter in parameters]

    @torch.no_grad()
    def step(self, closure=None):
        if closure is None:
            loss = None
        else:
            loss = torch.enable_grad()(closure)()
        for parameter, velocity in zip(self.own_list, self.velocity, strict=True):
            velocity.mul_(0.5).add_(parameter.grad)
            parameter.sub_(velocity, alpha=self.param_groups[0]["lr"])
        return loss


class OwnReferences(UserCode):
    def configure_optimizers(self):
        return KeepsOwnReferences(self.parameters(), lr=0.1)


class UnknownToLightning(Manual):
    """Module that steps an optimizer that `configure_optimizers` does not return."""

    ignored_warnings = ("`LightningModule.configure_optimizers` returned `None`",)

    def __init__(self):
        super().__init__()
        self.own_optimizers = [Adam(self.net.parameters(), lr=3e-3)]

    def configure_optimizers(self):
        return None

    def training_step(self, batch, batch_idx):
        optimizer = self.own_optimizers[0]
        optimizer.zero_grad()
        self.manual_backward(self.noted_loss(batch))
        optimizer.step()


class StepsInACallback(pl.Callback):
    """Callback that decays weights with its own optimizer, between steps and in validation."""

    def on_train_start(self, trainer, module):
        self.optimizer = SGD(module.parameters(), lr=1e-3)

    def decay(self, module):
        self.optimizer.zero_grad()
        sum(parameter.square().sum() for parameter in module.parameters()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def on_train_batch_end(self, trainer, module, *args):
        self.decay(module)

    def on_validation_start(self, trainer, module):
        with torch.enable_grad():
            self.decay(module)


class DecaysInACallback(Validated):
    settings = {"inference_mode": False}

    def configure_callbacks(self):
        return [StepsInACallback()]


class TrainsInValidation(Validated):
    """Module that takes a step in `validation_step`, as in test-time adaptation."""

    settings = {"inference_mode": False}

    def validation_step(self, batch, batch_idx):
        optimizer = SGD(self.parameters(), lr=1e-3)
        with torch.enable_grad():
            loss = sum(parameter.square().sum() for parameter in self.parameters())
            loss.backward()
        optimizer.step()
        self.zero_grad()


@in_half_precision()
@code_of_users(
    TrainsWithoutSchedule,
    OwnReferences,
    UnknownToLightning,
    DecaysInACallback,
    TrainsInValidation,
)
def test_optimizers_of_the_users_own_step_on_fp32_parameters(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


class UpdatesWeightsByHand(Manual):
    """Module that writes the update itself inside of the step, where parameters are in half precision."""

    num_batches = 6
    lr = 0.1
    ignored_warnings = (
        "`LightningModule.configure_optimizers` returned `None`",
        "`net.0.weight` was written inside",
    )

    def configure_optimizers(self):
        return None

    def training_step(self, batch, batch_idx):
        self.zero_grad()
        self.manual_backward(self.noted_loss(batch))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter -= self.lr * parameter.grad


class MovesATeacherByHand(Manual):
    """Module that moves a teacher in `training_step` after the step, with an operation that needs a single dtype."""

    def build(self):
        super().build()
        self.teacher = small_net().requires_grad_(False)

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        with torch.no_grad():
            for teacher, student in zip(
                self.teacher.parameters(), self.net.parameters(), strict=True
            ):
                teacher.lerp_(student, 0.01)


@in_half_precision()
@code_of_users(UpdatesWeightsByHand)
def test_updates_written_in_a_manual_step_train(comparison, user_code, world_size, precision):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


class UpdatesWeightsInSmallSteps(UpdatesWeightsByHand):
    """Module whose steps half precision rounds away. A warning is an error in these tests."""

    lr = 1e-4
    ignored_warnings = ("`LightningModule.configure_optimizers` returned `None`",)


@in_half_precision()
@code_of_users(UpdatesWeightsInSmallSteps)
def test_an_update_written_in_a_manual_step_that_is_rounded_is_a_warning(
    comparison, user_code, world_size, precision
):
    comparison.reference(user_code, world_size)
    for outcome in comparison.run(user_code, "hybrid_allreduce", world_size, precision):
        assert re.search(r"`net\.\d\.\w+` was written inside", outcome.error)


@in_half_precision()
@code_of_users(MovesATeacherByHand)
def test_a_teacher_that_is_moved_in_a_manual_step_ends_with_the_cure(
    comparison, user_code, world_size, precision
):
    comparison.reference(user_code, world_size)
    for outcome in comparison.run(user_code, "hybrid_allreduce", world_size, precision):
        assert "got dtype" in outcome.error
        assert ".float()" in outcome.error


class StepsInsideBackward(Manual):
    """Module that steps each parameter as soon as its gradient is ready, as LOMO does to save memory."""

    ignored_warnings = ("`LightningModule.configure_optimizers` returned `None`",)

    def __init__(self):
        super().__init__()
        self.optimizer_of = {}
        for parameter in self.parameters():
            self.optimizer_of[parameter] = SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(self.step)

    def step(self, parameter):
        self.optimizer_of[parameter].step()
        self.optimizer_of[parameter].zero_grad()

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.noted_loss(batch))

    def configure_optimizers(self):
        return None


@in_half_precision()
def test_an_optimizer_that_steps_inside_backward_is_refused_by_name(
    comparison, world_size, precision
):
    if world_size == 1:
        comparison.reference(StepsInsideBackward, world_size)
    for outcome in comparison.run(StepsInsideBackward, "hybrid_allreduce", world_size, precision):
        assert "SGD" in outcome.error
        assert "backward" in outcome.error


# ---- the loss scale of an optimizer that is replaced -----------------------------------------------------------------


def assign_new_optimizer(module):
    module.trainer.optimizers = [SGD(module.parameters(), lr=0.01)]


def make_optimizers_again(module):
    module.trainer.strategy.setup_optimizers(module.trainer)


class WatchesTheScale(Toy):
    """Module that records the factor by which backward multiplies the loss, with a hook on the loss."""

    def __init__(self, replace=None):
        super().__init__(lr=0.01)
        self.replace = replace
        self.scales = []

    def on_train_epoch_start(self):
        if self.replace is not None and self.current_epoch == 1:
            self.replace(self)

    def training_step(self, batch, batch_idx):
        images, targets = batch
        loss = F.cross_entropy(self.net(images).float(), targets)
        loss.register_hook(lambda gradient: self.scales.append(gradient.item()))
        return loss


def scales_of_a_fit(replace):
    module = WatchesTheScale(replace)
    scale = DynamicLossScale(2.0**4, growth_interval=2)
    fit(
        None,
        module,
        strategy=HybridAllReduceStrategy(loss_scale=scale),
        precision="16-true",
        max_epochs=3,
    )
    return module.scales


@pytest.mark.parametrize("replace", [assign_new_optimizer, make_optimizers_again])
def test_the_loss_scale_continues_to_grow_after_an_optimizer_was_replaced(two_ranks, replace):
    """At most the growth of two clean steps is lost."""
    without = two_ranks.run(scales_of_a_fit, None)
    replaced = two_ranks.run(scales_of_a_fit, replace)
    for rank, scales in enumerate(replaced):
        expected = without[rank]
        assert len(expected) == 12, f"rank {rank}"
        assert len(scales) == 12, f"rank {rank}"
        assert expected[-1] == 2.0 ** (4 + 5), f"rank {rank}"
        assert scales[-1] >= expected[-1] / 2, f"rank {rank}"
        assert scales[4] == pytest.approx(expected[4], rel=0.5), f"rank {rank}"
