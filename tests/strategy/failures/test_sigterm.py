"""SIGTERM without `StopOnSignal`: every rank ends soon, and `save_on_exception` saves a checkpoint."""

import os
import signal
from functools import partial

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_hybrid.callbacks import StopOnSignal
from tests import toy
from tests.scenes import at

LIMIT_S = 30.0  # a deadlock would last 45 s, the timeout of the pool's groups


class Module(toy.Toy):
    """Module without BatchNorm, because DDP's wait for its buffers would only end with the missing process."""

    def __init__(self):
        super().__init__()
        self.net[2] = nn.Identity()


def signal_itself(steps, trainer, module):
    if trainer.global_step == steps.get(dist.get_rank()):
        os.kill(os.getpid(), signal.SIGTERM)


def signalled(steps, callbacks):
    """Fit until a signal stops the run, and return the error and the step of this rank."""
    callbacks = [at(on_after_backward=partial(signal_itself, steps)), *callbacks]
    trainer = toy.trainer(callbacks=callbacks, max_epochs=3, enable_checkpointing=True)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        trainer.fit(Module(), toy.loader())
        end = "went on"
    except BaseException as error:
        end = f"{type(error).__name__}: {error}"
    finally:
        signal.signal(signal.SIGTERM, handler)
    return end, trainer.global_step


def saving(folder):
    return ModelCheckpoint(folder, "{step}", save_on_exception=True, every_n_epochs=100)


@pytest.mark.parametrize("steps", [{0: 2}, {0: 3, 1: 3}, {0: 3, 1: 2}, {0: 4, 1: 5}], ids=str)
def test_a_signal_to_rank_zero_stops_all_ranks_after_the_same_step_with_a_checkpoint(
    two_ranks, tmp_path, steps
):
    ends = two_ranks.run(signalled, steps, [saving(tmp_path)], timeout_s=LIMIT_S)
    assert ends == [("SIGTERMException: ", steps[0] + 1)] * 2
    assert os.listdir(tmp_path) == [f"step={steps[0] + 1}.ckpt"]


def test_a_signal_to_another_rank_alone_ends_the_run_with_a_checkpoint_of_rank_zero(
    two_ranks, tmp_path
):
    end_0, end_1 = two_ranks.run(signalled, {1: 2}, [saving(tmp_path)], timeout_s=LIMIT_S)
    assert "comm: rank 1 gave up: it received SIGTERM" in end_0[0]
    assert end_1[0] == "SIGTERMException: "
    assert len(os.listdir(tmp_path)) == 1


def test_a_signal_that_the_callback_does_not_handle_still_ends_the_run(two_ranks, tmp_path):
    callbacks = [saving(tmp_path), StopOnSignal(str(tmp_path), signals="SIGUSR1")]
    end_0, end_1 = two_ranks.run(signalled, {0: 2}, callbacks, timeout_s=LIMIT_S)
    assert end_0 == ("SIGTERMException: ", 3)
    assert "comm: rank 0 gave up: it received SIGTERM" in end_1[0]
    assert os.listdir(tmp_path) == ["step=3.ckpt"]
