"""Input pipelines: sample order, sharding over ranks, exact resume and prefetching to the device.

README.md describes how an image passes through these modules.
"""

from lightning_hybrid.data.order import EpochOrder, ResumableLoader, batch_size_per_rank

__all__ = ["EpochOrder", "ResumableLoader", "batch_size_per_rank"]
