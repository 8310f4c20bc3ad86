"""Callbacks for any LightningModule: metrics to any logger, a report, averages of weights, checks."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_hybrid.callbacks.ema import MasterWeightAveraging
    from lightning_hybrid.callbacks.fp16_range import HalfPrecisionReport, half_precision_report
    from lightning_hybrid.callbacks.numerics import NonFiniteLossError, NumericsMonitor
    from lightning_hybrid.callbacks.recalibrate_bn import RecalibrateBatchNorm
    from lightning_hybrid.callbacks.replica_check import (
        DataOrderError,
        ReplicaCheck,
        ReplicaDriftError,
    )
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
    "MasterWeightAveraging": "ema",
    "RecalibrateBatchNorm": "recalibrate_bn",
    "RunReport": "run_report.callback",
    "StopOnSignal": "stop_on_signal",
    "TimeToAccuracy": "time_to_accuracy",
    "TrainingMetrics": "training_metrics",
    **dict.fromkeys(("HalfPrecisionReport", "half_precision_report"), "fp16_range"),
    **dict.fromkeys(("NonFiniteLossError", "NumericsMonitor"), "numerics"),
    **dict.fromkeys(("DataOrderError", "ReplicaCheck", "ReplicaDriftError"), "replica_check"),
}


def __getattr__(name: str) -> object:
    # Imported when it is first asked for: some commands use a module of this package, and no Lightning.
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
