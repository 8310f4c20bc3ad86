import copy

import pytest
import torch
from torch import nn

from lightning_hybrid.optim import WarmupPolynomialDecay, starting_rate
from lightning_hybrid.optim.schedule import MLPERF_LARS


def sgd(*lrs):
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs])


def trace(optimizer, schedule, num_steps):
    """Return the learning rates of the next `num_steps` updates, as lists over groups."""
    rates = []
    for _ in range(num_steps):
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return rates


def test_every_rate_is_that_of_the_formula():
    optimizer = sgd(8.0, 1.0)
    schedule = WarmupPolynomialDecay(
        optimizer, 100, 20, power=2.0, end_lr=0.5, warmup_start_lr=0.25
    )
    for s, rates in enumerate(trace(optimizer, schedule, 130)):
        for base, rate in zip((8.0, 1.0), rates, strict=True):
            if s < 20:
                assert rate == pytest.approx(0.25 + (base - 0.25) * s / 20, rel=1e-14)
            elif s < 100:
                assert rate == pytest.approx(
                    0.5 + (base - 0.5) * (1 - (s - 20) / 80) ** 2, rel=1e-14
                )
            else:
                assert rate == 0.5


def test_the_peak_is_exact_and_without_warm_up_comes_first():
    assert trace(o := sgd(24.7), WarmupPolynomialDecay(o, 10, 3), 4)[3] == [24.7]
    assert trace(o := sgd(24.7), WarmupPolynomialDecay(o, 10), 1) == [[24.7]]


def test_a_decay_from_the_start_falls_from_the_peak_to_the_curve():
    """Caffe's rule is base * (1 - s / total) ** power. The first W rates are those of the ramp."""
    optimizer = sgd(32.0)
    schedule = WarmupPolynomialDecay(
        optimizer, 4000, 400, end_lr=0.0, warmup_start_lr=1.0, decay_from="start"
    )
    rates = [rate for (rate,) in trace(optimizer, schedule, 4001)]
    assert rates[:401:100] == pytest.approx([1.0, 8.75, 16.5, 24.25, 32 * 0.9**2])
    assert rates[399] == pytest.approx(1 + 31 * 399 / 400)
    assert rates[2200] == pytest.approx(32 * 0.45**2)
    assert rates[4000] == 0.0


def test_resume_gives_the_same_rates():
    optimizer = sgd(8.0, 2.0)
    schedule = WarmupPolynomialDecay(optimizer, 20, 5)
    trace(optimizer, schedule, 7)
    saved = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
    second = sgd(1.0, 1.0)
    resumed = WarmupPolynomialDecay(second, 11)
    second.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert trace(optimizer, schedule, 15) == trace(second, resumed, 15)


@pytest.mark.parametrize("num_steps", [0, 7])
def test_resume_by_last_epoch_gives_the_same_rates(num_steps):
    """At step 0 the rate is 0, which is below the end, so the base rate must be used."""
    optimizer = sgd(8.0)
    schedule = WarmupPolynomialDecay(optimizer, 20, 5)
    trace(optimizer, schedule, num_steps)
    second = sgd(1.0)
    second.load_state_dict(optimizer.state_dict())
    resumed = WarmupPolynomialDecay(second, 20, 5, last_epoch=schedule.last_epoch - 1)
    assert trace(optimizer, schedule, 10) == trace(second, resumed, 10)


def test_a_tensor_rate_is_filled_in_place():
    lr = torch.tensor(8.0, dtype=torch.float64)
    optimizer = sgd(lr)
    same = sgd(8.0)
    held = optimizer.param_groups[0]["lr"]
    rates = trace(optimizer, WarmupPolynomialDecay(optimizer, 20, 5), 22)
    assert rates == trace(same, WarmupPolynomialDecay(same, 20, 5), 22)
    assert optimizer.param_groups[0]["lr"] is held


BAD = [
    ("total_steps", 10.0),
    ("warmup_steps", -1),
    ("warmup_steps", 10),
    ("power", 0),
    ("end_lr", -1e-4),
]
BAD += [("end_lr", 9.0), ("warmup_start_lr", -0.1), ("decay_from", "peak")]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_arguments_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"^`{name}` \(="):
        WarmupPolynomialDecay(sgd(8.0), **{"total_steps": 10, name: value})


def test_an_end_above_the_rate_of_any_group_and_what_is_no_optimizer_are_refused():
    with pytest.raises(
        ValueError,
        match=r"`end_lr` \(=0.1\) must not exceed the learning rate of group 1 \(=0.01\)",
    ):
        WarmupPolynomialDecay(sgd(8.0, 0.01), 10, end_lr=0.1)
    with pytest.raises(TypeError, match="`optimizer` "):
        WarmupPolynomialDecay(nn.Linear(1, 1), 10)


def test_a_starting_rate_of_lars_goes_through_mlperfs_points_and_grows_between_them():
    for batch_size, rate in MLPERF_LARS.items():
        assert starting_rate("lars", batch_size=batch_size) == pytest.approx(rate)
    rates = [starting_rate("lars", batch_size=batch) for batch in range(256, 65537, 256)]
    assert rates == sorted(rates)
    rate = starting_rate("lars", batch_size=8192, sgd_lr=0.4, sgd_batch_size=512)
    assert rate == pytest.approx(34)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "adam", "batch_size": 1}, "`optimizer`"),
        ({"optimizer": "lars", "batch_size": 131072}, "at most 65536"),
        ({"optimizer": "sgd", "batch_size": 1, "sgd_lr": float("nan")}, "`sgd_lr`"),
    ],
)
def test_a_starting_rate_that_has_no_point_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        starting_rate(**arguments)
