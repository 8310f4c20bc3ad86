"""Input pipelines: what a rank reads, in which order, and how it gets to the device in time.

README.md shows the way of an image through these modules.
"""

from lightning_hybrid.checks import moved
from lightning_hybrid.data.order import EpochOrder, ResumableLoader, batch_size_per_rank

__all__ = ["EpochOrder", "ResumableLoader", "batch_size_per_rank"]

_OF_MEMORY = ("EvalLoader", "ImageSet", "Normalize", "TrainLoader")
_PLACES = dict.fromkeys(_OF_MEMORY, "recipes.datasets.in_memory.loader")
__getattr__ = moved(__name__, _PLACES | {name: f"recipes.datasets.{name}" for name in ("images", "in_memory")})
