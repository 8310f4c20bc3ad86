"""User code that reads the training loader gets a separate pass, and training reads the same batches as without it."""

import copy
import pickle
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.data import EpochOrder, ResumableLoader
from tests import toy
from tests.data import user_loaders
from tests.data.user_loaders import KINDS, Images, Kind, Saves, numbers, of
from tests.scenes import at

pytestmark = pytest.mark.filterwarnings("ignore")
STOP = 11  # batches done, in the second epoch


class Numbers(ResumableLoader):
    """Loader that derives from `ResumableLoader`, as the recipes' loaders do."""

    def _batches(self, epoch: int, shares: Iterator[Any]) -> Iterator[Any]:
        for share in shares:
            yield torch.from_numpy(share), torch.zeros(len(share), 4)


class Shuffles(Sampler):
    """Sampler that shuffles its own list in place, so that each iteration changes it."""

    def __init__(self) -> None:
        self.indices = list(range(32))

    def __iter__(self) -> Iterator[int]:
        np.random.shuffle(self.indices)
        return iter(self.indices)

    def __len__(self) -> int:
        return 32


LOOKED_AT = {
    "shuffle": KINDS["shuffle"],
    "shuffle, generator, no distributed sampler": Kind(
        make=lambda **w: of(batch_size=4, shuffle=True, generator=user_loaders.generator(), **w),
        settings=user_loaders.NO_SAMPLER,
    ),
    "batch sampler, own NumPy stream": KINDS["batch sampler, own NumPy stream"],
    "lazy, global torch": KINDS["lazy, global torch"],
    "stream with a state": KINDS["stream with a state"],
    "two loaders, max_size_cycle": KINDS["two loaders, max_size_cycle"],
    "loader of this package": Kind(
        make=lambda **w: Numbers(EpochOrder(num_images=32, global_batch_size=4, seed=5)),
        settings={"max_steps": -1},
    ),
}


def look(trainer: pl.Trainer, *args: Any) -> None:
    """Read two batches of each training loader, read one of a second pass, and begin a third pass."""
    loaders = trainer.train_dataloader
    for loader in loaders.values() if isinstance(loaders, dict) else [loaders]:
        for _ in islice(iter(loader), 2):
            pass
        next(iter(loader))
        iter(loader)


HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_epoch_end",
)


def look_now_and_then(trainer: pl.Trainer, *args: Any) -> None:
    """Read the loader before training and in the middle of an epoch only, because each read starts processes."""
    if trainer.fit_loop.total_batch_idx in (-1, STOP - 1, STOP):
        look(trainer)


def read(
    kind: Kind, folder: str, *, looks: bool, resumes: bool = False, workers: int = 0
) -> list[Any]:
    looking = at(**dict.fromkeys(HOOKS, look))
    if workers:
        looking = at(on_train_start=look_now_and_then, on_train_batch_end=look_now_and_then)
    if looks:
        callbacks = [looking]
    else:
        callbacks = []
    if not resumes:
        callbacks.append(Saves(folder, [STOP]))
    if resumes:
        path = f"{folder}/{STOP}.ckpt"
    else:
        path = None
    module = user_loaders.fit(kind, "hybrid_allreduce", workers, callbacks, path)
    return list(module.read.values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LOOKED_AT)
def test_a_fit_and_its_resume_read_the_same_with_looks_in_every_hook(one_rank, tmp_path, name):
    assert one_rank.run(_differences, name, str(tmp_path)) == [[]]


def test_workers_read_the_same_with_looks_in_every_hook(one_rank, tmp_path):
    assert one_rank.run(_differences, "persistent workers", str(tmp_path), 2) == [[]]


def _differences(name: str, folder: str, workers: int = 0) -> list[str]:
    """Name the fits that read other batches, or draw other numbers, than an uninterrupted fit without such reads."""
    kind = (KINDS | LOOKED_AT)[name]
    undisturbed = read(kind, f"{folder}/without", looks=False, workers=workers)
    names = []
    if read(kind, f"{folder}/with", looks=True, workers=workers) != undisturbed:
        names.append("undisturbed")
    for saved_by in ("without", "with"):
        if (
            read(kind, f"{folder}/{saved_by}", looks=True, resumes=True, workers=workers)
            != undisturbed[STOP:]
        ):
            names.append(f"resumed, saved {saved_by} looks")
    return names


class Module(pl.LightningModule):
    """Module that records the images of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.images: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if isinstance(batch, torch.Tensor):
            images = batch
        else:
            images = batch[0]
        self.images.append(images.tolist())
        return self.net(images.float().reshape(-1, 1) / 32).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


class ReadsAll(pl.Callback):
    """Callback that reads the whole training loader in hooks around the end of a fit, as for features of all images."""

    def __init__(self) -> None:
        self.read: dict[str, list[int]] = {}

    def note(self, hook: str, trainer: pl.Trainer) -> None:
        self.read[hook] = sorted(
            image for batch in trainer.train_dataloader for image in batch.tolist()
        )

    def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.note("on_train_end", trainer)

    def on_fit_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.note("on_fit_end", trainer)

    def teardown(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self.note("teardown", trainer)


def test_every_image_is_read_around_the_end_of_a_fit_and_after_it():
    callback = ReadsAll()
    trainer = toy.trainer(max_steps=3, callbacks=[callback])
    trainer.fit(Module(), DataLoader(range(16), 2, shuffle=True))
    callback.note("after the fit", trainer)
    hooks = ("on_train_end", "on_fit_end", "teardown", "after the fit")
    assert callback.read == {hook: list(range(16)) for hook in hooks}


def test_an_iterator_that_a_module_holds_next_to_the_loop_reads_its_own_pass():
    """Users draw negatives, or a second view, from the same loader."""

    class Holds(Module):
        def on_train_start(self) -> None:
            self.second = iter(self.trainer.train_dataloader)
            self.second_images: list[list[int]] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.second_images.append(next(self.second).tolist())
            return super().training_step(batch, batch_idx)

    module = Holds()
    toy.trainer(max_epochs=1).fit(module, DataLoader(range(16), 2, shuffle=True))
    for images in (module.images, module.second_images):
        assert sorted(chain(*images)) == list(range(16))


def test_a_look_while_the_loader_is_made_for_a_schedule_leaves_the_resumed_order(tmp_path):
    """`estimated_stepping_batches` creates the loader before the checkpoint is read."""

    class Schedules(Module):
        def configure_optimizers(self) -> Any:
            _ = self.trainer.estimated_stepping_batches
            next(iter(self.trainer.train_dataloader))
            return super().configure_optimizers()

    def fit(**options: Any) -> list[list[int]]:
        pl.seed_everything(0, verbose=False)
        module = Schedules()
        callbacks = [Saves(str(tmp_path), [3])]
        trainer = toy.trainer(max_epochs=1, callbacks=callbacks)
        trainer.fit(module, DataLoader(range(16), 2, shuffle=True), **options)
        return module.images

    whole = fit()
    assert fit(ckpt_path=f"{tmp_path}/3.ckpt") == whole[3:]


def test_a_look_at_the_users_own_combined_loader_leaves_training_as_it_was():
    """Lightning keeps the iterators of training in that object."""
    combined = CombinedLoader([DataLoader(range(8), 2, shuffle=True)], "max_size")

    class Pair(Module):
        def on_train_start(self) -> None:
            next(iter(combined))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch[0], batch_idx)

    module = Pair()
    toy.trainer(max_epochs=1).fit(module, combined)
    assert sorted(chain(*module.images)) == list(range(8))


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_end"])
def test_a_look_that_replaces_the_iterators_of_training_is_refused_by_name(hook):
    """Lightning also uses the module's own `CombinedLoader`, and `ddp` would silently skip images."""

    class Keeps(Module):
        def train_dataloader(self) -> Any:
            self.combined = CombinedLoader([DataLoader(range(8), 2, shuffle=True)], "max_size")
            return self.combined

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch[0], batch_idx)

    callback = at(**{hook: lambda trainer, module, *args: next(iter(module.combined)) and None})
    with pytest.raises(RuntimeError, match="A second iteration of the training loader"):
        toy.trainer(max_epochs=1, callbacks=[callback]).fit(Keeps())


class Generating(Sampler):
    """Sampler that holds a generator, which cannot be copied."""

    def __init__(self) -> None:
        self.numbers = iter(number for number in range(100))

    def __iter__(self) -> Iterator[int]:
        return islice(self.numbers, 8)

    def __len__(self) -> int:
        return 8


def test_a_look_at_a_sampler_that_cannot_be_copied_is_refused_by_name():
    loader = DataLoader(range(100), 2, sampler=Generating())
    trainer = toy.trainer(
        max_epochs=1, callbacks=[at(on_train_start=look)], use_distributed_sampler=False
    )
    with pytest.raises(
        RuntimeError,
        match=r"its `sampler` \(of type Generating\) cannot be copied .*Create another loader",
    ):
        trainer.fit(Module(), loader)


class Wraps:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader

    def __len__(self) -> int:
        return len(self.loader)


class Wrapping(HybridAllReduceStrategy):
    def process_dataloader(self, dataloader: object) -> object:
        return Wraps(super().process_dataloader(dataloader))


def test_a_strategy_that_wraps_the_loader_again_is_refused_by_name():
    """The loop would not hold the strategy's iterators, so a resumed run would start from the beginning."""
    trainer = toy.trainer(max_epochs=1, strategy=Wrapping())
    with pytest.raises(
        RuntimeError, match=r"\(=Wraps\) is not the one that the strategy's `process_dataloader`"
    ):
        trainer.fit(Module(), DataLoader(range(8), 2))


class CountsBatches(DataLoader):
    """Loader with its own state, a count of the batches that it returned."""

    num_given = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.num_given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"num_given": self.num_given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_given = state["num_given"]


def test_a_checkpoint_after_a_look_has_the_state_after_the_loops_own_batch(tmp_path):
    path = f"{tmp_path}/looked.ckpt"

    def save(trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            list(trainer.train_dataloader)
            trainer.save_checkpoint(path)

    trainer = toy.trainer(max_epochs=1, callbacks=[at(on_train_batch_end=save)])
    trainer.fit(Module(), CountsBatches(range(8), 2))
    loop = torch.load(path)["loops"]["fit_loop"]["state_dict"]
    assert loop["combined_loader"] == [{"num_given": 3}]


class Stream(IterableDataset):
    """Stream that counts the samples that it returned, over all iterations."""

    def __init__(self) -> None:
        self.num_given = 0

    def __iter__(self) -> Iterator[int]:
        for image in range(8):
            self.num_given += 1
            yield image


def test_a_look_at_a_stream_leaves_the_counts_of_the_data_set():
    stream = Stream()
    callback = at(
        on_train_start=lambda trainer, *args: [None for _ in trainer.train_dataloader] and None
    )
    toy.trainer(max_epochs=2, callbacks=[callback]).fit(Module(), DataLoader(stream, 2))
    assert stream.num_given == 16


class MovesBatches(Module):
    """Module that moves batches in its own hook, so that no prefetcher wraps the loader."""

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        next(iter(self.trainer.train_dataloader))


@pytest.mark.parametrize("strategy", ["hybrid_allreduce", "ddp"])
def test_looks_without_a_prefetcher_leave_training_as_it_was(strategy):
    module = MovesBatches()
    trainer = toy.trainer(max_epochs=1, strategy=strategy)
    loader = Numbers(EpochOrder(num_images=32, global_batch_size=4, seed=5), trainer=trainer)
    trainer.fit(module, loader)
    assert sorted(chain(*module.images)) == list(range(32))
    module = MovesBatches()
    toy.trainer(max_epochs=1).fit(module, DataLoader(range(32), 4, shuffle=True))
    assert sorted(chain(*module.images)) == list(range(32))


def test_the_loader_of_a_fit_can_be_given_to_another_one(tmp_path):
    """`trainer.train_dataloader` belongs to its trainer, and the next trainer resumes from its own position."""
    first = toy.trainer(max_epochs=1)
    first.fit(Module(), DataLoader(range(16), 2, shuffle=True))
    whole = Module()
    toy.trainer(max_epochs=1, callbacks=[Saves(str(tmp_path), [3])]).fit(
        whole, first.train_dataloader
    )
    resumed = Module()
    toy.trainer(max_epochs=1).fit(resumed, first.train_dataloader, ckpt_path=f"{tmp_path}/3.ckpt")
    assert sorted(chain(*whole.images)) == list(range(16))
    assert resumed.images == whole.images[3:]


def test_two_looks_draw_other_numbers_and_leave_the_global_streams_as_they_were():
    drawn: list[Any] = []

    def look_twice(trainer: pl.Trainer, *args: Any) -> None:
        state = torch.get_rng_state()
        for _ in range(2):
            drawn.append(next(iter(trainer.train_dataloader))[1].tolist())
        assert torch.equal(torch.get_rng_state(), state)
        assert numbers() != drawn[0][0]

    toy.trainer(max_epochs=1, callbacks=[at(on_train_start=look_twice)]).fit(
        Module(), of(Images(8), shuffle=True)
    )
    assert drawn[0] != drawn[1]


def test_a_look_in_a_loop_of_ones_own_waits_for_no_trainer():
    """Without a trainer, any code that reads a loader of this package advances it."""
    loader = Numbers(EpochOrder(num_images=32, global_batch_size=4, seed=5))
    next(iter(loader))
    assert loader.batches_done == 1
    trainer = toy.trainer()
    loader.bind_trainer(trainer)
    assert len(list(loader)) == 8
    assert loader.batches_done == 1


make_shuffles = partial(DataLoader, range(32), 4)


def test_a_sampler_that_shuffles_its_own_list_keeps_its_order_under_looks():
    def fit(*callbacks: pl.Callback) -> list[list[int]]:
        pl.seed_everything(0, verbose=False)
        module = Module()
        trainer = toy.trainer(
            max_epochs=3, callbacks=list(callbacks), use_distributed_sampler=False
        )
        trainer.fit(module, make_shuffles(sampler=Shuffles()))
        return module.images

    assert fit(at(**dict.fromkeys(HOOKS, look))) == fit()


def test_a_trainer_can_be_pickled_and_copied_after_its_fit():
    """`torch.save(module)` pickles the trainer if the module refers to it."""
    trainer = toy.trainer(strategy=HybridAllReduceStrategy(), max_epochs=1)
    trainer.fit(toy.Toy(), toy.loader())
    unpickled = pickle.loads(pickle.dumps(trainer))
    copied = copy.deepcopy(trainer)
    images = [batch[0].tolist() for batch in trainer.train_dataloader]
    assert [batch[0].tolist() for batch in copied.train_dataloader] == images
    assert unpickled.global_step == trainer.global_step
