"""Input pipelines: what a rank reads, in which order, and how it gets to the device in time.

    order           who reads which image when, and how far a loader is; resume: Lightning's counters afterwards
    loaders         of image sets that fit in memory; digits is one
    source          images as they are stored, and what becomes of broken ones; folder, shards: two ways to store them
    decode, views   image files -> pixels -> what the network sees
    dali            NVIDIA's decoder in place of decode and threads
    threads         batches ahead of the consumer; buffers: their memory; image_loader: loaders made of all this
    on_device       normalisation; prefetch: batches on the device in time
    image_module    what imagenet and synthetic, two LightningDataModules, have in common

Image sets are imported by their own name (`lightning_hybrid.data.in_memory.digits`), since each brings its own library along.
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
