"""Data of every kind that a trainer takes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from tests import toy
from tests.battery.as_ddp.trainers import state_of
from tests.battery.case import Plain, Run, behaviour, loader


class Stream(IterableDataset):
    """Without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter([toy.Blobs()[number] for number in range(12)])


class Counted(DataLoader):
    """A loader with state of its own."""

    position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.position += 1
            yield batch


class Takes(Plain):
    """Takes the first pair of images and targets in a batch of any structure, and notes what batches are."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def loss(self, batch: Any, name: str) -> Any:
        self.seen.append(copy.deepcopy(batch))
        return super().loss(_pair(batch), name)


def _pair(batch: Any) -> Any:
    if isinstance(batch, dict):
        return _pair(next(value for value in batch.values() if value is not None))
    return batch if isinstance(batch[0], Tensor) else _pair(next(each for each in batch if each is not None))


def in_fours(num_samples: int = 32, **options: Any) -> DataLoader:
    return DataLoader(toy.Blobs(num_samples), batch_size=4, **options)


def to_dicts(samples: Any) -> Any:
    images, targets = zip(*samples, strict=True)
    return {"batch": (torch.stack(images), torch.stack(targets)), "names": ["a"] * len(samples), "none": None}


def random() -> Any:
    sampler = RandomSampler(data := toy.Blobs(32), generator=torch.Generator().manual_seed(1))
    return DataLoader(data, batch_size=4, sampler=sampler)


KINDS: dict[str, Callable[[], Any]] = {
    "iterable": lambda: DataLoader(Stream(), batch_size=4),
    "shuffled": lambda: in_fours(shuffle=True),
    "drop_last": lambda: in_fours(31, drop_last=True),
    "uneven": lambda: in_fours(31),
    "dicts": lambda: in_fours(collate_fn=to_dicts),
    "random": random,
    "stateful": lambda: Counted(toy.Blobs(32), batch_size=4),
    "list_of_loaders": lambda: [loader(2), loader(3)],
    "dict_of_loaders": lambda: {"a": loader(2), "b": {"c": loader(3)}},
    "combined_min": lambda: CombinedLoader([loader(2), loader(3)], "min_size"),
    "combined_longest": lambda: CombinedLoader({"a": loader(2), "b": loader(3)}, "max_size"),
    "python_list": lambda: [(torch.ones(4, toy.NUM_FEATURES), torch.zeros(4, dtype=torch.long))] * 3,
}


def fed(name: str, run: Run) -> Any:
    """A fit on it: every batch as the module gets it, and the state of the trainer."""
    trainer, module = run.fit(Takes(), KINDS[name]())
    return module.seen, {} if name == "python_list" else state_of(trainer), module.state_dict()


def evaluated(name: str, run: Run) -> Any:
    """The same in validation and prediction."""
    module, trainer = Takes(), run.trainer()
    returned = trainer.validate(module, KINDS[name](), verbose=False)
    return module.seen, returned, None if name == "dicts" else trainer.predict(Plain(), KINDS[name]())


for _name in KINDS:
    behaviour(functools.partial(fed, _name), name=f"fed_{_name}")
for _name in ("iterable", "uneven", "dicts"):
    behaviour(functools.partial(evaluated, _name), name=f"evaluated_{_name}")


@behaviour
def changed_by_hooks(run: Run) -> Any:
    class Moves(Takes):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] * 2, batch[1]]

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            self.seen.append(str(device))
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] + 1, batch[1]]

    _, module = run.fit(Moves())
    return module.seen, module.state_dict()


@behaviour
def stepped_by_an_iterator(run: Run) -> Any:
    numbers: list[Any] = []

    class Draws(Plain):
        def training_step(self, dataloader_iter: Any) -> Any:
            batch, batch_idx, dataloader_idx = next(dataloader_iter)
            numbers.append((batch_idx, dataloader_idx))
            loss = F.cross_entropy(self(batch[0].to(self.body.weight.dtype)).float(), batch[1])
            self.log("loss", loss, batch_size=4)
            return loss

    trainer, module = run.fit(Draws())
    return numbers, module.state_dict(), trainer.global_step


@behaviour
def predictions_not_kept(run: Run) -> Any:
    return run.trainer().predict(Plain(), loader(), return_predictions=False)


@behaviour
def resumed_in_mid_epoch(run: Run) -> Any:
    class Saves(Takes):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step == 3:
                self.trainer.save_checkpoint(run.folder / "a.ckpt")

    run.fit(Saves(), Counted(toy.Blobs(64), batch_size=4))
    data = Counted(toy.Blobs(64), batch_size=4)
    trainer, module = run.fit(Takes(), data, start={"ckpt_path": run.folder / "a.ckpt"})
    return module.seen, data.position, trainer.global_step, module.state_dict()
