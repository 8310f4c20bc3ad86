"""A signal to any rank stops all of them after the same step, with a checkpoint from which a run goes on to the bit."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hybrid.callbacks import StopOnSignal
from lightning_hybrid.checkpoint.file import check_whole
from tests import toy


class Signals(pl.Callback):
    """The process is sent a signal in the backward of a step, or in a validation."""

    def __init__(self, rank, *, step=None, in_validation=None, number=signal.SIGTERM):
        self.rank, self.step, self.in_validation, self.number = rank, step, in_validation, number
        self.is_sent = False

    def on_after_backward(self, trainer, module):
        if trainer.global_step == self.step and dist.get_rank() == self.rank and not self.is_sent:
            self.is_sent = True
            os.kill(os.getpid(), self.number)

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        if self.in_validation == trainer.global_step and dist.get_rank() == self.rank and batch_idx == 0:
            os.kill(os.getpid(), self.number)


def stopped(folder, rank, where, name="SIGTERM", every_n_steps=1, accumulate=1):
    """What ended each rank, after which step; the handler of the signal afterwards is the one of before."""
    before = signal.getsignal(signal.Signals[name])
    module, signals = toy.Toy(), Signals(rank, number=signal.Signals[name], **where)
    stop = StopOnSignal(folder, signals=["SIGUSR2", name], every_n_steps=every_n_steps)
    trainer = toy.trainer(callbacks=[stop, signals], max_epochs=3, accumulate_grad_batches=accumulate)
    code = "went on"
    try:
        trainer.fit(module, toy.loader(), toy.loader())
    except SIGTERMException as end:
        code = end.code
    is_as_before = signal.getsignal(signal.Signals[name]) is before
    return code, trainer.global_step, is_as_before, len(module.losses)


def whole(resume=None):
    module = toy.Toy()
    trainer = toy.trainer(max_epochs=3, callbacks=[StopOnSignal()])
    trainer.fit(module, toy.loader(), toy.loader(), ckpt_path=resume)
    return toy.weights(module)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_any_rank_stops_all_after_the_same_step(two_ranks, tmp_path, rank):
    """4 steps an epoch; the signal comes in step 2 of the second."""
    results = two_ranks.run(stopped, str(tmp_path), rank, {"step": 5})
    codes, *rest = zip(*results, strict=True)
    assert codes == (143, 0)  # the second rank as one that Lightning started
    assert rest == [(6, 6), (True, True), (6, 6)]
    assert check_whole(Path(tmp_path, "stopped.ckpt"))


@pytest.mark.parametrize("step", [0, 4], ids=["sanity check", "after the first epoch"])
def test_a_signal_in_validation_is_obeyed_when_it_is_over(two_ranks, tmp_path, step):
    results = two_ranks.run(stopped, str(tmp_path), 1, {"in_validation": step})
    assert [(code, at) for code, at, *_ in results] == [(143, step), (0, step)]


def test_a_signal_in_the_last_step_stops_before_the_test(two_ranks, tmp_path):
    results = two_ranks.run(stopped, str(tmp_path), 0, {"step": 11})
    assert [(code, step) for code, step, *_ in results] == [(143, 12), (0, 12)]


def test_a_rank_alone_stops_as_well_and_at_another_signal(one_rank, tmp_path):
    assert one_rank.run(stopped, str(tmp_path), 0, {"step": 5}, "SIGUSR1") == [(143, 6, True, 6)]


class Breaks(pl.Callback):
    def __init__(self, error):
        self.error = error

    def on_after_backward(self, trainer, module):
        if trainer.global_step == 5:
            raise self.error


def broken(folder, error, signals):
    trainer = toy.trainer(callbacks=[StopOnSignal(folder), *signals, Breaks(error)], max_epochs=3)
    try:
        trainer.fit(toy.Toy(), toy.loader())
    except BaseException as end:
        return type(end), getattr(end, "code", None)
    return None


@pytest.mark.parametrize(
    ("error", "signals"),
    [(FloatingPointError(), [Signals(0, step=5)]), (SIGTERMException(), [])],
    ids=["after the signal", "Lightning's own, without a signal"],
)
def test_a_step_that_fails_leaves_no_checkpoint(one_rank, tmp_path, error, signals):
    """It would be of the middle of a step."""
    ((kind, code),) = one_rank.run(broken, str(tmp_path), error, signals)
    assert kind is type(error)
    assert code is None
    assert os.listdir(tmp_path) == []


def folder_of(given, own):
    saves = ModelCheckpoint(own) if own else None
    trainer = toy.trainer(callbacks=[saves] if saves else [], default_root_dir="root", enable_checkpointing=bool(own))
    return str(StopOnSignal(given)._folder(trainer))


def test_the_checkpoint_goes_where_it_is_told_or_to_the_others():
    assert [folder_of("given", "own"), folder_of(None, "own")] == ["given", str(Path("own").absolute())]
    assert folder_of(None, None) == "root"


def fitted_again(folder, next_signal):
    """Steps of a fit that is stopped, and of another one with the same callback."""
    stop, steps = StopOnSignal(folder, every_n_steps=5), []
    for step in (4, next_signal):
        trainer = toy.trainer(callbacks=[stop, Signals(0, step=step)], max_epochs=3)
        with contextlib.suppress(SIGTERMException):
            trainer.fit(toy.Toy(), toy.loader())
        steps.append(trainer.global_step)
        is_theirs = "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)
        assert is_theirs or trainer.global_step < 12  # after a whole fit Lightning asks by itself again
    return steps


@pytest.mark.parametrize(("next_signal", "last"), [(None, 12), (3, 5)])
def test_another_fit_begins_anew(two_ranks, tmp_path, next_signal, last):
    """It was not asked to stop, and is asked after its own steps 0, 5, 10."""
    assert two_ranks.run(fitted_again, str(tmp_path), next_signal) == [[5, last]] * 2


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_a_stopped_run_goes_on_to_the_bit(two_ranks, tmp_path):
    """After a whole epoch, as the toy's loader keeps no place: `tests/evidence/resume` stops at any step."""
    two_ranks.run(stopped, str(tmp_path), 1, {"step": 3})
    expected = two_ranks.run(whole)
    for weights, resumed in zip(expected, two_ranks.run(whole, str(tmp_path / "stopped.ckpt")), strict=True):
        assert toy.same_bits(weights, resumed)


class Places(pl.Callback):
    """Epoch and batch of each step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append((trainer.current_epoch, batch_idx))


def places(folder, stopped_in, validates, limits):
    """The places of a run that is stopped in a step, and of the one that goes on."""
    found, checkpoint = [], None
    for step in (stopped_in, None):
        seen = Places()
        trainer = toy.trainer(callbacks=[StopOnSignal(folder), Signals(0, step=step), seen], **limits)
        with contextlib.suppress(SIGTERMException):
            trainer.fit(toy.Toy(), toy.loader(), toy.loader() if validates else None, ckpt_path=checkpoint)
        found.append(seen.seen)
        checkpoint = str(Path(folder, "stopped.ckpt"))
    return found


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("limits", [{"max_epochs": 3}, {"max_epochs": 10, "max_steps": 24}], ids=["epochs", "steps"])
def test_a_run_of_one_rank_that_stops_between_two_epochs_misses_no_batch(one_rank, tmp_path, limits, validates):
    """In Lightning's own file the epoch that is over looks begun, where `max_steps` is set and nothing is validated."""
    ((before, after),) = one_rank.run(places, str(tmp_path), 15, validates, limits)  # 8 steps an epoch
    assert before + after == [(epoch, batch) for epoch in range(3) for batch in range(8)]


class Steps(pl.Callback):
    """The steps that loggers would write, and those there were."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append((trainer.fit_loop.epoch_loop._batches_that_stepped, trainer.global_step))


def steps_of_loggers(checkpoint):
    steps = Steps()
    trainer = toy.trainer(max_epochs=3, callbacks=[StopOnSignal(), steps])
    trainer.fit(toy.Toy(), toy.loader(), toy.loader(), ckpt_path=checkpoint)
    return steps.seen


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.parametrize("where", [{"step": 3}, {"step": 5}, {"in_validation": 4}], ids=str)
def test_loggers_go_on_with_the_step_they_were_at(two_ranks, tmp_path, where):
    """A metric has its step whether the run was stopped in an epoch or between two: no row is missing."""
    ((_, at, *_), _) = two_ranks.run(stopped, str(tmp_path), 1, where)
    for seen in two_ranks.run(steps_of_loggers, str(tmp_path / "stopped.ckpt")):
        assert seen == [(step, step + 1) for step in range(at, 12)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("every_n_steps", "step", "last"), [(3, 4, 6), (3, 6, 9), (5, 4, 5), (100, 4, 12)])
def test_all_ranks_are_asked_every_few_steps(two_ranks, tmp_path, every_n_steps, step, last):
    """After steps 0, n, 2 n, ...; at the end of training in any case."""
    results = two_ranks.run(stopped, str(tmp_path), 1, {"step": step}, "SIGTERM", every_n_steps)
    assert [(code, at) for code, at, *_ in results] == [(143, last), (0, last)]


@pytest.mark.parametrize("world", ["one_rank", "two_ranks"])
def test_a_step_of_several_batches_is_made_to_its_end(request, tmp_path, world):
    """Of 3 batches; the signal comes in the first of them."""
    ranks = request.getfixturevalue(world)
    results = ranks.run(stopped, str(tmp_path), 0, {"step": 0}, "SIGTERM", 1, 3)
    assert [(at, num) for _, at, _, num in results] == [(1, 3)] * len(results)


@pytest.mark.parametrize("every_n_steps", [0, -1, 1.5, True, "3"])
def test_a_number_of_steps_that_is_none_is_refused(every_n_steps):
    with pytest.raises(ValueError, match=r"`every_n_steps` \(=.*\) must be a whole number, 1 or more"):
        StopOnSignal(every_n_steps=every_n_steps)


def test_a_signal_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"`signals` \(=SIGNONE\) must be names of signals"):
        StopOnSignal(signals=["SIGNONE"])
