"""How other projects use `DDPStrategy`, its loaders and metrics, with this strategy in its place."""

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_hybrid import HybridAllReduceStrategy
from tests import toy
from tests.scenes import fit, same

pytestmark = pytest.mark.long


# ---- weather models (anemoi-core): ranks that share an instance of the model have a group of their own ---------------


class Groups:
    """`num_ranks_per_model` ranks get the same samples; each computes on its part of the features."""

    def __init__(self, num_ranks_per_model=2, **options):
        super().__init__(**options)
        self.num_ranks_per_model = num_ranks_per_model

    def setup(self, trainer):
        size = self.num_ranks_per_model
        all_ranks = torch.arange(self.world_size).split(size)
        groups = [dist.new_group(ranks.tolist()) for ranks in all_ranks]  # every rank makes all of them
        self.model.group, self.model.part = groups[self.global_rank // size], self.global_rank % size
        for parameter in self.model.parameters():  # of a part only: DDP divides by all ranks
            parameter.register_hook(lambda grad: grad * float(size))
        super().setup(trainer)

    def process_dataloader(self, dataloader):
        dataloader = super().process_dataloader(dataloader)
        size = self.num_ranks_per_model
        dataloader.dataset.share_of(self.global_rank // size, self.world_size // size)
        return dataloader


class GroupDDP(Groups, DDPStrategy):
    pass


class GroupHybrid(Groups, HybridAllReduceStrategy):
    pass


class Shared(Dataset):
    """Samples of this instance of the model; integers, whose sums are exact in any order."""

    def share_of(self, instance, num_instances):
        self.instance, self.num_instances = instance, num_instances

    def __len__(self):
        return 16

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index * self.num_instances + self.instance)
        return torch.randint(-2, 3, (8,), generator=generator).float()


class Weather(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def training_step(self, x, batch_idx):
        own = slice(4 * self.part, 4 * self.part + 4)
        partial = (x[:, own] * self.weight[own]).sum(1)
        whole = partial.detach().clone()
        dist.all_reduce(whole, group=self.group)  # its gradient is that of each rank's own part
        return (partial * (whole - 1).sign()).float().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=2.0**-4)


def samples():
    return DataLoader(Shared(), batch_size=4)


def test_a_subclass_with_groups_of_its_own_has_the_bits_of_ddps(four_ranks):
    scene = {"train": samples, "use_distributed_sampler": False}
    runs = [fit(four_ranks, Weather, kind=kind, **scene) for kind in (GroupDDP, GroupHybrid)]
    assert all(same(one.weights, runs[0][0].weights) for run in runs for one in run)
    assert not torch.equal(runs[0][0].weights["weight"], torch.ones(8))
    half = fit(four_ranks, Weather, kind=GroupHybrid, precision="16-true", **scene)
    # Gradients are multiples of 1/16 below 2 and exact in fp16; weights are sums of 8 of them, and exact in fp32.
    assert same(half[3].weights["weight"].float(), runs[0][0].weights["weight"])


# ---- torchvision's transforms in a loader with workers, and torchmetrics ---------------------------------------------


class Pictures(Dataset):
    def __init__(self):
        v2 = pytest.importorskip("torchvision.transforms.v2")
        self.images, self.labels = load_digits(return_X_y=True)
        self.transform = v2.Compose(
            [
                v2.ToImage(),
                v2.RandomResizedCrop(16, scale=(0.7, 1.0), antialias=True),
                v2.RandomRotation(10),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize([0.3], [0.35]),
            ]
        )

    def __len__(self):
        return 512

    def __getitem__(self, index):
        image = (self.images[index].reshape(8, 8, 1) * 15.9).astype("uint8")
        return self.transform(image), int(self.labels[index])


class Reader(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(1, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(784, 10))
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(logits.float(), batch[1])

    configure_optimizers = toy.Toy.configure_optimizers
    optimizer_name, lr = "SGD", 0.1


def seeded():
    pl.seed_everything(1, workers=True, verbose=False)
    return DataLoader(Pictures(), batch_size=32, shuffle=True, num_workers=1)


def test_random_transforms_in_workers_and_metrics_are_those_of_ddp(two_ranks):
    pytest.importorskip("torchvision")
    options = {"train": seeded, "max_epochs": 2, "timeout_s": 300.0}
    theirs = fit(two_ranks, Reader, strategy="ddp", **options)
    ours = fit(two_ranks, Reader, **options)
    half = fit(two_ranks, Reader, precision="16-true", **options)
    assert same([each.weights for each in ours], [each.weights for each in theirs])
    assert ours[0].metrics == theirs[0].metrics
    # The same images: an image whose two best logits are nearer than a rounding may change its class.
    assert half[0].metrics["accuracy"] == pytest.approx(theirs[0].metrics["accuracy"], abs=0.03)
    assert half[0].metrics["accuracy"] > 0.3
