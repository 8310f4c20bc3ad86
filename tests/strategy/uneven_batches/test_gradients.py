"""Ranks whose loaders have 7, 5, 5 and 3 batches: each step has the gradients of its global batch."""

from tests.strategy.uneven_batches import support
from tests.strategy.uneven_batches.support import NUM_SAMPLES, fits, largest_error, same_weights


def test_all_samples_are_trained_once_with_the_gradients_of_the_global_batch(four_ranks):
    results = fits(four_ranks)
    assert sorted(support.numbers_of(results)) == list(range(sum(NUM_SAMPLES)))
    assert largest_error(results) < 1e-6
    assert same_weights(results)
    for rank in results:
        assert rank["batch_indices"] == list(range(7))
        assert rank["global_step"] == 7
