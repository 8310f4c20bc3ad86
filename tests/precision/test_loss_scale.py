"""Loss scales: behavior on overflow, on clean steps, at their bounds and with invalid settings."""

import pytest
import torch

from lightning_hybrid.precision.loss_scale import (
    NUM_LOOKS,
    DynamicLossScale,
    StaticLossScale,
    loss_scale_from,
    unscale_,
)

OVERFLOW = torch.tensor(True)
CLEAN = torch.tensor(False)


def values(scale, steps):
    """Return the scale after each step, where `x` is an overflow and `.` is a clean step."""
    return [scale.update(OVERFLOW if step == "x" else CLEAN) or scale.value for step in steps]


def test_default_scale_follows_the_rule_of_torchs_grad_scaler():
    """With equal defaults, our scale follows torch's until it reaches one of our bounds."""
    ours = DynamicLossScale(growth_interval=5)
    theirs = torch.amp.GradScaler("cpu", growth_interval=5)
    theirs.scale(torch.ones(()))  # creates its state
    for step in range(60):
        found_inf = step % 13 == 3
        ours.update(torch.tensor(found_inf))
        torch._amp_update_scale_(
            theirs._scale, theirs._growth_tracker, torch.tensor(float(found_inf)), 2.0, 0.5, 5
        )
        assert ours.value == theirs.get_scale()


def test_scale_stays_within_its_bounds_and_lives_on():
    scale = DynamicLossScale(init_scale=4.0, growth_interval=1, min_scale=1.0, max_scale=8.0)
    assert values(scale, "x" * 300)[-1] == 1.0
    assert values(scale, "." * 300)[-1] == 8.0


def test_hysteresis_forgives_overflows_until_the_scale_grows_again():
    """Hysteresis follows Megatron's rule. With 2, the second overflow since the last growth lowers the scale.

    The two overflows need not be consecutive. A hysteresis of 1 equals no hysteresis.
    """
    scale = DynamicLossScale(init_scale=1024.0, growth_interval=2, hysteresis=2)
    assert values(scale, "x.xx..xx") == [1024, 1024, 512, 256, 256, 512, 512, 256]
    with_it = DynamicLossScale(hysteresis=1, growth_interval=3)
    without = DynamicLossScale(growth_interval=3)
    assert values(with_it, "xx....." * 6) == values(without, "xx....." * 6)


def test_state_round_trip_continues_the_count_and_hysteresis_used_up():
    first, second = (
        DynamicLossScale(init_scale=64.0, growth_interval=4, hysteresis=2) for _ in range(2)
    )
    values(first, "x...")
    second.load_state_dict(first.state_dict())
    assert values(second, ".x") == values(first, ".x") == [128.0, 128.0]
    second.load_state_dict(first.state_dict())
    assert values(second, "x") == [64.0]
    # A checkpoint from before hysteresis existed.
    second.load_state_dict({"scale": 64.0, "num_clean_steps": 0})
    assert values(second, "x") == [64.0]


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_more_clean_steps_than_a_shorter_interval_has_grow_the_scale_at_the_next_one(hysteresis):
    """Torch's kernel tests for equality with the interval, so beyond it the scale would never grow again."""
    scale = DynamicLossScale(init_scale=64.0, growth_interval=2, hysteresis=hysteresis)
    scale.load_state_dict({"scale": 64.0, "num_clean_steps": 5})
    scale.update(CLEAN)
    assert scale.value == 128.0


def test_a_static_scale_never_moves_and_wins_over_a_checkpoints():
    scale = StaticLossScale(128.0)
    scale.load_state_dict({"scale": 65536.0, "num_clean_steps": 3})
    assert values(scale, "x.") == [128.0, 128.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"init_scale": 1000.0}, r"`init_scale` \(=1000.0\) must be a power of two.*512 or 1024"),
        ({"init_scale": float("inf")}, r"`init_scale` \(=inf\)"),
        ({"growth_factor": 0.5}, r"`growth_factor` \(=0.5\) must be a number in \[1, inf\)"),
        ({"backoff_factor": 1.0}, r"`backoff_factor` \(=1.0\) must be a number in \(0, 1\)"),
        ({"growth_interval": 0}, r"`growth_interval` \(=0\)"),
        ({"hysteresis": 0}, r"`hysteresis` \(=0\) must be a whole number of overflows"),
        (
            {"init_scale": 2.0, "min_scale": 4.0},
            r"`init_scale` \(=2.0\) must be between `min_scale` \(=4.0\)",
        ),
    ],
)
def test_bad_dynamic_scale_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DynamicLossScale(**arguments)


@pytest.mark.parametrize("setting", ["statik", True])
def test_bad_setting_is_refused(setting):
    with pytest.raises(ValueError, match="`loss_scale` "):
        loss_scale_from(setting)


@pytest.mark.parametrize(
    ("where", "bad"), [(0, float("inf")), (1, float("-inf")), (2, float("nan"))]
)
def test_unscaling_divides_exactly_and_finds_what_is_not_finite_in_any_dtype(where, bad):
    gradients = [torch.rand(5), torch.rand(3, dtype=torch.float64), torch.rand(4)[::2]]
    expected = [gradient / 1024 for gradient in gradients]
    assert unscale_(gradients, torch.tensor(1024.0)).item() == 0
    assert all(map(torch.equal, gradients, expected))
    gradients[where][-1] = bad
    assert unscale_(gradients, torch.tensor(1024.0)).item() == 1


def follow(scale, *gradients, limit=2.0**16):
    """Return the scale after each step with these largest gradients, with the overflows of fp16."""
    scales = []
    for largest in gradients:
        is_overflow = largest * scale.value >= limit
        seen_largest = None
        if scale.wants_largest:
            seen_largest = torch.tensor(float("inf") if is_overflow else largest)
        scale.update(torch.tensor(is_overflow), seen_largest)
        scales.append(scale.value)
    return scales


def test_a_first_scale_that_is_too_high_skips_one_step_and_falls_to_where_gradients_have_room():
    assert follow(DynamicLossScale(), 3000.0, 3000.0, 3000.0) == [1.0, 1.0, 1.0]  # 2^12 / 3000
    assert follow(DynamicLossScale(), 10.0, 10.0, 10.0) == [1.0, 256.0, 256.0]
    # At most half.
    bounded = DynamicLossScale(init_scale=2.0**20, min_scale=4.0)
    assert follow(bounded, 100.0, 0.001) == [4.0, 2.0**19]


def test_a_later_overflow_halves_the_scale():
    scale = DynamicLossScale()
    assert follow(scale, 0.5, 10.0, 10.0, 10.0) == [2.0**16, 2.0**15, 2.0**14, 2.0**13]
    assert not scale.wants_largest


def follow_as_on_cuda(scale, *gradients):
    """Follow steps whose outcomes are unknown to the host, which reads the largest gradient of all first steps."""
    scales = []
    for num_steps, largest in enumerate(gradients, start=1):
        scales += follow(scale, largest)
        scale._num_looks = NUM_LOOKS - num_steps
        assert scale.wants_largest
    return scales


def test_on_cuda_too_an_overflow_after_a_clean_first_step_halves_the_scale():
    assert follow_as_on_cuda(DynamicLossScale(), 0.5, 3.0, 0.5) == [2.0**16, 2.0**15, 2.0**15]
    scales = follow_as_on_cuda(DynamicLossScale(), 3000.0, 10.0, 300.0, 10.0)
    assert scales == [1.0, 256.0, 128.0, 128.0]


@pytest.mark.parametrize("hysteresis", [1, 2])
@pytest.mark.parametrize("found_inf", [OVERFLOW, CLEAN])
def test_gradients_that_wait_for_a_step_keep_the_scale_that_they_have(hysteresis, found_inf):
    """Another optimizer divides by this scale after the first optimizer has changed the scale."""
    scale = DynamicLossScale(init_scale=2.0**10, growth_interval=1, hysteresis=hysteresis)
    of_gradients = scale.scale
    for _ in range(hysteresis):
        scale.update(found_inf)
    assert scale.value != 2.0**10
    assert of_gradients.item() == 2.0**10


@pytest.mark.parametrize(
    ("saved", "expected"), [(2.0**30, 2.0**24), (2.0**-3, 1.0), (2.0**9, 2.0**9)]
)
def test_a_loaded_scale_is_within_the_bounds_at_once(saved, expected):
    scale = DynamicLossScale(min_scale=1.0, max_scale=2.0**24)
    scale.load_state_dict({"scale": saved, "num_clean_steps": 0})
    assert scale.value == expected


def test_a_run_resumed_between_fall_and_leap_goes_on_with_the_leap():
    scale = DynamicLossScale()
    resumed = DynamicLossScale()
    follow(scale, 10.0)
    resumed.load_state_dict(scale.state_dict())
    assert follow(resumed, 10.0) == follow(scale, 10.0) == [256.0]
    later = DynamicLossScale()
    later.load_state_dict(scale.state_dict())
    assert not later.wants_largest
