"""Time to accuracy: two clocks, logged once, continued in a resumed run, and equal on every rank."""

import pytest
import torch.distributed as dist

from lightning_hybrid.callbacks import TimeToAccuracy, time_to_accuracy
from lightning_hybrid.callbacks import metrics as m
from tests import toy
from tests.callbacks.support import Module, fit

# Each rank has its own value here.
pytestmark = pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist")
# Times of the test's clock: a step, and a validation of four batches.
STEP_S = 0.5
VALIDATION_S = 4 * 1000.0


class Rises(Module):
    everywhere = True

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        rises = self.everywhere or dist.get_rank() == dist.get_world_size() - 1
        value = (self.current_epoch + 1) / 4 if rises else 0.0
        self.log("rises", value)


def reached(options, path=None, resumed_at=None, everywhere=True):
    options = {"target": 0.5, "monitor": "rises"} | options
    module = Rises()
    module.everywhere = everywhere
    if resumed_at is not None:
        first = TimeToAccuracy(**options)
        _, _, trainer = fit(callbacks=[first], module=Rises(), max_epochs=resumed_at)
        trainer.save_checkpoint(path)
    event = TimeToAccuracy(**options)
    logger, _, trainer = fit(callbacks=[event], module=module, max_epochs=3, ckpt_path=path)
    names = (m.TIME_TO_ACCURACY_TRAIN_S, m.TIME_TO_ACCURACY_TOTAL_S, m.TIME_TO_ACCURACY_STEP)
    columns = [logger.column(name) for name in names]
    return columns, trainer.global_step, event.describe(), event.reached


def test_both_times_are_logged_once_when_the_target_is_reached(two_ranks):
    """The target is reached in the second of three epochs, after eight steps and two validations."""
    words = "rises reached 0.5 after 8 steps: 4.0 s of training, 8004.0 s with validation"
    for rank, (columns, num_steps, line, _) in enumerate(two_ranks.run(reached, {})):
        train_s, total_s, step = columns
        assert train_s == {9: 8 * STEP_S}, f"rank {rank}"
        assert total_s == {9: 8 * STEP_S + 2 * VALIDATION_S}, f"rank {rank}"
        assert step == {9: 8.0}, f"rank {rank}"
        assert num_steps == 12, f"rank {rank}"
        assert line == words, f"rank {rank}"


def test_a_loss_reaches_its_target_from_above_and_training_ends_there_if_asked(two_ranks):
    """Ten exceeds the loss of random guesses among three classes (log 3), so the first validation reaches it."""
    options = {"target": 10.0, "monitor": m.VAL_LOSS, "mode": "min", "stop": True}
    for rank, (_, num_steps, _, event) in enumerate(two_ranks.run(reached, options)):
        assert num_steps == 4, f"rank {rank}"
        assert event[m.TIME_TO_ACCURACY_STEP] == 4, f"rank {rank}"


def test_a_resumed_run_goes_on_with_the_clock(two_ranks, tmp_path):
    rank_0, _ = two_ranks.run(reached, {}, f"{tmp_path}/some.ckpt", 1)
    columns, _, _, event = rank_0
    assert event == {
        m.TIME_TO_ACCURACY_TRAIN_S: 8 * STEP_S,
        m.TIME_TO_ACCURACY_TOTAL_S: 8 * STEP_S + 2 * VALIDATION_S,
        m.TIME_TO_ACCURACY_STEP: 8.0,
    }
    assert len(columns[0]) == 1


def test_the_time_between_a_failed_fit_and_the_next_does_not_count(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(time_to_accuracy, "perf_counter", lambda: now_s)
    event = TimeToAccuracy(target=0.5, monitor="rises")
    event.on_train_start(None, None)
    now_s = 10.0
    event.on_exception(None, None, RuntimeError("of the user"))
    now_s = 1000.0
    event.on_train_start(None, None)
    now_s = 1005.0
    assert event.elapsed_s == 15.0


def test_one_rank_alone_does_not_stop(two_ranks):
    """Each rank has its own value. If `stop` applied to one rank only, the others would wait for it forever."""
    results = two_ranks.run(reached, {"stop": True}, None, None, False)
    assert [(step, event) for _, step, _, event in results] == [(12, None)] * 2


def test_a_metric_that_is_not_there_is_named_with_those_that_are(two_ranks):
    error = two_ranks.run(toy.error_of, reached, {"monitor": "val/accuracy"})[0]
    assert error.startswith(
        "ValueError: `monitor` (='val/accuracy') must be a metric that validation logs"
    )
    assert "rises, " in error
    assert m.VAL_ACC in error


@pytest.mark.parametrize("target", [75.9, 0.0, "75.9"])
def test_a_target_in_per_cent_is_refused(target):
    with pytest.raises(
        ValueError, match=r"^`target` \(=.*\) must be above 0 and at most 1, .* Set target=0.759"
    ):
        TimeToAccuracy(target=target)
    assert TimeToAccuracy(target=2.5, monitor="val/loss", mode="min").target == 2.5
