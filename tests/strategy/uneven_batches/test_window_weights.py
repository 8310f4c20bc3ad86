"""Weights of the batches of a step: factors of the losses and the divisor of the sums."""

import pytest

from lightning_hybrid.strategy.uneven_batches.agreement import AgreedBatch
from lightning_hybrid.strategy.uneven_batches.window_weights import WindowWeights


def coefficients(steps, accumulation, limits_factors):
    """Return the factor of each rank's loss in each batch, and the divisor of the sums.

    Args:
        steps: Numbers of samples of each rank, for each batch of a step.
        accumulation: `accumulate_grad_batches`.
        limits_factors: As in `WindowWeights.begin`.
    """
    world_size = len(steps[0])
    ranks = [WindowWeights(world_size) for _ in range(world_size)]
    factors = []
    for index, samples in enumerate(steps):
        factors_of_batch = []
        for weights, num_own in zip(ranks, samples, strict=True):
            batch = AgreedBatch(num_own=num_own, num_total=sum(samples), num_largest=max(samples))
            if index == 0:
                weights.begin(batch, accumulation=accumulation, limits_factors=limits_factors)
            else:
                weights.add(batch)
            factors_of_batch.append(weights.factor)
        factors.append(factors_of_batch)
    assert len({weights.num_terms for weights in ranks}) == 1
    return factors, ranks[0].num_terms


@pytest.mark.parametrize("limits_factors", [False, True])
@pytest.mark.parametrize(
    ("steps", "accumulation"),
    [
        ([[4, 4, 4, 2]], 1),
        ([[3, 0, 0, 0]], 1),
        ([[4, 4, 4, 4], [4, 1, 4, 0]], 2),
        ([[4, 0, 0, 0]], 3),
        ([[1, 0, 0], [64, 64, 64]], 2),
    ],
)
def test_every_sample_has_the_same_weight(steps, accumulation, limits_factors):
    factors, num_terms = coefficients(steps, accumulation, limits_factors)
    num_samples = sum(map(sum, steps))
    for samples, factors_of_batch in zip(steps, factors, strict=True):
        for num_own, factor in zip(samples, factors_of_batch, strict=True):
            weight_of_mean = factor / accumulation / num_terms
            assert weight_of_mean == pytest.approx(num_own / num_samples, rel=1e-15)


@pytest.mark.parametrize("limits_factors", [False, True])
@pytest.mark.parametrize(
    ("batch_size", "world_size", "accumulation"), [(5, 3, 1), (7, 3, 3), (1, 49, 7)]
)
def test_equal_batches_have_factors_of_exactly_one(
    batch_size, world_size, accumulation, limits_factors
):
    steps = [[batch_size] * world_size] * accumulation
    factors, num_terms = coefficients(steps, accumulation, limits_factors)
    assert factors == [[1.0] * world_size] * accumulation
    assert num_terms == world_size


def test_the_divisor_is_the_world_size_unless_factors_are_limited():
    """The divisor also applies to a sum that a user's loop carries over."""
    _, num_terms = coefficients([[4, 3, 0]], 1, limits_factors=False)
    assert num_terms == 3
    factors, _ = coefficients([[4, 3, 0]], 1, limits_factors=True)
    assert max(factors[0]) == 1


def test_a_step_without_samples_divides_by_the_world_size():
    assert coefficients([[0, 0]], 1, limits_factors=True) == ([[0.0, 0.0]], 2)
