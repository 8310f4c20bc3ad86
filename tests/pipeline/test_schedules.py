"""How many micro-batches a rank keeps for backward, which is a pipeline's memory."""

from __future__ import annotations

import pytest

from tests.pipeline.sleeping import kept_by_plan, measured

STAGE_S = 0.001


@pytest.mark.parametrize(("schedule", "kept"), [("gpipe", [4, 4]), ("1f1b", [2, 1])])
def test_a_rank_keeps_as_many_micro_batches_as_the_formula_says(two_ranks, schedule, kept):
    assert [most for _, most in two_ranks.run(measured, schedule, 4, 1, STAGE_S)] == kept


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "num_microbatches", "parts"),
    [("gpipe", 8, 1), ("1f1b", 8, 1), ("interleaved", 4, 2), ("interleaved", 8, 2)],
)
def test_so_do_four_ranks_in_the_planners_order(four_ranks, schedule, num_microbatches, parts):
    found = four_ranks.run(measured, schedule, num_microbatches, parts, STAGE_S)
    assert [most for _, most in found] == kept_by_plan(schedule, 4, num_microbatches, parts)
