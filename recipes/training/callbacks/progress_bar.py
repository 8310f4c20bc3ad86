"""Progress bar that shows large-batch training metrics without synchronizing with the device."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.progress_bar import ProgressBar

from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.callbacks.training_metrics import is_logged_step

# Label, format and unit factor of metrics that `TrainingMetrics` logs. Metrics of the module are inserted after the
# second one, because a terminal of 80 columns has no more room.
_SHOWN = {
    m.TRAIN_LOSS: ("loss", "{:.3g}", 1.0),
    m.IMAGES_PER_S: ("img/s", "{:,.0f}", 1.0),
    m.COMM_EXPOSED_S: ("comm ms", "{:.2g}", 1e3),
    m.DATA_WAIT_S: ("wait ms", "{:.2g}", 1e3),
    m.TRAIN_SKIPPED_STEPS: ("skipped", "{:.0f}", 1.0),
}
_NUM_FIRST = 2

# Characters of Rich's line without description, batch counts and values: the bar, two times and the gaps.
_BAR_WIDTH = 4
_OTHER_COLUMNS = _BAR_WIDTH + len("0:00:00 • 0:00:00") + 4


def labeled(metrics: dict[str, Any]) -> dict[str, str]:
    """Select the logged metrics that the progress bar shows, and format them with short labels.

    >>> labeled({"train/loss": 0.25, "throughput/images_per_s": 12345.6, "comm/exposed_s": 0.0123, "my/own": 1.0})
    {'loss': '0.25', 'img/s': '12,346', 'comm ms': '12'}
    """
    return {
        label: text.format(factor * float(metrics[name]))
        for name, (label, text, factor) in _SHOWN.items()
        if name in metrics
    }


def fitting(values: dict[str, Any], room: int) -> dict[str, Any]:
    """Return the entries of a dictionary that fit on a line of `room` characters.

    An entry is shown as ` name: value`. Entries that no longer fit are left out.

    >>> fitting({"loss": "0.25", "img/s": "12,346", "skipped": "0"}, room=24)
    {'loss': '0.25', 'skipped': '0'}
    """
    kept = {}
    for name, value in values.items():
        if (length := len(f" {name}: {value}")) <= room:
            kept[name] = value
            room -= length
    return kept


class _LoggedValues(ProgressBar):
    # Shows the values of the last logged step. Lightning's bars read all values after each batch, which on CUDA waits
    # for the device each time.

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._values: dict[str, Any] = {}

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Update the displayed metrics at logged steps, when `TrainingMetrics` has copied them to the host."""
        if is_logged_step(trainer):
            self._read(trainer, pl_module)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Update the displayed metrics after validation."""
        if not trainer.sanity_checking:
            self._read(trainer, pl_module)
        super().on_validation_end(trainer, pl_module)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Return the metrics of the last logged step or validation."""
        return dict(self._values)

    def _read(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        own_values = {
            name: value
            for name, value in super().get_metrics(trainer, pl_module).items()
            if name != "v_num"
        }
        values = {
            name: f"{float(v):.4g}" if isinstance(v, int | float) else v
            for name, v in own_values.items()
        }
        logged = list(labeled(trainer.callback_metrics).items())
        self._values = dict(logged[:_NUM_FIRST]) | values | dict(logged[_NUM_FIRST:])


class _RichBar(_LoggedValues, RichProgressBar):
    def configure_columns(self, trainer: pl.Trainer) -> list[Any]:
        """Return the columns of Lightning's Rich bar, with a shorter bar and without batches per second.

        The metric `img/s` replaces the batches per second.
        """
        columns = [
            base_column
            for base_column in super().configure_columns(trainer)
            if type(base_column).__name__ != "ProcessingSpeedColumn"
        ]
        for column in columns:
            if hasattr(column, "bar_width"):
                column.bar_width = _BAR_WIDTH
        return columns

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Return as many of the latest metrics as fit on one line of the terminal."""
        values = super().get_metrics(trainer, pl_module)
        if self._console is None:
            return values
        batches = f"{self.total_train_batches}"
        used = (
            len(self._get_train_description(trainer.current_epoch))
            + 2 * len(batches)
            + 1
            + _OTHER_COLUMNS
        )
        return fitting(values, self._console.width - used)

    def _get_train_description(self, current_epoch: int) -> str:
        # If the steps are limited and the epochs are not, Lightning writes "Epoch 3/-2".
        text = super()._get_train_description(current_epoch)
        if self.trainer.max_epochs == -1:
            return text.replace("/-2", "")
        return text


class _PlainBar(_LoggedValues, TQDMProgressBar):
    pass


def progress_bar(refresh_rate: int = 10, *, is_enabled: bool = True) -> Callback | None:
    """Create a progress bar with loss, throughput, exposed communication time and data-loading time.

    The bar also shows metrics that the module logs with `prog_bar=True`. It is Lightning's Rich bar if `rich` is
    installed. The values are the latest ones of `TrainingMetrics`, so list that callback before this one.

    Args:
        refresh_rate: Refreshes per second of Rich's bar, or batches between two refreshes of the plain bar.
        is_enabled: False returns None, because Lightning rejects a bar together with `enable_progress_bar=False`.
    """
    if not is_enabled:
        return None
    return (_PlainBar if find_spec("rich") is None else _RichBar)(refresh_rate=refresh_rate)
