"""Callbacks that copy, save, average, prune, freeze and cut, and what is asked of the model outside of a step."""

from __future__ import annotations

import copy
import io
import tempfile

import torch
import torch.nn.functional as F
from lightning.pytorch import callbacks
from torch import nn, optim

from tests import toy
from tests.battery.case import HALF, Row, row, samples
from tests.toy import NUM_CLASSES, NUM_FEATURES

ONES = torch.ones(2, NUM_FEATURES)


def called(base=Row, *, attributes=None, **hooks):
    """A row with a callback of these hooks."""
    return row(base, configure_callbacks=lambda self: callbacks.LambdaCallback(**hooks), **(attributes or {}))


def shipped(make, **more):
    """A row with one of Lightning's own."""
    return row(configure_callbacks=lambda self: make(), **more)


def digits(state):
    """Dtypes, and whether some value has more digits than a bf16 or an fp16."""
    some = [t for t in state.values() if t.is_floating_point()]
    return {t.dtype for t in some}, any(not torch.equal(t.half().float(), t.float()) for t in some)


class _Saves(Row):
    """What is kept is what the module has when training ends."""

    def keep(self, saved):
        self.saved, self.facts["saved"] = saved, digits(saved)

    def after_fit(self):
        state = self.state_dict()
        self.facts["saved is the module"] = all(torch.equal(self.saved[n], state[n]) for n in self.saved)


def through_a_file(trainer, module):
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    module.keep(torch.load(file))


def copy_module(trainer, module):
    module.copies = [copy.deepcopy(module.net)]
    module.keep({f"net.{n}": v for n, v in module.copies[0].state_dict().items()})
    module.facts["says"] = module.copies[0](ONES).dtype


def keep_best(trainer, module, *_):
    if module.losses[-1] == min(module.losses):
        module.best = {n: v.detach().clone() for n, v in module.net.state_dict().items()}


def keep_first(trainer, module):
    module.first = copy.deepcopy(module.state_dict())


def reset_once(trainer, module):
    if trainer.current_epoch == 0:
        module.load_state_dict(module.first)


def reinitialise(trainer, module):
    with torch.no_grad():
        module.net[2].bias.zero_()
        nn.init.constant_(module.net[0].bias, 0.125)
        module.net[0].weight[0] = 0.5


def freeze_late(trainer, module):
    if trainer.current_epoch == 1:
        module.net[0].requires_grad_(False)


def clamp(trainer, module, *_):
    for p in module.parameters():
        p.data.clamp_(-0.25, 0.25)


def look_before_step(trainer, module, optimizer):
    """In the hook that is made for it: fp32 and unscaled."""
    total = torch.stack([p.grad.norm() for p in module.parameters()]).norm().item()
    module.facts["unscaled"] = 0 < total < 20
    module.facts["dtypes"] = {p.grad.dtype for p in module.parameters()}


def look_after_backward(trainer, module):
    """Where gradients are scaled, as under mixed precision, but there."""
    module.facts["there"] = all(p.grad is not None and p.grad.shape == p.shape for p in module.parameters())


def ask(trainer, module, *_):
    module.eval()
    with torch.no_grad():
        module.facts["says"] = module(ONES).dtype
    module.train()


def write_as_vector(trainer, module):
    """All weights as one vector, changed and written back (SWAG, evolution): each becomes a view of it."""
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, module.parameters())


def pruning(self):
    layers = [(self.net[0], "weight"), (self.net[2], "weight")]
    return callbacks.ModelPruning("l1_unstructured", layers, amount=0.25, use_lottery_ticket_hypothesis=True)


ROWS = {
    # what is read back from a file in a callback, a part in the module's own hook, a copy after each step
    "SavesStateDict": called(_Saves, on_train_epoch_end=through_a_file),
    "SavesPart": row(
        _Saves,
        on_train_epoch_end=lambda self: self.keep({f"net.{n}": v.clone() for n, v in self.net.state_dict().items()}),
    ),
    "SavesInStep": called(
        _Saves,
        on_train_batch_end=lambda t, module, *_: module.keep(copy.deepcopy(module.net.state_dict(prefix="net."))),
    ),
    # `copy.deepcopy` in a callback, and a call of the copy: best weights, a model to serve, a momentum model
    "CopiesModule": called(_Saves, on_train_epoch_end=copy_module),
    "RestoresBest": called(
        on_train_batch_end=keep_best, on_train_end=lambda trainer, module: module.net.load_state_dict(module.best)
    ),
    "LoadsInFit": called(on_fit_start=keep_first, on_train_epoch_end=reset_once, attributes={"falls_to": 0.8}),
    "Reinitialises": called(on_train_epoch_start=reinitialise),
    "Ema": shipped(lambda: callbacks.EMAWeightAveraging(decay=0.8)),
    "Swa": shipped(
        lambda: callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1), epochs=4
    ),
    "Averages": shipped(callbacks.WeightAveraging),
    "Prunes": shipped(  # all weights of all layers; masks are made in the fit
        lambda: callbacks.ModelPruning("l1_unstructured", amount=0.25, use_lottery_ticket_hypothesis=False),
        epochs=4,
        roundings=16,  # which of two weights of nearly one size is cut off
    ),
    # The weights go back to their first values after each pruning. On a CPU in fp32 they do so once: from then on
    # Lightning's copy of the first values is the weights' own memory. Half-precision weights have memory of their own,
    # as all have on a GPU.
    "PrunesLottery": row(configure_callbacks=pruning, epochs=4, falls_to=0.8, different=dict.fromkeys(HALF, "rank")),
    "FreezesLater": called(on_train_epoch_start=freeze_late, attributes={"find_unused": True}),
    "AccumulationChanges": shipped(lambda: callbacks.GradientAccumulationScheduler({0: 1, 1: 2, 3: 4}), epochs=4),
    "WatchesRate": shipped(lambda: [callbacks.TQDMProgressBar(refresh_rate=0), callbacks.Timer()]),
    "ClampsAll": called(on_train_batch_end=clamp, attributes={"falls_to": 0.95}),  # WGAN, for all weights
    "LooksAtGradients": called(on_before_optimizer_step=look_before_step),
    "LooksAfterBackward": called(on_after_backward=look_after_backward),
    "PredictsInFit": called(on_train_batch_end=ask),
    "WritesAsVector": called(on_train_epoch_end=write_as_vector),
}


class Freezes(Row):
    """A backbone that is unfrozen later: on one rank only, as Lightning's `ddp` averages nothing of it."""

    worlds, epochs = (1,), 4
    parts = {
        "backbone": lambda: nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.ReLU()),
        "net": lambda: nn.Linear(16, NUM_CLASSES),
    }

    def forward(self, x):
        return self.net(self.backbone(x))

    def configure_optimizers(self):
        return optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)

    def configure_callbacks(self):
        return callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=2)


class StopsEarly(Row):
    epochs = 6

    def configure_callbacks(self):
        return callbacks.EarlyStopping("loss", patience=1, stopping_threshold=0.25, mode="min")

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


class Predicts(Row):
    """After the fit: `predict`, whose outputs have autocast's dtype as under mixed precision, and the module itself."""

    settings = {"inference_mode": True}

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def after_fit(self):
        self.facts["module says"] = self(ONES).dtype
        said = self.trainer.predict(self, toy.loader(16, batch_size=4))[0].float()
        first = torch.arange(4) * self.trainer.world_size + self.global_rank
        apart = (said - self(samples().images[first])).abs().max().item()
        self.facts["predict says what the module says"] = apart < 0.1  # logits of up to 6: bf16 rounds at 2**-8
        self.facts["module says afterwards"] = self(ONES).dtype


class Distils(Row):
    """A teacher outside of the module, held by a callback, and fp32 for good."""

    def on_fit_start(self):
        torch.manual_seed(3)
        self.__dict__["teacher"] = nn.Linear(NUM_FEATURES, NUM_CLASSES).requires_grad_(False)

    def loss(self, batch):
        with torch.no_grad():
            target = self.teacher(batch[0]).float().softmax(-1)
        return super().loss(batch) + 0.1 * F.kl_div(self(batch[0]).log_softmax(-1), target, reduction="batchmean")


class Checkpoints(Row):
    """Lightning's checkpoint of the last step loads into a fresh module: fp32, and the weights of the module."""

    settings = {"enable_checkpointing": True}

    def configure_callbacks(self):
        directory = tempfile.mkdtemp() if self.trainer.is_global_zero else ""
        return callbacks.ModelCheckpoint(self.trainer.strategy.broadcast(directory), save_last=True)

    def after_fit(self):
        path = self.trainer.strategy.broadcast(self.trainer.checkpoint_callback.last_model_path)
        state = torch.load(path, weights_only=True)["state_dict"]
        self.facts["saved"] = digits(state)
        self.facts["is the module"] = all(torch.equal(state[n], v) for n, v in self.state_dict().items())
