"""Guard of a learning-rate schedule, which stays the same object and waits on skipped steps."""

import copy

import pytest
import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, SequentialLR

from lightning_hybrid.precision.schedule_guard import ScheduleGuard, is_guarded
from lightning_hybrid.precision.skipped_steps import SkipFlag


def guarding(config, was_skipped, may_put_off=lambda: False):
    guard = ScheduleGuard(lambda optimizer: [SkipFlag(was_skipped(optimizer))], may_put_off)
    guard.guard(config)
    return guard


def make(kind=ExponentialLR, interval="step"):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    if kind is ExponentialLR:
        arguments = {"gamma": 0.5}
    else:
        arguments = {}
    return optimizer, LRSchedulerConfig(kind(optimizer, **arguments), interval=interval)


def test_state_dict_and_type_stay_what_they_were():
    _, config = make()
    plain = copy.deepcopy(config.scheduler.state_dict())
    guard = guarding(config, lambda _: True)
    guard.guard(config)
    assert len(guard) == 1  # guarding twice has no further effect
    assert isinstance(config.scheduler, ExponentialLR)
    assert config.scheduler.state_dict() == plain
    guard.release()
    assert type(config.scheduler) is ExponentialLR
    assert config.scheduler.state_dict() == plain


@pytest.mark.parametrize(
    ("kind", "interval"), [(ReduceLROnPlateau, "step"), (ExponentialLR, "epoch")]
)
def test_schedules_that_do_not_count_steps_are_left_alone(kind, interval):
    _, config = make(kind, interval)
    guarding(config, lambda _: True)
    assert not is_guarded(config.scheduler)


def test_a_chain_of_schedules_waits_as_one():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    parts = [ExponentialLR(optimizer, 0.5), ExponentialLR(optimizer, 0.1)]
    config = LRSchedulerConfig(SequentialLR(optimizer, parts, milestones=[2]), interval="step")
    guarding(config, lambda _: True)
    optimizer.step()
    config.scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 1.0
