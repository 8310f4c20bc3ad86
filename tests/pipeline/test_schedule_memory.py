"""What a pipeline holds of schedules that it no longer needs: nothing."""

from __future__ import annotations

import gc

import lightning.pytorch as pl

from lightning_hybrid import HybridPipelineStrategy
from tests.pipeline import cases


class CountsStages(pl.Callback):
    """Counts the stages that are held after each batch, each with memory for the messages of all micro-batches."""

    def __init__(self):
        self.counts = []

    def on_train_batch_end(self, *args):
        from lightning_hybrid.pipeline.checked_stage import CheckedStage

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
