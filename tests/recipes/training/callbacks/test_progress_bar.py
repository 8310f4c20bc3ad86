"""Progress bar: displayed values, the steps at which it reads metrics, and the choice of the bar."""

import importlib.util

import pytest

from recipes.training.callbacks import progress_bar as progress
from recipes.training.callbacks.progress_bar import progress_bar
from tests.callbacks.support import TWO_STEPS, Module, counting, fit


class Says(Module):
    """Module with a user's own metric for the bar."""

    def training_step(self, batch, batch_idx):
        self.log("own", 0.123456, prog_bar=True)
        return super().training_step(batch, batch_idx)


def shown(has_rich):
    """Return the values of the bar after each step, and the steps at which it read metrics."""
    results = []
    steps_read = []
    bar_class = progress._RichBar if has_rich else progress._PlainBar

    class Watches(bar_class):
        def on_train_batch_end(self, trainer, module, *args):
            super().on_train_batch_end(trainer, module, *args)
            results.append(self.get_metrics(trainer, module))

        def _read(self, trainer, module):
            steps_read.append(trainer.global_step)
            super()._read(trainer, module)

    if has_rich:
        narrow = {"console_kwargs": {"width": 80}}
    else:
        narrow = {}
    fit(
        callbacks=[Watches(refresh_rate=1, **narrow)],
        module=Says(),
        strategy=counting(TWO_STEPS),
        enable_progress_bar=True,
    )
    return results, steps_read


@pytest.mark.parametrize("has_rich", [True, False], ids=["rich", "plain"])
def test_a_bar_shows_the_last_logged_step_and_reads_at_no_other(two_ranks, has_rich):
    """Every second step is logged, with 32 images per second and 50 ms per step of waiting for others."""
    pytest.importorskip("rich" if has_rich else "tqdm")
    rank_0, _ = two_ranks.run(shown, has_rich)
    values, steps_read = rank_0
    assert steps_read == [2, 4, 4, 6, 8, 8]  # and after each validation
    assert values[0] == {}
    names = ["loss", "img/s", "own"]
    if not has_rich:  # a line of 80 columns has no room for more
        names += ["comm ms", "wait ms", "skipped"]
    last = values[-1]
    assert list(last) == names
    assert last["img/s"] == "32"
    assert last["own"] == "0.1235"
    assert has_rich or last["comm ms"] == "50"
    # Nothing new between logged steps.
    assert values[2] == {**values[1], "loss": values[2]["loss"]}


def test_the_bar_is_richs_where_there_is_rich(monkeypatch):
    kinds = []
    for has_rich in (True, False):
        real = importlib.util.find_spec
        monkeypatch.setattr(
            progress, "find_spec", lambda name, has=has_rich: real("torch") if has else None
        )
        if has_rich and real("rich") is None:
            continue
        kinds.append(type(progress_bar()))
    assert kinds[-1] is progress._PlainBar
    assert kinds[:-1] in ([progress._RichBar], [])
    assert progress_bar(is_enabled=False) is None
