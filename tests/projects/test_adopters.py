"""Other projects that use `DDPStrategy`, with their loaders and metrics, under this strategy."""

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_hybrid import HybridAllReduceStrategy
from tests import toy
from tests.scenes import fit, same

pytestmark = pytest.mark.long


class Groups:
    def setup(self, trainer):
        pairs = torch.arange(self.world_size).split(2)
        groups = [dist.new_group(pair.tolist()) for pair in pairs]  # every rank creates all of them
        self.model.group = groups[self.global_rank // 2]
        self.model.part = self.global_rank % 2
        # Each rank has a part of the sum, and DDP divides by all ranks.
        for parameter in self.model.parameters():
            parameter.register_hook(lambda grad: grad * 2.0)
        super().setup(trainer)

    def process_dataloader(self, dataloader):
        dataloader = super().process_dataloader(dataloader)
        dataloader.dataset.instance = self.global_rank // 2
        return dataloader


class GroupDDP(Groups, DDPStrategy):
    pass


class GroupHybrid(Groups, HybridAllReduceStrategy):
    pass


class OfInstance(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(2 * index + self.instance)
        return torch.randint(-2, 3, (8,), generator=generator).float()


class Weather(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def training_step(self, x, batch_idx):
        part = slice(4 * self.part, 4 * self.part + 4)
        partial = (x[:, part] * self.weight[part]).sum(1)
        whole = partial.detach().clone()
        dist.all_reduce(whole, group=self.group)
        return (partial * (whole - 1).sign()).float().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=2.0**-4)


def samples():
    return DataLoader(OfInstance(), batch_size=4)


def test_a_subclass_with_groups_of_its_own_has_the_bits_of_ddps(four_ranks):
    """Results are equal in fp16 too: gradients are multiples of 1/8, weights of 1/128, all below 2 and exact."""
    scene = {"train": samples, "use_distributed_sampler": False}
    theirs = fit(four_ranks, Weather, kind=GroupDDP, **scene)
    ours = fit(four_ranks, Weather, kind=GroupHybrid, **scene)
    half = fit(four_ranks, Weather, kind=GroupHybrid, precision="16-true", loss_scale=1.0, **scene)
    expected = theirs[0].weights["weight"]
    assert not torch.equal(expected, torch.ones(8))
    for name, results in {"ddp": theirs, "fp32": ours, "fp16": half}.items():
        for rank, seen in enumerate(results):
            weight = seen.weights["weight"].float()
            assert torch.equal(weight, expected), f"{name}, rank {rank}"


class Pictures(toy.Blobs):
    """Blobs as pictures of 3 x 4 pixels with random transforms."""

    def __getitem__(self, index):
        v2 = pytest.importorskip("torchvision.transforms.v2")
        crop = v2.RandomCrop((3, 4), padding=1)
        change = v2.Compose([crop, v2.RandomHorizontalFlip(), v2.GaussianNoise()])
        image, target = super().__getitem__(index)
        return change(image.view(1, 3, 4)).flatten(), target


class Reader(toy.Toy):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(toy.NUM_CLASSES, average="micro")

    def training_step(self, batch, batch_idx):
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.accuracy(self.net(batch[0]), batch[1])
        return super().training_step(batch, batch_idx)


def seeded():
    pl.seed_everything(1, workers=True, verbose=False)
    return DataLoader(
        Pictures(256), batch_size=32, shuffle=True, num_workers=1, persistent_workers=True
    )


def test_random_transforms_in_workers_and_metrics_are_those_of_ddp(two_ranks):
    """In fp16, an image whose two best logits are closer than a rounding may change its class."""
    pytest.importorskip("torchvision")
    # Otherwise random numbers depend only on the batch, and not on earlier draws.
    scene = {"train": seeded, "timeout_s": 600.0}
    theirs = fit(two_ranks, Reader, strategy="ddp", **scene)
    ours = fit(two_ranks, Reader, exact_resume=False, **scene)
    half = fit(two_ranks, Reader, exact_resume=False, precision="16-true", **scene)
    for rank in range(2):
        assert same(ours[rank].weights, theirs[rank].weights), f"rank {rank}"
    assert ours[0].metrics == theirs[0].metrics
    assert half[0].metrics["accuracy"] == pytest.approx(theirs[0].metrics["accuracy"], abs=0.05)
    assert half[0].metrics["accuracy"] > 0.4
