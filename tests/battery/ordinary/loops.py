"""Loops: automatic ones with what Lightning adds to them, and ones by hand."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import nn, optim

from tests import toy
from tests.battery.case import Manual, Row, row
from tests.toy import NUM_CLASSES, NUM_FEATURES

SCALED = {"16-mixed": "gap"}
"""Lightning's mixed precision unscales in `optimizer.step` at the earliest: what comes before sees, and clips,
gradients times the scale, and learns nothing. A raw optimizer steps with them."""

CLIPS = {"gradient_clip_val": 0.1}
ROWS = {
    "Accumulates": row(settings={"accumulate_grad_batches": 2}),
    "AccumulatesUnevenly": row(settings={"accumulate_grad_batches": 3}, epochs=5),  # less in an epoch's last step
    "ClipsNorm": row(settings=CLIPS, lr=0.3),
    "ClipsValue": row(settings={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, lr=0.3),
    "ClipsAndAccumulates": row(settings=CLIPS | {"accumulate_grad_batches": 2}, lr=0.5, epochs=5),
    "ClipsByOwnHook": row(
        configure_gradient_clipping=lambda self, optimizer, *_, **__: self.clip_gradients(optimizer, 0.1, "norm"),
        lr=0.3,
    ),
    "ByHand": row(Manual),
}


def total_norm(self):
    return torch.stack([p.grad.float().norm() for p in self.parameters()]).norm()


class NoisyGradients(Row):
    """Gradients are changed in a hook, unscaled: noise, and none below a size."""

    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            p.grad.add_(1e-3 * torch.ones_like(p.grad))
        self.facts["dtypes"] = {p.grad.dtype for p in self.parameters()}


class GradientNorms(Row):
    """Logged by Lightning's own helper."""

    def on_before_optimizer_step(self, optimizer):
        norms = grad_norm(self.net, norm_type=2)
        self.facts["norms are of unscaled gradients"] = 0 < norms["grad_2.0_norm_total"] < 20


class TensorHooks(Row):
    """`register_hook` on a weight: what autograd hands over is scaled, as under mixed precision; half of it is."""

    def build(self):
        super().build()
        self.net[0].weight.register_hook(lambda gradient: gradient * 0.5)


class ReturnsNone(Row):
    ignored_warnings = ("`training_step` returned `None`",)
    worlds = (1,)  # Lightning refuses it on more

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else loss


class ReturnsDict(Row):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "more": batch[0]}


class Logs(Row):
    """Logs loss and accuracy, and asks for the epoch's mean."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"loss": loss, "large": 1e6}, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def after_fit(self):
        self.facts["large"] = self.trainer.callback_metrics["large_epoch"].item()


class Validates(Row):
    """A validation loop in the midst of training, which the loss does not feel."""

    def val_dataloader(self):
        return toy.loader(32)

    def validation_step(self, batch, batch_idx):
        self.facts.setdefault("validated", []).append(self(batch[0]).shape)
        return self.loss(batch)


class StepsTwice(Row):
    """`optimizer_step` is the user's: every second batch only, with a warm-up of the rate."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, (self.trainer.global_step + 1) / 4) * self.lr
        optimizer.step(closure=optimizer_closure)


class GradientPenalty(Row):
    """The gradient of the output by the input, in the loss (WGAN-GP)."""

    def loss(self, batch):
        x, y = batch
        x = x.float().requires_grad_()
        logits = self(x)
        (gradient,) = torch.autograd.grad(logits.float().sum(), x, create_graph=True)
        return F.cross_entropy(logits, y) + 0.1 * (gradient.norm(dim=1) - 1).square().mean()


class UnusedParameters(Row):
    find_unused = True
    adds = {"other": lambda: nn.Linear(NUM_FEATURES, NUM_CLASSES), "never": lambda: nn.Linear(2, 2)}

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self(x) if self.trainer.global_step % 2 else self(x) + self.other(x), y)


# ---- by hand -------------------------------------------------------------------------------------------------------


class ByHandWithClosure(Manual):
    def training_step(self, batch, batch_idx):
        def closure():
            optimizer.zero_grad()
            loss = self.note(self.loss(batch))
            self.manual_backward(loss)
            return loss

        optimizer = self.optimizers()
        optimizer.step(closure=closure)


class _InTurns(Manual):
    """A step after every `every` backwards; what a row does to gradients comes before it."""

    every, uses_wrapper, waits = 1, True, False  # the last: ranks average in the last backward of a step only

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=self.uses_wrapper)
        is_last = (batch_idx + 1) % self.every == 0
        with self.trainer.strategy.block_backward_sync() if self.waits and not is_last else nullcontext():
            self.manual_backward(self.note(self.loss(batch)) / self.every)
        self.after_each_backward()
        if is_last:
            self.before_step(optimizer)
            optimizer.step()
            optimizer.zero_grad()

    def after_each_backward(self):
        pass

    def before_step(self, optimizer):
        pass

    def clip_by_torch(self, optimizer):
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        if self.uses_wrapper:
            self.facts["norm is of unscaled gradients"] = 0 < norm.item() < 20

    def clip_by_lightning(self, optimizer):
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def clip_values_by_lightning(self, optimizer):
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")

    def clip_values_by_torch(self, optimizer):
        nn.utils.clip_grad_value_(self.parameters(), 0.01)

    def normalise(self, optimizer):
        """By hand, in place and by assignment."""
        total = total_norm(self)
        for i, p in enumerate(self.parameters()):
            if i % 2:
                p.grad = p.grad / (1 + total)
            else:
                p.grad.div_(1 + total)

    def look(self):
        self.facts["norm is of unscaled gradients"] = 0 < total_norm(self).item() < 20

    def note_dtypes(self):
        self.facts["dtypes"] = {p.grad.dtype for p in self.parameters()}


def in_turns(before_step=_InTurns.before_step, **more):
    return row(_InTurns, before_step=before_step, **more)


def clips(how):
    return in_turns(how, after_each_backward=_InTurns.note_dtypes, lr=0.3, mixed_fails=SCALED)


TWICE = {"every": 2, "lr": 0.5, "epochs": 5, "mixed_fails": SCALED}
ROWS |= {
    "ByHandClips": clips(_InTurns.clip_by_lightning),
    "ByHandClipsValue": clips(_InTurns.clip_values_by_lightning),
    "ByHandTorchClips": clips(_InTurns.clip_by_torch),
    "ByHandTorchClipsValue": clips(_InTurns.clip_values_by_torch),
    "ByHandChangesGradients": clips(_InTurns.normalise),
    "ByHandAccumulates": in_turns(every=2),
    "ByHandAccumulatesAndClips": in_turns(_InTurns.clip_by_lightning, **TWICE),
    "ByHandLooksAndAccumulates": in_turns(  # looks at gradients after each backward, not at the end only
        every=2,
        after_each_backward=_InTurns.look,
        mixed_fails={"16-mixed": "norm is of unscaled gradients is False"},
    ),
    "ByHandNoSync": in_turns(every=2, waits=True),
    "ByHandNoSyncAndClips": in_turns(_InTurns.clip_by_torch, waits=True, **TWICE),
    "ByHandRaw": in_turns(uses_wrapper=False, mixed_fails=SCALED),  # torch's own optimizer, not Lightning's wrapper
    "ByHandRawAndClips": in_turns(_InTurns.clip_by_torch, uses_wrapper=False, lr=0.3),
}


class ByHandTwoBackwardsInABatch(Manual):
    """Half a batch each."""

    worlds = (1,)

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        losses = []
        for part in (slice(0, 4), slice(4, 8)):
            losses.append(self.loss((x[part], y[part])) / 2)
            self.manual_backward(losses[-1])
        self.note(torch.stack(losses).sum())
        optimizer.step()


class ByHandSchedules(Manual):
    """Schedules stepped by hand, one by steps and one by epochs."""

    def configure_optimizers(self):
        optimizer = optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        by_step = optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)
        return [optimizer], [by_step, optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        by_step, by_epoch = self.lr_schedulers()
        by_step.step()
        if self.trainer.is_last_batch:
            by_epoch.step()
        self.facts.setdefault("rates", []).append(round(by_step.get_last_lr()[0], 7))


class _Two(Manual):
    """Two parts with an optimizer each."""

    epochs = 5
    adds = {"head": lambda: nn.Linear(NUM_FEATURES, NUM_CLASSES)}

    def configure_optimizers(self):
        return optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9), optim.Adam(self.head.parameters(), lr=1e-2)

    def both(self, batch):
        return self.note(self.loss(batch) + F.cross_entropy(self.head(batch[0]), batch[1]))


class TwoOptimizers(_Two):
    """Both losses, then both steps."""

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(self.both(batch))
        for optimizer in self.optimizers():
            optimizer.step()


class TwoOptimizersAlternate(_Two):
    """One in even batches, the other in odd ones; what the one at rest collects is dropped."""

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.both(batch))
        self.optimizers()[batch_idx % 2].step()
        for optimizer in self.optimizers():
            optimizer.zero_grad()


class TwoOptimizersAndClips(_Two):
    mixed_fails = SCALED

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.both(batch))
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


class _Gan(Manual):
    """A generator that is to match the mean of the data; what is noted is how far it is from it."""

    epochs, find_unused = 6, True
    roundings = 24  # Adam divides by gradients that two players make small; the distance is a difference of means
    parts = {
        "generator": lambda: nn.Linear(4, NUM_FEATURES),
        "critic": lambda: nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)),
    }

    def configure_optimizers(self):
        generator = optim.Adam(self.generator.parameters(), lr=3e-2, betas=(0.5, 0.9))
        return generator, optim.Adam(self.critic.parameters(), lr=1e-2, betas=(0.5, 0.9), eps=1e-3)

    def fake(self, batch_idx):
        return self.generator(torch.randn(8, 4, generator=torch.Generator().manual_seed(batch_idx)))

    def loss_of_critic(self, real, fake):
        said = self.critic(torch.cat([real, fake.to(real.dtype)]))[:, 0]
        return F.binary_cross_entropy_with_logits(said, (torch.arange(16) < 8).to(said.dtype))

    def loss_of_generator(self, fake):
        said = self.critic(fake)[:, 0]
        return F.binary_cross_entropy_with_logits(said, torch.ones_like(said))

    def note_distance(self, real, fake):
        self.note((fake.detach().float().mean(0) - real.float().mean(0)).square().mean())


class GanToggles(_Gan):
    """As in Lightning's documentation."""

    def training_step(self, batch, batch_idx):
        real, (for_generator, for_critic) = batch[0], self.optimizers()
        self.toggle_optimizer(for_generator)
        fake = self.fake(batch_idx)
        self.manual_backward(self.loss_of_generator(fake))
        for_generator.step()
        for_generator.zero_grad()
        self.untoggle_optimizer(for_generator)
        self.note_distance(real, fake)
        self.toggle_optimizer(for_critic)
        self.manual_backward(self.loss_of_critic(real, self.fake(batch_idx).detach()))
        for_critic.step()
        for_critic.zero_grad()
        self.untoggle_optimizer(for_critic)


class GanDoesNotToggle(_Gan):
    """`zero_grad` before each backward takes away what the other's loss left."""

    def training_step(self, batch, batch_idx):
        real, (for_generator, for_critic) = batch[0], self.optimizers()
        for_critic.zero_grad()
        self.manual_backward(self.loss_of_critic(real, self.fake(batch_idx).detach()))
        for_critic.step()
        for_generator.zero_grad()
        fake = self.fake(batch_idx)
        self.manual_backward(self.loss_of_generator(fake))
        for_generator.step()
        self.note_distance(real, fake)


class GanClips(GanDoesNotToggle):
    """Wasserstein: the critic's weights are cut off, and its gradients."""

    def loss_of_critic(self, real, fake):
        return self.critic(fake).mean() - self.critic(real).mean()

    def loss_of_generator(self, fake):
        return -self.critic(fake).mean()

    def on_train_batch_start(self, batch, batch_idx):
        for p in self.critic.parameters():
            p.data.clamp_(-0.25, 0.25)


# ---- SAM: a step to where it is worst, a gradient there, and back ---------------------------------------------------


class SamByHand(Manual):
    """Stores weights, goes up, comes back, steps (Foret et al. 2020)."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.note(self.loss(batch)))
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
            old = [p.detach().clone() for p in self.parameters()]
            for p in self.parameters():
                p.add_(0.05 * p.grad / (norm + 1e-12))
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for p, before in zip(self.parameters(), old, strict=True):
                p.copy_(before)
        optimizer.step()


class Sam(optim.Optimizer):
    """The one that everybody copies: holds a base optimizer, and old weights in `state`."""

    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    def trained(self):
        return [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for p, _ in self.trained()]).norm()
        for p, group in self.trained():
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * (group["rho"] / (norm + 1e-12)).to(p))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p, _ in self.trained():
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure=None):
        raise NotImplementedError("call first_step and second_step")


class SamClass(Manual):
    mixed_fails = SCALED

    def configure_optimizers(self):
        return Sam(self.parameters(), optim.SGD, lr=self.lr, momentum=0.9)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.manual_backward(self.note(self.loss(batch)))
        optimizer.first_step()
        self.manual_backward(self.loss(batch))
        optimizer.second_step()
