"""What a pipeline holds of schedules that it no longer needs: nothing."""

import gc

from lightning_hybrid.pipeline.checked_stage import CheckedStage
from tests import toy
from tests.pipeline.cases import in_stages
from tests.scenes import at, fit


def stages_held(*_):
    gc.collect()
    return sum(isinstance(one, CheckedStage) for one in gc.get_objects())


def test_batches_of_other_shapes_leave_no_memory_behind(two_ranks):
    callbacks = [at(on_train_batch_end=stages_held)]
    for seen in fit(two_ranks, **in_stages(data=toy.Blobs(20), num_microbatches=2, callbacks=callbacks)):
        counts = seen.looks["on_train_batch_end"]
        assert len(counts) == 6
        assert max(counts) == counts[0]
