"""Loaders and hooks reported by users, resumed in the middle of an epoch: exactly, with a warning or with an error."""

import pickle
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from lightning_hybrid.data import EpochOrder, ResumableLoader
from lightning_hybrid.data.exact_loader import exact
from lightning_hybrid.data.random_streams import stream_names
from tests import toy
from tests.data.user_loaders import Saves

pytestmark = pytest.mark.filterwarnings("ignore:.*weights_only", "ignore:The dataloader")


class Net(pl.LightningModule):
    """Module that records the step and the images of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.read: list[tuple[int, list[Any]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.read.append((self.trainer.global_step, batch.tolist()))
        return self.net(batch.float().reshape(-1, 1)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-4)


def fit(
    module: Net, loader: Any, *callbacks: pl.Callback, folder: Any = None, **options: Any
) -> list[str]:
    """Fit, and return the warnings."""
    pl.seed_everything(0, verbose=False)
    ckpt_path = options.pop("ckpt_path", None)
    if folder is None:
        saves = []
    else:
        saves = [Saves(str(folder), [3, 11])]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = toy.trainer(callbacks=[*callbacks, *saves], **{"max_epochs": 2, **options})
        trainer.fit(module, loader, ckpt_path=ckpt_path)
    return [str(warning.message) for warning in caught]


class LooksFirst(Net):
    """Module that initializes itself from the first batch, as ActNorm does."""

    def on_train_start(self) -> None:
        next(iter(self.trainer.train_dataloader))


def test_a_look_for_the_first_batch_leaves_what_a_resume_reads(tmp_path):
    whole = Net()
    fit(whole, DataLoader(range(16), 2, shuffle=True), folder=tmp_path)
    resumed = LooksFirst()
    fit(resumed, DataLoader(range(16), 2, shuffle=True), ckpt_path=f"{tmp_path}/3.ckpt")
    assert resumed.read == whole.read[3:]


class Noisy(Dataset):
    strength = 0

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> int:
        return index + 100 * self.strength


class Harder(pl.Callback):
    def __init__(self, dataset: Noisy) -> None:
        self.dataset = dataset

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.dataset.strength = 10 * trainer.current_epoch


class WeighsByEpoch(Net):
    def on_train_epoch_start(self) -> None:
        self.weight = 0.5**self.current_epoch


def warnings_of_hooks(
    path: str | None, folder: Any, module: Net, *callbacks: pl.Callback
) -> list[str]:
    loader = DataLoader(range(32), 4, shuffle=True)
    texts = fit(module, loader, *callbacks, ckpt_path=path, folder=folder)
    return [text for text in texts if "on_train_epoch_start" in text]


def test_hooks_at_the_start_of_a_resumed_epoch_that_do_not_run_again_are_named(tmp_path):
    lambda_callback = LambdaCallback(on_train_epoch_start=lambda *_: None)
    callbacks = [Harder(Noisy()), lambda_callback, pl.callbacks.Timer()]
    assert warnings_of_hooks(None, tmp_path, WeighsByEpoch(), *callbacks) == []
    (text,) = warnings_of_hooks(f"{tmp_path}/11.ckpt", None, WeighsByEpoch(), *callbacks)
    names = ("Harder", "LambdaCallback", "WeighsByEpoch")
    listed = ", ".join(f"`{name}.on_train_epoch_start`" for name in names)
    assert f"in the middle of epoch 1. In this epoch, {listed} ran before the checkpoint" in text
    assert warnings_of_hooks(f"{tmp_path}/0.ckpt", None, WeighsByEpoch(), *callbacks) == []
    assert warnings_of_hooks(f"{tmp_path}/11.ckpt", None, Net()) == []


class Numbers(ResumableLoader):
    def _batches(self, epoch: int, shares: Iterator[Any]) -> Iterator[Any]:
        return (torch.from_numpy(share) for share in shares)


def test_hooks_at_the_start_of_an_epoch_are_named_for_loaders_of_this_package_too(tmp_path):
    def loader() -> Numbers:
        return Numbers(EpochOrder(num_images=32, global_batch_size=4, seed=0))

    fit(WeighsByEpoch(), loader(), folder=tmp_path)
    for stop, num_warnings in ((11, 1), (0, 0)):
        texts = fit(WeighsByEpoch(), loader(), ckpt_path=f"{tmp_path}/{stop}.ckpt")
        named = [text for text in texts if "`WeighsByEpoch.on_train_epoch_start`" in text]
        assert len(named) == num_warnings, f"stopped after {stop} batches"


class Buckets:
    batch_size = 4
    drop_last = False

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(32, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return (order[i : i + 4] for i in range(0, 32, 4))


class SilentBuckets(Buckets):
    """Batch sampler that stores its epoch under another name."""

    @property
    def epoch(self) -> None:
        return None

    @epoch.setter
    def epoch(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(32, generator=torch.Generator().manual_seed(self.number)).tolist()
        return (order[i : i + 4] for i in range(0, 32, 4))


class SetsEpoch(pl.Callback):
    """Callback that sets the epoch of the batch sampler, counted from `first`."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.train_dataloader.batch_sampler.set_epoch(self.first + trainer.current_epoch)


@pytest.mark.parametrize(
    ("make", "callbacks"),
    [
        (Buckets, [SetsEpoch()]),
        (Buckets, [SetsEpoch(first=7)]),
        (Buckets, []),
        (SilentBuckets, [SetsEpoch()]),
    ],
    ids=["epoch", "another number", "not set", "epoch that is not shown"],
)
def test_a_batch_sampler_that_follows_from_set_epoch_resumes(tmp_path, make, callbacks):
    """The sampler resumes in the middle of an epoch, where the hook does not run, and silently at an epoch's end."""

    def run(**options: Any) -> tuple[list[Any], list[str]]:
        module = Net()
        loader = DataLoader(range(32), batch_sampler=make())
        settings = {"use_distributed_sampler": False, "max_epochs": 3, **options}
        texts = fit(module, loader, *callbacks, **settings)
        return module.read, [text for text in texts if "training loader" in text]

    whole, _ = run(folder=tmp_path)
    assert (whole[0][1] != whole[8][1]) == bool(callbacks)
    for stop, done in ((3, 3), (11, 11), (0, 8)):
        assert run(ckpt_path=f"{tmp_path}/{stop}.ckpt") == (whole[done:], [])


def test_a_number_that_a_hook_gives_set_epoch_is_kept_as_under_ddp(tmp_path):
    """The user's hook determines the order of the sampler, and not the epoch of the loop."""

    class Restarts(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            trainer.train_dataloader.sampler.set_epoch(5)

    def run(**options: Any) -> list[Any]:
        module = Net()
        fit(module, DataLoader(range(32), 4, shuffle=True), Restarts(), **options)
        return module.read

    whole = run(folder=tmp_path)
    assert whole == run(strategy="ddp")
    assert [images for _, images in whole[:8]] == [images for _, images in whole[8:]]
    assert run(ckpt_path=f"{tmp_path}/11.ckpt") == whole[11:]


class SetOfEpoch(Dataset):
    """Data set whose images depend on the epoch, as in a curriculum."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> int:
        return 1000 * self.epoch + index


def test_a_data_set_with_epochs_goes_on_in_its_epoch(tmp_path):
    class SetsData(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            trainer.train_dataloader.dataset.set_epoch(trainer.current_epoch)

    def run(**options: Any) -> list[Any]:
        module = Net()
        fit(module, DataLoader(SetOfEpoch(), 4, shuffle=True), SetsData(), **options)
        return module.read

    whole = run(folder=tmp_path)
    assert run(ckpt_path=f"{tmp_path}/11.ckpt") == whole[11:]


class Crops:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)


class Compose:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)


class Pictures(Dataset):
    def __init__(self, transform: Any = None) -> None:
        self.transform = transform
        self.samples = list(range(1000))

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> int:
        return index


class Collates:
    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __call__(self, images: list[int]) -> torch.Tensor:
        return torch.tensor(images)

    def method(self, images: list[int]) -> torch.Tensor:
        return torch.tensor(images)


def collate_with(generator: torch.Generator, images: list[int]) -> torch.Tensor:
    return torch.tensor(images)


def closure() -> Any:
    rng = np.random.RandomState(0)

    def collate(images: list[int]) -> Any:
        return torch.tensor(images), rng

    return collate


@pytest.mark.parametrize(
    ("roots", "names"),
    [
        ([Pictures(Crops())], ["Crops.rng"]),
        ([Pictures(Compose(Crops(), Compose(Crops())))], ["Crops.rng", "Crops.rng"]),
        ([Subset(Pictures(Crops()), range(8))], ["Crops.rng"]),
        (
            [ConcatDataset([Pictures(), Subset(Pictures(Compose(Crops())), range(8))])],
            ["Crops.rng"],
        ),
        ([Pictures(), Collates()], ["Collates.generator"]),
        ([Pictures(), Collates().method], ["Collates.generator"]),
        ([Pictures(), partial(collate_with, torch.Generator())], [""]),
        ([Pictures(), closure()], ["closure.<locals>.collate"]),
        ([Pictures(np.random), Pictures(np.random.rand), torch.utils.data.default_collate], []),
        ([Pictures(torch.default_generator), pl.Trainer], []),
    ],
)
def test_generators_are_found_wherever_a_data_set_or_collate_fn_holds_them(roots, names):
    assert stream_names(*roots) == names


def test_a_generator_of_a_transform_below_a_subset_is_a_warning(tmp_path):
    loader = DataLoader(Subset(Pictures(Compose(Crops())), range(32)), 4)
    texts = fit(Net(), loader, folder=tmp_path)
    assert len([text for text in texts if "draw from `Crops.rng` are not restored" in text]) == 1


class CountsEpochs(DataLoader):
    """Loader whose `collate_fn` reads the number of iterations so far."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.num_iterations = 0
        super().__init__(*args, collate_fn=self.collate, **options)

    def __iter__(self) -> Any:
        self.num_iterations += 1
        return super().__iter__()

    def collate(self, images: list[int]) -> torch.Tensor:
        return torch.tensor([[image, self.num_iterations] for image in images])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_fn_of_the_loader_reads_the_counts_of_the_loader_that_is_iterated(workers):
    module = Net()
    if workers:
        context = "fork"
    else:
        context = None
    loader = CountsEpochs(
        range(8), batch_size=4, num_workers=workers, multiprocessing_context=context
    )
    fit(module, loader, use_distributed_sampler=False)
    assert [images[0][1] for _, images in module.read] == [1, 1, 2, 2]


def test_workers_that_are_not_forked_receive_a_loader_of_the_users_class():
    """Their `collate_fn` refers to the loader, and the class that resumes exactly cannot be pickled."""

    class Reader:
        rank = seed = 0
        world_size = 1

    copied = exact(CountsEpochs(range(8), batch_size=4), Reader())
    copied.num_iterations = 3
    collate = pickle.loads(pickle.dumps(copied.collate_fn))
    assert type(collate.__self__) is CountsEpochs
    assert collate([5]).tolist() == [[5, 3]]


def test_every_image_of_the_first_epoch_is_read_once_over_a_stop(tmp_path):
    whole = Net()
    fit(whole, DataLoader(range(16), 2, shuffle=True), folder=tmp_path, max_epochs=1)
    resumed = Net()
    fit(
        resumed,
        DataLoader(range(16), 2, shuffle=True),
        ckpt_path=f"{tmp_path}/3.ckpt",
        max_epochs=1,
    )
    images = [images for _, images in [*whole.read[:3], *resumed.read]]
    assert sorted(chain(*images)) == list(range(16))


def test_a_schedule_of_the_accumulation_makes_the_steps_that_are_left(tmp_path):
    """The second epoch has two batches per step, and the checkpoint is from the middle of its second step."""

    def run(**options: Any) -> list[Any]:
        module = Net()
        fit(
            module,
            DataLoader(range(32), 4, shuffle=True),
            GradientAccumulationScheduler({0: 1, 1: 2}),
            **options,
        )
        return module.read

    whole = run(folder=tmp_path)
    assert run(ckpt_path=f"{tmp_path}/11.ckpt") == whole[10:]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(32))


def test_a_stream_resumes_after_whole_steps_of_the_interrupted_run(tmp_path):
    """The stream is read before training starts, when the accumulation of the interrupted run must already be known."""

    def run(accumulate: int, **options: Any) -> list[Any]:
        module = Net()
        fit(module, DataLoader(Stream(), 4), accumulate_grad_batches=accumulate, **options)
        return [images for _, images in module.read]

    whole = run(2, folder=tmp_path)
    for accumulate in (2, 1):
        assert run(accumulate, ckpt_path=f"{tmp_path}/3.ckpt") == whole[2:]
    text = toy.error_of(run, 4, ckpt_path=f"{tmp_path}/3.ckpt")
    assert (
        "`accumulate_grad_batches` (=4) must divide the number of finished batches of the epoch (=2)"
        in text
    )


class OnlyLoads(IterableDataset):
    """Stream that can load a state, for example that of another class, but does not save one."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(16))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("There is no state to load.")


def test_a_stream_without_state_dict_is_read_again(tmp_path):
    whole = Net()
    fit(whole, DataLoader(OnlyLoads(), 2), folder=tmp_path)
    resumed = Net()
    fit(resumed, DataLoader(OnlyLoads(), 2), ckpt_path=f"{tmp_path}/3.ckpt")
    assert resumed.read == whole.read[3:]


class Shifted(DataLoader):
    """Loader whose batches depend on its epoch, and which counts how often it is iterated over and read."""

    epoch = 0
    num_iterations = 0
    num_batches = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self.num_iterations += 1
        return self._batches(super().__iter__())

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.num_batches += 1
            yield batch + 100 * self.epoch


class KeepsLoader(Net):
    """Module that sets the epoch of its own loader."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> Any:
        return self.loader

    def on_train_epoch_start(self) -> None:
        self.loader.set_epoch(self.current_epoch)


def images_of(module: Net) -> list[list[int]]:
    return [images for _, images in module.read]


def test_a_module_sets_the_epoch_of_its_own_loader():
    module = KeepsLoader(Shifted(range(4), 2))
    fit(module, None, use_distributed_sampler=False)
    assert images_of(module) == [[0, 1], [2, 3], [100, 101], [102, 103]]


def test_counters_that_a_loader_writes_are_those_of_the_users_object():
    loader = Shifted(range(4), 2)
    counts = []
    callback = LambdaCallback(
        on_train_batch_end=lambda *_: counts.append((loader.num_iterations, loader.num_batches))
    )
    fit(Net(), loader, callback, use_distributed_sampler=False)
    assert counts == [(1, 1), (1, 2), (2, 3), (2, 4)]


class ReplacesCollate(KeepsLoader):
    """Module that replaces the `collate_fn` of its own loader."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.loader.collate_fn = lambda images: torch.tensor(images) + 1000
        if self.current_epoch == 2:
            self.loader.collate_fn = self.loader.negative


class Negative(DataLoader):
    sign = -1

    def negative(self, images: list[int]) -> torch.Tensor:
        return self.sign * torch.tensor(images)


def test_a_module_replaces_the_collate_fn_of_its_own_loader():
    """A method of the loader is bound to the loader that training iterates over."""
    module = ReplacesCollate(Negative(range(4), 2))
    fit(module, None, use_distributed_sampler=False, max_epochs=3)
    assert images_of(module)[1::2] == [[2, 3], [1002, 1003], [-2, -3]]
    assert module.trainer.train_dataloader.collate_fn.__self__ is not module.loader
