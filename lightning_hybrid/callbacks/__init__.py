"""Callbacks for any LightningModule: metrics to any logger, a report, averages of weights, checks."""

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_hybrid.checks import moved

if TYPE_CHECKING:
    from lightning_hybrid.callbacks.ema import MasterWeightAveraging
    from lightning_hybrid.callbacks.fp16_range import HalfPrecisionReport, half_precision_report
    from lightning_hybrid.callbacks.numerics import NonFiniteLossError, NumericsMonitor
    from lightning_hybrid.callbacks.recalibrate_bn import RecalibrateBatchNorm
    from lightning_hybrid.callbacks.replica_check import DataOrderError, ReplicaCheck, ReplicaDriftError
    from lightning_hybrid.callbacks.run_report.callback import RunReport
    from lightning_hybrid.callbacks.stop_on_signal import StopOnSignal
    from lightning_hybrid.callbacks.time_to_accuracy import TimeToAccuracy
    from lightning_hybrid.callbacks.training_metrics import TrainingMetrics

__all__ = [
    "DataOrderError",
    "HalfPrecisionReport",
    "MasterWeightAveraging",
    "NonFiniteLossError",
    "NumericsMonitor",
    "RecalibrateBatchNorm",
    "ReplicaCheck",
    "ReplicaDriftError",
    "RunReport",
    "StopOnSignal",
    "TimeToAccuracy",
    "TrainingMetrics",
    "half_precision_report",
]

_PLACES = {
    "HalfPrecisionReport": "lightning_hybrid.callbacks.fp16_range",
    "half_precision_report": "lightning_hybrid.callbacks.fp16_range",
    "MasterWeightAveraging": "lightning_hybrid.callbacks.ema",
    "NonFiniteLossError": "lightning_hybrid.callbacks.numerics",
    "NumericsMonitor": "lightning_hybrid.callbacks.numerics",
    "RecalibrateBatchNorm": "lightning_hybrid.callbacks.recalibrate_bn",
    "DataOrderError": "lightning_hybrid.callbacks.replica_check",
    "ReplicaCheck": "lightning_hybrid.callbacks.replica_check",
    "ReplicaDriftError": "lightning_hybrid.callbacks.replica_check",
    "RunReport": "lightning_hybrid.callbacks.run_report.callback",
    "StopOnSignal": "lightning_hybrid.callbacks.stop_on_signal",
    "TimeToAccuracy": "lightning_hybrid.callbacks.time_to_accuracy",
    "TrainingMetrics": "lightning_hybrid.callbacks.training_metrics",
}

_moved = moved(
    __name__,
    {
        "SeedEachStep": "recipes.training.callbacks.seed_each_step",
        "StepCheckpoint": "recipes.training.callbacks.step_checkpoint",
        "progress_bar": "recipes.training.callbacks.progress_bar",
    },
)


def __getattr__(name: str) -> object:
    # Imported when it is first asked for: some commands use a module of this package, and no Lightning.
    return getattr(import_module(_PLACES[name]), name) if name in _PLACES else _moved(name)
