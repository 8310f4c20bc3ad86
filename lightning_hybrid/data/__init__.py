"""Input pipelines: what a rank reads, in which order, and how it gets to the device in time.

README.md shows the way of an image through these modules.
"""

from lightning_hybrid.data.order import EpochOrder, ResumableLoader, batch_size_per_rank

__all__ = ["EpochOrder", "ResumableLoader", "batch_size_per_rank"]
