"""What a codec's fit leaves in memory: nothing."""

from __future__ import annotations

import gc

from lightning_hybrid.comm.codec.padded_bucket import PaddedBucket
from tests.strategy.codec.test_codec import fit


def buckets_held():
    gc.collect()
    return sum(isinstance(one, PaddedBucket) for one in gc.get_objects())


def more_buckets_after_a_fit():
    before = buckets_held()
    trainer, _ = fit("int8", max_epochs=1)
    return trainer.global_step, buckets_held() - before


def test_after_a_fit_nothing_holds_the_memory_of_its_buckets(two_ranks):
    """It is that of all gradients once more: a validation that follows may need it."""
    for num_steps, num_more in two_ranks.run(more_buckets_after_a_fit):
        assert num_steps > 0
        assert num_more <= 0
