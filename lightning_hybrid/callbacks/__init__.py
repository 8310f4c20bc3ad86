"""Callbacks for any LightningModule: metrics to any logger, a report, a progress bar, exact repetition, checks."""

from lightning_hybrid.callbacks.ema import MasterWeightAveraging
from lightning_hybrid.callbacks.epoch_metrics import KeepEpochMetrics
from lightning_hybrid.callbacks.numbers import NonFiniteLossError, WatchNumbers
from lightning_hybrid.callbacks.progress import progress_bar
from lightning_hybrid.callbacks.replicas import CheckReplicas, DataOrderError, ReplicaDriftError
from lightning_hybrid.callbacks.report import RunReport
from lightning_hybrid.callbacks.seed import SeedEachStep
from lightning_hybrid.callbacks.step_checkpoint import StepCheckpoint
from lightning_hybrid.callbacks.stop import StopOnSignal
from lightning_hybrid.callbacks.time_to_accuracy import TimeToAccuracy
from lightning_hybrid.callbacks.training import TrainingMetrics

__all__ = [
    "CheckReplicas",
    "DataOrderError",
    "KeepEpochMetrics",
    "MasterWeightAveraging",
    "NonFiniteLossError",
    "ReplicaDriftError",
    "RunReport",
    "SeedEachStep",
    "StepCheckpoint",
    "StopOnSignal",
    "TimeToAccuracy",
    "TrainingMetrics",
    "WatchNumbers",
    "progress_bar",
]
