"""Models with state outside of the optimizer: counters, averages, teachers, buffers created during the fit."""

import copy

import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchmetrics import MeanMetric, SumMetric

from tests.battery.case import HALF_SHOWS, Row, row
from tests.battery.ordinary.models import values


def zero():
    return torch.zeros(())


class Counter(Row):
    """Module that counts images in floating point beyond the limits of half precision (256 in bf16, 2,048 in fp16)."""

    adds = {"count": zero, "steps": lambda: torch.tensor(2040.0)}

    def training_step(self, batch, batch_idx):
        self.count += 100.25
        self.steps.add_(1)
        return super().training_step(batch, batch_idx)

    def after_fit(self):
        self.facts["counters"] = (self.count.item(), self.steps.item(), self.count.dtype)


class AssignedBuffers(Row):
    """Module that assigns `self.count = self.count + 1` instead of writing in place, and makes a buffer in the fit."""

    adds = {"count": zero}

    def training_step(self, batch, batch_idx):
        self.count = self.count + 100.25
        if batch_idx == 0:
            self.register_buffer("late", torch.full((2,), 1.0 + 2.0**-20))
            self.plain = torch.full((2,), 3.0 + 2.0**-18)
        return super().training_step(batch, batch_idx)

    def after_fit(self):
        self.facts["buffers"] = [(t.dtype, t.tolist()) for t in (self.count, self.late, self.plain)]


def frozen_copy(self):
    return copy.deepcopy(self.net).requires_grad_(False)


def pairs_of(teacher, student):
    return list(zip(teacher.parameters(), student.parameters(), strict=True))


class _Teacher(Row):
    """Module with a frozen copy that slowly follows the student. The student is also trained to agree with it.

    A float64 shadow records how the teacher should move.
    """

    momentum = 0.996

    def build(self):
        super().build()
        self.teacher = frozen_copy(self)
        self.shadow = None
        with torch.no_grad():
            for p in self.teacher.parameters():
                p.add_(0.25 * torch.randn_like(p))

    def pairs(self):
        return pairs_of(self.teacher, self.net)

    def loss(self, batch):
        x, y = batch
        with torch.no_grad():
            target = self.teacher(x).softmax(-1)
        logits = self(x)
        return F.cross_entropy(logits, y) + 0.1 * F.kl_div(
            logits.log_softmax(-1), target, reduction="batchmean"
        )

    def training_step(self, batch, batch_idx):
        m = self.momentum
        students = [s.detach().double() for _, s in self.pairs()]
        shadow = self.shadow or [t.detach().double() for t, _ in self.pairs()]
        self.shadow = [t * m + s * (1 - m) for t, s in zip(shadow, students, strict=True)]
        with torch.no_grad():
            self.follow()
        return super().training_step(batch, batch_idx)

    def after_fit(self):
        gaps = [
            (t - s).abs().max() / s.abs().max()
            for (t, _), s in zip(self.pairs(), self.shadow, strict=True)
        ]
        self.facts["teacher moved as it should, to 1e-5"] = max(map(float, gaps)) < 1e-5
        self.facts["dtypes"] = {t.dtype for t, _ in self.pairs()}


def teacher(follow_one, **special):
    def follow(self):
        for t, s in self.pairs():
            follow_one(t, s, self.momentum)

    return row(_Teacher, follow=follow, **special)


def by_new_data(t, s, m):
    t.data = t.data * m + s.data * (1 - m)


def by_foreach(self):
    teachers, students = (list(side) for side in zip(*self.pairs(), strict=True))
    torch._foreach_mul_(teachers, self.momentum)
    torch._foreach_add_(teachers, students, alpha=1 - self.momentum)


READS_HALF = {"bf16-true": "teacher moved as it should"}  # half-precision students
ROWS = {
    "Byol": teacher(by_new_data, different=READS_HALF),
    "Moco": teacher(lambda t, s, m: t.data.mul_(m).add_(s.data, alpha=1 - m)),
    "MeanTeacher": teacher(lambda t, s, m: t.copy_(t * m + s * (1 - m)), different=READS_HALF),
    "TeacherByLerp": teacher(lambda t, s, m: t.lerp_(s, 1 - m), refused=HALF_SHOWS),  # as in timm
    "TeacherByForeach": row(_Teacher, follow=by_foreach),
}


class AveragedInside(Row):
    def build(self):
        super().build()
        self.average = AveragedModel(
            self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9)
        ).requires_grad_(False)

    def on_before_zero_grad(self, optimizer):
        self.average.update_parameters(self.net)


class SmallWrites(Row):
    """Module with a weight that the user changes by less than half precision can represent at a time."""

    adds = values(extra=lambda: torch.ones(4))

    def loss(self, batch):
        return super().loss(batch) + 0 * self.extra.sum()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.extra.data.sub_(2e-4)

    def after_fit(self):
        self.facts["extra"] = round(self.extra[0].item(), 4)


class Metrics(Row):
    """Module with torchmetrics as submodules, whose sums exceed the range of half precision."""

    adds = {"total": SumMetric, "mean": MeanMetric}

    def training_step(self, batch, batch_idx):
        self.total(torch.tensor(100.25))
        self.mean.update(torch.tensor(1e5))
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.facts["total"] = (self.total.compute().item(), self.mean.compute().item())
