"""Stop on a signal: all ranks stop after the same step, with a checkpoint from which a run resumes bit for bit."""

import contextlib
import logging
import os
import signal
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.callbacks import StopOnSignal
from lightning_hybrid.checkpoint.file import check_whole
from tests import toy
from tests.scenes import at


class Signals(pl.Callback):
    def __init__(self, rank, *, step=None, in_validation=None, number=signal.SIGTERM):
        self.rank = rank
        self.step = step
        self.in_validation = in_validation
        self.number = number
        self.is_sent = False

    def on_after_backward(self, trainer, module):
        if trainer.global_step == self.step and dist.get_rank() == self.rank and not self.is_sent:
            self.is_sent = True
            os.kill(os.getpid(), self.number)

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        is_now = self.in_validation == trainer.global_step and batch_idx == 0
        if is_now and dist.get_rank() == self.rank:
            os.kill(os.getpid(), self.number)


def stopped(folder, rank, where, name="SIGTERM", every_n_steps=1, accumulate=1):
    before = signal.getsignal(signal.Signals[name])
    module = toy.Toy()
    signals = Signals(rank, number=signal.Signals[name], **where)
    stop = StopOnSignal(folder, signals=["SIGUSR2", name], every_n_steps=every_n_steps)
    trainer = toy.trainer(
        callbacks=[stop, signals], max_epochs=3, accumulate_grad_batches=accumulate
    )
    code = "went on"
    try:
        trainer.fit(module, toy.loader(), toy.loader())
    except SIGTERMException as end:
        code = end.code
    is_as_before = signal.getsignal(signal.Signals[name]) is before
    return code, trainer.global_step, is_as_before, len(module.losses)


STOPS = [  # signalled rank, place of the signal, steps between agreements, and last step; 4 steps per epoch
    (1, {"step": 5}, 1, 6),
    (1, {"in_validation": 0}, 1, 0),  # the sanity check
    (1, {"in_validation": 4}, 1, 4),
    (0, {"step": 11}, 1, 12),  # the last step, before a test
    (1, {"step": 4}, 3, 6),  # agreement after steps 0, n, 2 n, ...
    (1, {"step": 4}, 100, 12),  # and at the end of training
]


@pytest.mark.parametrize(("rank", "where", "every_n_steps", "last"), STOPS, ids=str)
def test_a_signal_to_any_rank_stops_all_after_the_same_step(
    two_ranks, tmp_path, rank, where, every_n_steps, last
):
    results = two_ranks.run(stopped, str(tmp_path), rank, where, "SIGTERM", every_n_steps)
    # The second rank behaves like one that Lightning started.
    assert [(code, step, is_as_before) for code, step, is_as_before, _ in results] == [
        (143, last, True),
        (0, last, True),
    ]
    assert check_whole(Path(tmp_path, "stopped.ckpt"))


class SignalledWhileLoadersAreSetUp(toy.Toy):
    """Module whose last rank receives SIGTERM while Lightning sets up the loaders."""

    def train_dataloader(self):
        if dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return toy.loader()


def stopped_in_setup(folder):
    before = signal.getsignal(signal.SIGTERM)
    trainer = toy.trainer(callbacks=[StopOnSignal(folder)], max_epochs=3)
    code = "went on"
    try:
        trainer.fit(SignalledWhileLoadersAreSetUp())
    except SIGTERMException as end:
        code = end.code
    return code, trainer.global_step, signal.getsignal(signal.SIGTERM) is before


def test_a_signal_while_loaders_are_set_up_stops_all_ranks_at_the_first_batch(two_ranks, tmp_path):
    results = two_ranks.run(stopped_in_setup, str(tmp_path))
    assert results == [(143, 0, True), (0, 0, True)]
    assert check_whole(Path(tmp_path, "stopped.ckpt"))


def test_a_rank_alone_that_is_signalled_in_its_setup_stops_after_a_step(one_rank, tmp_path):
    assert one_rank.run(stopped_in_setup, str(tmp_path)) == [(143, 1, True)]


def test_a_rank_alone_stops_as_well_and_at_another_signal(one_rank, tmp_path):
    assert one_rank.run(stopped, str(tmp_path), 0, {"step": 5}, "SIGUSR1") == [(143, 6, True, 6)]


class OnAnotherHost(HybridAllReduceStrategy):
    """Strategy on a host that is not the first one of an elastic run."""

    is_global_zero = False


def logged_on_another_host(folder):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    log = logging.getLogger("lightning.pytorch")
    log.addHandler(handler)
    callbacks = [StopOnSignal(folder), Signals(0, step=5)]
    trainer = toy.trainer(strategy=OnAnotherHost(), callbacks=callbacks, max_epochs=3)
    try:
        with contextlib.suppress(SIGTERMException):
            trainer.fit(toy.Toy(), toy.loader())
    finally:
        log.removeHandler(handler)
    return [message for message in messages if message.startswith("stopped by")]


def test_a_host_of_an_elastic_run_that_writes_no_checkpoint_says_who_writes_it(one_rank, tmp_path):
    ((message,),) = one_rank.run(logged_on_another_host, str(tmp_path))
    assert os.listdir(tmp_path) == []
    assert message.startswith(
        "stopped by SIGTERM in epoch 0 after step 6. This host has written no"
    )
    assert "only the first host of the run writes" in message
    assert "To resume" not in message


def broken(folder, error, signals):
    def breaks(trainer, module):
        if trainer.global_step == 5:
            raise error

    trainer = toy.trainer(
        callbacks=[StopOnSignal(folder), *signals, at(on_after_backward=breaks)], max_epochs=3
    )
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
    """A checkpoint would contain the middle of a step."""
    assert one_rank.run(broken, str(tmp_path), error, signals) == [(type(error), None)]
    assert os.listdir(tmp_path) == []


def folder_of(stop_folder, checkpoint_folder):
    callbacks = []
    if checkpoint_folder is not None:
        callbacks = [ModelCheckpoint(checkpoint_folder)]
    trainer = toy.trainer(
        callbacks=callbacks, default_root_dir="root", enable_checkpointing=bool(callbacks)
    )
    return str(StopOnSignal(stop_folder)._folder(trainer))


def test_the_checkpoint_goes_to_the_folder_of_the_callback_or_to_that_of_other_checkpoints():
    assert folder_of("stops", "checkpoints") == "stops"
    assert folder_of(None, "checkpoints") == str(Path("checkpoints").absolute())
    assert folder_of(None, None) == "root"
    assert folder_of("s3://bucket/run", None) == "s3://bucket/run"


def fitted_again(folder):
    stop = StopOnSignal(folder, every_n_steps=5)
    steps = []
    for step in (4, None):
        trainer = toy.trainer(callbacks=[stop, Signals(0, step=step)], max_epochs=3)
        with contextlib.suppress(SIGTERMException):
            trainer.fit(toy.Toy(), toy.loader())
        steps.append(trainer.global_step)
        is_theirs = "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)
        # After a whole fit, Lightning's own broadcast of the signal is in place again.
        assert is_theirs or trainer.global_step < 12
    return steps


def test_a_second_fit_with_the_same_callback_is_not_stopped(two_ranks, tmp_path):
    assert two_ranks.run(fitted_again, str(tmp_path)) == [[5, 12]] * 2


def epoch_batch_and_step(trainer, module, outputs, batch, batch_idx):
    return trainer.current_epoch, batch_idx, trainer.fit_loop.epoch_loop._batches_that_stepped


def run(folder, where, validates, limits, ckpt_path=None):
    looks = at(on_train_batch_end=epoch_batch_and_step)
    module = toy.Toy()
    trainer = toy.trainer(callbacks=[StopOnSignal(folder), Signals(0, **where), looks], **limits)
    val = toy.loader() if validates else None
    with contextlib.suppress(SIGTERMException):
        trainer.fit(module, toy.loader(), val, ckpt_path=ckpt_path)
    return looks.kept["on_train_batch_end"], toy.weights(module)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.parametrize(
    ("world", "where", "validates", "limits"),
    [
        ("one_rank", {"step": 7}, False, {"max_epochs": 10, "max_steps": 24}),
        ("two_ranks", {"step": 3}, True, {"max_epochs": 3}),
    ],
    ids=str,
)
def test_a_run_that_stops_between_two_epochs_goes_on_to_the_bit_and_misses_no_batch(
    request, tmp_path, world, where, validates, limits
):
    """In Lightning's own file, the finished epoch looks started if `max_steps` is set and there is no validation.

    `tests/data/test_resume_anywhere.py` stops at any step, which requires a loader that saves its position.
    """
    ranks = request.getfixturevalue(world)
    path = str(tmp_path / "stopped.ckpt")
    whole = ranks.run(run, str(tmp_path), {}, validates, limits)
    interrupted = ranks.run(run, str(tmp_path), where, validates, limits)
    resumed = ranks.run(run, str(tmp_path), {}, validates, limits, path)

    length = 8 // ranks.world_size
    all_batches = [(step // length, step % length, step) for step in range(3 * length)]
    for rank in range(ranks.world_size):
        batches, weights = whole[rank]
        batches_before, _ = interrupted[rank]
        batches_after, resumed_weights = resumed[rank]
        assert batches == all_batches, f"rank {rank}"
        assert batches_before + batches_after == all_batches, f"rank {rank}"
        assert len(batches_before) == length, f"rank {rank}"
        assert toy.same_bits(weights, resumed_weights), f"rank {rank}"


def test_a_step_of_several_batches_is_made_to_its_end(two_ranks, tmp_path):
    """The signal arrives in the first of 3 batches, and the step is completed."""
    results = two_ranks.run(stopped, str(tmp_path), 0, {"step": 0}, "SIGTERM", 1, 3)
    for rank, (_, global_step, _, num_batches) in enumerate(results):
        assert global_step == 1, f"rank {rank}"
        assert num_batches == 3, f"rank {rank}"


def test_a_signal_that_is_none_is_refused():
    with pytest.raises(ValueError, match="`signals` contains SIGNONE, which is not a signal"):
        StopOnSignal(signals=["SIGNONE"])


def test_a_single_name_of_a_signal_needs_no_list():
    assert StopOnSignal(signals="SIGUSR1").signals == [signal.SIGUSR1]


@pytest.mark.parametrize(
    ("number", "text"), [(15, "15"), (signal.SIGTERM, "<Signals.SIGTERM: 15>")]
)
def test_the_number_of_a_signal_is_refused_in_favor_of_its_name(number, text):
    words = (
        rf"`signals` contains {text}, but must contain names of signals, not numbers. Set signals="
    )
    with pytest.raises(ValueError, match=words):
        StopOnSignal(signals=[number])


class FailsInSetup(toy.Toy):
    """Module whose fit fails, and which records the replaced signal handlers during validation."""

    def train_dataloader(self):
        raise FileNotFoundError("no data")

    def on_validation_start(self):
        names = ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn")
        connector = self.trainer._signal_connector
        self.replaced = [name for name in names if name in vars(connector)]


def handlers_after_a_failed_fit(folder):
    trainer = toy.trainer(callbacks=[StopOnSignal(folder)])
    module = FailsInSetup()
    with pytest.raises(FileNotFoundError):
        trainer.fit(module)
    trainer.validate(module, toy.loader(), verbose=False)
    return module.replaced


def test_a_failed_fit_leaves_lightnings_own_handlers_to_a_later_validation(one_rank, tmp_path):
    assert one_rank.run(handlers_after_a_failed_fit, str(tmp_path)) == [[]]
