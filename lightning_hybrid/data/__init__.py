"""Input pipelines: what a rank reads, in which order, and how it gets to the device in time.

README.md shows the way of an image through these modules.
"""

from lightning_hybrid.data.in_memory.loader import EvalLoader, ImageSet, Normalize, TrainLoader
from lightning_hybrid.data.order import EpochOrder, ResumableLoader, batch_size_per_rank

__all__ = [
    "EpochOrder",
    "EvalLoader",
    "ImageSet",
    "Normalize",
    "ResumableLoader",
    "TrainLoader",
    "batch_size_per_rank",
]
