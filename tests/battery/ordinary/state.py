"""What a model writes beside its optimizer: counters, averages, teachers, buffers made on the way."""

from __future__ import annotations

import copy
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchmetrics import MeanMetric, SumMetric

from tests.battery.ordinary.case import HALF, HALF_SHOWS, Row
from tests.toy import NUM_CLASSES, NUM_FEATURES


class Counter(Row):
    """Counts images in floating point, past what half precision can count to (256 in bf16, 2,048 in fp16)."""

    def build(self):
        super().build()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("steps", torch.tensor(2040.0))

    def training_step(self, batch, batch_idx):
        self.count += 100.25
        self.steps.add_(1)
        return super().training_step(batch, batch_idx)

    def after_fit(self):
        self.facts["counters"] = (self.count.item(), self.steps.item(), self.count.dtype)


class AssignedBuffers(Row):
    """Assigned, not written: `self.count = self.count + 1`; and first of all made in the fit."""

    def build(self):
        super().build()
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.count = self.count + 100.25
        if batch_idx == 0:
            self.register_buffer("late", torch.full((2,), 1.0 + 2.0**-20))
            self.plain = torch.full((2,), 3.0 + 2.0**-18)
        return super().training_step(batch, batch_idx)

    def after_fit(self):
        self.facts["buffers"] = [(t.dtype, t.tolist()) for t in (self.count, self.late, self.plain)]


class EmaBuffer(Row):
    """A slow mean of what comes in: from the first batch on it moves by less than a bf16 can say."""

    def build(self):
        super().build()
        self.register_buffer("mean", torch.full((NUM_FEATURES,), 100.0))

    def training_step(self, batch, batch_idx):
        self.mean.mul_(0.9999).add_(batch[0].mean(0), alpha=1e-4)
        return super().training_step(batch, batch_idx)

    def after_fit(self):
        self.facts["mean"] = self.mean.tolist()


class RunningNormaliser(Row):
    """Inputs less their running mean, by their running deviation (reinforcement learning)."""

    def build(self):
        super().build()
        self.register_buffer("mean", torch.zeros(NUM_FEATURES))
        self.register_buffer("var", torch.ones(NUM_FEATURES))
        self.register_buffer("count", torch.tensor(1e-4))

    def forward(self, x):
        with torch.no_grad():
            n, delta = len(x), x.mean(0) - self.mean
            total = self.count + n
            self.var = (self.var * self.count + x.var(0) * n + delta**2 * self.count * n / total) / total
            self.mean = self.mean + delta * n / total
            self.count = total
        return self.net((x - self.mean) / self.var.sqrt())


class Codebook(Row):
    """Vector quantisation with a codebook by exponential averages, in buffers, and a straight-through gradient."""

    def build(self):
        super().build()
        self.register_buffer("codes", torch.randn(8, 16))
        self.register_buffer("sums", self.codes.clone())
        self.register_buffer("sizes", torch.ones(8))

    def forward(self, x):
        z = self.net[:2](x)
        nearest = torch.cdist(z.detach().float(), self.codes).argmin(-1)
        with torch.no_grad():
            hits = F.one_hot(nearest, 8).type(z.dtype)
            self.sizes.mul_(0.99).add_(hits.sum(0), alpha=0.01)
            self.sums.mul_(0.99).add_(hits.t() @ z, alpha=0.01)
            self.codes.copy_(self.sums / self.sizes.unsqueeze(1).clamp(min=1e-2))
        return self.net[2](z + 0.1 * (self.codes[nearest] - z).detach())


class ClassCentres(Row):
    """Written by index, as a queue or a memory bank is."""

    def build(self):
        super().build()
        self.register_buffer("bank", torch.zeros(64, NUM_CLASSES))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def loss(self, batch):
        x, y = batch
        logits = self(x)
        at = (torch.arange(len(x)) + self.place) % 64
        self.bank[at] = logits.detach().float()
        self.place += len(x)
        return F.cross_entropy(logits, y) + 1e-3 * (logits.float() @ self.bank.t()).square().mean()


class CachedTable(Row):
    """A table of sines, made in the first forward and kept as an attribute."""

    table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.sin(torch.arange(NUM_FEATURES, dtype=x.dtype, device=x.device))
        return self.net(x + self.table)


# ---- teachers ------------------------------------------------------------------------------------------------------


class _Teacher(Row):
    """A frozen copy that follows the student slowly; the student is also trained to agree with it.

    A shadow in float64 says how the teacher should have moved.
    """

    momentum = 0.996

    def build(self):
        super().build()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.shadow = None
        with torch.no_grad():
            for p in self.teacher.parameters():
                p.add_(0.25 * torch.randn_like(p))

    def pairs(self):
        return list(zip(self.teacher.parameters(), self.net.parameters(), strict=True))

    def loss(self, batch):
        x, y = batch
        with torch.no_grad():
            target = self.teacher(x).softmax(-1)
        logits = self(x)
        return F.cross_entropy(logits, y) + 0.1 * F.kl_div(logits.log_softmax(-1), target, reduction="batchmean")

    def training_step(self, batch, batch_idx):
        self.shadow = self.shadow or [t.detach().double() for t, _ in self.pairs()]
        self.shadow = [
            s * self.momentum + p.detach().double() * (1 - self.momentum)
            for s, (_, p) in zip(self.shadow, self.pairs(), strict=True)
        ]
        with torch.no_grad():
            self.follow()
        return super().training_step(batch, batch_idx)

    def after_fit(self):
        gap = max(
            float((t - s).abs().max() / s.abs().max()) for (t, _), s in zip(self.pairs(), self.shadow, strict=True)
        )
        self.facts["teacher moved as it should, to 1e-5"] = gap < 1e-5
        self.facts["dtypes"] = {t.dtype for t, _ in self.pairs()}


class Byol(_Teacher):
    different: ClassVar = {"bf16-true": "teacher moved as it should"}  # it reads half-precision students

    def follow(self):
        for t, s in self.pairs():
            t.data = t.data * self.momentum + s.data * (1 - self.momentum)


class Moco(_Teacher):
    def follow(self):
        for t, s in self.pairs():
            t.data.mul_(self.momentum).add_(s.data, alpha=1 - self.momentum)


class MeanTeacher(_Teacher):
    different: ClassVar = {"bf16-true": "teacher moved as it should"}

    def follow(self):
        for t, s in self.pairs():
            t.copy_(t * self.momentum + s * (1 - self.momentum))


class TeacherByLerp(_Teacher):
    """timm's way."""

    refused = HALF_SHOWS

    def follow(self):
        for t, s in self.pairs():
            t.lerp_(s, 1 - self.momentum)


class TeacherByForeach(_Teacher):
    def follow(self):
        teachers, students = (list(side) for side in zip(*self.pairs(), strict=True))
        torch._foreach_mul_(teachers, self.momentum)
        torch._foreach_add_(teachers, students, alpha=1 - self.momentum)


class Dino(Row):
    """A teacher moved in a hook after each step, and the centre of what it says."""

    def build(self):
        super().build()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, NUM_CLASSES))

    def loss(self, batch):
        x, y = batch
        with torch.no_grad():
            said = self.teacher(x)
            self.center = self.center * 0.99 + said.mean(0, keepdim=True) * 0.01
            target = F.softmax(said - self.center, dim=-1)
        logits = self(x)
        return F.cross_entropy(logits, y) - 0.1 * (target * F.log_softmax(logits, dim=-1)).sum(-1).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for t, s in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                t.data.mul_(0.996).add_(s.detach().data, alpha=0.004)


class TargetNetwork(Row):
    """Copied now and then, by its state."""

    def build(self):
        super().build()
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self(x), y) + 0.1 * F.mse_loss(self(x), self.target(x).detach())

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx % 2 == 0:
            self.target.load_state_dict(self.net.state_dict())


class AveragedInside(Row):
    """torch's own averaged model as a part of the module."""

    refused = HALF_SHOWS

    def build(self):
        super().build()
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9)).requires_grad_(False)

    def on_before_zero_grad(self, optimizer):
        self.average.update_parameters(self.net)


class LateTeacher(Row):
    """Made when the fit starts, outside of the module's list of parts."""

    def on_fit_start(self):
        self.copies = [copy.deepcopy(self.net)]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for t, s in zip(self.copies[0].parameters(), self.net.parameters(), strict=True):
                t.mul_(0.9).add_(s, alpha=0.1)

    def loss(self, batch):
        x, _ = batch
        with torch.no_grad():
            target = self.copies[0](x).float()
        return super().loss(batch) + 0.1 * F.mse_loss(self(x), target)


class Samples(Row):
    """Calls itself between epochs, as one does to draw samples or to look at a fixed batch."""

    def on_train_epoch_end(self):
        with torch.no_grad():
            said = self(torch.ones(2, NUM_FEATURES))
        self.facts.setdefault("dtypes", []).append(said.dtype)
        self.facts.setdefault("finite", []).append(bool(said.isfinite().all()))


class SamplesInHooks(Samples):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.on_train_epoch_end()

    def on_train_epoch_start(self):
        self.on_train_epoch_end()


class LooksAtWeights(Row):
    """Histograms, NumPy, and norms of weights: what monitoring reads."""

    refused: ClassVar = {"bf16-true": HALF_SHOWS["bf16-true"]}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.facts["sizes"] = [torch.histc(p.detach().float(), 4).numel() for p in self.parameters()]
        self.facts["numpy"] = [p.detach().numpy().shape for p in self.parameters()]
        self.facts["finite"] = bool(torch.stack([p.detach().norm() for p in self.parameters()]).isfinite().all())


class WeightClamp(Row):
    """WGAN: weights are cut off after each step."""

    falls_to = 0.95

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for p in self.net[0].parameters():
            p.data.clamp_(-0.25, 0.25)

    def after_fit(self):
        # What is cut off is the half copy: a master may be above it by less than half a digit of it.
        self.facts["within"] = self.net[0].weight.abs().max().item() <= 0.25 * (1 + 2.0**-8)


class ProjectedWeights(Row):
    """Rows of length one after each step, in `optimizer_step`."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        with torch.no_grad():
            self.net[0].weight.copy_(F.normalize(self.net[0].weight.float(), dim=1))


class SmallWrites(Row):
    """A weight that the user moves by hand, by less than half precision can say at a time."""

    different = dict.fromkeys(HALF, "extra is 1.0, not 0.9976")  # written through half

    def build(self):
        super().build()
        self.extra = nn.Parameter(torch.ones(4))

    def loss(self, batch):
        return super().loss(batch) + 0 * self.extra.sum()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.extra.data.sub_(2e-4)

    def after_fit(self):
        self.facts["extra"] = round(self.extra[0].item(), 4)


class Metrics(Row):
    """torchmetrics as parts of the module: sums beyond what half precision can hold."""

    def build(self):
        super().build()
        self.total, self.mean = SumMetric(), MeanMetric()

    def training_step(self, batch, batch_idx):
        self.total(torch.tensor(100.25))
        self.mean.update(torch.tensor(1e5))
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.facts["total"] = (self.total.compute().item(), self.mean.compute().item())
