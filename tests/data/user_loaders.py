"""Loaders that users write, and comparisons of a resumed fit with an uninterrupted one.

An uninterrupted fit of each kind writes checkpoints. A case is a fit that resumes from one of them. The images, and the
random numbers of their transforms, are compared batch by batch.
"""

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from tests import toy

NUM_EPOCHS = 3


def numbers() -> list[float]:
    """Draw a number from each global stream, as transforms do."""
    return [torch.rand(1).item(), np.random.rand(), np.random.randn(), random.random()]


class Images(Dataset):
    def __init__(self, num_images: int = 32, first: int = 0) -> None:
        self.num_images = num_images
        self.first = first

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return self.first + index, torch.tensor(numbers())


class Stream(IterableDataset):
    """Stream of images without a length, of which each rank and worker reads its share."""

    def __init__(self, num_images: int = 32) -> None:
        self.num_images = num_images

    def __iter__(self) -> Iterator[Any]:
        world = dist.get_world_size()
        worker = 0
        num_workers = 1
        info = get_worker_info()
        if info is not None:
            worker = info.id
            num_workers = info.num_workers
        for index in range(worker * world + dist.get_rank(), self.num_images, num_workers * world):
            yield index, torch.tensor(numbers())


class StatefulStream(Stream):
    """Stream with a state, which resumes without reading earlier samples again."""

    done = 0
    is_resumed = False

    def __iter__(self) -> Iterator[Any]:
        if not self.is_resumed:
            self.done = 0
        self.is_resumed = False
        world = dist.get_world_size()
        rank = dist.get_rank()
        for index in range(rank + self.done * world, self.num_images, world):
            self.done += 1
            yield index, torch.tensor(numbers())

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]
        self.is_resumed = True


class LiveStateStream(StatefulStream):
    """Stream whose `state_dict` is the dictionary in which it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"done": 0}

    @property
    def done(self) -> int:
        return self.state["done"]

    @done.setter
    def done(self, number: int) -> None:
        self.state["done"] = number

    def state_dict(self) -> dict[str, Any]:
        return self.state


class Buckets(Sampler):
    """Batch sampler that draws from NumPy, either from its own stream or from the global one."""

    def __init__(self, num_images: int = 32, *, is_own: bool) -> None:
        self.num_images = num_images
        self.stream = np.random.default_rng(5) if is_own else np.random

    def __iter__(self) -> Iterator[list[int]]:
        order = self.stream.permutation(self.num_images)
        return (order[k : k + 4].tolist() for k in range(0, self.num_images, 4))

    def __len__(self) -> int:
        return -(-self.num_images // 4)


class Lazy(Sampler):
    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[int]:
        return (self.stream() for _ in range(32))

    def __len__(self) -> int:
        return 32


class Counting(Sampler):
    """Sampler that counts its own iterations, which cannot be restored."""

    num_iterations = 0

    def __iter__(self) -> Iterator[int]:
        self.num_iterations += 1
        return iter(np.random.default_rng(self.num_iterations).permutation(32).tolist())

    def __len__(self) -> int:
        return 32


class Doubling(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch
            yield batch

    def __len__(self) -> int:
        return 2 * super().__len__()


def generator(seed: int = 9) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def of(data: Any = None, batch_size: int = 2, **options: Any) -> DataLoader:
    if options.get("num_workers"):
        options["multiprocessing_context"] = "fork"
    return DataLoader(Images() if data is None else data, batch_size=batch_size, **options)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Loader, built with a number of workers, and the trainer settings that it needs."""

    make: Callable[..., Any]
    settings: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    is_refused: str = ""
    ranks: tuple[int, ...] = (1, 2)
    workers: tuple[int, ...] = (0, 2)


NO_SAMPLER: dict[str, Any] = {"use_distributed_sampler": False}
KINDS: dict[str, Kind] = {
    "shuffle": Kind(make=lambda **w: of(shuffle=True, **w)),
    "shuffle, generator": Kind(make=lambda **w: of(shuffle=True, generator=generator(), **w)),
    "weighted": Kind(
        make=lambda **w: of(sampler=WeightedRandomSampler([1 + i % 7 for i in range(32)], 32), **w)
    ),
    "batch sampler, own NumPy stream": Kind(
        make=lambda **w: DataLoader(Images(), batch_sampler=Buckets(is_own=True), **_forked(w)),
        settings=NO_SAMPLER,
    ),
    "batch sampler, global NumPy": Kind(
        make=lambda **w: DataLoader(Images(), batch_sampler=Buckets(is_own=False), **_forked(w)),
        settings=NO_SAMPLER,
    ),
    "no distributed sampler": Kind(
        make=lambda **w: of(batch_size=4, shuffle=True, **w), settings=NO_SAMPLER
    ),
    "lazy, global torch": Kind(
        make=lambda **w: of(batch_size=4, sampler=Lazy(lambda: int(torch.randint(32, ()))), **w),
        settings=NO_SAMPLER,
    ),
    "persistent workers": Kind(
        make=lambda **w: of(shuffle=True, persistent_workers=True, **w), workers=(2,)
    ),
    "accumulate": Kind(make=lambda **w: of(shuffle=True, **w), accumulate=2),
    "limit_train_batches": Kind(
        make=lambda **w: of(shuffle=True, **w), settings={"limit_train_batches": 5}
    ),
    "two loaders, max_size_cycle": Kind(
        make=lambda **w: CombinedLoader(
            {"a": of(Images(12), shuffle=True, **w), "b": of(Images(32, 100), shuffle=True, **w)},
            "max_size_cycle",
        )
    ),
    "two loaders, max_size": Kind(
        make=lambda **w: CombinedLoader(
            {"a": of(Images(12), shuffle=True, **w), "b": of(Images(32, 100), shuffle=True, **w)},
            "max_size",
        )
    ),
    "stream": Kind(make=lambda **w: of(Stream(), **w)),
    "stream with a state": Kind(make=lambda **w: of(StatefulStream(), **w), workers=(0,)),
    "stream with a live state": Kind(make=lambda **w: of(LiveStateStream(), **w), workers=(0,)),
    "stream in a cycle": Kind(
        make=lambda **w: CombinedLoader(
            {"a": of(Stream(12), **w), "b": of(Stream(), **w)}, "max_size_cycle"
        )
    ),
    "counts its iterations": Kind(
        make=lambda **w: of(batch_size=4, sampler=Counting(), **w),
        settings=NO_SAMPLER,
        is_refused="count its",
    ),
    "gives each batch twice": Kind(
        make=lambda **w: _doubling(**w), is_refused="one batch for each index list"
    ),
    "in_order=False": Kind(
        make=lambda **w: of(shuffle=True, in_order=False, **w),
        is_refused="in_order",
        workers=(2,),
        ranks=(1,),
    ),
}


def _forked(options: dict[str, Any]) -> dict[str, Any]:
    if options.get("num_workers"):
        return options | {"multiprocessing_context": "fork"}
    return options


def _doubling(**options: Any) -> DataLoader:
    return Doubling(Images(), 2, shuffle=True, **_forked(options))


if find_spec("torchdata") is not None:

    def _stateful(data: Any = None, batch_size: int = 2, **options: Any) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(
            Images() if data is None else data, batch_size=batch_size, **_forked(options)
        )

    KINDS |= {
        "torchdata": Kind(make=lambda **w: _stateful(shuffle=True, **w)),
        "torchdata, stream with a state": Kind(
            make=lambda **w: _stateful(StatefulStream(), **w), workers=(0,)
        ),
    }


class Reads(pl.LightningModule):
    """Module that records its batches by number, with epoch, images and random numbers."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.make = make
        self.net = nn.Sequential(nn.Linear(1, 2), nn.Dropout(0.5), nn.Linear(2, 1))
        self.read: dict[int, tuple[int, Any, Any]] = {}
        self.warnings: list[str] = []

    def train_dataloader(self) -> Any:
        return self.make()

    def val_dataloader(self) -> Any:
        return of(Images(4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if isinstance(batch, dict):
            parts = list(batch.values())
        elif isinstance(batch[0], list):
            parts = batch
        else:
            parts = [batch]
        images = []
        drawn = []
        for part in parts:
            if part is None:  # of a loader that ended before the others
                images.append(None)
                drawn.append(None)
            else:
                images.append(torch.as_tensor(part[0]).flatten().tolist())
                drawn.append(part[1].tolist())
        number = self.trainer.fit_loop.total_batch_idx
        self.read[number] = (self.trainer.current_epoch, images, drawn)
        first = next(part[0] for part in parts if part is not None)
        return self.net(torch.as_tensor(first).float().reshape(-1, 1) / 32).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        numbers()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Saves(pl.Callback):
    def __init__(self, folder: str, stops: list[int]) -> None:
        self.folder = folder
        self.stops = stops

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        num_batches = trainer.fit_loop.total_batch_idx + 1
        if num_batches in self.stops:
            trainer.save_checkpoint(f"{self.folder}/{num_batches}.ckpt")

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(f"{self.folder}/0.ckpt")


def fit(
    kind: Kind,
    strategy: Any,
    workers: int,
    callbacks: Any = (),
    path: str | None = None,
    **trainer_settings: Any,
) -> Reads:
    pl.seed_everything(3, verbose=False)
    module = Reads(lambda: kind.make(num_workers=workers) if workers else kind.make())
    settings = {"max_steps": 10**6, "accumulate_grad_batches": kind.accumulate} | kind.settings
    validates = "val_check_interval" in settings
    trainer = toy.trainer(
        strategy=strategy() if callable(strategy) else strategy,
        max_epochs=NUM_EPOCHS,
        callbacks=list(callbacks),
        limit_val_batches=1 if validates else 0,
        num_sanity_val_steps=0,
        **settings | trainer_settings,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, ckpt_path=path)
    module.warnings = [str(warning.message) for warning in caught]
    return module


STOPS = (0, 3, 8, 11, 20)  # batches done; 0: the end of the first epoch


def outcomes(
    name: str, strategy: Any, workers: int, folder: str, stops: tuple[int, ...] = STOPS
) -> list[dict[str, Any]]:
    """Return the differences between fits that resume from `stops` and an uninterrupted one on this rank."""
    kind = KINDS[name]
    whole = fit(kind, strategy, workers, [Saves(folder, list(stops))]).read
    batches_per_epoch = 1 + max(number for number, (epoch, _, _) in whole.items() if epoch == 0)
    cases = []
    for stop in stops:
        if stop >= len(whole):
            continue
        if stop == 0:
            first = batches_per_epoch
        else:
            first = stop - (stop % batches_per_epoch) % kind.accumulate
        expected = [batch for number, batch in sorted(whole.items()) if number >= first]
        case = {
            "kind": name,
            "workers": workers,
            "ranks": dist.get_world_size(),
            "stop": stop,
            "batches": len(expected),
        }
        cases.append(case | compare(kind, strategy, workers, f"{folder}/{stop}.ckpt", expected))
    return cases


def compare(
    kind: Kind, strategy: Any, workers: int, path: str, expected: list[Any]
) -> dict[str, Any]:
    """Count the batches in which a resumed fit differs from the expected ones, and return its messages."""
    try:
        module = fit(kind, strategy, workers, path=path)
    except Exception as error:
        return {"images": 0, "numbers": 0, "messages": f"{type(error).__name__}: {error}"}

    resumed = [batch for _, batch in sorted(module.read.items())]
    num_images = 0
    num_drawn = 0
    for left, read in zip_longest(expected, resumed, fillvalue=(None, None, None)):
        num_images += left[:2] != read[:2]
        num_drawn += left[2] != read[2]
    messages = [
        text for text in module.warnings if "training loader" in text or "not resumable" in text
    ]
    return {"images": num_images, "numbers": num_drawn, "messages": " ".join(messages)}
