"""Files, copies and weights after an error, which are exact fp32, and runs that resume from them bit for bit."""

import copy
import io
import pickle
from functools import partial

import lightning.pytorch as pl
import torch
from torch.optim import Adam
from torch.optim.swa_utils import AveragedModel

from tests import toy
from tests.precision.user_code.support import (
    Frozen,
    Manual,
    Setup,
    UserCode,
    Validated,
    code_of_users,
    in_half_precision,
    small_net,
    trainer_of,
)
from tests.precision.user_code.test_gradients import FailsInBackward
from tests.scenes import same

# ---- files written by users ------------------------------------------------------------------------------------------


def data_of_parameters(module):
    return {
        name: parameter.data.cpu()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def detached_parameters(module):
    return {
        name: parameter.detach().cpu()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def parameters_themselves(module):
    return dict(module.named_parameters())


def numpy_arrays(module):
    return {
        name: torch.from_numpy(p.detach().cpu().numpy().copy())
        for name, p in module.named_parameters()
    }


class SavesWhatItTrains(UserCode):
    """Module that saves only the trained parameters, as users of LoRA with a frozen backbone do."""

    num_batches = 4
    epochs = 3

    def __init__(self, collect):
        super().__init__()
        self.collect = collect
        self.strict_loading = False

    def build(self):
        super().build()
        self.backbone = small_net().requires_grad_(False)

    def loss(self, batch):
        images, targets = batch
        return torch.nn.functional.cross_entropy(self.net(images) + self.backbone(images), targets)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["state_dict"] = self.collect(self)

    def configure_optimizers(self):
        return Adam(self.net.parameters(), lr=3e-3)


class SavesByStateDict(SavesWhatItTrains):
    """Module that overrides `state_dict`, which then contains the trained parameters."""

    def __init__(self):
        super().__init__(collect=None)

    def on_save_checkpoint(self, checkpoint):
        pass

    def state_dict(self, *args, **kwargs):
        return {f"net.{name}": parameter for name, parameter in self.net.named_parameters()}


class SavesAfterAnEpoch(pl.Callback):
    """Callback that saves a checkpoint when the first epoch ends, and keeps the weights at that time."""

    def __init__(self, path):
        self.path = path
        self.weights = {}

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)
            self.weights = {
                name: value.detach().clone() for name, value in module.named_parameters()
            }


def continue_from_a_file(make_user_code, setup):
    """Return the trained weights of a run, of a run that resumes from its file, and the weights in the file."""
    path = f"{setup.folder}/first_epoch.ckpt"
    saves = SavesAfterAnEpoch(path)
    whole = make_user_code()
    trainer_of(whole, setup, callbacks=[saves]).fit(whole)

    torch.manual_seed(5)  # any seed of a new process
    continued = make_user_code()
    with torch.no_grad():
        for parameter in continued.net.parameters():
            parameter.add_(1.0)
    trainer_of(continued, setup).fit(continued, ckpt_path=path, weights_only=False)
    file = torch.load(path, weights_only=False)["state_dict"]
    return toy.weights(whole.net), toy.weights(continued.net), file, saves.weights


@in_half_precision()
@code_of_users(
    partial(SavesWhatItTrains, data_of_parameters),
    partial(SavesWhatItTrains, detached_parameters),
    partial(SavesWhatItTrains, parameters_themselves),
    partial(SavesWhatItTrains, numpy_arrays),
    SavesByStateDict,
)
def test_a_run_continues_bit_for_bit_from_the_parameters_that_the_user_saved(
    rank_pool, tmp_path, user_code, world_size, precision
):
    ranks = rank_pool.ranks(world_size)
    for strategy, its_precision in (("ddp", "32-true"), ("hybrid_allreduce", precision)):
        folder = tmp_path / strategy
        folder.mkdir()
        setup = Setup(strategy=strategy, precision=its_precision, folder=str(folder))
        results = ranks.run(continue_from_a_file, user_code, setup)
        for rank, (whole, continued, file, at_save) in enumerate(results):
            assert same(whole, continued), f"rank {rank} under {strategy}"
            assert at_save, f"rank {rank} under {strategy}"
            for name, value in file.items():
                assert same(value.detach(), at_save[name]), f"{name} on rank {rank}"


# ---- copies made inside of a step ------------------------------------------------------------------------------------


def by_state_dict(module, folder):
    return {name: value.detach().clone() for name, value in module.net.state_dict().items()}


def by_own_state_dict(module, folder):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def by_deepcopy(module, folder):
    return dict(copy.deepcopy(module.net).state_dict())


def by_copied_parameter(module, folder):
    return {"weight": copy.deepcopy(module.net[0].weight).detach()}


def by_pickle(module, folder):
    return dict(pickle.loads(pickle.dumps(module.net)).state_dict())


def by_file_of_the_module(module, folder):
    buffer = io.BytesIO()
    torch.save(module.net, buffer)
    buffer.seek(0)
    return dict(torch.load(buffer, weights_only=False).state_dict())


def by_file_of_the_state_dict(module, folder):
    buffer = io.BytesIO()
    torch.save(module.net.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer)


def by_average(module, folder):
    return dict(AveragedModel(module.net).module.state_dict())


def by_checkpoint(module, folder):
    path = f"{folder}/inside.ckpt"
    module.trainer.save_checkpoint(path)
    return torch.load(path)["state_dict"]


def by_loading_elsewhere(module, folder):
    net = small_net()
    net.load_state_dict(module.net.state_dict())
    return dict(net.state_dict())


class CopiesInsideAStep(Frozen):
    """Module that copies its weights in `training_step`, before and after the forward pass."""

    epochs = 1
    num_batches = 1

    def __init__(self, automatic_optimization):
        super().__init__()
        self.automatic_optimization = automatic_optimization

    def training_step(self, batch, batch_idx):
        self.copy_weights("before forward")
        loss = self.noted_loss(batch)
        self.copy_weights("after forward")
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.copy_weights("after backward")
            self.optimizers().step()
        return loss

    def copy_weights(self, moment):
        for copied in COPIES:
            self.outcome.facts[f"{copied.__name__} {moment}"] = copied(
                self, self.trainer.default_root_dir
            )


COPIES = [
    by_state_dict,
    by_own_state_dict,
    by_deepcopy,
    by_copied_parameter,
    by_pickle,
    by_file_of_the_module,
    by_file_of_the_state_dict,
    by_average,
    by_checkpoint,
    by_loading_elsewhere,
]


class TrainsACopyInsideAStep(UserCode):
    """Module that takes small steps on a copy of the network in `training_step`, as MAML does."""

    def training_step(self, batch, batch_idx):
        images, targets = batch
        copied = copy.deepcopy(self.net)
        optimizer = torch.optim.SGD(copied.parameters(), lr=1e-4)
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(copied(images), targets).backward()
            optimizer.step()
        moved = copied[0].weight.detach() - copy.deepcopy(self.net)[0].weight.detach()
        self.outcome.readings["way of the copy"].append(moved)
        return super().training_step(batch, batch_idx)


class ReadsWhileWeightsAreExchanged(Validated, Frozen):
    """Module that replaces its weights for a moment inside of a step, copies them, and restores the trained ones."""

    ignored_warnings = ("`net.0.weight` was written inside",)

    def __init__(self, copied):
        super().__init__()
        self.copied = copied

    def exchange(self):
        kept = [parameter.data.clone() for parameter in self.parameters()]
        for parameter in self.parameters():
            parameter.data.mul_(0.5)
        self.copied(self, self.trainer.default_root_dir)
        for parameter, value in zip(self.parameters(), kept, strict=True):
            parameter.data.copy_(value)

    def training_step(self, batch, batch_idx):
        self.exchange()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.exchange()
        super().validation_step(batch, batch_idx)


@in_half_precision()
@code_of_users(
    partial(ReadsWhileWeightsAreExchanged, by_state_dict),
    partial(ReadsWhileWeightsAreExchanged, by_deepcopy),
    partial(ReadsWhileWeightsAreExchanged, by_pickle),
    partial(ReadsWhileWeightsAreExchanged, by_checkpoint),
)
def test_reading_weights_inside_a_step_rounds_none(comparison, user_code, world_size, precision):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


@in_half_precision(usual_world_size=2)
@code_of_users(
    partial(CopiesInsideAStep, True),
    partial(CopiesInsideAStep, False),
    TrainsACopyInsideAStep,
)
def test_copies_made_inside_a_step_are_fp32_with_all_digits(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


# ---- errors ----------------------------------------------------------------------------------------------------------


class NotesWeights(pl.Callback):
    """Callback that records the weights that user code finds after an error ended the fit, and those of the file."""

    def on_exception(self, trainer, module, exception):
        facts = module.outcome.facts
        facts["weights in on_exception"] = {
            name: value.detach().clone() for name, value in module.named_parameters()
        }
        path = f"{trainer.default_root_dir}/broken.ckpt"
        trainer.save_checkpoint(path)
        facts["weights in the file"] = dict(torch.load(path)["state_dict"])


class Breaks(Validated, Frozen):
    """Module that fails in one of its hooks in the second batch."""

    settings = {"val_check_interval": 1}
    raises = "the user's bug"

    def __init__(self, hook):
        super().__init__()
        self.hook = hook

    def break_in(self, hook):
        if self.hook == hook and self.trainer.global_step > 0:
            raise RuntimeError("the user's bug")

    def configure_callbacks(self):
        return [NotesWeights()]

    def on_train_batch_start(self, *args):
        self.break_in("on_train_batch_start")

    def training_step(self, batch, batch_idx):
        self.break_in("training_step")
        loss = super().training_step(batch, batch_idx)
        if self.hook == "backward" and batch_idx > 0:
            return BreaksInBackward.apply(loss)
        return loss

    def on_before_backward(self, loss):
        self.break_in("on_before_backward")

    def on_after_backward(self):
        self.break_in("on_after_backward")

    def on_before_optimizer_step(self, optimizer):
        self.break_in("on_before_optimizer_step")

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        self.break_in("optimizer_step")

    def on_train_batch_end(self, *args):
        self.break_in("on_train_batch_end")

    def validation_step(self, batch, batch_idx):
        self.break_in("validation_step")
        super().validation_step(batch, batch_idx)


class BreaksInBackward(FailsInBackward):
    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("the user's bug")


class BreaksByHand(Manual, Frozen):
    """Module that fails in `training_step` of manual optimization after a backward pass."""

    raises = "the user's bug"

    def configure_callbacks(self):
        return [NotesWeights()]

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        if batch_idx == 1:
            raise RuntimeError("the user's bug")


class IsInterrupted(Breaks):
    """Module that is interrupted by Ctrl-C in the middle of a step."""

    raises = "SystemExit"

    def __init__(self):
        super().__init__("training_step")

    def break_in(self, hook):
        if hook == "training_step" and self.trainer.global_step > 0:
            raise KeyboardInterrupt


HOOKS = [
    "on_train_batch_start",
    "training_step",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "on_train_batch_end",
    "validation_step",
]


@in_half_precision(world_sizes=(1,))
@code_of_users(*[partial(Breaks, hook) for hook in HOOKS], BreaksByHand, IsInterrupted)
def test_after_an_error_weights_and_file_are_fp32_with_all_digits(
    comparison, user_code, world_size, precision
):
    """The learning rate is 0, so the weights must equal the initial ones."""
    (outcome,) = comparison.assert_as_under_ddp(user_code, world_size, precision)
    assert same(outcome.facts["weights in on_exception"], outcome.start)
    assert same(outcome.facts["weights in the file"], outcome.start)
