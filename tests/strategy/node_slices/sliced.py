"""A network whose last layers may be cut over the ranks of a node, and its fits with and without."""

from __future__ import annotations

from functools import partial

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_hybrid import Comm, HybridAllReduceStrategy
from lightning_hybrid.optim import LAMB, LARS, param_groups
from tests import toy

NUM_IMAGES, NUM_INPUTS, NUM_CLASSES = 6, 12, 8


class Net(nn.Module):
    """A normalised trunk, a pair as fc6 and fc7, and a head."""

    def __init__(self, is_cut=True, dropout=0.0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.trunk = nn.Sequential(nn.Linear(NUM_INPUTS, 10, bias=False), nn.BatchNorm1d(10), nn.Tanh())
            self.fc6, self.fc7, self.fc8 = nn.Linear(10, 16), nn.Linear(16, 14), nn.Linear(14, NUM_CLASSES)
        self.dropout = nn.Dropout(dropout)
        self.node_slices = (("fc6", "fc7"), ("fc8",)) if is_cut else ()

    def forward(self, images):
        # No ReLU: in half precision a unit near zero would be off in one run and on in the other.
        x = self.dropout(self.fc6(self.trunk(images)).tanh())
        return self.fc8(self.fc7(x).tanh())


class Module(pl.LightningModule):
    """A classifier that keeps what it sees: gradients of its steps, whole, and what it validates."""

    def __init__(self, make_optimizer, is_cut=True, overflows=(), looks=True, dropout=0.0, penalty=0.0):
        super().__init__()
        self.net = Net(is_cut, dropout)
        self.make_optimizer, self.overflows, self.penalty = make_optimizer, overflows, penalty
        self.gradients, self.validated = [], []
        if looks:
            self.on_after_backward = self.look

    def training_step(self, batch, batch_idx):
        images, targets = batch
        loss = F.cross_entropy(self.net(images).float(), targets)
        self.log("loss", loss, sync_dist=True)
        if self.penalty:
            loss = loss + self.penalty * sum(one.float().square().sum() for one in self.parameters())
        if batch_idx in self.overflows and dist.get_rank() == 1:
            # In the slice of one rank alone.
            loss = loss + (self.net.fc6.weight.float().sum() * float("inf"))
        return loss

    def look(self):
        seen = {}
        for prefix, layer in self.net.named_modules():
            for name, parameter in layer.named_parameters(recurse=False):
                gradient = parameter.grad.detach().float().clone()
                seen[f"{prefix}.{name}"] = layer.whole_of(name, gradient) if hasattr(layer, "whole_of") else gradient
        self.gradients.append(seen)

    def validation_step(self, batch, batch_idx):
        images, targets = batch
        loss = F.cross_entropy(self.net(images).float(), targets)
        self.validated.append(float(loss))
        self.log("val", loss, sync_dist=True)

    def configure_optimizers(self):
        return self.make_optimizer(self)


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def lars(module, fused=True, **options):
    return LARS(param_groups(module, weight_decay=1e-3), lr=1.0, trust_coefficient=0.02, fused=fused, **options)


def lamb(module, fused=True):
    return LAMB(param_groups(module, weight_decay=1e-3), lr=0.02, fused=fused, max_grad_norm=0.5)


lars_lists, lamb_lists = partial(lars, fused=False), partial(lamb, fused=False)
lars_joint = partial(lars, denominator="joint", trust_clip=1.0)


def images_of(num, rank=None, size=NUM_IMAGES):
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    images = torch.randn(num * size, NUM_INPUTS, generator=generator)
    return list(zip(images, torch.randint(NUM_CLASSES, (num * size,), generator=generator), strict=True))


def loader(num, size=NUM_IMAGES):
    return torch.utils.data.DataLoader(images_of(num, size=size), batch_size=size)


def fit(
    make_optimizer, precision, is_cut, num=5, options=None, module_options=None, val=None, ckpt_path=None, **settings
):
    """What a fit leaves, and what it saw."""
    module = Module(make_optimizer, is_cut, **(module_options or {}))
    scale = {"loss_scale": 1024} if precision == "16-true" else {}
    strategy = HybridAllReduceStrategy(**{"comm": Comm(tune="off"), **scale, **(options or {})})
    trainer = toy.trainer(
        strategy=strategy,
        precision=precision,
        use_distributed_sampler=False,
        **{"max_epochs": 1, "num_sanity_val_steps": 0, **settings},
    )
    trainer.fit(module, loader(num), val, ckpt_path=ckpt_path)
    return {
        "weights": toy.weights(module),
        "state": trainer.optimizers[0].state_dict()["state"],
        "gradients": module.gradients,
        "validated": module.validated,
        "skipped": getattr(trainer.precision_plugin, "num_skipped_steps", 0),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "kinds": [type(layer) for layer in module.net.modules()],
    }


def difference(one, other, least=1e-30):
    """The largest difference of tensors of one structure, of each relative to its norm, or to `least`."""
    if isinstance(one, torch.Tensor):
        assert one.shape == other.shape
        scale = max(float(other.double().norm()), least)
        return float((one.double() - other.double()).norm()) / scale
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max((difference(one[key], other[key], least) for key in one), default=0.0)
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        return max((difference(*pair, least) for pair in zip(one, other, strict=True)), default=0.0)
    return abs(one - other)


def both(make_optimizer, precision, kwargs=None):
    """How far a fit with slices is from one without, for each thing that is compared."""
    whole, cut = (fit(make_optimizer, precision, is_cut, **(kwargs or {})) for is_cut in (False, True))
    # What began at zero is mostly rounding in half precision, and small beside the others, whose norms are 0.2 to 4.
    least = 1e-30 if precision == "32-true" else 1.0
    found = {name: difference(cut[name], whole[name], least) for name in whole if name != "kinds"}
    return found, cut["skipped"], cut["kinds"] == whole["kinds"]
