"""How many micro-batches a rank keeps for backward, which is a pipeline's memory."""

from __future__ import annotations

import gc

import lightning.pytorch as pl
import pytest

from lightning_hybrid import HybridPipelineStrategy
from tests.evidence.bubble.sleeping import kept_by_plan, measured
from tests.pipeline import cases

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


class CountsStages(pl.Callback):
    """Counts the stages that are held after each batch, each with memory for the messages of all micro-batches."""

    def __init__(self):
        self.counts = []

    def on_train_batch_end(self, *args):
        from lightning_hybrid.pipeline.stage import CheckedStage

        gc.collect()
        self.counts.append(sum(isinstance(one, CheckedStage) for one in gc.get_objects()))


def stages_held():
    counter = CountsStages()
    strategy = HybridPipelineStrategy(num_stages=2, num_microbatches=2)
    cases.fit(strategy, num_samples=20, batch_size=8, max_epochs=2, callbacks=[counter])
    return counter.counts


def test_batches_of_other_shapes_leave_no_memory_behind(two_ranks):
    for counts in two_ranks.run(stages_held):
        assert len(counts) == 6
        assert max(counts) == counts[0]
