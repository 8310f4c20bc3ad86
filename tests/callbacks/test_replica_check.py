"""Detection of ranks that diverge or read in another order. The error names exactly these ranks with their hosts."""

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from lightning_hybrid.callbacks import NumericsMonitor, ReplicaCheck
from lightning_hybrid.callbacks.replica_check import order_of
from lightning_hybrid.comm.health.replica_difference import first_difference
from lightning_hybrid.data.order import EpochOrder, ResumableLoader
from lightning_hybrid.run_status import run_status
from tests import toy
from tests.scenes import fit, same

LAST = "net.8.weight"


class Spoils(pl.Callback):
    def __init__(self, rank, step, target):
        self.rank = rank
        self.step = step
        self.spoil = getattr(self, target)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.step and dist.get_rank() == self.rank:
            with torch.no_grad():
                self.spoil(trainer, dict(module.named_parameters())[LAST])

    def weight(self, trainer, weight):
        weight.view(-1)[3] += 0.5

    def below_half(self, trainer, weight):
        weight.view(-1)[3] *= 1 + 2**-20  # forward rounds it to the same half

    def momentum(self, trainer, weight):
        trainer.optimizers[0].state[weight]["momentum_buffer"].view(-1)[0].neg_()

    def loss_scale(self, trainer, weight):
        trainer.precision_plugin.loss_scale.scale *= 2.0

    def skipped(self, trainer, weight):
        run_status(trainer).optimizer_steps[0].num_skipped.add_(1)


def spoiled(ranks, target, precision, every_n_steps, rank=1, step=2):
    """Return error and step of each rank after `target` was changed on one rank."""
    callbacks = [Spoils(rank, step, target), ReplicaCheck(every_n_steps)]
    results = fit(ranks, max_epochs=1, precision=precision, callbacks=callbacks, raises=True)
    return [(seen.error, seen.global_step) for seen in results]


@pytest.mark.parametrize(
    ("target", "precision", "named"),
    [
        # Only there, because the gradients of all other parameters are averages.
        ("weight", "16-true", f": `{LAST}`"),
        ("below_half", "16-true", f": `{LAST}`"),
        ("momentum", "bf16-true", f": `{LAST}`"),
        ("skipped", "16-true", ": number of skipped steps 0"),
        ("loss_scale", "16-true", ""),  # and thereby the rounding of gradients, on both ranks
    ],
)
def test_what_one_rank_changed_is_an_error_on_both_within_n_steps(
    two_ranks, target, precision, named
):
    expected_begin = (
        "ReplicaDriftError: The ranks no longer have the same weights. They diverged between steps"
    )
    for rank, (error, last_step) in enumerate(spoiled(two_ranks, target, precision, 4)):
        assert error.startswith(expected_begin), f"on rank {rank}: {error}"
        assert "between steps 0 and 4 (with every_n_steps=4): " in error, f"on rank {rank}"
        assert f"{named} on rank 1 (host " in error, f"on rank {rank}"
        assert "differs from its value on rank 0 (host " in error, f"on rank {rank}"
        assert last_step == 4, f"on rank {rank}"


def test_the_first_difference_is_named_right_after_the_change(three_ranks):
    """The error lists the momentum that was written and the weight that it moved. The third rank is in the minority."""
    results = spoiled(three_ranks, "momentum", "32-true", 1, rank=2, step=1)
    summary = "2 of 20 tensors differ, and the last of them is `momentum_buffer` of the optimizer"
    for rank, (error, last_step) in enumerate(results):
        assert f"`{LAST}` on rank 2 (host " in error, f"on rank {rank}"
        assert "differs from its value on ranks 0, 1 (host " in error, f"on rank {rank}"
        assert summary in error, f"on rank {rank}"
        assert last_step == 2, f"on rank {rank}"


@pytest.mark.parametrize("precision", ["16-true", "32-true"])
def test_a_sound_run_is_bit_for_bit_what_it_is_without_this_check_and_that_of_numbers(
    two_ranks, precision
):
    scene = {"max_epochs": 1, "precision": precision, "log_every_n_steps": 2}
    checked = fit(two_ranks, callbacks=[ReplicaCheck(3), NumericsMonitor()], **scene)
    plain = fit(two_ranks, **scene)
    for rank in range(2):
        assert same(checked[rank].weights, plain[rank].weights), f"rank {rank}"


class Differs(toy.Toy):
    """Module that changes the checkpoint that it loads, on rank 0 only."""

    def __init__(self, changed):
        super().__init__()
        self.changed = changed

    def on_load_checkpoint(self, checkpoint):
        if dist.get_rank() == 0 and self.changed == "weights":
            checkpoint["state_dict"][LAST] *= 1 + 2**-20
        elif dist.get_rank() == 0:
            for state in checkpoint["optimizer_states"][0]["state"].values():
                state["momentum_buffer"] *= 1 + 2**-20


def test_what_differs_between_checkpoints_is_found_before_the_first_step_and_of_weights_all_take_rank_zeros(
    two_ranks, tmp_path
):
    """Weights are sent in fp32. Sending half weights, as DDP does, would leave different lower digits on each rank."""
    path = str(tmp_path / "a.ckpt")
    scene = {"precision": "16-true"}
    fit(two_ranks, max_epochs=1, save_to=path, **scene)
    scene |= {"ckpt_path": path, "callbacks": [ReplicaCheck(100)], "raises": True}
    for rank, seen in enumerate(fit(two_ranks, partial(Differs, "weights"), **scene)):
        assert seen.error == "", f"on rank {rank}"
    words = (
        "They diverged when training started (with every_n_steps=100): `momentum_buffer` of the op"
    )
    for rank, seen in enumerate(fit(two_ranks, partial(Differs, "momentum"), **scene)):
        assert words in seen.error, f"on rank {rank}"
        assert "Give every rank the same checkpoint" in seen.error, f"on rank {rank}"


def sizes_of_checks(every_n_steps):
    """Return the bytes of each collective of a check in one epoch."""
    calls = []
    original = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        calls.append((tensor.numel() * tensor.element_size(), tensor.dtype))
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        fit(max_epochs=1, callbacks=[ReplicaCheck(every_n_steps)])
    finally:
        dist.all_reduce = original
    # Lightning's own collectives have 8 bytes.
    return [num_bytes for num_bytes, dtype in calls if dtype is torch.int64 and num_bytes > 8]


def test_a_sound_check_sends_16_bytes_and_there_is_none_between(two_ranks):
    """The epoch has four steps of 8 images per rank, with a check before them, after every third, and at the end."""
    for rank, sizes in enumerate(two_ranks.run(sizes_of_checks, 3)):
        assert sizes == [16, 16, 16], f"rank {rank}"


def test_a_tensor_that_one_rank_lacks_is_named():
    error = first_difference([{"`a`": 1}, {"`a`": 1, "`b`": 3}], ["x", "y"])
    assert error.startswith(
        "`b`, which some ranks do not have, on rank 1 (host y) differs from its value on rank 0 (host x)"
    )


class Loader(ResumableLoader):
    def _batches(self, epoch, shares):
        return iter(())

    def __len__(self):
        return 3


def test_of_our_loaders_the_order_and_the_epoch_are_told():
    order = {"num_images": 12, "global_batch_size": 4, "seed": 3, "world_size": 2}
    result = order_of(Loader(EpochOrder(**order, rank=1)))
    assert result.items() >= {**order, "epoch": 0}.items()
    assert result == order_of(Loader(EpochOrder(**order, rank=0)))


def with_a_seed_of_its_own():
    rank = dist.get_rank()
    sampler = DistributedSampler(toy.Blobs(), num_replicas=2, rank=rank, seed=2 + 7 * rank)
    return DataLoader(toy.Blobs(), batch_size=8, sampler=sampler)


def test_another_seed_of_the_data_on_one_rank_is_an_error_on_both_before_the_first_step(two_ranks):
    results = fit(
        two_ranks, train=with_a_seed_of_its_own, callbacks=[ReplicaCheck(100)], raises=True
    )
    expected_begin = (
        "DataOrderError: The ranks read the data in different orders, which was detected when "
        "training started"
    )
    seeds = "`seed` is 2 on rank 0 and 9 on rank 1. Some samples would be read twice"
    for rank, seen in enumerate(results):
        assert seen.error.startswith(expected_begin), f"on rank {rank}: {seen.error}"
        assert seeds in seen.error, f"on rank {rank}"
        assert "ranks 0, 1 are on host " in seen.error.lower(), f"on rank {rank}"
        assert seen.global_step == 0, f"on rank {rank}"


class SeedOfRank(Sampler):
    """Sampler with a seed of its own on each rank, as users write it with `use_distributed_sampler=False`."""

    def __init__(self):
        self.seed = dist.get_rank()

    def __len__(self):
        return 16

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        return iter(torch.randint(64, (16,), generator=generator).tolist())


def with_a_sampler_for_each_rank():
    return DataLoader(toy.Blobs(), batch_size=8, sampler=SeedOfRank())


def with_data_for_each_rank():
    return toy.loader(16 + 8 * dist.get_rank())


@pytest.mark.parametrize(
    ("train", "options"),
    [(with_a_sampler_for_each_rank, {}), (with_data_for_each_rank, {"uneven_batches": "join"})],
    ids=["own sampler", "own data"],
)
def test_ranks_with_data_of_their_own_have_no_common_order(two_ranks, train, options):
    options = {"use_distributed_sampler": False, "callbacks": [ReplicaCheck(1)], **options}
    for rank, seen in enumerate(fit(two_ranks, train=train, raises=True, **options)):
        assert seen.error == "", f"on rank {rank}"
