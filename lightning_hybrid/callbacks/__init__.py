"""Callbacks for any LightningModule: metrics to any logger, a report, a progress bar, exact repetition, checks."""

from lightning_hybrid.callbacks.ema import MasterWeightAveraging
from lightning_hybrid.callbacks.epoch_metrics import KeepEpochMetrics
from lightning_hybrid.callbacks.numerics import NonFiniteLossError, NumericsMonitor
from lightning_hybrid.callbacks.progress import progress_bar
from lightning_hybrid.callbacks.recalibrate_bn import RecalibrateBatchNorm
from lightning_hybrid.callbacks.replica_check import DataOrderError, ReplicaCheck, ReplicaDriftError
from lightning_hybrid.callbacks.run_report.callback import RunReport
from lightning_hybrid.callbacks.seed import SeedEachStep
from lightning_hybrid.callbacks.step_checkpoint import StepCheckpoint
from lightning_hybrid.callbacks.stop_on_signal import StopOnSignal
from lightning_hybrid.callbacks.time_to_accuracy import TimeToAccuracy
from lightning_hybrid.callbacks.training_metrics import TrainingMetrics

__all__ = [
    "DataOrderError",
    "KeepEpochMetrics",
    "MasterWeightAveraging",
    "NonFiniteLossError",
    "NumericsMonitor",
    "RecalibrateBatchNorm",
    "ReplicaCheck",
    "ReplicaDriftError",
    "RunReport",
    "SeedEachStep",
    "StepCheckpoint",
    "StopOnSignal",
    "TimeToAccuracy",
    "TrainingMetrics",
    "progress_bar",
]
