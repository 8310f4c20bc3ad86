"""`LocalSteps` with typical user code: Adam, averaged weights, teachers, skipped steps, a search."""

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn

from lightning_hybrid import LocalSteps
from lightning_hybrid.callbacks import MasterWeightAveraging
from lightning_hybrid.optim import LAMB
from lightning_hybrid.run_status import run_status
from tests import scenes, toy
from tests.scenes import at, same

OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}


def weights_of(module):
    return torch.cat([value.detach().float().reshape(-1) for value in module.state_dict().values()])


def fit(ranks, module, options, **settings):
    scene = {"between_nodes": LocalSteps(**options), "ranks_per_node": 1}
    return scenes.fit(ranks, module, **scene | settings)


LOW_RATE = partial(toy.Toy, lr=0.05)


class Rows(pl.LightningModule):
    """Module in which each rank sees its own embedding rows, and has no second moment of the other rank's rows."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.rows = nn.Embedding(16, 4)

    def training_step(self, batch, batch_idx):
        return self.rows(torch.arange(8) + 8 * self.global_rank).square().mean()

    def configure_optimizers(self):
        return self.kind(self.parameters(), lr=1e-3)


def weights_now(trainer, module, *_):
    return weights_of(module)


@pytest.mark.parametrize(("kind", "across"), [(torch.optim.AdamW, "int4"), (LAMB, None)])
def test_an_element_that_one_node_alone_has_seen_moves_no_faster_on_the_others(
    two_ranks, kind, across
):
    """An averaged first moment with a second moment of zero once made steps of 1e8 times the learning rate."""
    looks = at(on_train_batch_start=weights_now, on_train_batch_end=weights_now)
    options = {"every": 4, "dtype": across}
    for seen in fit(two_ranks, partial(Rows, kind), options, max_epochs=1, callbacks=[looks]):
        before = torch.stack(seen.looks["on_train_batch_start"])
        after = torch.stack(seen.looks["on_train_batch_end"])
        largest_move = float((after - before).abs().max())
        assert 0 < largest_move < 2e-2, f"rank {seen.rank}"


@pytest.mark.parametrize(
    ("averages", "options"),
    [
        ([partial(MasterWeightAveraging, decay=0.5)], OUTER),
        ([StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)], {}),
    ],
    ids=["ema, outer step", "swa"],
)
def test_hooks_at_the_end_of_training_see_the_mean(two_ranks, averages, options):
    """Hooks that run before the strategy's hooks still see the mean, and not the weights or averages of one node."""
    callbacks = [*averages, at(on_train_end=weights_now)]
    rank_0, rank_1 = fit(
        two_ranks, LOW_RATE, {"every": 3} | options, max_steps=5, callbacks=callbacks
    )
    assert same(rank_0.looks["on_train_end"], rank_1.looks["on_train_end"])
    assert same(rank_0.weights, rank_1.weights)


class LeavesOut(toy.Toy):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        loss = optimizer_closure()
        if self.global_rank == 0 or batch_idx % 2:
            optimizer.step(closure=lambda: loss)


def test_a_step_that_one_node_leaves_out_ends_the_period_with_the_next_batch(two_ranks):
    callbacks = [at(on_train_batch_start=weights_now)]
    rank_0, rank_1 = fit(
        two_ranks, partial(LeavesOut, lr=0.05), {"every": 2}, max_steps=5, callbacks=callbacks
    )
    assert same(rank_0.weights, rank_1.weights)
    at_starts_0 = rank_0.looks["on_train_batch_start"]
    at_starts_1 = rank_1.looks["on_train_batch_start"]
    assert len(at_starts_0) == 5
    assert not torch.equal(at_starts_0[1], at_starts_1[1])


class ByHand(toy.Toy):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Manual(toy.Toy):
    """Module that makes the same steps in a manual loop, with the optimizer that Lightning wraps."""

    def __init__(self):
        super().__init__(lr=0.05)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_a_manual_loop_in_half_precision_averages_fp32_weights(two_ranks):
    """A manual loop steps inside of `training_step`, where parameters are half-precision copies."""
    scene = {"options": {"every": 2}, "precision": "16-true", "loss_scale": 1024}
    automatic = fit(two_ranks, LOW_RATE, **scene)
    for seen in fit(two_ranks, Manual, **scene):
        assert same(seen.weights, automatic[seen.rank].weights), f"rank {seen.rank}"


def test_steps_that_lightning_does_not_count_are_a_single_warning(two_ranks):
    rank_0, _ = fit(two_ranks, ByHand, {"every": 2}, max_epochs=1, warns=True)
    texts = [text for text in rank_0.warnings if "which is still 0 after 2 batches" in text]
    assert len(texts) == 1


class Teacher(toy.Toy):
    """Module whose frozen teacher weights follow its network, as in mean teachers and BYOL.

    Another frozen layer is constant. The buffer is not a BatchNorm statistic, and each node changes it differently.
    """

    def __init__(self):
        super().__init__(lr=0.05)
        self.teacher = nn.Linear(3, 3).requires_grad_(False)
        self.fixed = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("center", torch.zeros(3))

    @torch.no_grad()
    def on_train_batch_end(self, *_):
        first = next(parameter for parameter in self.parameters() if parameter.requires_grad)
        self.write(first.mean())
        self.center += 1 + self.global_rank

    def write(self, target):
        self.teacher.weight.lerp_(target, 0.1)


class WritesData(Teacher):
    """Module that writes its teacher through `.data`, as MoCo does, which torch's version counters do not count."""

    def write(self, target):
        self.teacher.weight.data.mul_(0.9).add_(0.1 * target)


def center(trainer, module, *_):
    return module.center[0].item()


@pytest.mark.parametrize("module", [Teacher, WritesData])
def test_frozen_weights_that_user_code_writes_are_averaged_and_other_buffers_are_those_of_rank_zero(
    two_ranks, module
):
    """Frozen weights are averaged after steps 2 and 4, and at the end. Other buffers come from rank zero."""
    rank_0, rank_1 = fit(
        two_ranks, module, {"every": 2}, max_steps=5, callbacks=[at(on_train_batch_start=center)]
    )
    assert torch.equal(rank_0.weights["teacher.weight"], rank_1.weights["teacher.weight"])
    assert [seen.looks["on_train_batch_start"] for seen in (rank_0, rank_1)] == [
        [0, 1, 2, 3, 4],
        [0, 2, 3, 5, 5],
    ]
    assert rank_0.weights["center"][0] == rank_1.weights["center"][0] == 5


class NotesBuffers(toy.Toy):
    """Module that records the running mean at the start of each forward pass."""

    def __init__(self):
        super().__init__()
        self.means = []
        self.net[2].register_forward_pre_hook(
            lambda layer, args: self.means.append(layer.running_mean.clone())
        )


def noted_means(trainer, module):
    return torch.stack(module.means)


def test_the_ranks_of_a_node_begin_each_forward_with_the_same_running_statistics(four_ranks):
    """DDP broadcasts buffers from rank zero. With local steps, each node uses the buffers of its first rank."""
    scene = {"ranks_per_node": 2, "max_epochs": 1, "callbacks": [at(on_train_end=noted_means)]}
    means = [
        seen.looks["on_train_end"][0]
        for seen in fit(four_ranks, NotesBuffers, {"every": 4}, **scene)
    ]
    assert same(means[0], means[1])
    assert same(means[2], means[3])
    assert not same(means[0], means[2])


class Restores(toy.Toy):
    """Module that restores its first weights in the middle of a fit, as a search does."""

    def __init__(self, path):
        super().__init__()
        self.path = path


def trains_alone_around_a_restore(trainer, module, batch, batch_idx):
    if batch_idx == 0:
        trainer.save_checkpoint(module.path)
    if batch_idx != 3:
        return None
    before = run_status(trainer).node_group is not None
    trainer._checkpoint_connector.restore(module.path)
    return before, run_status(trainer).node_group is not None


def test_nodes_agree_again_after_a_checkpoint_is_loaded_within_a_fit(two_ranks, tmp_path):
    look = at(on_train_batch_start=trains_alone_around_a_restore)
    scene = {"max_epochs": 1, "callbacks": [look], "limit_train_batches": 4}
    module = partial(Restores, str(tmp_path / "first.ckpt"))
    for seen in fit(two_ranks, module, {"every": 8}, **scene):
        assert seen.looks["on_train_batch_start"] == [(True, False)]
