"""DDP communication hook that averages gradients inside nodes and combines nodes by Adasum.

    buffer  --/ before-->  wire  --sum in the node, Adasum of the nodes-->  wire  --/ after-->  buffer

`before * after` is the number of ranks on a node, because Adasum is homogeneous of degree 1. `before` is chosen as in
`comm/hook.py`, but for the total number of ranks. The Adasum of orthogonal gradients is their sum, so overflow in fp16
must be prevented here as well.
"""

# There is no `from __future__ import annotations` here, because DistributedDataParallel compares the hook's annotations
# with the classes themselves.

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_hybrid.comm.codec.padded_bucket import num_reals
from lightning_hybrid.comm.hook import (
    HookState,
    engine_and_buffer,
    from_wire,
    split_divisor,
    to_wire,
)


def adasum_bucket(state: HookState, bucket: dist.GradBucket) -> Future[Tensor]:
    """Start combining a gradient bucket over all ranks with Adasum, and return a future of the bucket.

        bucket = Adasum over nodes (mean over the ranks of a node (bucket)), for each parameter separately

    This is a DDP communication hook, to be registered by `register_comm_hook(state, adasum_bucket)`.

    Collective: every rank must call it, in the same order of buckets, as DistributedDataParallel does. The future holds
    `bucket.buffer()`, which is changed in place. Afterwards it is bitwise equal on all ranks. A complex element counts
    as a pair of reals.

    Raises:
        TypeError: The gradients are sparse.
        ValueError: Adasum does not support the nodes or the plan (see `combine.py`).
        RuntimeError: The engine has failed or is closed.

    Source: Maleki et al. 2020 (arXiv:2006.02924).
    """
    engine, buffer = engine_and_buffer(state, bucket)
    topology = engine.topology
    # `bucket.gradients()` cannot be used here, because it returns only half of the reals of a complex gradient.
    numels = tuple(num_reals(parameter) for parameter in bucket.parameters())
    is_fp16 = (state.comm_dtype or buffer.dtype) == torch.float16
    before, _ = split_divisor(topology.world_size, is_fp16=is_fp16)
    return engine.submit(
        to_wire(buffer, state.comm_dtype, before=before),
        bucket_index=bucket.index(),
        is_last=bucket.is_last(),
        finish=partial(from_wire, buffer=buffer, after=len(topology.node) / before),
        adasum_numels=numels,
    )
