"""Lightning callbacks for metrics, run reports, weight averaging, checks and stopping on signals."""

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
    from lightning_hybrid.callbacks.stragglers.callback import StragglerMonitor
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
    "StragglerMonitor",
    "TimeToAccuracy",
    "TrainingMetrics",
    "half_precision_report",
]

_MODULES = {
    "DataOrderError": "replica_check",
    "HalfPrecisionReport": "fp16_range",
    "MasterWeightAveraging": "ema",
    "NonFiniteLossError": "numerics",
    "NumericsMonitor": "numerics",
    "RecalibrateBatchNorm": "recalibrate_bn",
    "ReplicaCheck": "replica_check",
    "ReplicaDriftError": "replica_check",
    "RunReport": "run_report.callback",
    "StopOnSignal": "stop_on_signal",
    "StragglerMonitor": "stragglers.callback",
    "TimeToAccuracy": "time_to_accuracy",
    "TrainingMetrics": "training_metrics",
    "half_precision_report": "fp16_range",
}


def __getattr__(name: str) -> object:
    # Modules are imported on first access, because some commands use this package without
    # Lightning.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
