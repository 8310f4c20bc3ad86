"""DDP communication hook that averages gradient buckets asynchronously.

    buffer  --/ before-->  wire  --sum over the world-->  wire  --/ after-->  buffer         before * after = num_terms

`num_terms` is the number of ranks, unless gradients have weights (`strategy/uneven_batches/`).

Only this module divides. If the wire dtype is fp16, `before` is a power of two near sqrt(world_size), because such a
division is exact. At 2,048 ranks, sums can then be 64 times larger before they overflow. Gradients lose 6 bits of the
subnormal range. They would lose 11 bits if they were divided by 2,048 before the reduction. In other dtypes the sum of
all gradients does not overflow, so `before` is 1, which saves a pass over memory.

NCCL adds in the wire dtype and rounds at every addition. Over Gloo, 16-bit tensors are added in fp32 inside a node and
rounded once. Therefore the accuracy measured on CPUs does not apply to GPUs. Overflow does not depend on the backend:
at 2,048 ranks, partial sums are at most 32 times the largest gradient, and inf and nan survive additions in any order.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_hybrid.comm.codec.error_feedback import BucketFeedback, ErrorFeedback
from lightning_hybrid.comm.codec.padded_bucket import BlockNumbers, PaddedBucket, num_reals
from lightning_hybrid.comm.engine.engine import CommEngine
from lightning_hybrid.comm.stats.phases import Phase

# There is no `from __future__ import annotations` in this file, because DistributedDataParallel compares the hook's
# annotations with the classes themselves and rejects strings.

WIRE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class HookState:
    """State of the DDP communication hook `average_bucket`, with the engine and the wire dtype.

    Args:
        engine: Engine that sums the buckets.
        comm_dtype: Dtype in which buckets are summed: float32, float16 or bfloat16. If None, the bucket's own dtype is
            used, which needs no copy.
        scatter: Function of a sharded update that may average a bucket in a different way. If `scatter` is None or
            returns None, `average_bucket` averages the bucket.
        parameters: Parameters of the module, in the order in which a codec numbers its blocks. Other parameters are
            numbered in the order of the first buckets.

    Raises:
        ValueError: `comm_dtype` is another dtype.
    """

    def __init__(
        self,
        *,
        engine: CommEngine,
        comm_dtype: torch.dtype | None = None,
        scatter: Callable[[dist.GradBucket], Future[Tensor] | None] | None = None,
        parameters: Iterable[Tensor] = (),
    ) -> None:
        if comm_dtype is not None and comm_dtype not in WIRE_DTYPES:
            raise ValueError(
                f"`comm_dtype` (={comm_dtype}) must be None or one of float32, float16, bfloat16, because gradients "
                "are summed in this dtype. Leave `comm.dtype` unset to sum gradients in their own dtype."
            )
        self.engine: CommEngine | None = engine
        self.comm_dtype = comm_dtype
        self.scatter = scatter
        self.blocks = BlockNumbers(parameters)
        self.feedback = self._new_feedback()
        self.num_buckets = 0  # number of buckets that DDP has passed to the hook
        # The ids of a bucket's parameters, and the buffer for their gradients, by bucket index.
        self._padded: dict[int, tuple[list[int], PaddedBucket]] = {}

    def _new_feedback(self) -> ErrorFeedback | None:
        engine = self.engine
        if engine is None or engine.coder is None or not engine.coder.codec.error_feedback:
            return None

        def sum_over_node_(values: Tensor) -> None:
            engine.submit(values, bucket_index=0, exchange="node_sum").wait()

        topology = engine.topology
        add_up_ = None
        if max(map(len, topology.nodes)) > 1:
            add_up_ = sum_over_node_
        return ErrorFeedback(
            self.blocks.num_blocks,
            device=engine.device,
            add_up_=add_up_,
            is_leader=topology.rank == topology.leader,
        )

    def padded(self, bucket: dist.GradBucket) -> PaddedBucket:
        """Return the padded buffer from which the codec encodes a bucket."""
        parameters = bucket.parameters()
        ids = [id(parameter) for parameter in parameters]
        cached_ids, padded = self._padded.get(bucket.index(), (None, None))
        if padded is None or cached_ids != ids:  # DDP rebuilds its buckets after the first step.
            numels = [num_reals(parameter) for parameter in parameters]
            first_ids = [self.blocks.first_of(parameter) for parameter in parameters]
            dtype = self.comm_dtype or bucket.buffer().dtype
            device = bucket.buffer().device
            padded = PaddedBucket(numels, first_ids, dtype=dtype, device=device)
            self._padded[bucket.index()] = (ids, padded)
        return padded

    def __getstate__(self) -> dict:
        # Threads and process groups cannot be pickled. DDP does not register hooks again after unpickling, so the
        # caller must register the hook again, with a state that has an engine.
        return {
            "engine": None,
            "comm_dtype": self.comm_dtype,
            "scatter": None,
            "feedback": None,
            "num_buckets": 0,
        }


def engine_and_buffer(state: HookState, bucket: dist.GradBucket) -> tuple[CommEngine, Tensor]:
    """Check a gradient bucket, and return the communication engine and the bucket's flat tensor.

    Raises:
        TypeError: The gradients are sparse.
        RuntimeError: The state has no engine.
    """
    engine = state.engine
    buffer = bucket.buffer()
    if engine is None:
        raise RuntimeError(
            "The state of the DDP communication hook has no engine, because it was unpickled. Register the "
            "hook again with a new `HookState(engine=...)`."
        )
    state.num_buckets += 1
    if buffer.layout != torch.strided or not buffer.is_floating_point():
        raise TypeError(
            f"Bucket {bucket.index()} (layout {buffer.layout}, dtype {buffer.dtype}) contains sparse or complex "
            "gradients, which this strategy cannot average. Set `sparse=False` in embeddings, or use strategy='ddp'."
        )
    if bucket.is_last():
        # Buckets arrive in order, so all gradients of this rank are ready.
        engine.trace.enter(Phase.WAIT)
    return engine, buffer


def average_bucket(state: HookState, bucket: dist.GradBucket) -> Future[Tensor]:
    """Start averaging a gradient bucket over all ranks, and return a future of the bucket.

        bucket = (sum over ranks of bucket / before) / after         before * after = num_terms

    This is a DDP communication hook, to be registered by `register_comm_hook(state, average_bucket)`.

    Collective: every rank must call it, in the same order of buckets, as DistributedDataParallel does. The future holds
    `bucket.buffer()`, which is changed in place. Afterwards it is bitwise equal on all ranks. Complex gradients arrive
    as pairs of reals.

    Raises:
        TypeError: The gradients are sparse.
        RuntimeError: The engine has failed or is closed.
    """
    # On a CPU, backward runs within the precision plugin's `TorchFunctionMode`, which would intercept every torch call.
    with torch._C.DisableTorchFunction():
        return _average(state, bucket)


def _average(state: HookState, bucket: dist.GradBucket) -> Future[Tensor]:
    engine, buffer = engine_and_buffer(state, bucket)
    if state.scatter is not None:
        future = state.scatter(bucket)
        if future is not None:
            return future

    # The divisor is also split if only the dtype between nodes is fp16, because it may be narrower than the wire dtype.
    dtypes = (state.comm_dtype or buffer.dtype, engine.dtype_across_nodes)
    before, after = split_divisor(engine.num_terms, is_fp16=torch.float16 in dtypes)
    if engine.coder is not None:
        padded = state.padded(bucket)
        wire = padded.load(buffer, before=before)
        feedback = None
        if state.feedback is not None:
            feedback = feedback_of(state.feedback, engine, bucket, padded, wire, before)
        return engine.submit(
            wire,
            bucket_index=bucket.index(),
            is_last=bucket.is_last(),
            finish=partial(padded.store, buffer=buffer, after=after),
            block_ids=padded.ids,
            feedback=feedback,
        )
    return engine.submit(
        to_wire(buffer, state.comm_dtype, before=before),
        bucket_index=bucket.index(),
        is_last=bucket.is_last(),
        finish=partial(from_wire, buffer=buffer, after=after),
    )


def feedback_of(
    feedback: ErrorFeedback,
    engine: CommEngine,
    bucket: dist.GradBucket,
    padded: PaddedBucket,
    wire: Tensor,
    before: int,
) -> BucketFeedback:
    """Return the error-feedback residuals of a bucket.

    The call is collective within a node if other ranks encode the blocks of the bucket than in the previous step.
    """
    plan = engine.planned(bucket.index(), wire.numel(), wire.dtype)
    split_rule = (plan.algorithm, plan.num_chunks)
    return feedback.bucket(
        bucket.index(), padded, split_rule=split_rule, divisor=before, is_last=bucket.is_last()
    )


def split_divisor(num_terms: float, *, is_fp16: bool) -> tuple[int, float]:
    """Split the divisor `num_terms` into one factor before the reduction and one after it.

    For fp16, the first divisor is a power of two near the square root of `num_terms`. For other dtypes it is 1.
    `num_terms` is the number of ranks, or the sum of all weights if gradients have weights.
    """
    if not is_fp16:
        return 1, float(num_terms)
    # Division by a power of two is exact. Near the square root, sums do not overflow and small gradients do not vanish.
    before = 1 << (math.ceil(num_terms).bit_length() // 2)
    return before, num_terms / before


def to_wire(buffer: Tensor, comm_dtype: torch.dtype | None, *, before: int) -> Tensor:
    """Divide a bucket by `before`, and return it in the wire dtype.

    If the buffer has the wire dtype, it is changed in place and returned. The division uses the wider of the two
    dtypes, so its result is exact unless the wire dtype cannot hold it.

    >>> to_wire(torch.tensor([6e-8], dtype=torch.float16), torch.float32, before=4)   # a subnormal survives
    tensor([1.4901e-08])
    """
    if comm_dtype is None or comm_dtype == buffer.dtype:
        wire = buffer
    elif comm_dtype.itemsize > buffer.dtype.itemsize:
        # The division comes after the conversion, because in fp16 it would lose bits of subnormal gradients.
        wire = buffer.to(comm_dtype)
    else:
        wire = torch.empty_like(buffer, dtype=comm_dtype)
        return torch.div(buffer, before, out=wire)
    if before > 1:
        wire.div_(before)
    return wire


def from_wire(wire: Tensor, *, buffer: Tensor, after: float) -> Tensor:
    """Divide the reduced tensor `wire` by `after`, and write the result into `buffer`.

    The division uses the wider of the two dtypes, so it rounds once.
    """
    if wire is not buffer and wire.dtype.itemsize > buffer.dtype.itemsize:
        return buffer.copy_(wire.div_(after))
    if wire is not buffer:
        buffer.copy_(wire)
    if after != 1:
        buffer.div_(after)
    return buffer
