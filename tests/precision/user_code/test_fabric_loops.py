"""Fabric loops: weights, gradients and files of a user's own loop equal those of `ddp` in fp32."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam

from tests.precision.user_code.support import (
    FabricLoop,
    code_of_users,
    copies_of_gradients,
    dtypes_of_gradients,
    dtypes_of_parameters,
    in_every_precision,
    in_half_precision,
    is_on_last_rank,
    parameters_equal,
)
from tests.precision.user_code.test_gradients import FailsInBackward
from tests.precision.user_code.test_optimizers import Sam, ScheduleFree
from tests.scenes import same


class Loop(FabricLoop):
    """Plain loop with hooks between its statements, in which subclasses run their code."""

    def make_optimizer(self):
        return SGD(self.net.parameters(), lr=0.1, momentum=0.5)

    def run(self, fabric):
        self.fabric = fabric
        self.model, self.optimizer = fabric.setup(self.net, self.make_optimizer())
        for number, batch in enumerate(self.batches()):
            self.number = number
            self.before_step()
            self.optimizer.zero_grad()
            loss = self.loss_of(batch)
            fabric.backward(loss)
            self.after_backward()
            self.optimizer.step()
            self.after_step()
        self.after_training()

    def loss_of(self, batch):
        images, targets = batch
        return self.noted(F.cross_entropy(self.model(images), targets))

    def before_step(self):
        pass

    def after_backward(self):
        pass

    def after_step(self):
        pass

    def after_training(self):
        pass


class FrozenLoop(Loop):
    """Loop with a learning rate of 0, so that only user code writes weights."""

    is_exact = True

    def make_optimizer(self):
        return SGD(self.net.parameters(), lr=0.0)


# ---- weights ---------------------------------------------------------------------------------------------------------


class SavesItsAverage(Loop):
    """Loop that replaces the weights by an average, saves it, and continues from the trained weights."""

    def run(self, fabric):
        self.average = copy.deepcopy(self.net)
        super().run(fabric)

    def after_step(self):
        with torch.no_grad():
            for average, parameter in zip(
                self.average.parameters(), self.net.parameters(), strict=True
            ):
                average.mul_(0.9).add_(parameter, alpha=0.1)
        if self.number % 2 == 1:
            self.save_average()

    def save_average(self):
        kept = [parameter.data.clone() for parameter in self.net.parameters()]
        for parameter, average in zip(
            self.net.parameters(), self.average.parameters(), strict=True
        ):
            parameter.data.copy_(average)
        path = f"{self.folder}/average.ckpt"
        self.fabric.save(path, {"model": self.model, "optimizer": self.optimizer})
        for parameter, value in zip(self.net.parameters(), kept, strict=True):
            parameter.data.copy_(value)
        is_saved = same(dict(torch.load(path)["model"]), dict(self.average.state_dict()))
        self.outcome.facts[f"the file has the average after {self.number + 1} steps"] = is_saved


class ExchangesWeights(FrozenLoop):
    """Loop that zeroes the weights, reads the state, and restores the weights."""

    def after_step(self):
        kept = [parameter.data.clone() for parameter in self.net.parameters()]
        for parameter in self.net.parameters():
            parameter.data.zero_()
        self.model.state_dict()
        for parameter, value in zip(self.net.parameters(), kept, strict=True):
            parameter.data.copy_(value)


class WritesWeights(FrozenLoop):
    """Loop that writes weights in every possible way between steps."""

    def after_step(self):
        self.net[0].weight.data[self.number] = 1 / 3
        self.net.state_dict()["2.bias"].copy_(torch.full((3,), 1 / 7))
        self.net[0].bias.detach().numpy()[self.number] = 1 / 5
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1 - 1e-5)


class ClampsWeights(Loop):
    def after_step(self):
        for parameter in self.net.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        largest = max(
            float(parameter.detach().abs().max()) for parameter in self.model.parameters()
        )
        self.outcome.facts[f"weights are clamped after {self.number + 1} steps"] = (
            largest <= 0.1 + 1e-8
        )


class CallsParts(FrozenLoop):
    """Loop that calls the network without Fabric's wrapper, and one of its layers, between steps."""

    def after_step(self):
        images = torch.linspace(-1, 1, 24).reshape(2, 12)
        with torch.no_grad():
            self.outcome.facts[f"network after {self.number + 1} steps"] = self.net(images)
            self.outcome.facts[f"layer after {self.number + 1} steps"] = self.net[0](images)


class SeesFp32(Loop):
    """Loop that records dtypes and gradients between its statements, and uses a hook on a parameter."""

    def run(self, fabric):
        self.kept_list = list(self.net.parameters())
        self.num_calls = 0
        self.net[0].weight.register_hook(self.halve)
        super().run(fabric)

    def halve(self, gradient):
        self.num_calls += 1
        return gradient * 0.5

    def look(self, moment):
        facts = self.outcome.facts
        facts[f"dtypes of parameters {moment}"] = dtypes_of_parameters(self.model)
        facts[f"dtypes of gradients {moment}"] = dtypes_of_gradients(self.net)
        pairs = zip(self.kept_list, self.net.parameters(), strict=True)
        facts[f"the list is valid {moment}"] = all(kept is parameter for kept, parameter in pairs)
        self.outcome.readings[f"gradients {moment}"].extend(copies_of_gradients(self.net))

    def before_step(self):
        self.look("before the step")

    def after_backward(self):
        self.look("after backward")

    def after_step(self):
        self.look("after the step")

    def after_training(self):
        self.outcome.facts["calls of the hook"] = self.num_calls


@in_half_precision()
@code_of_users(
    SavesItsAverage, ExchangesWeights, WritesWeights, ClampsWeights, CallsParts, SeesFp32
)
def test_weights_between_the_statements_of_a_loop_are_fp32(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


# ---- loss terms that are computed from weights -----------------------------------------------------------------------


class PenalisesWeights(Loop):
    """Loop that penalizes the squared weights, which it lists in one of three ways."""

    def __init__(self, source):
        super().__init__()
        self.source = source

    def run(self, fabric):
        self.kept_list = list(self.net.parameters())
        super().run(fabric)

    def listed(self):
        if self.source == "the wrapper":
            return self.model.parameters()
        if self.source == "the network":
            return self.net.parameters()
        return self.kept_list

    def loss_of(self, batch):
        penalty = sum(parameter.square().sum() for parameter in self.listed())
        return super().loss_of(batch) + 0.02 * penalty


class PenalisesOneWeight(PenalisesWeights):
    """Loop whose penalty reaches only one layer."""

    def __init__(self):
        super().__init__("a list")

    def listed(self):
        return [self.net[2].weight]


class PenalisesWeightsOnOneRank(PenalisesWeights):
    """Loop in which only the last rank adds the penalty, as if it applied to a part of the data."""

    def __init__(self):
        super().__init__("the network")

    def loss_of(self, batch):
        if is_on_last_rank():
            return super().loss_of(batch)
        return Loop.loss_of(self, batch)


class PenalisesWeightsWhileItAccumulates(PenalisesWeights):
    """Loop with a penalty in every micro-batch, which ranks average in the last one."""

    def __init__(self):
        super().__init__("the wrapper")

    def run(self, fabric):
        self.model, optimizer = fabric.setup(self.net, self.make_optimizer())
        for number, batch in enumerate(self.batches()):
            is_last = number % 3 == 2
            with fabric.no_backward_sync(self.model, enabled=not is_last):
                fabric.backward(self.loss_of(batch) / 3)
            if is_last:
                optimizer.step()
                optimizer.zero_grad()


class StaysNearTheStart(Loop):
    """Loop with a proximal term of distances to the start, in a separate backward pass before that of the loss."""

    def run(self, fabric):
        self.start = [parameter.detach().clone() for parameter in self.net.parameters()]
        self.model, optimizer = fabric.setup(self.net, self.make_optimizer())
        for batch in self.batches():
            optimizer.zero_grad()
            loss = self.loss_of(batch)
            for parameter, start in zip(self.model.parameters(), self.start, strict=True):
                loss = loss + 0.1 * (parameter - start).square().sum()
            fabric.backward(loss)
            optimizer.step()


class CallsTheNetWithoutTheWrapper(Loop):
    """Loop with a consistency term from the unwrapped network, which Fabric does not know."""

    def loss_of(self, batch):
        images, _ = batch
        gap = self.net(images + 0.1) - self.model(images)
        return super().loss_of(batch) + gap.square().mean()


class LearnsTheNoise(Loop):
    """Loop with a learned noise level, which is used in the loss and never in the forward pass."""

    def __init__(self):
        super().__init__()
        self.net.register_parameter("log_var", nn.Parameter(torch.zeros(())))

    def loss_of(self, batch):
        log_var = self.net.log_var
        return (-log_var).exp() * super().loss_of(batch) + log_var


class LearnsTheNoiseWhileItAccumulates(LearnsTheNoise):
    """Loop with a learned noise level in every micro-batch, of which ranks average the last one."""

    def run(self, fabric):
        self.model, optimizer = fabric.setup(self.net, self.make_optimizer())
        for number, batch in enumerate(self.batches()):
            is_last = number % 3 == 2
            with fabric.no_backward_sync(self.model, enabled=not is_last):
                fabric.backward(self.loss_of(batch) / 3)
            if is_last:
                optimizer.step()
                optimizer.zero_grad()


class HalvesThePenalisedGradient(PenalisesOneWeight):
    """Loop with hooks on a weight that is used both in the forward pass and in a penalty."""

    def run(self, fabric):
        self.num_calls = 0
        self.net[2].weight.register_hook(self.halve)
        self.net[2].weight.register_post_accumulate_grad_hook(self.count)
        super().run(fabric)

    def halve(self, gradient):
        self.num_calls += 1
        return gradient * 0.5

    def count(self, parameter):
        self.num_calls += 1

    def after_backward(self):
        gradient = self.net[2].weight.grad.clone()
        self.outcome.readings["gradient"].append(gradient)
        self.outcome.facts[f"calls of hooks in step {self.number}"] = self.num_calls


@in_half_precision(usual_world_size=2)
@code_of_users(
    LearnsTheNoise,
    LearnsTheNoiseWhileItAccumulates,
    HalvesThePenalisedGradient,
    partial(PenalisesWeights, "the wrapper"),
    partial(PenalisesWeights, "the network"),
    partial(PenalisesWeights, "a list"),
    PenalisesOneWeight,
    PenalisesWeightsOnOneRank,
    PenalisesWeightsWhileItAccumulates,
    StaysNearTheStart,
    CallsTheNetWithoutTheWrapper,
)
def test_a_term_computed_from_weights_is_in_the_averaged_gradients(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


# ---- gradients -------------------------------------------------------------------------------------------------------


class AddsGradientsOfTwoLosses(Loop):
    """Loop that keeps the gradients of two losses by reference, and steps with their sum."""

    def run(self, fabric):
        self.model, optimizer = fabric.setup(self.net, self.make_optimizer())
        for images, targets in self.batches():
            kept = []
            for number in range(2):
                optimizer.zero_grad()
                logits = self.model(images)
                if number == 0:
                    loss = F.cross_entropy(logits, targets)
                else:
                    loss = logits.square().mean()
                fabric.backward(self.noted(loss))
                kept.append([parameter.grad for parameter in self.net.parameters()])
            for parameter, first, second in zip(self.net.parameters(), *kept, strict=True):
                parameter.grad = first + second
            optimizer.step()


class KeepsGradients(Loop):
    """Loop that keeps gradients by reference from step to step."""

    def run(self, fabric):
        self.kept = []
        super().run(fabric)

    def after_backward(self):
        self.kept.extend(parameter.grad for parameter in self.net.parameters())

    def after_training(self):
        self.outcome.readings["gradients of all steps"] = [
            gradient.clone() for gradient in self.kept
        ]


class DetachesGradients(Loop):
    def after_step(self):
        for parameter in self.net.parameters():
            parameter.grad.detach_()
            parameter.grad.zero_()


@in_every_precision()
@code_of_users(AddsGradientsOfTwoLosses, KeepsGradients, DetachesGradients)
def test_a_gradient_that_the_loop_holds_stays_what_it_is(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


class ClipsAndWritesGradients(Loop):
    def after_backward(self):
        self.net[0].weight.grad[0] = 0.0
        self.net[2].bias.grad = self.net[2].bias.grad * 0.5
        norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.1)
        self.outcome.readings["norm"].append(norm.detach().clone())


class ComputesGradientsByHand(Loop):
    """Loop that sets `p.grad` from `torch.autograd.grad`, which is local, so it runs on one rank."""

    def run(self, fabric):
        self.model, optimizer = fabric.setup(self.net, self.make_optimizer())
        parameters = list(self.net.parameters())
        for images, targets in self.batches():
            loss = self.noted(F.cross_entropy(self.net(images), targets))
            for parameter, gradient in zip(
                parameters, torch.autograd.grad(loss, parameters), strict=True
            ):
                parameter.grad = gradient
            optimizer.step()


class DropsMicrobatches(Loop):
    """Loop that zeroes gradients within a step of three micro-batches, in one of several ways."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def drop(self, optimizer):
        if self.way == "optimizer":
            optimizer.zero_grad()
        if self.way == "module":
            self.net.zero_grad()
        if self.way == "none":
            for parameter in self.model.parameters():
                parameter.grad = None

    def run(self, fabric):
        self.model, optimizer = fabric.setup(self.net, self.make_optimizer())
        for number, batch in enumerate(self.batches()):
            is_last = number % 3 == 2
            with fabric.no_backward_sync(self.model, enabled=not is_last):
                fabric.backward(self.loss_of(batch) / 3)
            if number % 3 == 0:
                self.drop(optimizer)
            if is_last:
                optimizer.step()
                optimizer.zero_grad()


class CatchesAnError(Loop):
    """Loop in which the backward pass of a micro-batch fails on one rank, which may drop the earlier micro-batches."""

    def __init__(self, is_dropped):
        super().__init__()
        self.is_dropped = is_dropped

    def run(self, fabric):
        self.model, optimizer = fabric.setup(self.net, self.make_optimizer())
        for number, batch in enumerate(self.batches()):
            is_last = number % 3 == 2
            with fabric.no_backward_sync(self.model, enabled=not is_last):
                loss = self.loss_of(batch) / 3
                if number % 3 == 1 and is_on_last_rank():
                    self.fail(fabric, loss, optimizer)
                else:
                    fabric.backward(loss)
            if is_last:
                optimizer.step()
                optimizer.zero_grad()

    def fail(self, fabric, loss, optimizer):
        with pytest.raises(RuntimeError, match="the sample is bad"):
            fabric.backward(FailsInBackward.apply(loss))
        if self.is_dropped:
            optimizer.zero_grad()


class ForwardsTwice(Loop):
    """Loop with two forward passes before one backward pass."""

    def loss_of(self, batch):
        images, targets = batch
        gap = self.model(images + 0.1) - self.model(images - 0.1)
        return self.noted(F.cross_entropy(self.model(images), targets) + gap.square().mean())


@in_half_precision(usual_world_size=2)
@code_of_users(
    ClipsAndWritesGradients,
    partial(DropsMicrobatches, "optimizer"),
    partial(DropsMicrobatches, "module"),
    partial(DropsMicrobatches, "none"),
    partial(CatchesAnError, True),
    partial(CatchesAnError, False),
    ForwardsTwice,
)
def test_a_step_of_the_loop_has_the_gradients_of_its_backwards(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


class AsksTorchForGradients(Loop):
    """Loop that calls `torch.autograd.grad` on the wrapper's output and allows None for unused parameters."""

    def run(self, fabric):
        self.model, optimizer = fabric.setup(self.net, self.make_optimizer())
        parameters = list(self.model.parameters())
        for batch in self.batches():
            gradients = torch.autograd.grad(self.loss_of(batch), parameters, allow_unused=True)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()


@in_half_precision(world_sizes=(1,))
def test_gradients_of_the_wrapper_by_torch_are_right_or_an_error(comparison, world_size, precision):
    """Under mixed precision Lightning raises an error, because it requires `fabric.backward`."""
    comparison.reference(AsksTorchForGradients, world_size)
    (outcome,) = comparison.run(AsksTorchForGradients, "hybrid_allreduce", world_size, precision)
    if not outcome.error:
        comparison.assert_as_under_ddp(AsksTorchForGradients, world_size, precision)


@in_half_precision(world_sizes=(1,))
@code_of_users(ComputesGradientsByHand)
def test_gradients_computed_by_hand_in_a_loop_are_stepped_with(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


# ---- optimizers ------------------------------------------------------------------------------------------------------


class RollsBack(Loop):
    """Loop that restores an earlier state of network and optimizer."""

    def make_optimizer(self):
        return Adam(self.net.parameters(), lr=3e-3)

    def after_step(self):
        if self.number == 1:
            self.kept_weights = copy.deepcopy(self.model.state_dict())
            self.kept_state = copy.deepcopy(self.optimizer.state_dict())
        if self.number == 3:
            self.model.load_state_dict(self.kept_weights)
            self.optimizer.load_state_dict(self.kept_state)
            self.outcome.facts["weights are the kept ones"] = parameters_equal(
                self.net, dict(self.kept_weights)
            )

    def after_training(self):
        states = self.optimizer.state_dict()["state"].values()
        self.outcome.facts["dtypes of state"] = sorted(
            {str(v.dtype) for state in states for v in state.values()}
        )


class Sharpness(Loop):
    """Loop of sharpness-aware minimization with a closure."""

    def make_optimizer(self):
        return Sam(self.net.parameters(), lr=0.1)

    def run(self, fabric):
        self.model, optimizer = fabric.setup(self.net, self.make_optimizer())
        for batch in self.batches():
            optimizer.zero_grad()
            fabric.backward(self.loss_of(batch))
            optimizer.step(partial(self.evaluate, fabric, batch))

    def evaluate(self, fabric, batch):
        loss = self.loss_of(batch)
        fabric.backward(loss)
        return loss


class SharpnessByHand(Loop):
    """Loop that moves the weights along the gradient and back, with a backward pass in between."""

    def run(self, fabric):
        self.model, optimizer = fabric.setup(self.net, self.make_optimizer())
        for batch in self.batches():
            optimizer.zero_grad()
            fabric.backward(self.loss_of(batch))
            kept = []
            with torch.no_grad():
                norm = torch.stack(
                    [parameter.grad.norm() for parameter in self.net.parameters()]
                ).norm()
                for parameter in self.net.parameters():
                    kept.append(parameter.detach().clone())
                    parameter.add_(0.05 * parameter.grad / norm)
            optimizer.zero_grad()
            fabric.backward(self.loss_of(batch))
            with torch.no_grad():
                for parameter, value in zip(self.net.parameters(), kept, strict=True):
                    parameter.copy_(value)
            optimizer.step()


class BackwardInsideAutocast(Loop):
    """Loop that computes the loss and its gradients inside of `fabric.autocast`, and steps outside of it."""

    def run(self, fabric):
        self.model, optimizer = fabric.setup(self.net, self.make_optimizer())
        for batch in self.batches():
            with fabric.autocast():
                loss = self.loss_of(batch)
                optimizer.zero_grad()
                fabric.backward(loss)
            optimizer.step()


class AccumulatesInsideAutocast(Loop):
    """Loop that adds the gradients of three micro-batches, each inside of `fabric.autocast`."""

    def __init__(self, is_local):
        super().__init__()
        self.is_local = is_local

    def run(self, fabric):
        self.model, optimizer = fabric.setup(self.net, self.make_optimizer())
        for number, batch in enumerate(self.batches()):
            is_last = number % 3 == 2
            skips_average = self.is_local and not is_last
            with fabric.autocast(), fabric.no_backward_sync(self.model, enabled=skips_average):
                fabric.backward(self.loss_of(batch) / 3)
            if is_last:
                optimizer.step()
                optimizer.zero_grad()


class TrainsInsideAutocast(Loop):
    """Loop whose every statement is inside of `fabric.autocast`."""

    def run(self, fabric):
        self.model, optimizer = fabric.setup(self.net, self.make_optimizer())
        with fabric.autocast():
            for batch in self.batches():
                optimizer.zero_grad()
                fabric.backward(self.loss_of(batch))
                optimizer.step()


class TrainsByClosureInsideAutocast(Sharpness):
    """Loop whose optimizer evaluates a closure inside of `fabric.autocast`."""

    def run(self, fabric):
        self.model, optimizer = fabric.setup(self.net, self.make_optimizer())
        with fabric.autocast():
            for batch in self.batches():
                optimizer.zero_grad()
                fabric.backward(self.loss_of(batch))
                optimizer.step(partial(self.evaluate, fabric, batch))


@in_half_precision(usual_world_size=2)
@code_of_users(
    BackwardInsideAutocast,
    partial(AccumulatesInsideAutocast, True),
    partial(AccumulatesInsideAutocast, False),
    TrainsInsideAutocast,
    TrainsByClosureInsideAutocast,
)
def test_a_loop_may_run_backward_and_steps_inside_autocast(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


class WithoutSchedule(Loop):
    """Loop with a schedule-free optimizer, which moves the weights for evaluation and back."""

    def make_optimizer(self):
        return ScheduleFree(self.net.parameters(), lr=0.2)

    def after_step(self):
        optimizer = self.optimizer.optimizer
        optimizer.eval()
        with torch.no_grad():
            self.outcome.validation_losses.append(
                self.model(torch.ones(2, 12)).square().mean().item()
            )
        optimizer.train()


class UpdatesWeightsByHand(Loop):
    """Loop that writes the update itself, in steps that half precision would round away."""

    num_batches = 6

    def run(self, fabric):
        self.model = fabric.setup(self.net)
        for batch in self.batches():
            self.net.zero_grad()
            fabric.backward(self.loss_of(batch))
            with torch.no_grad():
                for parameter in self.net.parameters():
                    parameter -= 1e-4 * parameter.grad


class Decoder(nn.Sequential):
    """Network with a method that computes its loss."""

    def decode(self, images):
        return 2 * self(images)


class CallsAMarkedMethod(Loop):
    """Loop that calls a method that is marked as a forward method for Fabric."""

    def __init__(self):
        super().__init__()
        self.net = Decoder(*self.net)

    def run(self, fabric):
        self.model, optimizer = fabric.setup(self.net, self.make_optimizer())
        self.model.mark_forward_method("decode")
        for images, targets in self.batches():
            optimizer.zero_grad()
            fabric.backward(self.noted(F.cross_entropy(self.model.decode(images), targets)))
            optimizer.step()


class StepsTwoOptimizers(Loop):
    """Loop with an optimizer for each layer, one of which clips values."""

    def run(self, fabric):
        first = SGD(self.net[0].parameters(), lr=0.1)
        second = Adam(self.net[2].parameters(), lr=1e-2)
        self.model, first, second = fabric.setup(self.net, first, second)
        for batch in self.batches():
            first.zero_grad()
            second.zero_grad()
            fabric.backward(self.loss_of(batch))
            fabric.clip_gradients(self.model, first, clip_val=0.05)
            first.step()
            second.step()


class LoadsAnEarlierFile(Loop):
    """Loop that loads an earlier file in the middle."""

    def after_step(self):
        state = {"model": self.model, "optimizer": self.optimizer}
        if self.number == 1:
            self.fabric.save(f"{self.folder}/earlier.ckpt", state)
        if self.number == 3:
            self.fabric.load(f"{self.folder}/earlier.ckpt", state)


class TrainsTwoNetworks(Loop):
    """Loop with a generator and a critic, whose weights are clamped."""

    def run(self, fabric):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        generator, optimizer = fabric.setup(self.net, self.make_optimizer())
        critic, critic_optimizer = fabric.setup(critic, Adam(critic.parameters(), lr=3e-3))
        for images, targets in self.batches():
            real = F.one_hot(targets, 3).float()
            critic_optimizer.zero_grad()
            fabric.backward(
                self.noted(critic(generator(images).detach()).mean() - critic(real).mean())
            )
            critic_optimizer.step()
            for parameter in critic.parameters():
                parameter.data.clamp_(-0.5, 0.5)
            optimizer.zero_grad()
            fabric.backward(self.noted(-critic(generator(images)).mean()))
            optimizer.step()
        self.outcome.readings["critic"] = [
            parameter.detach().clone() for parameter in critic.parameters()
        ]


@in_half_precision()
@code_of_users(
    RollsBack,
    Sharpness,
    SharpnessByHand,
    WithoutSchedule,
    UpdatesWeightsByHand,
    CallsAMarkedMethod,
    StepsTwoOptimizers,
    LoadsAnEarlierFile,
    TrainsTwoNetworks,
)
def test_optimizers_of_a_loop_step_on_fp32_weights(comparison, user_code, world_size, precision):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


class QuasiNewton(Loop):
    """Loop of LBFGS on one batch, whose loss it brings close to zero."""

    def run(self, fabric):
        optimizer = torch.optim.LBFGS(self.net.parameters(), lr=0.3, max_iter=4, history_size=4)
        self.model, optimizer = fabric.setup(self.net, optimizer)
        self.batch = self.batches()[0]
        for _ in range(6):
            optimizer.step(partial(self.evaluate, fabric, optimizer))
        self.outcome.facts["the loss is small"] = self.outcome.losses[-1] < 0.2

    def evaluate(self, fabric, optimizer):
        optimizer.zero_grad()
        loss = self.loss_of(self.batch)
        fabric.backward(loss)
        return loss


@in_half_precision()
def test_lbfgs_reaches_a_small_loss_in_a_loop(comparison, world_size, precision):
    comparison.reference(QuasiNewton, world_size)
    for outcome in comparison.run(QuasiNewton, "hybrid_allreduce", world_size, precision):
        assert not outcome.error
        assert outcome.facts == {"the loss is small": True}


class StepsInsideBackward(Loop):
    def run(self, fabric):
        self.model = fabric.setup(self.net)
        self.optimizer_of = {}
        for parameter in self.net.parameters():
            self.optimizer_of[parameter] = SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(self.step)
        for batch in self.batches():
            fabric.backward(self.loss_of(batch))

    def step(self, parameter):
        self.optimizer_of[parameter].step()
        self.optimizer_of[parameter].zero_grad()


@in_half_precision(world_sizes=(1,))
def test_an_optimizer_that_steps_inside_backward_is_refused_in_a_loop(
    comparison, world_size, precision
):
    comparison.reference(StepsInsideBackward, world_size)
    (outcome,) = comparison.run(StepsInsideBackward, "hybrid_allreduce", world_size, precision)
    assert "SGD" in outcome.error
    assert "backward" in outcome.error
