"""Loaders of different kinds, and the kinds of batches that they return."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, default_collate

from tests import toy
from tests.battery.case import Row, row, samples


def mine(tensor):
    """Return this rank's share, as Lightning computes it for a dataset with a length and a sampler."""
    return tensor[dist.get_rank() :: dist.get_world_size()]


def my_samples():
    return mine(samples().images), mine(samples().targets)


class _Refills:
    sampler = None

    def __init__(self):
        self.images, self.targets = my_samples()
        self.x = torch.empty(8, toy.NUM_FEATURES)
        self.y = torch.empty(8, dtype=torch.long)

    def __len__(self):
        return len(self.images) // 8

    def fill(self, i):
        self.x.copy_(self.images[8 * i : 8 * i + 8])
        self.y.copy_(self.targets[8 * i : 8 * i + 8])
        return self.x, self.y

    def __iter__(self):
        return (self.fill(i) for i in range(len(self)))


class _Stream(IterableDataset):
    def __init__(self):
        self.images, self.targets = my_samples()

    def __iter__(self):
        return iter(zip(self.images, self.targets, strict=True))


class Batch:
    def __init__(self, samples):
        self.x, self.y = default_collate(samples)

    def to(self, device, non_blocking=False):
        self.x = self.x.to(device)
        self.y = self.y.to(device)
        return self


class _Dicts(toy.Blobs):
    def __getitem__(self, i):
        return {
            "x": {"image": self.images[i]},
            "y": [self.targets[i]],
            "name": f"sample {i}",
            "weight": 1.0 + 2.0**-20,
        }


def loss_of_dicts(self, batch):
    self.facts["weight"] = (batch["weight"].dtype, batch["weight"][0].item(), batch["name"][0])
    return F.cross_entropy(self(batch["x"]["image"]), batch["y"][0])


def loss_of_two(self, batch):
    return sum(F.cross_entropy(self(batch[name][0]), batch[name][1]) for name in "ab") / 2


def loss_of_fields(self, batch):
    self.facts["dtype"] = batch.x.dtype
    return F.cross_entropy(self(batch.x), batch.y)


def fed(make, base=Row, **special):
    return row(base, train_dataloader=lambda self: make(), **special)


def collated(collate, data=samples, **special):
    return fed(lambda: DataLoader(data(), batch_size=8, collate_fn=collate), **special)


def of_samples(data=samples, **options):
    return fed(lambda: DataLoader(data(), batch_size=8, **options))


ROWS = {
    "Refilled": fed(_Refills),
    "RefilledAccumulated": fed(_Refills, settings={"accumulate_grad_batches": 2}),
    "Iterable": of_samples(_Stream),
    "Limited": row(  # requests another loader in every epoch, and leaves it after three batches
        settings={"reload_dataloaders_every_n_epochs": 1, "limit_train_batches": 3}, epochs=4
    ),
    "Combined": fed(  # two loaders of different lengths
        lambda: CombinedLoader(
            {"a": toy.loader(64), "b": toy.loader(32, batch_size=4)}, "max_size_cycle"
        ),
        loss=loss_of_two,
    ),
    "DictBatches": fed(lambda: DataLoader(_Dicts(), batch_size=8), loss=loss_of_dicts),
    "OwnBatches": collated(Batch, loss=loss_of_fields),
    # "fork", because in a process of the pool the default is "spawn", which would import torch again.
    "OneWorker": of_samples(num_workers=1, persistent_workers=True, multiprocessing_context="fork"),
    "Shuffled": of_samples(shuffle=True, drop_last=True),
    "LastBatchIsSmall": of_samples(lambda: toy.Blobs(60)),
}


class MovedByHand(Row):
    """Module with its own `transfer_batch_to_device`, and the hooks before and after it."""

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.facts["dtype"] = batch[0].dtype
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * 0.5, batch[1]
