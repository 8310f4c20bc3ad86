"""A guarded schedule is the same object that waits on skipped steps."""

import copy

import pytest
import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, SequentialLR

from lightning_hybrid.scheduler_guard import guard, is_guarded, unguard


def make(kind=ExponentialLR, interval="step"):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    arguments = {"gamma": 0.5} if kind is ExponentialLR else {}
    return optimizer, LRSchedulerConfig(kind(optimizer, **arguments), interval=interval)


def test_guarded_schedule_waits_while_the_step_was_skipped():
    optimizer, config = make()
    skipped = [True, False, True]
    guard(config, lambda _: skipped[-1])
    rates = []
    for skipped[-1] in (False, True, True, False):
        optimizer.step()
        config.scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.5, 0.5, 0.5, 0.25]


def test_guard_is_told_the_schedulers_own_optimizer():
    optimizer, config = make()
    asked = []
    guard(config, lambda o: asked.append(o) or False)
    optimizer.step()
    config.scheduler.step()
    assert asked == [optimizer]


def test_state_dict_and_type_stay_what_they_were():
    _, config = make()
    plain = copy.deepcopy(config.scheduler.state_dict())
    guard(config, lambda _: True)
    assert isinstance(config.scheduler, ExponentialLR)
    assert config.scheduler.state_dict() == plain
    unguard(config)
    assert type(config.scheduler) is ExponentialLR
    assert config.scheduler.state_dict() == plain


def test_guarding_twice_is_guarding_once():
    _, config = make()
    guard(config, lambda _: True)
    guard(config, lambda _: True)
    unguard(config)
    assert type(config.scheduler) is ExponentialLR


@pytest.mark.parametrize(("kind", "interval"), [(ReduceLROnPlateau, "step"), (ExponentialLR, "epoch")])
def test_schedules_that_do_not_count_steps_are_left_alone(kind, interval):
    _, config = make(kind, interval)
    guard(config, lambda _: True)
    assert not is_guarded(config.scheduler)


def test_a_chain_of_schedules_waits_as_one():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    parts = [ExponentialLR(optimizer, 0.5), ExponentialLR(optimizer, 0.1)]
    config = LRSchedulerConfig(SequentialLR(optimizer, parts, milestones=[2]), interval="step")
    guard(config, lambda _: True)
    optimizer.step()
    config.scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 1.0
