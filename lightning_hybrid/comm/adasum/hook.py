"""The hook of DistributedDataParallel for `Adasum`: mean inside the node, Adasum between nodes.

    buffer  --/ before-->  wire  --sum in the node, Adasum of the nodes-->  wire  --/ after-->  buffer

`before * after` is the number of ranks on a node, as Adasum is homogeneous of degree 1. `before` is that of hook.py,
chosen for all ranks: of orthogonal gradients Adasum is the sum, which on a wire of fp16 needs the same room.
"""

# As in hook.py no `from __future__ import annotations`: DistributedDataParallel compares the annotations with classes.

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_hybrid.comm.hook import (
    HookState,
    engine_and_buffer,
    from_wire,
    split_divisor,
    to_wire,
)


def adasum_bucket(state: HookState, bucket: dist.GradBucket) -> Future[Tensor]:
    """Combine a bucket over all ranks, in place, in the background. For `register_comm_hook(state, adasum_bucket)`.

        bucket = Adasum over nodes (mean over the ranks of a node (bucket)), for each parameter by itself

    Collective: every rank must call it, in the same bucket order; DistributedDataParallel does. In place: the future
    holds `bucket.buffer()`. Afterwards all ranks hold the same bits. A complex parameter is a pair of reals.

    Raises:
        TypeError: for sparse gradients.
        ValueError: if nodes or plan do not fit (`combine.py`).
        RuntimeError: if the engine has failed or is closed.

    Source: Maleki et al. 2020 (arXiv:2006.02924).
    """
    engine, buffer = engine_and_buffer(state, bucket)
    topology = engine.topology
    # Of parameters, not of `bucket.gradients()`: of a complex one that has the first half of the reals alone.
    numels = tuple(
        parameter.numel() * (1 + parameter.is_complex()) for parameter in bucket.parameters()
    )
    is_fp16 = (state.comm_dtype or buffer.dtype) == torch.float16
    before, _ = split_divisor(topology.world_size, is_fp16=is_fp16)
    return engine.submit(
        to_wire(buffer, state.comm_dtype, before=before),
        bucket_index=bucket.index(),
        is_last=bucket.is_last(),
        finish=partial(from_wire, buffer=buffer, after=len(topology.node) / before),
        adasum_numels=numels,
    )
