"""Callbacks for any LightningModule: metrics to any logger, a report, averages of weights, checks."""

from lightning_hybrid.callbacks.ema import MasterWeightAveraging
from lightning_hybrid.callbacks.numerics import NonFiniteLossError, NumericsMonitor
from lightning_hybrid.callbacks.recalibrate_bn import RecalibrateBatchNorm
from lightning_hybrid.callbacks.replica_check import DataOrderError, ReplicaCheck, ReplicaDriftError
from lightning_hybrid.callbacks.run_report.callback import RunReport
from lightning_hybrid.callbacks.stop_on_signal import StopOnSignal
from lightning_hybrid.callbacks.time_to_accuracy import TimeToAccuracy
from lightning_hybrid.callbacks.training_metrics import TrainingMetrics
from lightning_hybrid.checks import moved

__all__ = [
    "DataOrderError",
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
]

__getattr__ = moved(
    __name__,
    {
        "SeedEachStep": "recipes.training.callbacks.seed_each_step",
        "StepCheckpoint": "recipes.training.callbacks.step_checkpoint",
        "progress_bar": "recipes.training.callbacks.progress_bar",
    },
)
