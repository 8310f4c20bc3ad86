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
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests import toy
from tests.battery.ordinary.case import Manual, Row, samples


def mine(tensor):
    """This rank's part: what Lightning does for a dataset with a length and a sampler."""
    return tensor[dist.get_rank() :: dist.get_world_size()] if dist.is_initialized() else tensor


class _Refills:
    """A loader with a length that fills the same memory for each batch."""

    sampler = None

    def __init__(self):
        blobs = samples()
        self.images, self.targets = mine(blobs.images), mine(blobs.targets)
        self.x, self.y = torch.empty(8, toy.NUM_FEATURES), torch.empty(8, dtype=torch.long)

    def __len__(self):
        return len(self.images) // 8

    def fill(self, i):
        self.x.copy_(self.images[8 * i : 8 * i + 8])
        self.y.copy_(self.targets[8 * i : 8 * i + 8])
        return self.x, self.y

    def __iter__(self):
        for i in range(len(self)):
            yield self.fill(i)


class _RefillsNumpy(_Refills):
    """A buffer of NumPy's, as of a decoder or of shared memory."""

    def __init__(self):
        super().__init__()
        self.buffer = np.empty((8, toy.NUM_FEATURES), dtype=np.float32)

    def fill(self, i):
        self.buffer[:] = self.images[8 * i : 8 * i + 8].numpy()
        return torch.from_numpy(self.buffer), self.targets[8 * i : 8 * i + 8]


class _RefillsDict(_Refills):
    def fill(self, i):
        x, y = super().fill(i)
        return {"image": x, "label": y, "id": f"{i}"}


class _RefillsHalf(_Refills):
    """Already of the compute dtype."""

    def __init__(self):
        super().__init__()
        self.x = self.x.half()


class _RefillsBytes(_Refills):
    def fill(self, i):
        x, y = super().fill(i)
        self.bytes = getattr(self, "bytes", torch.empty(x.shape, dtype=torch.uint8))
        self.bytes.copy_((x * 32 + 128).clamp(0, 255))
        return self.bytes, y


class Refilled(Row):
    def train_dataloader(self):
        return _Refills()


class RefilledNumpy(Row):
    def train_dataloader(self):
        return _RefillsNumpy()


class RefilledHalf(Row):
    def train_dataloader(self):
        return _RefillsHalf()

    def forward(self, x):
        return self.net(x.float())


class RefilledBytes(Row):
    def train_dataloader(self):
        return _RefillsBytes()

    def forward(self, x):
        return self.net((x.float() - 128) / 32)


class RefilledDict(Row):
    def train_dataloader(self):
        return _RefillsDict()

    def loss(self, batch):
        return F.cross_entropy(self(batch["image"]), batch["label"])


class RefilledByHand(Manual):
    def train_dataloader(self):
        return _Refills()


class RefilledAccumulated(Row):
    settings = {"accumulate_grad_batches": 2}

    def train_dataloader(self):
        return _Refills()


class RefilledInTurns(Row):
    """Two buffers in turns and no length: Lightning itself looks one batch ahead to know the last one, no further."""

    class _Turns:
        def __iter__(self):
            one, other = _Refills(), _Refills()
            return ((other if i % 2 else one).fill(i) for i in range(len(one)))

    def train_dataloader(self):
        return self._Turns()


class RefilledInDataset(Row):
    """A dataset with one buffer for all samples, which it clones."""

    class _OneBuffer(Dataset):
        def __init__(self):
            self.blobs, self.buffer = samples(), torch.empty(toy.NUM_FEATURES)

        def __len__(self):
            return len(self.blobs)

        def __getitem__(self, i):
            return self.buffer.copy_(self.blobs.images[i]).clone(), self.blobs.targets[i]

    def train_dataloader(self):
        return DataLoader(self._OneBuffer(), batch_size=8)


class _Stream(IterableDataset):
    def __init__(self):
        blobs = samples()
        self.images, self.targets = mine(blobs.images), mine(blobs.targets)

    def __iter__(self):
        return iter(zip(self.images, self.targets, strict=True))


class Iterable(Row):
    def train_dataloader(self):
        return DataLoader(_Stream(), batch_size=8)


class IterableWithLength(Row):
    ignored_warnings = ("Your `IterableDataset` has `__len__` defined",)

    class _Counted(_Stream):
        def __len__(self):
            return len(self.images)

    def train_dataloader(self):
        return DataLoader(self._Counted(), batch_size=8)


class OwnLoader(Row):
    """Batches made once, given again in every epoch."""

    class _Batches:
        def __init__(self):
            blobs = samples()
            self.batches = list(zip(mine(blobs.images).split(8), mine(blobs.targets).split(8), strict=True))

        def __iter__(self):
            return iter(self.batches)

        def __len__(self):
            return len(self.batches)

    def train_dataloader(self):
        return self._Batches()


class Generator(Row):
    """A plain generator function, that ends by itself; one epoch."""

    epochs = 1

    def train_dataloader(self):
        def batches():
            for _ in range(3):
                yield from DataLoader(_Stream(), batch_size=8)

        return batches()


class Limited(Row):
    """Another loader is asked for in every epoch, and left after three batches."""

    settings = {"reload_dataloaders_every_n_epochs": 1, "limit_train_batches": 3}
    epochs = 4


class Combined(Row):
    """Two loaders of different lengths side by side."""

    mode = "max_size_cycle"

    def train_dataloader(self):
        return CombinedLoader({"a": toy.loader(64), "b": toy.loader(32, batch_size=4)}, self.mode)

    def loss(self, batch):
        return sum(F.cross_entropy(self(batch[name][0]), batch[name][1]) for name in "ab") / 2


class CombinedRefilled(Combined):
    def train_dataloader(self):
        return CombinedLoader({"a": _Refills(), "b": toy.loader(64)}, "min_size")


class DictBatches(Row):
    """Text, numbers, None and nests beside tensors."""

    class _Dicts(toy.Blobs):
        def __getitem__(self, i):
            return {
                "x": {"image": self.images[i]},
                "y": [self.targets[i]],
                "name": f"sample {i}",
                "weight": 1.0 + 2.0**-20,
            }

    def train_dataloader(self):
        return DataLoader(self._Dicts(), batch_size=8)

    def loss(self, batch):
        self.facts["weight"] = (batch["weight"].dtype, batch["weight"][0].item(), batch["name"][0])
        return F.cross_entropy(self(batch["x"]["image"]), batch["y"][0])


class Batch:
    """A user's own: knows how to move, and has more than tensors."""

    def __init__(self, samples):
        self.x, self.y = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])

    def to(self, device, non_blocking=False):
        self.x, self.y = self.x.to(device), self.y.to(device)
        return self


class OwnBatches(Row):
    def train_dataloader(self):
        return DataLoader(samples(), batch_size=8, collate_fn=Batch)

    def loss(self, batch):
        self.facts["dtype"] = batch.x.dtype
        return F.cross_entropy(self(batch.x), batch.y)


Pair = namedtuple("Pair", "x y")


class NamedBatches(Row):
    def train_dataloader(self):
        return DataLoader(samples(), batch_size=8, collate_fn=lambda s: Pair(*torch.utils.data.default_collate(s)))

    def loss(self, batch):
        return F.cross_entropy(self(batch.x), batch.y)


@dataclasses.dataclass
class Data:
    x: torch.Tensor
    y: torch.Tensor
    name: str = ""


class DataclassBatches(NamedBatches):
    def train_dataloader(self):
        return DataLoader(samples(), batch_size=8, collate_fn=lambda s: Data(*torch.utils.data.default_collate(s)))


class Ragged(Row):
    """Sequences of different lengths: a list of tensors."""

    def train_dataloader(self):
        def collate(samples):
            return [x[: 12 - i] for i, (x, _) in enumerate(samples)], torch.stack([y for _, y in samples])

        return DataLoader(samples(), batch_size=8, collate_fn=collate)

    def loss(self, batch):
        x, y = batch
        x = torch.nn.utils.rnn.pad_sequence(x, batch_first=True)
        return F.cross_entropy(self(F.pad(x, (0, 12 - x.shape[1]))), y)


class MovedByHand(Row):
    """The user's own `transfer_batch_to_device`, and what Lightning offers before and after it."""

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.facts["dtype"] = batch[0].dtype
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x * 0.5, y


class AugmentedAfterTransfer(Row):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        self.facts["dtype"] = x.dtype
        return x + 0.25, y


class BeforeTransfer(Row):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x.clamp(-2, 2), y


class DataloaderIter(Row):
    """The user takes batches from the iterator."""

    ignored_warnings = ("You are using the `dataloader_iter` step flavor", "Found `dataloader_iter` argument")

    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.note(self.loss(batch))


class OneWorker(Row):
    epochs = 2

    def train_dataloader(self):
        # "fork": in a process of the pool it would be "spawn", and import torch again
        return DataLoader(
            samples(), batch_size=8, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
        )


class Shuffled(Row):
    def train_dataloader(self):
        return DataLoader(samples(), batch_size=8, shuffle=True, drop_last=True)


class LastBatchIsSmall(Row):
    def train_dataloader(self):
        return DataLoader(toy.Blobs(60), batch_size=8)


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

    class _Noisy(toy.Blobs):
        def __getitem__(self, i):
            return self.images[i] + 0.1 * torch.randn(toy.NUM_FEATURES), self.targets[i]

    def build(self):
        super().build()
        self.net.insert(2, torch.nn.Dropout(0.2))

    def train_dataloader(self):
        return DataLoader(self._Noisy(), batch_size=8)


class ReplayBuffer(Row):
    """Reinforcement learning: the step itself adds to what the loader draws from."""

    class _Replay(IterableDataset):
        def __init__(self):
            blobs = samples()
            self.items = list(zip(mine(blobs.images)[:16], mine(blobs.targets)[:16], strict=True))

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
