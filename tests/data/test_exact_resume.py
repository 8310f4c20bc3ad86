"""Exact resume of a user's own `DataLoader`: the remaining images, and the random numbers of their transforms."""

import random
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)

from lightning_hybrid import HybridAllReduceStrategy, HybridPipelineStrategy
from lightning_hybrid.data.random_streams import SeededStreams
from tests import toy
from tests.data import user_loaders
from tests.data.user_loaders import KINDS, Images, Kind, Saves, fit, generator, of, outcomes
from tests.scenes import at

pytestmark = pytest.mark.filterwarnings("ignore")
HYBRID = "hybrid_allreduce"
GRID = [
    pytest.param(name, workers, ranks, id=f"{name}-{workers} workers-{ranks} ranks")
    for name, kind in KINDS.items()
    for workers in kind.workers
    for ranks in kind.ranks
]
OFF = partial(HybridAllReduceStrategy, exact_resume=False)


def wrong(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cases that differ, or that raise an error without the reason expected for their kind."""
    reason = KINDS[cases[0]["kind"]].is_refused
    wrong_cases = []
    for case in cases:
        is_exact = not case["images"] and not case["numbers"] and "Error" not in case["messages"]
        is_refused_by_name = bool(reason) and reason in case["messages"]
        if not is_exact and not is_refused_by_name:
            wrong_cases.append(case)
    return wrong_cases


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_loader_reads_the_remaining_images_or_is_refused_by_name(
    one_rank, tmp_path, name
):
    """Each kind is resumed from the end of an epoch and from the middle of the second epoch."""
    results = one_rank.run(
        outcomes, name, HYBRID, KINDS[name].workers[0], str(tmp_path), (0, 11), timeout_s=120
    )
    assert [wrong(cases) for cases in results] == [[]]


@pytest.mark.long
@pytest.mark.battery
@pytest.mark.parametrize(("name", "workers", "ranks"), GRID)
def test_the_remaining_images_are_read_or_refused_by_name_from_five_stops(
    rank_pool, tmp_path, name, workers, ranks
):
    """The five stops are an epoch's end, both sides of it, and the middle of the first, second and last epoch."""
    results = rank_pool.ranks(ranks).run(
        outcomes, name, HYBRID, workers, str(tmp_path), timeout_s=300
    )
    assert [wrong(cases) for cases in results] == [[]] * ranks


def test_both_ranks_of_a_pipeline_read_the_remaining_images(two_ranks, tmp_path):
    strategy = partial(HybridPipelineStrategy, num_stages=2, num_microbatches=2)
    rank_0, rank_1 = two_ranks.run(
        outcomes, "shuffle", strategy, 0, str(tmp_path), (3, 5), timeout_s=120
    )
    assert wrong(rank_0) == []
    assert rank_0 == rank_1


def shuffled(
    folder: str,
    stop: int | None = None,
    workers: int = 0,
    strategy: Any = HYBRID,
    batch_size: int = 2,
    accumulate: int = 1,
) -> Any:
    kind = Kind(make=partial(of, shuffle=True, batch_size=batch_size), accumulate=accumulate)
    path = None if stop is None else f"{folder}/{stop}.ckpt"
    try:
        module = fit(kind, strategy, workers, [Saves(folder, [3, 6])] if stop is None else [], path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return list(module.read.values())


def steps(ranks: list[Any], batches_of_step: int = 1) -> list[list[int]]:
    """Return the sorted images of each step over all ranks."""
    assert not isinstance(ranks[0], str), ranks[0]
    batches = []
    for batch_of_ranks in zip(*ranks, strict=True):
        images = [image for _, images, _ in batch_of_ranks for image in images[0]]
        batches.append(images)
    return [
        sorted(chain(*batches[i : i + batches_of_step]))
        for i in range(0, len(batches), batches_of_step)
    ]


def test_another_number_of_ranks_reads_the_remaining_images_of_each_step(rank_pool, tmp_path):
    whole = rank_pool.ranks(2).run(shuffled, str(tmp_path))
    on_one_rank = rank_pool.ranks(1).run(shuffled, str(tmp_path), 3, 0, HYBRID, 4)
    assert steps(on_one_rank) == steps(whole)[3:]
    (refused,) = rank_pool.ranks(1).run(shuffled, str(tmp_path), 3, 0, HYBRID, 2)
    assert (
        "`batch_size` (=2) times 1 ranks times 1 accumulated batches must equal the number of samples "
        "per step in the checkpoint (=4). Set batch_size=4." in refused
    )


def test_other_batch_sizes_and_accumulation_read_the_remaining_images(rank_pool, tmp_path):
    """The images per step may stay the same, or the images per batch."""
    whole = rank_pool.ranks(1).run(shuffled, str(tmp_path), None, 0, HYBRID, 2, 3)
    larger = rank_pool.ranks(1).run(shuffled, str(tmp_path), 6, 0, HYBRID, 6)
    assert steps(larger)[:3] == steps(whole, 3)[2:5]
    less_accumulation = rank_pool.ranks(1).run(shuffled, str(tmp_path), 6, 0, HYBRID, 2, 2)
    assert steps(less_accumulation) == steps(whole)[6:]


def test_another_number_of_workers_draws_the_same_numbers(one_rank, tmp_path):
    (whole,) = one_rank.run(shuffled, str(tmp_path))
    assert one_rank.run(shuffled, str(tmp_path), 3, 2) == [whole[3:]]


def plain(folder: str, strategy: Any, make: Any = None) -> Any:
    module = fit(Kind(make=make or KINDS["shuffle"].make), strategy, 0, [Saves(folder, [3])])
    epochs, images, drawn = zip(*module.read.values(), strict=True)
    return (epochs, images), drawn, toy.weights(module)


class Fixed(Images):
    def __getitem__(self, index: int) -> Any:
        return index, torch.zeros(4)


def test_an_uninterrupted_fit_is_that_of_ddp_except_for_random_transforms(one_rank, tmp_path):
    """Random transforms differ because dropout draws from the same stream."""
    ((ddp_images, ddp_drawn, ddp_weights),) = one_rank.run(plain, str(tmp_path), "ddp")
    ((images, drawn, _),) = one_rank.run(plain, str(tmp_path), HYBRID)
    ((off_images, off_drawn, off_weights),) = one_rank.run(plain, str(tmp_path), OFF)
    assert images == ddp_images
    assert off_images == ddp_images
    assert drawn != ddp_drawn
    assert off_drawn == ddp_drawn
    assert toy.same_bits(off_weights, ddp_weights)

    make = partial(of, Fixed(), shuffle=True)
    ((_, _, ddp_weights),) = one_rank.run(plain, str(tmp_path), "ddp", make)
    ((_, _, weights),) = one_rank.run(plain, str(tmp_path), HYBRID, make)
    assert toy.same_bits(weights, ddp_weights)


def weighted(folder: str, strategy: str, path: str | None) -> list[str]:
    """Return the warnings of a fit whose sampler draws at random."""
    sampler = WeightedRandomSampler([1.0 + i % 7 for i in range(32)], 32)
    kind = Kind(make=partial(of, sampler=sampler))
    callbacks = [] if path else [Saves(folder, [3])]
    return fit(kind, strategy, 0, callbacks, path).warnings


def warnings_of_a_resume(folder: str) -> list[str]:
    return fit(KINDS["shuffle"], HYBRID, 0, [], f"{folder}/3.ckpt").warnings


def test_a_checkpoint_of_ddp_opens_under_ours_and_ours_under_ddp(one_rank, tmp_path):
    (whole,) = one_rank.run(shuffled, str(tmp_path), None, 0, "ddp")
    (resumed,) = one_rank.run(shuffled, str(tmp_path), 3)
    assert [batch[:2] for batch in resumed] == [batch[:2] for batch in whole[3:]]
    (messages,) = one_rank.run(warnings_of_a_resume, str(tmp_path))
    assert (
        "which is exact only with the number of ranks, the batch size and the gradient accumulation of"
        in "\n".join(messages)
    )

    one_rank.run(weighted, f"{tmp_path}/w", "ddp", None)
    (messages,) = one_rank.run(weighted, f"{tmp_path}/w", HYBRID, f"{tmp_path}/w/3.ckpt")
    assert "The checkpoint has no state of the training loader" in "\n".join(messages)

    one_rank.run(shuffled, f"{tmp_path}/ours")
    (under_ddp,) = one_rank.run(shuffled, f"{tmp_path}/ours", 3, 0, "ddp")
    assert len(under_ddp) == len(whole) - 3


def drawn_numbers(kind: str) -> list[Any]:
    """Return the random numbers of the first batch, for each loader."""
    module = fit(KINDS[kind], HYBRID, 0, limit_train_batches=1)
    _, _, drawn = module.read[0]
    return drawn


def test_two_ranks_draw_different_random_numbers(two_ranks):
    rank_0, rank_1 = two_ranks.run(drawn_numbers, "shuffle")
    assert all(a != b for a, b in zip(chain(*rank_0[0]), chain(*rank_1[0]), strict=True))


def test_two_loaders_of_a_fit_draw_different_random_numbers(one_rank):
    ((first, second),) = one_rank.run(drawn_numbers, "two loaders, max_size")
    assert all(a != b for a, b in zip(chain(*first), chain(*second), strict=True))


def seed_otherwise(*args: Any, **kwargs: Any) -> None:
    torch.manual_seed(8)


def under_another_seed(folder: str) -> Any:
    whole = fit(KINDS["shuffle"], HYBRID, 0, [Saves(folder, [3])])
    resumed = fit(KINDS["shuffle"], HYBRID, 0, [at(setup=seed_otherwise)], f"{folder}/3.ckpt")
    return list(whole.read.values()), list(resumed.read.values())


def test_a_resume_draws_by_the_seed_of_the_interrupted_run(one_rank, tmp_path):
    """The script may use another seed when it resumes, or none."""
    ((whole, resumed),) = one_rank.run(under_another_seed, str(tmp_path))
    assert resumed == whole[3:]


def seed_everything_otherwise(*args: Any, **kwargs: Any) -> None:
    pl.seed_everything(8, verbose=False)


def under_another_seed_everything(folder: str, name: str) -> Any:
    whole = fit(KINDS[name], HYBRID, 0, [Saves(folder, [3])])
    callbacks = [at(setup=seed_everything_otherwise)]
    resumed = fit(KINDS[name], HYBRID, 0, callbacks, f"{folder}/3.ckpt")
    return list(whole.read.values()), list(resumed.read.values())


@pytest.mark.parametrize("name", ["shuffle", "weighted"])
def test_a_resume_after_another_seed_everything_reads_the_order_of_the_interrupted_run(
    two_ranks, tmp_path, name
):
    """Lightning seeds the `DistributedSampler` that it creates with the script's `seed_everything`."""
    for whole, resumed in two_ranks.run(under_another_seed_everything, str(tmp_path), name):
        assert resumed == whole[3:]


def with_seed_of_user(folder: str) -> str:
    """Return the error of a resume after three batches for which the user changes the sampler's seed."""

    def make(seed: int) -> Any:
        images = user_loaders.Images()
        sampler = DistributedSampler(images, seed=seed)
        return of(images, sampler=sampler)

    error = ""
    for seed, path in ((5, None), (6, f"{folder}/3.ckpt")):
        callbacks = [] if path else [Saves(folder, [3])]
        error = toy.error_of(fit, Kind(make=partial(make, seed)), HYBRID, 0, callbacks, path)
    return error


def test_a_sampler_with_another_seed_of_the_user_is_refused_by_its_seed(two_ranks, tmp_path):
    for error in two_ranks.run(with_seed_of_user, str(tmp_path)):
        assert "`DistributedSampler` has seed=6, but had seed=5 in the interrupted run" in error
        assert "set seed=5 in your sampler" in error


class SeededOnceSampler(Sampler):
    """Sampler that draws its order from the global seed at the time of its construction."""

    def __init__(self) -> None:
        self.seed = torch.initial_seed()

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed)
        return iter(torch.randperm(32, generator=generator).tolist())

    def __len__(self) -> int:
        return 32


def with_a_sampler_seeded_once(folder: str) -> str:
    kind = Kind(
        make=lambda: of(sampler=SeededOnceSampler()),
        settings=user_loaders.NO_SAMPLER,
    )
    fit(kind, HYBRID, 0, [Saves(folder, [3])])
    callbacks = [at(setup=seed_everything_otherwise)]
    return toy.error_of(fit, kind, HYBRID, 0, callbacks, f"{folder}/3.ckpt")


def test_the_error_of_another_order_names_another_seed_everything_first(one_rank, tmp_path):
    (error,) = one_rank.run(with_a_sampler_seeded_once, str(tmp_path))
    reason = error.split("does not reproduce the samples before the checkpoint. ")[1]
    assert reason.startswith(
        "The interrupted run used seed_everything(3), but this run uses seed_everything(8). Call seed_everything(3)"
    )


class ListSampler(Sampler):
    """Sampler with the same indices in every epoch."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def with_other_order(folder: str, indices: list[int]) -> str:
    """Return the error of a resume after three batches whose sampler has another order."""
    orders = [list(range(32)), indices]
    paths = [None, f"{folder}/3.ckpt"]
    for order, path in zip(orders, paths, strict=True):
        kind = Kind(
            make=partial(of, batch_size=4, sampler=ListSampler(order)),
            settings=user_loaders.NO_SAMPLER,
        )
        callbacks = [] if path else [Saves(folder, [3])]
        error = toy.error_of(fit, kind, HYBRID, 0, callbacks, path)
    return error


def test_an_order_that_differs_in_an_early_batch_is_refused(one_rank, tmp_path):
    """The checksum covers all batches before the checkpoint."""
    swapped = [1, 0, *range(2, 32)]
    (error,) = one_rank.run(with_other_order, str(tmp_path), swapped)
    assert "the sampler does not reproduce the samples before the checkpoint" in error
    assert one_rank.run(with_other_order, str(tmp_path), list(range(32))) == [""]


def under_workers(name: str, folder: str, workers: int) -> str:
    """Return the error of a resume with this number of workers, for a fit without workers."""
    fit(KINDS[name], HYBRID, 0, [Saves(folder, [3])])
    return toy.error_of(fit, KINDS[name], HYBRID, workers, [], f"{folder}/3.ckpt")


def test_a_stream_is_refused_under_other_workers(one_rank, tmp_path):
    """Each worker reads its own part of the stream, so the batches would differ."""
    (error,) = one_rank.run(under_workers, "stream", str(tmp_path), 2)
    assert "`num_workers` (=2) must equal the value in the checkpoint (=0), because" in error
    assert "Set num_workers=0." in error


class Numbers(IterableDataset):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Any]:
        blobs = toy.Blobs()
        return (blobs[index] for index in range(self.num_samples))


def test_a_stream_that_ends_before_the_checkpoint_is_refused(tmp_path):
    """Without the error, the epoch would end at once."""
    trainer = toy.trainer(max_epochs=1, max_steps=6)
    trainer.fit(toy.Toy(), DataLoader(Numbers(64), batch_size=8))
    trainer.save_checkpoint(tmp_path / "6.ckpt")
    loader = DataLoader(Numbers(32), batch_size=8)
    trainer = toy.trainer(max_epochs=1)
    error = toy.error_of(trainer.fit, toy.Toy(), loader, ckpt_path=tmp_path / "6.ckpt")
    assert "the data set does not reproduce the samples before the checkpoint" in error


def test_a_checkpoint_keeps_few_states_of_a_stream(one_rank, tmp_path):
    """The checkpoint keeps the states of the batch that Lightning holds, and of a step that is repeated."""
    one_rank.run(outcomes, "stream with a state", HYBRID, 0, str(tmp_path), (20,))
    (state,) = torch.load(tmp_path / "20.ckpt")["exact_resume"]
    assert 1 <= len(state["of_ranks"][0]["kept"]) <= 3


def own_stream(folder: str, stop: int | None, batch_size: int = 4) -> list[str]:
    """Return the warnings about the random stream of a sampler with its own generator."""
    sampler = WeightedRandomSampler([1.0] * 32, 32, generator=generator())
    kind = Kind(make=partial(of, batch_size=batch_size, sampler=sampler))
    if stop is None:
        module = fit(kind, HYBRID, 0, [Saves(folder, [])])
    else:
        module = fit(kind, HYBRID, 0, [], f"{folder}/{stop}.ckpt")
    return [text for text in module.warnings if "may differ from the interrupted run" in text]


def test_the_stream_of_a_sampler_of_other_ranks_is_not_taken(rank_pool, tmp_path):
    """At the end of an epoch nothing of the epoch is left, so this is a warning and not an error."""
    assert rank_pool.ranks(2).run(own_stream, str(tmp_path), None) == [[], []]
    assert rank_pool.ranks(2).run(own_stream, str(tmp_path), 0) == [[], []]
    (messages,) = rank_pool.ranks(1).run(own_stream, str(tmp_path), 0, 8)
    assert "the checkpoint lacks the state of the sampler" in messages[0]


def fails(trainer: pl.Trainer, *args: Any) -> None:
    if trainer.fit_loop.total_batch_idx == 11:
        raise OSError("gone")


def ended(folder: str, path: str | None = None) -> Any:
    saves = ModelCheckpoint(folder, "last", every_n_train_steps=4, save_on_exception=True)
    try:
        if path is None:
            callbacks = [saves, at(on_train_batch_start=fails)]
        else:
            callbacks = []
        module = fit(
            KINDS["shuffle"], HYBRID, 0, callbacks, path, enable_checkpointing=path is None
        )
    except OSError:
        return None
    return list(module.read.values())


def test_every_rank_can_resume_from_the_file_that_a_rank_saves_on_its_own_error(
    two_ranks, tmp_path
):
    """The file lacks the checksums of the other ranks, whose order follows from the epoch."""
    whole = two_ranks.run(shuffled, f"{tmp_path}/whole")
    two_ranks.run(ended, str(tmp_path))
    (path,) = tmp_path.glob("*.ckpt")
    assert two_ranks.run(ended, str(tmp_path), str(path)) == [batches[11:] for batches in whole]


def loop(folder: str, path: str | None, stops: tuple[int, ...] = (3, 8, 11)) -> Any:
    fabric = Fabric(strategy=HYBRID, accelerator="cpu", devices=dist.get_world_size())
    fabric.launch()
    fabric.seed_everything(3, verbose=False)
    loader = fabric.setup_dataloaders(of(shuffle=True))
    counts = {"done": 0}
    read = []
    if path is not None:
        state = {"loader": loader, "counts": counts}
        fabric.load(path, state)
        counts = state["counts"]
    while counts["done"] < 24:
        for images, drawn in loader:
            read.append((images.tolist(), drawn.tolist()))
            counts["done"] += 1
            if counts["done"] in stops:
                fabric.save(f"{folder}/{counts['done']}.ckpt", {"loader": loader, "counts": counts})
    fabric.strategy.teardown()
    return read


def test_a_loop_of_the_users_own_continues_with_the_remaining_images(two_ranks, tmp_path):
    whole = two_ranks.run(loop, str(tmp_path), None)
    for stop in (3, 8, 11):
        resumed = two_ranks.run(loop, str(tmp_path), f"{tmp_path}/{stop}.ckpt")
        assert resumed == [batches[stop:] for batches in whole], f"stopped after {stop} batches"


def loop_with_own_generator(path: str, is_resumed: bool, num_workers: int) -> list[list[int]]:
    """Read two epochs, and save after the last batch of the first, before the loop requests another one."""
    fabric = Fabric(strategy=HYBRID, accelerator="cpu", devices=1)
    fabric.launch()
    generator = torch.Generator().manual_seed(5)
    numbers = list(range(12))
    user_loader = DataLoader(
        numbers, batch_size=4, shuffle=True, generator=generator, num_workers=num_workers
    )
    loader = fabric.setup_dataloaders(user_loader, use_distributed_sampler=False)
    if is_resumed:
        fabric.load(path, {"loader": loader})
    read = []
    for _ in range(1 if is_resumed else 2):
        for batch in loader:
            read.append(batch.tolist())
            if len(read) == 3 and not is_resumed:
                fabric.save(path, {"loader": loader})
    fabric.strategy.teardown()
    return read


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_loop_saved_after_the_last_batch_of_an_epoch_continues_with_the_order_of_the_next(
    one_rank, tmp_path, num_workers
):
    """A sampler of whole batches draws once more when the loop requests another batch."""
    path = f"{tmp_path}/3.ckpt"
    (whole,) = one_rank.run(loop_with_own_generator, path, False, num_workers)
    (resumed,) = one_rank.run(loop_with_own_generator, path, True, num_workers)
    assert sorted(number for batch in whole[3:] for number in batch) == list(range(12))
    assert resumed == whole[3:]


class SizedStream(IterableDataset):
    """Stream with a length, whose loader has its own generator."""

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Any:
        return iter(range(12))


def loop_over_a_sized_stream(path: str, is_resumed: bool) -> list[list[int]]:
    fabric = Fabric(strategy=HYBRID, accelerator="cpu", devices=1)
    fabric.launch()
    generator = torch.Generator().manual_seed(5)
    loader = fabric.setup_dataloaders(DataLoader(SizedStream(), batch_size=4, generator=generator))
    if is_resumed:
        fabric.load(path, {"loader": loader})
    read = []
    for batch in loader:
        read.append(batch.tolist())
        if len(read) == 3 and not is_resumed:
            fabric.save(path, {"loader": loader})
    fabric.strategy.teardown()
    return read


@pytest.mark.filterwarnings("ignore:The training loader may resume inexactly")
def test_a_stream_saved_after_its_last_batch_begins_again_at_once(one_rank, tmp_path):
    """The sampler of a stream is endless, so the test must not draw from it."""
    path = f"{tmp_path}/3.ckpt"
    (whole,) = one_rank.run(loop_over_a_sized_stream, path, False, timeout_s=30.0)
    (resumed,) = one_rank.run(loop_over_a_sized_stream, path, True, timeout_s=30.0)
    assert resumed == whole


def continued_loop(folder: str, batch_size: int) -> list[list[int]]:
    """Return the remaining batches of an epoch, read by a Fabric with another number of ranks."""
    fabric = Fabric(strategy=HYBRID, accelerator="cpu", devices=dist.get_world_size())
    fabric.launch()
    fabric.seed_everything(3, verbose=False)
    try:
        loader = fabric.setup_dataloaders(of(batch_size=batch_size, shuffle=True))
        fabric.load(f"{folder}/3.ckpt", {"loader": loader, "counts": {}})
        return [sorted(images.tolist()) for images, _ in loader]
    finally:
        fabric.strategy.teardown()


def test_a_loop_of_the_users_own_converts_its_batches_or_refuses(rank_pool, tmp_path):
    rank_0, rank_1 = rank_pool.ranks(2).run(loop, str(tmp_path), None)
    batches = [
        sorted(images_0 + images_1)
        for (images_0, _), (images_1, _) in zip(rank_0, rank_1, strict=True)
    ]
    assert rank_pool.ranks(1).run(continued_loop, str(tmp_path), 4) == [batches[3:8]]
    (error,) = rank_pool.ranks(1).run(toy.error_of, continued_loop, str(tmp_path), 2)
    assert "must equal the number of samples per step in the checkpoint (=4)" in error


def test_global_random_streams_continue_after_a_seeded_context():
    """The state includes the second number of a pair of normal numbers, which NumPy keeps."""
    np.random.seed(0)
    expected = np.random.randn(3).tolist()
    np.random.seed(0)
    before = [np.random.randn()]
    seeded = SeededStreams()
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    with seeded(1, 2):
        outer = user_loaders.numbers()
        with seeded(3):
            inner = user_loaders.numbers()
        assert inner != outer
        assert user_loaders.numbers() == outer
    assert before + np.random.randn(2).tolist() == expected
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
