"""The DistributedDataParallel hook: one bucket of gradients in, a future of the averaged bucket out.

    buffer  --/ before-->  wire  --sum over the world-->  wire  --/ after-->  buffer         before * after = world_size

This is the only place that divides. On a wire of fp16 `before` is a power of two near sqrt(world_size): dividing by
it is exact, and the sum of 2,048 gradients then has 64 times the room it would have undivided, while gradients lose 6
bits of the subnormal range where dividing by 2,048 first would lose 11. Other dtypes have room for the sum of all:
`before` is 1, which saves a pass over memory.

NCCL adds in the wire's dtype and rounds at every addition; over Gloo 16-bit tensors are added in fp32 inside a node and
rounded once: what was measured of accuracy on CPUs does not hold on GPUs. Overflow does not depend on that: at 2,048
ranks any part of a sum is at most 32 times the largest gradient, and inf and nan survive every order of additions.
"""

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

# No `from __future__ import annotations` in this file: DistributedDataParallel compares the hook's annotations with the
# classes themselves and refuses strings.

WIRE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class HookState:
    """The state of the hook: an engine, and the dtype in which sums travel.

    `scatter`: where ranks share the update, it may average a bucket in its own way; None: `average_bucket` does.
    `comm_dtype`: None sums in the bucket's own dtype, without a copy; else float32, float16 or bfloat16.
    `parameters`: of the module, in its order, by which a codec numbers its blocks; without them, in the order of the
    first buckets.

    Raises:
        ValueError: for another dtype.
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
                f"`comm_dtype` (={comm_dtype}) must be None or one of float32, float16, bfloat16: gradients are summed "
                "in it. Leave `comm.dtype` unset to sum them as they are."
            )
        self.engine: CommEngine | None = engine
        self.comm_dtype = comm_dtype
        self.scatter = scatter
        self.blocks = BlockNumbers(parameters)
        self.feedback = self._new_feedback()
        self.num_buckets = 0  # that DDP has handed over
        self._padded: dict[
            int, tuple[list[int], PaddedBucket]
        ] = {}  # by index of the bucket, with what it is made for

    def _new_feedback(self) -> ErrorFeedback | None:
        engine = self.engine
        if engine is None or engine.coder is None or not engine.coder.codec.error_feedback:
            return None

        def add_up_(values: Tensor) -> None:
            engine.submit(values, bucket_index=0, exchange="node_sum").wait()

        topology = engine.topology
        return ErrorFeedback(
            self.blocks.num_blocks,
            device=engine.device,
            add_up_=add_up_ if max(map(len, topology.nodes)) > 1 else None,
            is_leader=topology.rank == topology.leader,
        )

    def padded(self, bucket: dist.GradBucket) -> PaddedBucket:
        """Return the memory in which a codec carries this bucket."""
        parameters = bucket.parameters()
        made_for = [id(parameter) for parameter in parameters]
        if (padded := self._padded.get(bucket.index())) is None or padded[
            0
        ] != made_for:  # DDP makes its buckets again
            numels = [num_reals(parameter) for parameter in parameters]
            firsts = [self.blocks.first_of(parameter) for parameter in parameters]
            dtype = self.comm_dtype or bucket.buffer().dtype
            device = bucket.buffer().device
            padded = made_for, PaddedBucket(numels, firsts, dtype=dtype, device=device)
            self._padded[bucket.index()] = padded
        return padded[1]

    def __getstate__(self) -> dict:
        # Threads and process groups cannot be pickled. DDP does not register hooks again after unpickling, so the
        # caller must do it, with a state that has an engine.
        return {
            "engine": None,
            "comm_dtype": self.comm_dtype,
            "scatter": None,
            "feedback": None,
            "num_buckets": 0,
        }


def engine_and_buffer(state: HookState, bucket: dist.GradBucket) -> tuple[CommEngine, Tensor]:
    """Return the engine that carries a bucket, and the bucket's flat tensor.

    Raises:
        TypeError: for sparse gradients.
        RuntimeError: if the state has no engine.
    """
    engine = state.engine
    buffer = bucket.buffer()
    if engine is None:
        raise RuntimeError(
            "this hook state was unpickled and has no engine: register the hook again, with a state built from one"
        )
    state.num_buckets += 1
    if buffer.layout != torch.strided or not buffer.is_floating_point():
        raise TypeError(
            f"bucket {bucket.index()} (of layout {buffer.layout}, {buffer.dtype}) must be dense and real: this "
            "strategy cannot average sparse gradients. Use `sparse=False` in embeddings, or plain `ddp`."
        )
    if bucket.is_last():
        # Buckets come in order: all gradients of this rank are ready.
        engine.trace.enter(Phase.WAIT)
    return engine, buffer


def average_bucket(state: HookState, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average a bucket over all ranks, in place, in the background. For `register_comm_hook(state, average_bucket)`.

        bucket = (sum over ranks of bucket / before) / after         before * after = world_size

    Collective: every rank must call it, in the same bucket order; DistributedDataParallel does. In place: the future
    holds `bucket.buffer()`. Afterwards all ranks hold the same bits. Complex gradients arrive as pairs of reals.

    Raises:
        TypeError: for sparse gradients.
        RuntimeError: if the engine has failed or is closed.
    """
    # On a CPU the precision's `TorchFunctionMode` is on around backward, and would take each call of torch made here.
    with torch._C.DisableTorchFunction():
        return _average(state, bucket)


def _average(state: HookState, bucket: dist.GradBucket) -> Future[Tensor]:
    engine, buffer = engine_and_buffer(state, bucket)
    if state.scatter is not None and (future := state.scatter(bucket)) is not None:
        return future
    # The divisor is split where fp16 occurs anywhere on the way: that between nodes may be narrower than the wire's.
    dtypes = (state.comm_dtype or buffer.dtype, engine.dtype_across_nodes)
    before, after = split_divisor(engine.num_terms, is_fp16=torch.float16 in dtypes)
    if engine.coder is not None:
        padded = state.padded(bucket)
        wire = padded.load(buffer, before=before)
        return engine.submit(
            wire,
            bucket_index=bucket.index(),
            is_last=bucket.is_last(),
            finish=partial(padded.store, buffer=buffer, after=after),
            block_ids=padded.ids,
            feedback=None
            if state.feedback is None
            else feedback_of(state.feedback, engine, bucket, padded, wire, before),
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
    """Return the residuals of a bucket. Collective in a node where others encode its blocks than before."""
    plan = engine.planned(bucket.index(), wire.numel(), wire.dtype)
    cut = plan.algorithm, plan.num_chunks
    return feedback.bucket(
        bucket.index(), padded, cut=cut, divisor=before, is_last=bucket.is_last()
    )


def split_divisor(world_size: int, *, is_fp16: bool) -> tuple[int, float]:
    """Split `world_size` into (a power of two near its square root) times (the rest), or into 1 times all of it."""
    if not is_fp16:
        return 1, float(world_size)
    # A power of two divides exactly. Near the square root, so neither sums overflow nor small gradients vanish.
    before = 1 << (world_size.bit_length() // 2)
    return before, world_size / before


def to_wire(buffer: Tensor, comm_dtype: torch.dtype | None, *, before: int) -> Tensor:
    """Return `buffer / before` in the wire's dtype: `buffer` itself, changed, where that is its own, else a new tensor.

    Exact but for what the wire's dtype cannot hold: the division happens in the wider of both dtypes.

    >>> to_wire(torch.tensor([6e-8], dtype=torch.float16), torch.float32, before=4)   # a subnormal survives
    tensor([1.4901e-08])
    """
    if comm_dtype is None or comm_dtype == buffer.dtype:
        return buffer.div_(before) if before > 1 else buffer
    if comm_dtype.itemsize > buffer.dtype.itemsize:
        # First to the wider dtype, then divide: dividing in fp16 would lose bits of subnormal gradients.
        wire = buffer.to(comm_dtype)
        return wire.div_(before) if before > 1 else wire
    return torch.div(buffer, before, out=torch.empty_like(buffer, dtype=comm_dtype))


def from_wire(wire: Tensor, *, buffer: Tensor, after: float) -> Tensor:
    """Write `wire / after` into `buffer`, rounded once: the division happens in the wider of both dtypes."""
    if wire is not buffer and wire.dtype.itemsize > buffer.dtype.itemsize:
        return buffer.copy_(wire.div_(after))
    if wire is not buffer:
        buffer.copy_(wire)
    return buffer.div_(after) if after != 1 else buffer
