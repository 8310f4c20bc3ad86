"""Training loops: automatic ones with Lightning's options, and manual ones."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn, optim

from tests.battery.case import Manual, Row, row
from tests.toy import NUM_FEATURES

CLIPS = {"gradient_clip_val": 0.1}
ROWS = {
    "Accumulates": row(settings={"accumulate_grad_batches": 2}),
    # The last step of an epoch has fewer batches.
    "AccumulatesUnevenly": row(settings={"accumulate_grad_batches": 3}, epochs=5),
    "ClipsNorm": row(settings=CLIPS, lr=0.3),
    "ClipsValue": row(
        settings={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, lr=0.3
    ),
    "ClipsAndAccumulates": row(settings=CLIPS | {"accumulate_grad_batches": 2}, lr=0.5, epochs=5),
    "ClipsByOwnHook": row(
        configure_gradient_clipping=lambda self, optimizer, *_, **__: self.clip_gradients(
            optimizer, 0.1, "norm"
        ),
        lr=0.3,
    ),
    "ByHand": row(Manual),
}


def total_norm(self):
    return torch.stack([p.grad.float().norm() for p in self.parameters()]).norm()


class TensorHooks(Row):
    """Module with a tensor hook that halves the gradient of a weight, which is scaled as under mixed precision."""

    def build(self):
        super().build()
        self.net[0].weight.register_hook(lambda gradient: gradient * 0.5)


class GradientPenalty(Row):
    def loss(self, batch):
        x, y = batch
        x = x.float().requires_grad_()
        logits = self(x)
        (gradient,) = torch.autograd.grad(logits.float().sum(), x, create_graph=True)
        return F.cross_entropy(logits, y) + 0.1 * (gradient.norm(dim=1) - 1).square().mean()


class _InTurns(Manual):
    """Manual loop with a step after every `every` backward passes. Rows change gradients before the step."""

    # With `waits`, ranks average only in the last backward pass of a step.
    every = 1
    uses_wrapper = True
    waits = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=self.uses_wrapper)
        is_last = (batch_idx + 1) % self.every == 0
        with (
            self.trainer.strategy.block_backward_sync()
            if self.waits and not is_last
            else nullcontext()
        ):
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

    def normalize(self, optimizer):
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


def in_turns(before_step=_InTurns.before_step, **special):
    return row(_InTurns, before_step=before_step, **special)


def clips(how):
    return in_turns(how, after_each_backward=_InTurns.note_dtypes, lr=0.3)


TWICE = {"every": 2, "lr": 0.5, "epochs": 5}
ROWS |= {
    "ByHandClips": clips(_InTurns.clip_by_lightning),
    "ByHandClipsValue": clips(_InTurns.clip_values_by_lightning),
    "ByHandTorchClips": clips(_InTurns.clip_by_torch),
    "ByHandChangesGradients": clips(_InTurns.normalize),
    "ByHandAccumulates": in_turns(every=2),
    "ByHandAccumulatesAndClips": in_turns(_InTurns.clip_by_lightning, **TWICE),
    # Reads gradients after each backward pass.
    "ByHandLooksAndAccumulates": in_turns(every=2, after_each_backward=_InTurns.look),
    "ByHandNoSync": in_turns(every=2, waits=True),
    "ByHandNoSyncAndClips": in_turns(_InTurns.clip_by_torch, waits=True, **TWICE),
    "ByHandRaw": in_turns(uses_wrapper=False),  # torch's optimizer without Lightning's wrapper
}


class GanToggles(Manual):
    """Generator that learns to match the mean of the data. The distance from the mean is recorded."""

    epochs = 6
    find_unused = True
    roundings = (
        24  # Adam divides by small gradients of two players; the distance is a difference of means
    )
    parts = {
        "generator": lambda: nn.Linear(4, NUM_FEATURES),
        "critic": lambda: nn.Sequential(
            nn.Linear(NUM_FEATURES, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)
        ),
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

    def training_step(self, batch, batch_idx):
        real = batch[0]
        (for_generator, for_critic) = self.optimizers()
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
