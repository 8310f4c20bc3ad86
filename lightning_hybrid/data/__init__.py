"""Input pipelines: what a rank reads, in which order, and how it gets to the device in time.

Image sets are imported by their own name (`lightning_hybrid.data.digits`), since each brings its own library along.
"""

from lightning_hybrid.data.loaders import EvalLoader, ImageSet, Normalise, TrainLoader
from lightning_hybrid.data.order import EpochOrder, ResumableLoader, batch_size_per_rank

__all__ = [
    "EpochOrder",
    "EvalLoader",
    "ImageSet",
    "Normalise",
    "ResumableLoader",
    "TrainLoader",
    "batch_size_per_rank",
]
