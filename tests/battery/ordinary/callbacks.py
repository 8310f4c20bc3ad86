"""Callbacks that copy, save, average, prune, freeze and cut, and what is asked of the model outside of a step."""

from __future__ import annotations

import copy
import io

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch import callbacks
from torch import nn, optim

from tests import toy
from tests.battery.ordinary.case import HALF, Row, samples
from tests.toy import NUM_CLASSES, NUM_FEATURES


class _With(Row):
    """A row of what `made()` makes."""

    def made(self):
        raise NotImplementedError

    def configure_callbacks(self):
        made = self.made()
        return made if isinstance(made, list) else [made]


def digits(state):
    """Dtypes, and whether some value has more digits than a bf16 or an fp16."""
    some = [t for t in state.values() if t.is_floating_point()]
    return {t.dtype for t in some}, any(not torch.equal(t.half().float(), t.float()) for t in some)


class SavesStateDict(_With):
    """`torch.save(module.state_dict())` in a callback; what is read back is what the module has when training ends."""

    class _Saves(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            file = io.BytesIO()
            torch.save(module.state_dict(), file)
            file.seek(0)
            module.saved = torch.load(file)
            module.facts["saved"] = digits(module.saved)

    def made(self):
        return self._Saves()

    def after_fit(self):
        state = self.state_dict()
        self.facts["saved is the module"] = all(torch.equal(self.saved[n], state[n]) for n in state)


class SavesPart(SavesStateDict):
    """The backbone only, in the module's own hook."""

    def made(self):
        return []

    def on_train_epoch_end(self):
        self.saved = {f"net.{n}": v.clone() for n, v in self.net.state_dict().items()}
        self.facts["saved"] = digits(self.saved)


class SavesInStep(SavesStateDict):
    class _Saves(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            module.saved = copy.deepcopy(module.net.state_dict(prefix="net."))
            module.facts["saved"] = digits(module.saved)


class CopiesModule(_With):
    """`copy.deepcopy` in a callback, and a call of the copy: best weights, a model to serve, a momentum model."""

    class _Copies(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            module.copies = [copy.deepcopy(module.net)]
            module.facts["copied"] = digits(module.copies[0].state_dict())
            module.facts["says"] = module.copies[0](torch.ones(2, NUM_FEATURES)).dtype

    def made(self):
        return self._Copies()

    def after_fit(self):
        ours, copied = self.net.state_dict(), self.copies[0].state_dict()
        self.facts["copy is the module"] = all(torch.equal(ours[n], copied[n]) for n in ours)


class RestoresBest(_With):
    """Keeps the best weights by hand and loads them when training ends."""

    class _Best(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if module.losses[-1] == min(module.losses):
                self.best = {n: v.detach().clone() for n, v in module.net.state_dict().items()}

        def on_train_end(self, trainer, module):
            module.net.load_state_dict(self.best)

    def made(self):
        return self._Best()


class LoadsInFit(_With):
    """Goes back to the weights of the beginning after the first epoch."""

    falls_to = 0.8

    class _Resets(pl.Callback):
        def on_fit_start(self, trainer, module):
            self.first = copy.deepcopy(module.state_dict())

        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 0:
                module.load_state_dict(self.first)

    def made(self):
        return self._Resets()


class Reinitialises(_With):
    """Sets some weights anew in the fit."""

    class _Resets(pl.Callback):
        def on_train_epoch_start(self, trainer, module):
            with torch.no_grad():
                module.net[2].bias.zero_()
                nn.init.constant_(module.net[0].bias, 0.125)
                module.net[0].weight[0] = 0.5

    def made(self):
        return self._Resets()


class Ema(_With):
    def made(self):
        return callbacks.EMAWeightAveraging(decay=0.8)


class Swa(_With):
    epochs = 4

    def made(self):
        return callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1)


class Averages(_With):
    """Lightning's own base class, with torch's plain average."""

    def made(self):
        return callbacks.WeightAveraging()


class Prunes(_With):
    """All weights of all layers; masks are made in the fit."""

    epochs = 4
    roundings = 16  # which of two weights of nearly one size is cut off

    def made(self):
        return callbacks.ModelPruning("l1_unstructured", amount=0.25, use_lottery_ticket_hypothesis=False)


class PrunesLottery(_With):
    """The weights go back to their first values after each pruning. On a CPU in fp32 they do so once: from then on
    Lightning's copy of the first values is the weights' own memory. Half-precision weights have memory of their own, as
    all have on a GPU."""

    epochs = 4
    different = dict.fromkeys(HALF, "rank")

    def made(self):
        layers = [(self.net[0], "weight"), (self.net[2], "weight")]
        return callbacks.ModelPruning("l1_unstructured", layers, amount=0.25, use_lottery_ticket_hypothesis=True)

    falls_to = 0.8


class Freezes(_With):
    """A backbone that is unfrozen later: on one rank only, as Lightning's `ddp` averages nothing of it."""

    worlds = (1,)
    epochs = 4

    class _Unfreezes(callbacks.BackboneFinetuning):
        pass

    def build(self):
        self.backbone = nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.ReLU())
        self.net = nn.Linear(16, NUM_CLASSES)

    def forward(self, x):
        return self.net(self.backbone(x))

    def configure_optimizers(self):
        return optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)

    def made(self):
        return self._Unfreezes(unfreeze_backbone_at_epoch=2)


class FreezesLater(_With):
    """The other way: a layer is frozen after an epoch."""

    find_unused = True

    class _FreezesFirst(pl.Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 1:
                module.net[0].requires_grad_(False)

    def made(self):
        return self._FreezesFirst()


class AccumulationChanges(_With):
    epochs = 4

    def made(self):
        return callbacks.GradientAccumulationScheduler({0: 1, 1: 2, 3: 4})


class StopsEarly(_With):
    epochs = 6

    def made(self):
        return callbacks.EarlyStopping("loss", patience=1, stopping_threshold=0.25, mode="min")

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


class WatchesRate(_With):
    """Lightning's monitors."""

    def made(self):
        return [callbacks.TQDMProgressBar(refresh_rate=0), callbacks.Timer()]


class ClampsAll(_With):
    """WGAN, in a callback, for all weights."""

    falls_to = 0.95

    class _Clamps(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            for p in module.parameters():
                p.data.clamp_(-0.25, 0.25)

    def made(self):
        return self._Clamps()


class LooksAtGradients(_With):
    """In the hook that is made for it: fp32 and unscaled."""

    class _Looks(pl.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            total = torch.stack([p.grad.norm() for p in module.parameters()]).norm().item()
            module.facts["unscaled"] = 0 < total < 20
            module.facts["dtypes"] = {p.grad.dtype for p in module.parameters()}

    def made(self):
        return self._Looks()


class LooksAfterBackward(_With):
    """Where gradients are scaled, as under mixed precision, but there."""

    class _Looks(pl.Callback):
        def on_after_backward(self, trainer, module):
            module.facts["there"] = all(p.grad is not None and p.grad.shape == p.shape for p in module.parameters())

    def made(self):
        return self._Looks()


class Predicts(Row):
    """After the fit: `predict`, whose outputs have autocast's dtype as under mixed precision, and the module itself."""

    settings = {"inference_mode": True}

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def after_fit(self):
        self.facts["module says"] = self(torch.ones(2, NUM_FEATURES)).dtype
        said = self.trainer.predict(self, toy.loader(16, batch_size=4))[0].float()
        first = torch.arange(4) * self.trainer.world_size + self.global_rank
        apart = (said - self(samples().images[first])).abs().max().item()
        self.facts["predict says what the module says"] = apart < 0.1  # logits of up to 6: bf16 rounds at 2**-8
        self.facts["module says afterwards"] = self(torch.ones(2, NUM_FEATURES)).dtype


class PredictsInFit(_With):
    """A callback that asks the module in the middle of training."""

    class _Asks(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            module.eval()
            with torch.no_grad():
                module.facts["says"] = module(torch.ones(2, NUM_FEATURES)).dtype
            module.train()

    def made(self):
        return self._Asks()


class Distils(_With):
    """A teacher outside of the module, held by a callback, and fp32 for good."""

    class _Teacher(pl.Callback):
        def on_fit_start(self, trainer, module):
            torch.manual_seed(3)
            module.__dict__["teacher"] = nn.Linear(NUM_FEATURES, NUM_CLASSES).requires_grad_(False)

    def made(self):
        return self._Teacher()

    def loss(self, batch):
        with torch.no_grad():
            target = self.teacher(batch[0]).float().softmax(-1)
        return super().loss(batch) + 0.1 * F.kl_div(self(batch[0]).log_softmax(-1), target, reduction="batchmean")


class Checkpoints(_With):
    """Lightning's checkpoint of the last step loads into a fresh module: fp32, and the weights of the module."""

    settings = {"enable_checkpointing": True}

    def made(self):
        import tempfile

        directory = tempfile.mkdtemp() if self.trainer.is_global_zero else ""
        return callbacks.ModelCheckpoint(self.trainer.strategy.broadcast(directory), save_last=True)

    def after_fit(self):
        path = self.trainer.strategy.broadcast(self.trainer.checkpoint_callback.last_model_path)
        state = torch.load(path, weights_only=True)["state_dict"]
        self.facts["saved"] = digits(state)
        self.facts["is the module"] = all(torch.equal(state[n], v) for n, v in self.state_dict().items())


class WritesAsVector(_With):
    """All weights as one vector, changed and written back (SWAG, evolution): each becomes a view of it."""

    class _Writes(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            vector = nn.utils.parameters_to_vector(module.parameters())
            nn.utils.vector_to_parameters(vector * 0.9, module.parameters())

    def made(self):
        return self._Writes()
