"""The progress bar: what it shows, when it reads, which bar it is."""

import importlib.util

import pytest

from recipes.training.callbacks import progress_bar as progress
from recipes.training.callbacks.progress_bar import progress_bar
from tests.callbacks.support import TWO_STEPS, Module, counting, fit


class Says(Module):
    """A metric of the user's own for the bar."""

    def training_step(self, batch, batch_idx):
        self.log("own", 0.123456, prog_bar=True)
        return super().training_step(batch, batch_idx)


def shown(has_rich):
    """Return the text of the bar after each step, and the calls to Lightning."""
    results = []
    asked = []

    class Watches(progress._RichBar if has_rich else progress._PlainBar):
        def on_train_batch_end(self, trainer, module, *args):
            super().on_train_batch_end(trainer, module, *args)
            results.append(self.get_metrics(trainer, module))

        def _read(self, trainer, module):
            asked.append(trainer.global_step)
            super()._read(trainer, module)

    if has_rich:
        narrow = {"console_kwargs": {"width": 80}}
    else:
        narrow = {}
    fit(
        more=[Watches(refresh_rate=1, **narrow)],
        module=Says(),
        strategy=counting(TWO_STEPS),
        enable_progress_bar=True,
    )
    return results, asked


@pytest.mark.parametrize("has_rich", [True, False], ids=["rich", "plain"])
def test_a_bar_shows_the_last_logged_step_and_reads_at_no_other(two_ranks, has_rich):
    """Logged every second step. 32 images per second of which 50 ms of each step wait for others."""
    pytest.importorskip("rich" if has_rich else "tqdm")
    found, asked = two_ranks.run(shown, has_rich)[0]
    assert asked == [2, 4, 4, 6, 8, 8]  # and after each validation
    assert found[0] == {}
    names = ["loss", "img/s", "own", "comm ms", "wait ms", "skipped"]
    # a line of 80 columns has no room for more
    assert list(found[-1]) == (names[:3] if has_rich else names)
    assert (found[-1]["img/s"], found[-1].get("comm ms", "50"), found[-1]["own"]) == (
        "32",
        "50",
        "0.1235",
    )
    assert found[2] == found[1] | {"loss": found[2]["loss"]}  # nothing new between logged steps


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
