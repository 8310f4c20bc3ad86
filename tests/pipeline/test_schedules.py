"""How many micro-batches a rank keeps for backward, which is a pipeline's memory."""

from __future__ import annotations

import pytest

from tests.evidence.bubble.sleeping import measured


@pytest.mark.parametrize(("schedule", "kept"), [("gpipe", [4, 4]), ("1f1b", [2, 1])])
def test_a_rank_keeps_as_many_micro_batches_as_the_formula_says(two_ranks, schedule, kept):
    assert [most for _, most in two_ranks.run(measured, schedule, 4, 1)] == kept


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "kept"), [("gpipe", [8] * 4), ("1f1b", [4, 3, 2, 1])])
def test_so_do_four_ranks(four_ranks, schedule, kept):
    assert [most for _, most in four_ranks.run(measured, schedule, 8, 1)] == kept
