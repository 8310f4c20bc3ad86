"""Network whose last layers can be sliced across the ranks of a node, and fits with sliced and with whole layers."""

from functools import partial

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn

from lightning_hybrid.optim import LAMB, LARS, param_groups
from tests import scenes
from tests.scenes import this_rank

NUM_IMAGES = 6
NUM_INPUTS = 12
NUM_CLASSES = 8


class Net(nn.Module):
    """Network with a normalized trunk, a pair of layers fc6 and fc7, and a head."""

    def __init__(self, is_cut=True, dropout=0.0, width=10):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.trunk = nn.Sequential(
                nn.Linear(NUM_INPUTS, width, bias=False), nn.BatchNorm1d(width), nn.Tanh()
            )
            self.fc6 = nn.Linear(width, 16)
            self.fc7 = nn.Linear(16, 14)
            self.fc8 = nn.Linear(14, NUM_CLASSES)
        self.dropout = nn.Dropout(dropout)
        self.node_slices = (("fc6", "fc7"), ("fc8",)) if is_cut else ()

    def forward(self, images):
        # No ReLU: in half precision, a unit near zero could be active in one run and inactive in the other.
        x = self.dropout(self.fc6(self.trunk(images)).tanh())
        return self.fc8(self.fc7(x).tanh())


class Module(pl.LightningModule):
    def __init__(
        self, make_optimizer, is_cut=True, overflows=(), dropout=0.0, penalty=0.0, width=10
    ):
        super().__init__()
        self.net = Net(is_cut, dropout, width)
        self.make_optimizer = make_optimizer
        self.overflows = overflows
        self.penalty = penalty

    def training_step(self, batch, batch_idx):
        images, targets = batch
        loss = F.cross_entropy(self.net(images).float(), targets)
        self.log("loss", loss, sync_dist=True)
        if self.penalty:
            loss = loss + self.penalty * sum(
                parameter.float().square().sum() for parameter in self.parameters()
            )
        if batch_idx in self.overflows and this_rank() == 1:  # only in the slice of one rank
            loss = loss + (self.net.fc6.weight.float().sum() * float("inf"))
        return loss

    def validation_step(self, batch, batch_idx):
        images, targets = batch
        loss = F.cross_entropy(self.net(images).float(), targets)
        self.log("val", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return self.make_optimizer(self)


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def lars(module, fused=True, **options):
    return LARS(
        param_groups(module, weight_decay=1e-3),
        lr=1.0,
        trust_coefficient=0.02,
        fused=fused,
        **options,
    )


def lamb(module, fused=True):
    return LAMB(param_groups(module, weight_decay=1e-3), lr=0.02, fused=fused, max_grad_norm=0.5)


lars_lists = partial(lars, fused=False)
lamb_lists = partial(lamb, fused=False)
lars_joint = partial(lars, denominator="joint", trust_clip=1.0)


def images_of(num, rank=None, size=NUM_IMAGES):
    generator = torch.Generator().manual_seed(this_rank() if rank is None else rank)
    images = torch.randn(num * size, NUM_INPUTS, generator=generator)
    targets = torch.randint(NUM_CLASSES, (num * size,), generator=generator)
    return list(zip(images, targets, strict=True))


def loader(num, size=NUM_IMAGES):
    return torch.utils.data.DataLoader(images_of(num, size=size), batch_size=size)


def fit(ranks, make_optimizer, precision="32-true", is_cut=True, *, num=5, special=None, **scene):
    """Fit one epoch and return the observations. `special` holds arguments of the module."""
    options = {
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "precision": precision,
        "train": partial(loader, num),
        "module": partial(Module, make_optimizer, is_cut, **(special or {})),
    }
    if precision == "16-true":
        options["loss_scale"] = 1024
    return scenes.fit(ranks, **options | scene)


def whole_and_cut(ranks, *args, **scene):
    """Fit with whole and with sliced layers, and return both observations of each rank."""
    whole = fit(ranks, *args, False, **scene)
    cut = fit(ranks, *args, True, **scene)
    return list(zip(whole, cut, strict=True))


def difference(result, expected, least=1e-30):
    """Return the largest difference of two trees of tensors, relative to the expected norm or to `least`."""
    if isinstance(result, torch.Tensor):
        assert result.shape == expected.shape
        scale = max(float(expected.double().norm()), least)
        return float((result.double() - expected.double()).norm()) / scale
    if isinstance(result, dict):
        assert result.keys() == expected.keys()
        pairs = [(result[key], expected[key]) for key in result]
    elif isinstance(result, (list, tuple)):
        pairs = list(zip(result, expected, strict=True))
    else:
        return abs(result - expected)
    return max((difference(*pair, least) for pair in pairs), default=0.0)
