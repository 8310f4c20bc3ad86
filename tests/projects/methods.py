"""Eight self-supervised methods with lightly's heads and losses, wired as in its examples, on a small network.

Digits in two to four views; what an image's views are depends on its number alone. See lightly's
`examples/pytorch_lightning_distributed`: losses over all ranks where it has them so, its optimizers and rates.
"""

import copy
from functools import partial
from time import process_time
from typing import Any

import lightning.pytorch as pl
import torch
from lightly import loss as losses
from lightly.models.modules import heads
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.utils.scheduler import cosine_schedule
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.rank_pool import Ranks
from tests.scenes import Seen, at, fit

NUM_STEPS = 24  # of two epochs
WIDTH = 32


def loader(num_small: int = 0) -> DataLoader:
    """Batches of 32: two views of 8 x 8 pixels, and some of 6 x 6."""
    images = torch.from_numpy(load_digits().images).float()[: 64 * NUM_STEPS // 2, None] / 16
    generator = torch.Generator().manual_seed(0)
    views = []
    for view in range(2 + num_small):
        moved = torch.roll(images, (view % 2, -(view // 2)), (2, 3))
        views.append(moved + 0.2 * torch.randn(moved.shape, generator=generator))
    views[2:] = [view[:, :, 1:7, 1:7] for view in views[2:]]
    return DataLoader(TensorDataset(*views), batch_size=32)


class Method(pl.LightningModule):
    """A method. `shaken`: weights changed by 1e-3 of each, in the way of this seed; 0: not."""

    make_head: Any
    make_loss: Any
    num_small_views = 0
    casts = False  # what goes into the loss to fp32: its arithmetic overflows in fp16

    def __init__(self, shaken: int = 0) -> None:
        super().__init__()
        self.losses: list[float] = []
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.backbone = nn.Sequential(
                *(nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
                *(nn.Conv2d(16, WIDTH, 3, 2, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU()),
                *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            )
            self.build()
            torch.manual_seed(shaken)
            for each in self.parameters():
                each.data *= 1 + (1e-3 if shaken else 0.0) * torch.randn_like(each)

    def build(self) -> None:
        self.head, self.criterion = self.make_head(), self.make_loss()

    def forward(self, x: Tensor) -> Any:
        z = self.head(self.backbone(x))
        return z.float() if self.casts else z

    def training_step(self, views: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(views)
        self.losses.append(loss.item())
        return loss

    def loss(self, views: list[Tensor]) -> Tensor:
        return self.criterion(*map(self, views))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.06)

    def follows(self, *names: str, **parts: nn.Module) -> None:
        """Make what follows parts by momentum, as copies or as given: `x_followed` of each x."""
        for name, part in ({each: copy.deepcopy(getattr(self, each)) for each in names} | parts).items():
            setattr(self, f"{name}_followed", part)
            deactivate_requires_grad(part)
        self.followed = (*names, *parts)

    def follow(self) -> None:
        momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
        for name in self.followed:
            update_momentum(getattr(self, name), getattr(self, f"{name}_followed"), m=momentum)

    def target(self, x: Tensor) -> Tensor:
        return self.head_followed(self.backbone_followed(x)).detach()


class SimCLR(Method):
    make_head = partial(heads.SimCLRProjectionHead, WIDTH, WIDTH, 16)
    make_loss = partial(losses.NTXentLoss, gather_distributed=True)


class BarlowTwins(Method):
    make_head = partial(heads.BarlowTwinsProjectionHead, WIDTH, 64, 64)
    make_loss = partial(losses.BarlowTwinsLoss, gather_distributed=True)


class VICReg(Method):
    make_head = BarlowTwins.make_head
    make_loss = partial(losses.VICRegLoss, gather_distributed=True)
    casts = True  # 25 times the variance's gradient, times the loss scale


class MoCo(Method):
    make_head = partial(heads.MoCoProjectionHead, WIDTH, WIDTH, 16)
    make_loss = partial(losses.NTXentLoss, memory_bank_size=(256, 16))

    def build(self) -> None:
        super().build()
        self.follows("backbone", "head")

    def loss(self, views: list[Tensor]) -> Tensor:
        self.follow()
        return self.criterion(self(views[0]), self.target(views[1]))


class BYOL(Method):
    make_head = partial(heads.BYOLProjectionHead, WIDTH, 64, 16)
    make_loss = losses.NegativeCosineSimilarity

    def build(self) -> None:
        super().build()
        self.predictor = heads.BYOLPredictionHead(16, 64, 16)
        self.follows("backbone", "head")

    def loss(self, views: list[Tensor]) -> Tensor:
        self.follow()
        predictions = [self.predictor(self(view)) for view in views]
        targets = [self.target(view) for view in reversed(views)]
        return 0.5 * sum(map(self.criterion, predictions, targets))


class SimSiam(Method):
    make_head = partial(heads.SimSiamProjectionHead, WIDTH, 64, 32)
    make_loss = losses.NegativeCosineSimilarity

    def build(self) -> None:
        super().build()
        self.predictor = heads.SimSiamPredictionHead(32, 16, 32)

    def loss(self, views: list[Tensor]) -> Tensor:
        z0, z1 = map(self, views)
        return 0.5 * (self.criterion(self.predictor(z0), z1.detach()) + self.criterion(self.predictor(z1), z0.detach()))


class DINO(Method):
    num_small_views = 2
    make_head = partial(heads.DINOProjectionHead, WIDTH, 64, 16, 128, freeze_last_layer=1)
    make_loss = partial(losses.DINOLoss, output_dim=128, warmup_teacher_temp_epochs=5)

    def build(self) -> None:
        super().build()
        self.follows("backbone", head=heads.DINOProjectionHead(WIDTH, 64, 16, 128))  # weight_norm refuses a copy

    def loss(self, views: list[Tensor]) -> Tensor:
        self.follow()
        return self.criterion([self.target(view) for view in views[:2]], [*map(self, views)], epoch=self.current_epoch)

    def on_after_backward(self) -> None:
        self.head.cancel_last_layer_gradients(current_epoch=self.current_epoch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class SwAV(Method):
    num_small_views = 2
    casts = True  # exp(1 / 0.05)
    make_head = partial(heads.SwaVProjectionHead, WIDTH, 64, 16)
    make_loss = partial(losses.SwaVLoss, sinkhorn_gather_distributed=True)

    def build(self) -> None:
        super().build()
        self.prototypes = heads.SwaVPrototypes(16, n_prototypes=32)

    def loss(self, views: list[Tensor]) -> Tensor:
        self.prototypes.normalize()
        found = [self.prototypes(nn.functional.normalize(self(view), dim=1)).float() for view in views]
        return self.criterion(found[:2], found[2:])

    configure_optimizers = DINO.configure_optimizers


METHODS = {kind.__name__: kind for kind in (SimCLR, BYOL, BarlowTwins, VICReg, DINO, MoCo, SwAV, SimSiam)}


def trained(ranks: Ranks, name: str, *, shaken: int = 0, **scene: Any) -> Seen:
    """What a method has learnt in 24 steps on both ranks, on one; `looks` has the processor time."""
    kind = METHODS[name]
    clock = at(on_train_start=process_seconds, on_train_end=process_seconds)
    options = {"max_epochs": 2, "callbacks": [clock], "timeout_s": 300.0, **scene}
    seen, other = fit(ranks, partial(kind, shaken), train=partial(loader, kind.num_small_views), **options)
    assert all(torch.equal(value, other.parameters[key]) for key, value in seen.parameters.items() if "bank" not in key)
    return seen


def process_seconds(*_: Any) -> float:
    return process_time()


def runs_of(ranks: Ranks, name: str) -> dict[str, Seen]:
    runs = {"ddp": trained(ranks, name, strategy="ddp"), "hybrid": trained(ranks, name)}
    for seed in (1, 2):
        runs[f"shaken_{seed}"] = trained(ranks, name, shaken=seed, strategy="ddp")
    runs["dynamic"] = trained(ranks, name, precision="16-true")
    # From its first step on at the scale that this run found: as many steps as the others.
    runs["fixed"] = trained(ranks, name, precision="16-true", loss_scale=runs["dynamic"].loss_scale)
    return runs


def distance(one: Seen, runs: dict[str, Seen], name: str) -> float:
    """How far apart the ends of a run and of `ddp` are, as a part of the way that `ddp` went."""
    start = dict(METHODS[name]().named_parameters())
    ends = {key: runs["ddp"].weights[key] for key, value in start.items() if value.requires_grad}
    apart = sum((one.weights[key].float() - end).square().sum() for key, end in ends.items())
    way = sum((start[key].detach() - end).square().sum() for key, end in ends.items())
    return float((apart / way).sqrt())
