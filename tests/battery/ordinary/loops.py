"""Loops: automatic ones with what Lightning adds to them, and ones by hand."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn, optim

from tests import toy
from tests.battery.ordinary.case import Manual, Row
from tests.toy import NUM_CLASSES, NUM_FEATURES


class Accumulates(Row):
    settings = {"accumulate_grad_batches": 2}


class AccumulatesUnevenly(Row):
    """The last step of an epoch has fewer batches."""

    settings = {"accumulate_grad_batches": 3}
    epochs = 5


class ClipsNorm(Row):
    settings = {"gradient_clip_val": 0.1}
    lr = 0.3


class ClipsValue(Row):
    settings = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    lr = 0.3


class ClipsAndAccumulates(Row):
    settings = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    lr, epochs = 0.5, 5


class ClipsByOwnHook(Row):
    lr = 0.3

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class NoisyGradients(Row):
    """Gradients are changed in a hook, unscaled: noise, and none below a size."""

    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            p.grad.add_(1e-3 * torch.ones_like(p.grad))
        self.facts["dtypes"] = {p.grad.dtype for p in self.parameters()}


class GradientNorms(Row):
    """Logged by Lightning's own helper."""

    def on_before_optimizer_step(self, optimizer):
        norms = lightning_norms(self.net)
        self.facts["norms are of unscaled gradients"] = 0 < norms["grad_2.0_norm_total"] < 20


def lightning_norms(module):
    from lightning.pytorch.utilities import grad_norm

    return grad_norm(module, norm_type=2)


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

    def build(self):
        super().build()
        self.other, self.never = nn.Linear(NUM_FEATURES, NUM_CLASSES), nn.Linear(2, 2)

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self(x) if self.trainer.global_step % 2 else self(x) + self.other(x), y)


# ---- by hand -------------------------------------------------------------------------------------------------------


SCALED = {"16-mixed": "gap"}
"""Lightning's mixed precision unscales in `optimizer.step` at the earliest: what comes before sees, and clips,
gradients times the scale, and learns nothing. A raw optimizer steps with them."""


class ByHand(Manual):
    pass


class ByHandWithClosure(Manual):
    def training_step(self, batch, batch_idx):
        def closure():
            optimizer.zero_grad()
            loss = self.note(self.loss(batch))
            self.manual_backward(loss)
            return loss

        optimizer = self.optimizers()
        optimizer.step(closure=closure)


class _Clips(Manual):
    lr = 0.3
    mixed_fails = SCALED

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.note(self.loss(batch)))
        self.facts["dtypes"] = {p.grad.dtype for p in self.parameters()}
        self.clip(optimizer)
        optimizer.step()


class ByHandClips(_Clips):
    def clip(self, optimizer):
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class ByHandClipsValue(_Clips):
    def clip(self, optimizer):
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")


class ByHandTorchClips(_Clips):
    def clip(self, optimizer):
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        self.facts["norm is of unscaled gradients"] = 0 < norm.item() < 20


class ByHandTorchClipsValue(_Clips):
    def clip(self, optimizer):
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.01)


class ByHandChangesGradients(_Clips):
    """Normalised by hand, in place and by assignment."""

    def clip(self, optimizer):
        total = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
        for i, p in enumerate(self.parameters()):
            if i % 2:
                p.grad = p.grad / (1 + total)
            else:
                p.grad.div_(1 + total)


class ByHandAccumulates(Manual):
    """Two backwards a step."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.note(self.loss(batch)) / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class ByHandAccumulatesAndClips(ByHandAccumulates):
    lr, epochs = 0.5, 5
    mixed_fails = SCALED

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.note(self.loss(batch)) / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


class ByHandLooksAndAccumulates(ByHandAccumulates):
    """Looks at gradients after each backward, not at the end only."""

    mixed_fails = {"16-mixed": "norm is of unscaled gradients is False"}

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.note(self.loss(batch)) / 2)
        norm = torch.stack([p.grad.float().norm() for p in self.parameters()]).norm()
        self.facts["norm is of unscaled gradients"] = 0 < norm.item() < 20
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class ByHandNoSync(Manual):
    """Averaged over ranks in the last batch of a step only."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        is_last = batch_idx % 2 == 1
        with nullcontext() if is_last else self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.note(self.loss(batch)) / 2)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


class ByHandNoSyncAndClips(Manual):
    lr, epochs = 0.5, 5
    mixed_fails = SCALED

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        is_last = batch_idx % 2 == 1
        with nullcontext() if is_last else self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.note(self.loss(batch)) / 2)
        if is_last:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


class ByHandTwoBackwardsInABatch(Manual):
    """Half a batch each."""

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

    worlds = (1,)


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


class ByHandRaw(Manual):
    """Torch's own optimizer, not Lightning's wrapper."""

    mixed_fails = SCALED

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.note(self.loss(batch)))
        optimizer.step()


class ByHandRawAndClips(Manual):
    lr = 0.3

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.note(self.loss(batch)))
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        optimizer.step()


class _Two(Manual):
    """Two parts with an optimizer each."""

    epochs = 5

    def build(self):
        super().build()
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def configure_optimizers(self):
        return optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9), optim.Adam(self.head.parameters(), lr=1e-2)


class TwoOptimizers(_Two):
    """Both losses, then both steps."""

    def training_step(self, batch, batch_idx):
        one, other = self.optimizers()
        one.zero_grad()
        other.zero_grad()
        self.manual_backward(self.note(self.loss(batch) + F.cross_entropy(self.head(batch[0]), batch[1])))
        one.step()
        other.step()


class TwoOptimizersAlternate(_Two):
    """One in even batches, the other in odd ones; what the one at rest collects is dropped."""

    def training_step(self, batch, batch_idx):
        loss = self.note(self.loss(batch) + F.cross_entropy(self.head(batch[0]), batch[1]))
        self.manual_backward(loss)
        self.optimizers()[batch_idx % 2].step()
        for optimizer in self.optimizers():
            optimizer.zero_grad()


class TwoOptimizersAndClips(_Two):
    mixed_fails = SCALED

    def training_step(self, batch, batch_idx):
        one, other = self.optimizers()
        self.manual_backward(self.note(self.loss(batch) + F.cross_entropy(self.head(batch[0]), batch[1])))
        self.clip_gradients(one, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        one.step()
        one.zero_grad()
        self.clip_gradients(other, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        other.step()
        other.zero_grad()


class _Gan(Manual):
    """A generator that is to match the mean of the data; what is noted is how far it is from it."""

    epochs = 6
    roundings = 24  # Adam divides by gradients that two players make small; the distance is a difference of means

    def build(self):
        self.generator = nn.Linear(4, NUM_FEATURES)
        self.critic = nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def configure_optimizers(self):
        return (
            optim.Adam(self.generator.parameters(), lr=3e-2, betas=(0.5, 0.9)),
            optim.Adam(self.critic.parameters(), lr=1e-2, betas=(0.5, 0.9), eps=1e-3),
        )

    def fake(self, batch_idx):
        return self.generator(torch.randn(8, 4, generator=torch.Generator().manual_seed(batch_idx)))

    def loss_of_critic(self, real, fake):
        told = self.critic(torch.cat([real, fake.to(real.dtype)]))[:, 0]
        return F.binary_cross_entropy_with_logits(told, (torch.arange(16) < 8).to(told.dtype))

    def loss_of_generator(self, fake):
        told = self.critic(fake)[:, 0]
        return F.binary_cross_entropy_with_logits(told, torch.ones_like(told))

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

    find_unused = True


class GanDoesNotToggle(_Gan):
    """`zero_grad` before each backward takes away what the other's loss left."""

    find_unused = True

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

    @torch.no_grad()
    def first_step(self):
        norms = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        for group in self.param_groups:
            scale = group["rho"] / (torch.stack(norms).norm() + 1e-12)
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * scale.to(p))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
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
