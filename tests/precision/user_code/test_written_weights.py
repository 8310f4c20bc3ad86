"""Weights that user code writes: training, validation and checkpoints use them with all digits."""

import copy
import itertools
import pickle
import weakref
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel
from torch.utils.weak import WeakTensorKeyDictionary

from tests import toy
from tests.precision.user_code.support import (
    Frozen,
    Manual,
    UserCode,
    Validated,
    code_of_users,
    dtypes_of_parameters,
    in_half_precision,
    parameters_equal,
    small_net,
)
from tests.scenes import same

# ---- weights replaced by an average and restored, with a read of the state in between --------------------------------


def write_into_data(parameter, value):
    parameter.data.copy_(value)


def replace_data(parameter, value):
    parameter.data = value.clone()


def assign_slice_of_data(parameter, value):
    parameter.data[:] = value


def copy_lists_of_data(parameter, value):
    torch._foreach_copy_([parameter.data], [value])


def exchange_data(parameter, value):
    parameter.data, value.data = value.data, parameter.data


def copy_without_gradient(parameter, value):
    with torch.no_grad():
        parameter.copy_(value)


def read_state_dict(trainer, module):
    module.state_dict()


def read_copy(trainer, module):
    copy.deepcopy(module.net)


def read_checkpoint(trainer, module):
    trainer.save_checkpoint(f"{trainer.default_root_dir}/average.ckpt")


def read_pickle(trainer, module):
    pickle.dumps(module.net)


def read_average(trainer, module):
    AveragedModel(module.net)


READERS = [read_state_dict, read_copy, read_checkpoint, read_pickle, read_average]
WRITERS = [
    write_into_data,
    replace_data,
    assign_slice_of_data,
    copy_lists_of_data,
    exchange_data,
    copy_without_gradient,
]
FORMS = list(itertools.product(READERS, WRITERS))


class ExchangesWeights(pl.Callback):
    """Callback that validates other weights, saves them and restores the trained ones, differently after each batch."""

    def on_train_start(self, trainer, module):
        self.trained = toy.weights(module)
        self.forms = itertools.cycle(FORMS)
        self.name = ""
        self.not_exact = module.outcome.facts["forms that lost digits or weights"] = []

    def on_validation_start(self, trainer, module):
        reader, self.writer = next(self.forms)
        self.name = f"{reader.__name__}, {self.writer.__name__}"
        self.kept = [parameter.data.clone() for parameter in module.parameters()]
        for parameter in module.parameters():
            self.writer(parameter, torch.zeros_like(parameter.detach()))
        reader(trainer, module)

    def on_validation_end(self, trainer, module):
        for parameter, kept in zip(module.parameters(), self.kept, strict=True):
            self.writer(parameter, kept)

    def on_train_batch_end(self, trainer, module, *args):
        if self.name and not parameters_equal(module, self.trained):
            self.not_exact.append(self.name)
        module.load_state_dict(self.trained)  # so that each form is tested separately


class ReadsWhileWeightsAreExchanged(Validated, Frozen):
    epochs = 1
    num_batches = len(FORMS) + 1
    batch_size = 2
    settings = {"val_check_interval": 1, "limit_val_batches": 1}

    def configure_callbacks(self):
        return [ExchangesWeights()]


class ExchangesWeightsAfterEachStep(UserCode):
    """Module in which a logger reads the state while weights are zeroed, before they are restored."""

    def __init__(self, put_back):
        super().__init__()
        self.put_back = put_back

    def on_train_batch_end(self, *args):
        kept = [parameter.detach().clone() for parameter in self.parameters()]
        for parameter in self.parameters():
            parameter.data.zero_()
        self.state_dict()
        for parameter, value in zip(self.parameters(), kept, strict=True):
            self.put_back(parameter, value)


class ValidatesItsAverage(Validated):
    """Module that validates an average of its weights. `ModelCheckpoint` saves it before the weights are restored."""

    epochs = 3
    num_batches = 4
    settings = {"val_check_interval": 0.5, "enable_checkpointing": True}

    def __init__(self):
        super().__init__()
        self.average = [parameter.detach().clone() for parameter in self.parameters()]

    def configure_callbacks(self):
        return [
            ModelCheckpoint(
                dirpath=f"{self.trainer.default_root_dir}/averages", save_on_train_epoch_end=False
            )
        ]

    def on_train_batch_end(self, *args):
        for average, parameter in zip(self.average, self.parameters(), strict=True):
            average.mul_(0.9).add_(parameter.detach(), alpha=0.1)

    def on_validation_start(self):
        self.kept = [parameter.data.clone() for parameter in self.parameters()]
        for parameter, average in zip(self.parameters(), self.average, strict=True):
            parameter.data.copy_(average)

    def on_validation_end(self):
        for parameter, kept in zip(self.parameters(), self.kept, strict=True):
            parameter.data.copy_(kept)


class EvaluatesOtherWeights(Validated):
    """Module that replaces weights during an evaluation outside of a fit, and reads the state meanwhile."""

    is_exact = True

    def exchange(self):
        self.outcome.facts["dtypes before"] = dtypes_of_parameters(self)
        self.kept = [parameter.data.clone() for parameter in self.parameters()]
        for parameter in self.parameters():
            parameter.data.mul_(0.5)
        self.state_dict()

    def put_back(self):
        self.outcome.facts["dtypes after"] = dtypes_of_parameters(self)
        for parameter, kept in zip(self.parameters(), self.kept, strict=True):
            parameter.data.copy_(kept)


class ValidatesOtherWeights(EvaluatesOtherWeights):
    entry_point = "validate"

    def on_validation_start(self):
        self.exchange()

    def on_validation_end(self):
        self.put_back()


class MeasuresOtherWeights(EvaluatesOtherWeights):
    entry_point = "test"

    def on_test_start(self):
        self.exchange()

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def test_dataloader(self):
        return self.val_dataloader()

    def on_test_end(self):
        self.put_back()


@pytest.mark.sampled(3)
@in_half_precision(usual_world_size=2)
@code_of_users(
    ReadsWhileWeightsAreExchanged,
    ValidatesOtherWeights,
    MeasuresOtherWeights,
    partial(ExchangesWeightsAfterEachStep, write_into_data),
    partial(ExchangesWeightsAfterEachStep, replace_data),
    ValidatesItsAverage,
)
def test_trained_weights_are_back_after_others_were_validated_and_saved(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


# ---- weights written through a state dict ----------------------------------------------------------------------------

PRETRAINED = 1 / 3  # has more digits than half precision


def write_values(net):
    for value in net.state_dict().values():
        value.copy_(torch.full_like(value, PRETRAINED))


def write_data_of_values(net):
    for value in net.state_dict().values():
        value.data.fill_(PRETRAINED)


def write_values_of_children(net):
    for child in net.children():
        write_values(child)


def load_state_dict(net):
    net.load_state_dict(
        {name: torch.full_like(value, PRETRAINED) for name, value in net.state_dict().items()}
    )


def load_vector(net):
    vector_to_parameters(
        torch.full_like(parameters_to_vector(net.parameters()), PRETRAINED), net.parameters()
    )


class WritesPretrainedWeights(Validated, Frozen):
    """Module that loads weights in a hook. The next batch, and validation, must use them."""

    epochs = 1

    def __init__(self, write, hook):
        super().__init__()
        self.write = write
        self.hook = hook

    def on_fit_start(self):
        if self.hook == "on_fit_start":
            self.write(self.net)

    def on_train_batch_start(self, batch, batch_idx):
        if self.hook == "on_train_batch_start" and batch_idx == 1:
            self.write(self.net)

    def on_validation_start(self):
        if self.hook == "on_validation_start":
            self.write(self.net)

    def on_train_end(self):
        expected = {
            name: torch.full_like(value, PRETRAINED) for name, value in self.outcome.start.items()
        }
        self.outcome.facts["weights are the written ones"] = parameters_equal(self, expected)


HOOKS = ("on_fit_start", "on_train_batch_start", "on_validation_start")
WRITTEN_THROUGH_STATE_DICTS = itertools.product(
    (write_values, write_data_of_values, write_values_of_children, load_state_dict, load_vector),
    HOOKS,
)


@in_half_precision(world_sizes=(1,))
@code_of_users(
    *[partial(WritesPretrainedWeights, write, hook) for write, hook in WRITTEN_THROUGH_STATE_DICTS]
)
def test_weights_written_in_a_hook_count_from_there_on(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


class HoldsItsAverage(Validated):
    """Module with an unfrozen average outside of the optimizer, which is moved through `state_dict()` and validated."""

    ddp_options = {"find_unused_parameters": True}

    def build(self):
        super().build()
        self.average = small_net()

    def on_train_batch_end(self, *args):
        trained = self.net.state_dict()
        for name, value in self.average.state_dict().items():
            value *= 0.5
            value += 0.5 * trained[name].detach()

    def validation_step(self, batch, batch_idx):
        images, targets = batch
        self.outcome.validation_losses.append(F.cross_entropy(self.average(images), targets).item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


@in_half_precision()
@code_of_users(HoldsItsAverage)
def test_an_average_that_no_optimizer_has_moves_and_is_validated(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


# ---- small changes in fp32 -------------------------------------------------------------------------------------------


class ShrinksWeights(Frozen):
    """Module that decays weights by less than the last digit of half precision."""

    def on_train_batch_end(self, *args):
        for parameter in self.parameters():
            parameter.data.mul_(1 - 1e-5)


class MovesWeightsAndBack(Frozen):
    """Module that evaluates perturbed weights, as in a search for flat minima."""

    def on_train_batch_end(self, *args):
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.3)
            self.state_dict()
            for parameter in self.parameters():
                parameter.sub_(0.3)


class WritesThroughNumpy(Frozen):
    def on_train_batch_start(self, batch, batch_idx):
        self.net[0].weight.detach().numpy()[batch_idx] = PRETRAINED


class CastsToFp32(Frozen):
    """Module that casts a part to fp32, which it already is."""

    def on_train_batch_end(self, *args):
        self.net.float()
        self.net[0].to(torch.float32)
        self.net[2].to("cpu", torch.float32)


class CastsToFp32AndTrainsSlowly(UserCode):
    """Module whose steps are below the last digit of half precision."""

    num_batches = 6

    def on_train_batch_start(self, batch, batch_idx):
        self.net.float()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class CopiesToATeacher(UserCode):
    """Module with a teacher that copies the student of the last step, and one that averages it."""

    def build(self):
        super().build()
        self.teacher = small_net().requires_grad_(False)
        self.average = small_net().requires_grad_(False)

    def on_train_batch_end(self, *args):
        for name, student in self.net.named_parameters():
            self.teacher.get_parameter(name).data.copy_(student)
            self.average.get_parameter(name).data.mul_(0.99).add_(student.detach(), alpha=0.01)

    def on_train_end(self):
        is_exact = same(dict(self.teacher.state_dict()), dict(self.net.state_dict()))
        self.outcome.facts["the teacher has all digits of the student"] = is_exact


@in_half_precision()
@code_of_users(
    ShrinksWeights,
    MovesWeightsAndBack,
    WritesThroughNumpy,
    CastsToFp32,
    CastsToFp32AndTrainsSlowly,
    CopiesToATeacher,
)
def test_fp32_code_between_steps_computes_in_fp32(comparison, user_code, world_size, precision):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


# ---- weights written inside of a step --------------------------------------------------------------------------------


class WritesARowInsideAStep(Frozen):
    """Module that writes exact half-precision values into one row, so that other rows keep their digits."""

    ignored_warnings = ("`net.0.weight` was written inside",)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.net[0].weight[batch_idx] = 0.5
        self.net[2].bias.data[1] = -0.25
        return super().training_step(batch, batch_idx)


class LoadsInsideAStep(Frozen):
    def training_step(self, batch, batch_idx):
        self.net[0].load_state_dict(
            {"weight": torch.full((16, toy.NUM_FEATURES), 0.25), "bias": torch.zeros(16)}
        )
        return super().training_step(batch, batch_idx)


class NormalizesPrototypes(UserCode):
    """Module that normalizes rows of a weight before each forward pass, as SwAV does."""

    ignored_warnings = ("`net.[02].weight` was written inside",)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            weight = self.net[2].weight
            weight.data.copy_(F.normalize(weight.data.float(), dim=1))
        return super().training_step(batch, batch_idx)


class NormalizesPrototypesOfAList(NormalizesPrototypes):
    """Module that normalizes the same rows through a list of parameters kept from the constructor."""

    def __init__(self):
        super().__init__()
        self.prototypes = [self.net[2].weight]

    def training_step(self, batch, batch_idx):
        for prototype in self.prototypes:
            prototype.data = F.normalize(prototype.data.float(), dim=1).to(prototype.dtype)
        return UserCode.training_step(self, batch, batch_idx)


class MovesATeacherInsideAStep(UserCode):
    """Module with a mean teacher that is updated in `training_step`."""

    def build(self):
        super().build()
        self.teacher = small_net().requires_grad_(False)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            for teacher, student in zip(
                self.teacher.parameters(), self.net.parameters(), strict=True
            ):
                teacher.mul_(0.9).add_(student, alpha=0.1)
        return loss


class ClampsTheCritic(Manual):
    """Module that clamps all weights after each step inside `training_step`, as WGAN does."""

    ignored_warnings = ("`net.[02].weight` was written inside",)

    limit = 0.1

    def parameters_to_clamp(self):
        return self.net.parameters()

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        for parameter in self.parameters_to_clamp():
            parameter.data.clamp_(-self.limit, self.limit)

    def on_train_batch_end(self, *args):
        largest = max(float(parameter.detach().abs().max()) for parameter in self.parameters())
        # Values that are written inside of a step are rounded to half precision.
        is_clamped = largest <= self.limit * (1 + 2**-8)
        self.outcome.facts[f"weights are clamped after {self.trainer.global_step} steps"] = (
            is_clamped
        )


class ClampsTheCriticByAList(ClampsTheCritic):
    def __init__(self):
        super().__init__()
        self.kept_list = list(self.net.parameters())

    def parameters_to_clamp(self):
        return self.kept_list


class ClampsTheCriticBesideALogger(ClampsTheCritic):
    """Module in which a logger reads the state dict before each clamp."""

    def parameters_to_clamp(self):
        self.state_dict()
        return self.net.parameters()


@in_half_precision()
@code_of_users(
    WritesARowInsideAStep,
    LoadsInsideAStep,
    NormalizesPrototypes,
    NormalizesPrototypesOfAList,
    MovesATeacherInsideAStep,
    ClampsTheCritic,
    ClampsTheCriticByAList,
    ClampsTheCriticBesideALogger,
)
def test_weights_written_inside_a_step_are_taken_over(comparison, user_code, world_size, precision):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


class GivesAWeightNewMemoryInsideAStep(UserCode):
    """Module that replaces the memory of a weight by fp32 memory, whatever its dtype in a step."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            weight = self.net[0].weight
            weight.data = 0.5 * weight.data.float()
        return super().training_step(batch, batch_idx)


@in_half_precision()
def test_new_fp32_memory_inside_a_step_is_taken_over_or_ends_with_an_error(
    comparison, world_size, precision
):
    comparison.reference(GivesAWeightNewMemoryInsideAStep, world_size)
    outcomes = comparison.run(
        GivesAWeightNewMemoryInsideAStep, "hybrid_allreduce", world_size, precision
    )
    if not all(outcome.error for outcome in outcomes):
        comparison.assert_as_under_ddp(GivesAWeightNewMemoryInsideAStep, world_size, precision)


# ---- references to parameters that users keep from the constructor ---------------------------------------------------


class Marked(nn.Parameter):
    """Parameter class of a user."""

    def is_marked(self):
        return True


class KeepsReferences(UserCode):
    """Module with lists, names by id, weak references, attributes and a parameter class from before the fit."""

    def build(self):
        super().build()
        self.net[0].weight = Marked(self.net[0].weight.detach())
        self.net[0].weight.no_decay = True
        self.kept_list = list(self.net.parameters())
        self.name_by_id = {id(parameter): name for name, parameter in self.named_parameters()}
        self.references = [weakref.ref(parameter) for parameter in self.net.parameters()]
        self.numbers = WeakTensorKeyDictionary(
            (parameter, 1) for parameter in self.net.parameters()
        )

    def look(self, moment):
        facts = self.outcome.facts
        pairs = list(zip(self.kept_list, self.net.parameters(), strict=True))
        group = self.trainer.optimizers[0].param_groups[0]["params"]
        facts[f"the list is valid {moment}"] = all(kept is parameter for kept, parameter in pairs)
        facts[f"the optimizer has the list {moment}"] = all(
            a is b for a, b in zip(self.kept_list, group, strict=True)
        )
        facts[f"ids are known {moment}"] = all(
            id(parameter) in self.name_by_id for parameter in self.parameters()
        )
        facts[f"keys are found {moment}"] = all(
            parameter in self.numbers for parameter in self.parameters()
        )
        facts[f"references live {moment}"] = all(
            a() is b for a, b in zip(self.references, self.kept_list, strict=True)
        )
        facts[f"the class is the user's {moment}"] = type(self.net[0].weight) is Marked
        facts[f"the attribute is there {moment}"] = getattr(self.net[0].weight, "no_decay", False)

    def on_train_start(self):
        self.look("when training starts")

    def training_step(self, batch, batch_idx):
        self.look("in a step")
        penalty = sum(parameter.float().square().sum() for parameter in self.kept_list)
        return super().training_step(batch, batch_idx) + 0.01 * penalty

    def on_after_backward(self):
        self.look("after backward")

    def on_train_batch_end(self, *args):
        self.look("after a step")

    def on_train_end(self):
        self.look("when training ends")


class KeepsAView(UserCode):
    """Module with a view of a weight, kept from the constructor, that is read and written between steps."""

    def build(self):
        super().build()
        self.first_rows = self.net[0].weight.detach()[:4]

    def on_train_batch_end(self, *args):
        step = self.trainer.global_step
        is_followed = same(self.first_rows, self.net[0].weight.detach()[:4])
        self.outcome.facts[f"the view shows the weight after {step} steps"] = is_followed
        self.first_rows.mul_(0.9)

    def training_step(self, batch, batch_idx):
        gap = float((self.first_rows.float() - self.net[0].weight.detach()[:4].float()).abs().max())
        self.outcome.facts["the view shows the weight in a step, up to rounding"] = gap < 2**-8
        return super().training_step(batch, batch_idx)


class SeesFp32(Validated):
    """Module that records the dtypes of parameters wherever no forward or backward pass runs."""

    def look(self, moment):
        self.outcome.facts[f"dtypes {moment}"] = dtypes_of_parameters(self)

    def on_fit_start(self):
        self.look("at the start of the fit")

    def on_train_start(self):
        self.look("at the start of training")

    def on_train_epoch_start(self):
        self.look("at the start of an epoch")

    def on_train_batch_start(self, *args):
        self.look("before a batch")

    def on_after_backward(self):
        self.look("after backward")

    def on_before_optimizer_step(self, optimizer):
        self.look("before the step")

    def on_train_batch_end(self, *args):
        self.look("after a batch")

    def on_validation_start(self):
        self.look("at the start of validation")

    def on_validation_batch_start(self, *args):
        self.look("before a batch of validation")

    def on_validation_batch_end(self, *args):
        self.look("after a batch of validation")

    def on_validation_epoch_end(self):
        self.look("at the end of validation")

    def on_train_epoch_end(self):
        self.look("at the end of an epoch")

    def on_save_checkpoint(self, checkpoint):
        self.look("when a checkpoint is saved")

    def on_train_end(self):
        self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/end.ckpt")
        self.look("at the end of training")


@in_half_precision(usual_world_size=2)
@code_of_users(KeepsReferences, SeesFp32)
def test_parameters_outside_of_a_step_are_the_users_own_in_fp32(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


@in_half_precision(usual_world_size=2)
def test_a_view_kept_from_the_constructor_shows_the_weight(
    pytestconfig, comparison, world_size, precision
):
    if pytestconfig.getoption("--moving-device"):
        pytest.skip(
            "a move to a device gives weights new memory, which no earlier view shows under `ddp` either"
        )
    comparison.assert_as_under_ddp(KeepsAView, world_size, precision)
