"""Loaders: what hands out batches, and of what kind they are."""

from __future__ import annotations

import dataclasses
from collections import namedtuple

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from tests import toy
from tests.battery.case import Manual, Row, row, samples


def mine(tensor):
    """This rank's part: what Lightning does for a dataset with a length and a sampler."""
    return tensor[dist.get_rank() :: dist.get_world_size()] if dist.is_initialized() else tensor


def my_samples():
    return mine(samples().images), mine(samples().targets)


class _Refills:
    """A loader with a length that fills the same memory for each batch."""

    sampler, dtype = None, torch.float32

    def __init__(self):
        self.images, self.targets = my_samples()
        self.x, self.y = torch.empty(8, toy.NUM_FEATURES, dtype=self.dtype), torch.empty(8, dtype=torch.long)

    def __len__(self):
        return len(self.images) // 8

    def fill(self, i):
        self.x.copy_(self.seen(self.images[8 * i : 8 * i + 8]))
        self.y.copy_(self.targets[8 * i : 8 * i + 8])
        return self.x, self.y

    def seen(self, images):
        return images

    def __iter__(self):
        return (self.fill(i) for i in range(len(self)))


class _RefillsNumpy(_Refills):
    """A buffer of NumPy's, as of a decoder or of shared memory."""

    def fill(self, i):
        self.buffer = getattr(self, "buffer", np.empty((8, toy.NUM_FEATURES), dtype=np.float32))
        self.buffer[:] = self.images[8 * i : 8 * i + 8].numpy()
        return torch.from_numpy(self.buffer), self.targets[8 * i : 8 * i + 8]


class _RefillsDict(_Refills):
    def fill(self, i):
        x, y = super().fill(i)
        return {"image": x, "label": y, "id": f"{i}"}


class _RefillsHalf(_Refills):
    """Already of the compute dtype."""

    dtype = torch.float16


class _RefillsBytes(_Refills):
    dtype = torch.uint8

    def seen(self, images):
        return (images * 32 + 128).clamp(0, 255)


class _Turns:
    """Two buffers in turns and no length: Lightning itself looks one batch ahead to know the last one, no further."""

    def __iter__(self):
        one, other = _Refills(), _Refills()
        return ((other if i % 2 else one).fill(i) for i in range(len(one)))


class _OneBuffer(Dataset):
    """A dataset with one buffer for all samples, which it clones."""

    def __init__(self):
        self.blobs, self.buffer = samples(), torch.empty(toy.NUM_FEATURES)

    def __len__(self):
        return len(self.blobs)

    def __getitem__(self, i):
        return self.buffer.copy_(self.blobs.images[i]).clone(), self.blobs.targets[i]


class _Stream(IterableDataset):
    def __init__(self):
        self.images, self.targets = my_samples()

    def __iter__(self):
        return iter(zip(self.images, self.targets, strict=True))


class _Counted(_Stream):
    def __len__(self):
        return len(self.images)


class _Batches:
    """Made once, given again in every epoch."""

    def __init__(self):
        self.batches = list(zip(*(part.split(8) for part in my_samples()), strict=True))

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def endless_three():
    """A plain generator function, that ends by itself."""
    for _ in range(3):
        yield from DataLoader(_Stream(), batch_size=8)


class Batch:
    """A user's own: knows how to move, and has more than tensors."""

    def __init__(self, samples):
        self.x, self.y = default_collate(samples)

    def to(self, device, non_blocking=False):
        self.x, self.y = self.x.to(device), self.y.to(device)
        return self


Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Data:
    x: torch.Tensor
    y: torch.Tensor
    name: str = ""


class _Dicts(toy.Blobs):
    """Text, numbers, None and nests beside tensors."""

    def __getitem__(self, i):
        one = {"x": {"image": self.images[i]}, "y": [self.targets[i]]}
        return one | {"name": f"sample {i}", "weight": 1.0 + 2.0**-20}


class _Noisy(toy.Blobs):
    def __getitem__(self, i):
        return self.images[i] + 0.1 * torch.randn(toy.NUM_FEATURES), self.targets[i]


def ragged(samples):
    """Sequences of different lengths: a list of tensors."""
    return [x[: 12 - i] for i, (x, _) in enumerate(samples)], torch.stack([y for _, y in samples])


def loss_of_ragged(self, batch):
    x = torch.nn.utils.rnn.pad_sequence(batch[0], batch_first=True)
    return F.cross_entropy(self(F.pad(x, (0, 12 - x.shape[1]))), batch[1])


def loss_of_dicts(self, batch):
    self.facts["weight"] = (batch["weight"].dtype, batch["weight"][0].item(), batch["name"][0])
    return F.cross_entropy(self(batch["x"]["image"]), batch["y"][0])


def loss_of_two(self, batch):
    return sum(F.cross_entropy(self(batch[name][0]), batch[name][1]) for name in "ab") / 2


def loss_of_fields(self, batch):
    self.facts["dtype"] = batch.x.dtype
    return F.cross_entropy(self(batch.x), batch.y)


def fed(make, base=Row, **more):
    """A row with a loader of its own."""
    return row(base, train_dataloader=lambda self: make(), **more)


def collated(collate, data=samples, **more):
    return fed(lambda: DataLoader(data(), batch_size=8, collate_fn=collate), **more)


def of_samples(data=samples, **options):
    return fed(lambda: DataLoader(data(), batch_size=8, **options))


ROWS = {
    "Refilled": fed(_Refills),
    "RefilledNumpy": fed(_RefillsNumpy),
    "RefilledHalf": fed(_RefillsHalf, forward=lambda self, x: self.net(x.float())),
    "RefilledBytes": fed(_RefillsBytes, forward=lambda self, x: self.net((x.float() - 128) / 32)),
    "RefilledDict": fed(_RefillsDict, loss=lambda self, b: F.cross_entropy(self(b["image"]), b["label"])),
    "RefilledByHand": fed(_Refills, Manual),
    "RefilledAccumulated": fed(_Refills, settings={"accumulate_grad_batches": 2}),
    "RefilledInTurns": fed(_Turns),
    "RefilledInDataset": of_samples(_OneBuffer),
    "Iterable": of_samples(_Stream),
    "IterableWithLength": fed(
        lambda: DataLoader(_Counted(), batch_size=8),
        ignored_warnings=("Your `IterableDataset` has `__len__` defined",),
    ),
    "OwnLoader": fed(_Batches),
    "Generator": fed(endless_three, epochs=1),
    "Limited": row(  # another loader is asked for in every epoch, and left after three batches
        settings={"reload_dataloaders_every_n_epochs": 1, "limit_train_batches": 3}, epochs=4
    ),
    "Combined": fed(  # two loaders of different lengths side by side
        lambda: CombinedLoader({"a": toy.loader(64), "b": toy.loader(32, batch_size=4)}, "max_size_cycle"),
        loss=loss_of_two,
    ),
    "CombinedRefilled": fed(
        lambda: CombinedLoader({"a": _Refills(), "b": toy.loader(64)}, "min_size"), loss=loss_of_two
    ),
    "DictBatches": fed(lambda: DataLoader(_Dicts(), batch_size=8), loss=loss_of_dicts),
    "OwnBatches": collated(Batch, loss=loss_of_fields),
    "NamedBatches": collated(lambda s: Pair(*default_collate(s)), loss=loss_of_fields),
    "DataclassBatches": collated(lambda s: Data(*default_collate(s)), loss=loss_of_fields),
    "Ragged": collated(ragged, loss=loss_of_ragged),
    # "fork": in a process of the pool it would be "spawn", and import torch again
    "OneWorker": of_samples(num_workers=1, persistent_workers=True, multiprocessing_context="fork"),
    "Shuffled": of_samples(shuffle=True, drop_last=True),
    "LastBatchIsSmall": of_samples(lambda: toy.Blobs(60)),
    "BeforeTransfer": row(on_before_batch_transfer=lambda self, b, _: (b[0].clamp(-2, 2), b[1])),
}


class AugmentedAfterTransfer(Row):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.facts["dtype"] = batch[0].dtype
        return batch[0] + 0.25, batch[1]


class MovedByHand(Row):
    """The user's own `transfer_batch_to_device`, and what Lightning offers before and after it."""

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.facts["dtype"] = batch[0].dtype
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * 0.5, batch[1]


class DataloaderIter(Row):
    """The user takes batches from the iterator."""

    ignored_warnings = ("You are using the `dataloader_iter` step flavor", "Found `dataloader_iter` argument")

    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.note(self.loss(batch))


class _Changing(Row):
    """A dataset whose level a callback raises; what comes in is looked at."""

    class _Levels(toy.Blobs):
        level = 0.0

        def __getitem__(self, i):
            return self.images[i] + self.level, self.targets[i], torch.tensor(self.level)

    def train_dataloader(self):
        self.data = self._Levels()
        return DataLoader(self.data, batch_size=8)

    def loss(self, batch):
        self.facts.setdefault("levels", []).append(batch[2][0].item())
        return super().loss(batch[:2])


class ChangedEachBatch(_Changing):
    """Before each batch is trained, for the next; and after it."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.data.level += 0.03125


class ChangedEachEpoch(_Changing):
    def on_train_epoch_end(self):
        self.data.level += 0.25


class ChangedAtEpochStart(_Changing):
    """By a callback, as curricula are."""

    class _Curriculum(pl.Callback):
        def on_train_epoch_start(self, trainer, module):
            module.data.level = 0.25 * trainer.current_epoch

    def configure_callbacks(self):
        return [self._Curriculum()]


class DrawsInDataset(Row):
    """Augmentation and dropout draw from one generator: the order of draws is the order of use."""

    def build(self):
        super().build()
        self.net.insert(2, torch.nn.Dropout(0.2))

    def train_dataloader(self):
        return DataLoader(_Noisy(), batch_size=8)


class ReplayBuffer(Row):
    """Reinforcement learning: the step itself adds to what the loader draws from."""

    class _Replay(IterableDataset):
        def __init__(self):
            self.items = list(zip(*(part[:16] for part in my_samples()), strict=True))

        def __iter__(self):
            for i in range(32):
                yield self.items[(7 * i) % len(self.items)]

    def train_dataloader(self):
        self.replay = self._Replay()
        return DataLoader(self.replay, batch_size=8)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.replay.items.append((batch[0][0].float() * 1.5, batch[1][0]))
        self.facts["size"] = len(self.replay.items)
        return loss
