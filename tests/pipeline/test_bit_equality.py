"""A pipeline trains what accumulation trains, to the bit."""

from __future__ import annotations

import pytest

from tests.pipeline import cases


def assert_equal(ranks, plain, options, settings):
    piped = ranks.run(cases.by_pipeline, options, settings)
    expected = plain.run(cases.by_accumulation, options["num_microbatches"], settings)
    for each in piped:
        assert cases.same(each["weights"], expected[0]["weights"])
    assert cases.same(cases.joined(piped), expected[0]["optimizer"])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_two_stages_train_what_accumulation_trains(one_rank, two_ranks, schedule):
    assert_equal(two_ranks, one_rank, {"num_stages": 2, "num_microbatches": 4, "schedule": schedule}, {})
