"""`LocalSteps` with what users write: Adam, averages of weights, teachers, steps left out, a search."""

from datetime import timedelta

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder, StochasticWeightAveraging
from torch import nn

from lightning_hybrid import Comm, HybridAllReduceStrategy, LocalSteps
from lightning_hybrid.callbacks import MasterWeightAveraging
from lightning_hybrid.optim import LAMB
from lightning_hybrid.strategy.local_steps.extension import OUTER_MOMENTUM
from tests import scenes, toy


def weights_of(module):
    return torch.cat([value.detach().float().reshape(-1) for value in module.state_dict().values()])


def fit(module, options, **settings):
    steps, comm = LocalSteps(**options), Comm(tune="off")
    strategy = HybridAllReduceStrategy(steps, ranks_per_node=1, comm=comm, timeout=timedelta(seconds=45))
    ckpt_path = settings.pop("ckpt_path", None)
    trainer = toy.trainer(strategy=strategy, **{"limit_val_batches": 0, **settings})
    trainer.fit(module, toy.loader(64), ckpt_path=ckpt_path)
    return trainer


# ---- optimizers ------------------------------------------------------------------------------------------------------


class Rows(pl.LightningModule):
    """Each rank sees rows of its own, as of words: the other has no second moment of them."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.changes, self.last = kind, [], None
        self.rows = nn.Embedding(16, 4)

    def training_step(self, batch, batch_idx):
        return self.rows(torch.arange(8) + 8 * self.global_rank).square().mean()

    def on_train_batch_start(self, batch, batch_idx):
        self.last = weights_of(self)

    def on_train_batch_end(self, *_):
        self.changes.append(float((weights_of(self) - self.last).abs().max()))

    def configure_optimizers(self):
        return self.kind(self.parameters(), lr=1e-3)


def changes(kind, across):
    module = Rows(kind)
    fit(module, {"every": 4, "dtype": across}, max_epochs=1)
    return max(module.changes)


@pytest.mark.parametrize("across", [None, "int4"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, LAMB])
def test_an_element_that_one_node_alone_has_seen_moves_no_faster_on_the_others(two_ranks, kind, across):
    """A first moment that is averaged where the second is zero made steps of 1e8 times the rate."""
    for largest in two_ranks.run(changes, kind, across):
        assert 0 < largest < 2e-2


# ---- hooks -----------------------------------------------------------------------------------------------------------


class Exports(toy.Toy):
    """Takes its weights where training ends."""

    def on_train_end(self):
        self.exported = weights_of(self)


AVERAGES = {
    "ema": lambda: MasterWeightAveraging(decay=0.5),
    "swa": lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1),
}


def fit_and_export(name, options):
    module = Exports(lr=0.05)
    callbacks = [AVERAGES[name]()] if name else []
    fit(module, {"every": 3} | options, max_steps=5, callbacks=callbacks)
    return module.exported, weights_of(module)


@pytest.mark.parametrize(
    ("name", "options"),
    [(None, {}), ("ema", {}), ("ema", {"outer_lr": 0.7, "outer_momentum": 0.9}), ("swa", {})],
)
def test_hooks_at_the_end_of_training_see_the_mean(two_ranks, name, options):
    """They come before those of a strategy: each node had its own weights there, and its own average after."""
    (exported, last), (other_exported, other_last) = two_ranks.run(fit_and_export, name, options)
    assert torch.equal(exported, other_exported)
    assert torch.equal(last, other_last)


# ---- steps -----------------------------------------------------------------------------------------------------------


class LeavesOut(toy.Toy):
    """Rank 1 leaves out every second step, as one whose gradient is too long."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        loss = optimizer_closure()
        if self.global_rank == 0 or batch_idx % 2:
            optimizer.step(closure=lambda: loss)


class Apart(Callback):
    """Whether the ranks held other weights where a batch began: local steps, or a mean before it."""

    def on_train_batch_start(self, trainer, module, *_):
        self.seen = [*getattr(self, "seen", ()), weights_of(module)]


def leave_out():
    module, seen = LeavesOut(lr=0.05), Apart()
    fit(module, {"every": 2}, max_steps=5, callbacks=[seen])
    return weights_of(module), seen.seen


def test_a_step_that_one_node_leaves_out_ends_the_period_with_the_next_batch(two_ranks):
    """It held the other node up until the timeout."""
    (one, seen), (other, others) = two_ranks.run(leave_out)
    assert torch.equal(one, other)
    assert len(seen) == 5
    assert not torch.equal(seen[1], others[1])


class ByHand(toy.Toy):
    """Steps its optimizer past Lightning."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_steps_that_lightning_does_not_count_are_warned_of(two_ranks):
    scene = {"between_nodes": LocalSteps(every=2), "ranks_per_node": 1, "max_epochs": 1, "warns": True}
    seen, _ = scenes.fit(two_ranks, ByHand, **scene)
    assert sum("which is still 0 after 2 batches" in text for text in seen.warnings) == 1


# ---- what else there is ----------------------------------------------------------------------------------------------


class Teacher(toy.Toy):
    """Follows its network with frozen weights, as mean teachers and BYOL do; another frozen layer stays."""

    def __init__(self):
        super().__init__(lr=0.05)
        self.teacher, self.fixed = nn.Linear(3, 3).requires_grad_(False), nn.Linear(2, 2).requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, *_):
        first = next(one for one in self.parameters() if one.requires_grad)
        self.teacher.weight.lerp_(first.mean(), 0.1)


def teach():
    module = Teacher()
    fit(module, {"every": 2}, max_steps=5)
    return module.teacher.weight.clone(), module.fixed.weight.clone()


def test_frozen_weights_that_user_code_writes_are_averaged(two_ranks):
    (one, _), (other, _) = two_ranks.run(teach)
    assert torch.equal(one, other)


class Counts(toy.Toy):
    """With a buffer that is no statistic of a BatchNorm, and that each node moves in its own way."""

    def __init__(self):
        super().__init__(lr=0.05)
        self.register_buffer("centre", torch.zeros(3))
        self.centres = []

    def training_step(self, batch, batch_idx):
        self.centre += 1 + self.global_rank
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_):
        self.centres.append(self.centre[0].item())


def count():
    module = Counts()
    fit(module, {"every": 2}, max_steps=5)
    return module.centres, module.centre[0].item()


def test_other_buffers_are_those_of_rank_zero_after_an_average(two_ranks):
    """After steps 2 and 4, and at the end."""
    assert two_ranks.run(count) == [([1, 2, 3, 4, 5], 5), ([2, 2, 4, 4, 6], 5)]


class Finds(LearningRateFinder):
    """Searches, and leaves the rate as it is."""

    def lr_find(self, trainer, pl_module):
        super().lr_find(trainer, pl_module)
        pl_module.lr = trainer.optimizers[0].param_groups[0]["lr"] = 0.05


def search_first(folder, options):
    found = []
    for callbacks in ([], [Finds(num_training_steps=8, early_stop_threshold=None, update_attr=False)]):
        module, seen = toy.Toy(lr=0.05), Apart()
        fit(module, options, max_epochs=1, callbacks=[*callbacks, seen], default_root_dir=folder)
        found.append(torch.stack([*seen.seen[-4:], weights_of(module)]))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"every": 2, "from_step": 2},
        {"every": 2, "outer_lr": 0.7, "outer_momentum": 0.9},
    ],
    ids=["post-local", "outer step"],
)
def test_a_search_before_training_leaves_no_trace(two_ranks, tmp_path, options):
    """Its steps part the nodes; what it loads at its end is everywhere the same."""
    for without, with_search in two_ranks.run(search_first, tmp_path, options):
        assert torch.equal(without, with_search)


class Saves(Callback):
    """Before the first batch and after the last."""

    def __init__(self, path):
        self.path = path

    def on_train_start(self, trainer, module):
        trainer.save_checkpoint(self.path / f"{trainer.global_step}.ckpt")

    on_train_epoch_end = on_train_start


def resume_and_save(path):
    options = {"every": 2, "outer_lr": 0.7, "outer_momentum": 0.9}
    fit(toy.Toy(), options, max_epochs=1, callbacks=[Saves(path)])
    (file,) = [one for one in path.iterdir() if one.name != "0.ckpt"]
    first = torch.load(file, weights_only=True)[OUTER_MOMENTUM]
    fit(toy.Toy(), options, max_epochs=2, limit_train_batches=0, callbacks=[Saves(path)], ckpt_path=file)
    second = torch.load(file, weights_only=True)[OUTER_MOMENTUM]
    return all(torch.equal(second[name], value) for name, value in first.items())


def test_outer_momentum_of_a_resumed_run_is_saved_before_its_first_batch(two_ranks, tmp_path):
    assert all(two_ranks.run(resume_and_save, tmp_path))
