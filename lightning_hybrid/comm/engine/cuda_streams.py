"""Execution of all-reduce stages on CUDA streams, for all algorithms except torch's own all-reduce.

These are hierarchical algorithms, codecs, Adasum and sharded updates.

    network    [ring 0]    [ring 1]    [ring 2]
    node   [reduce 0] [reduce 1] [broadcast 0] [reduce 2] [broadcast 1] [broadcast 2]

Communication inside the node and communication between nodes have separate streams, so that one chunk can be broadcast
inside the node while the next chunk is on the network. Both streams have high priority, because otherwise the few
blocks of NCCL's kernels would queue behind the thousands of blocks of backward. Reads and writes are ordered by events:

    ready    recorded where the hook runs         The stream of the first stage waits for it.
    end      after every stage of every chunk     The stream of the next stage waits for it, if it is the other stream.
    done     after the last stage and `finish`    The future's own event follows it.

Testing that NCCL runs the kernels of both streams at the same time, and that aborting its communicators ends them,
would require a machine with two GPUs. Everything else is tested with mock streams, events and communicators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.futures import Future

from lightning_hybrid.comm.engine.cuda_events import BucketEvents, StageEvents, new_event
from lightning_hybrid.comm.engine.in_flight import Chunk
from lightning_hybrid.comm.engine.process_groups import CommGroups
from lightning_hybrid.comm.engine.stages import run_stage, stages_by_name

HIGH_PRIORITY = -1


class CudaStreams:
    """Pair of CUDA streams for the all-reduce stages inside the node and between nodes.

    Args:
        device: CUDA device.
        groups: Process groups of the stages.
        keep_events: Whether to record the beginning of each stage, for a timeline.
    """

    def __init__(self, device: torch.device, groups: CommGroups, *, keep_events: bool) -> None:
        self._device = device
        self._groups = groups
        self._keep_events = keep_events
        self._network = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
        self._node = torch.cuda.Stream(device, priority=HIGH_PRIORITY)

    def put(self, events: BucketEvents) -> Future[Tensor]:
        """Enqueue all stages of a bucket on the streams, and return a future for the averaged bucket.

        The future holds a CUDA event. Threads that wait for the future make their streams wait for the event.
        """
        bucket = events.bucket
        flat = events.bucket.flat
        stages = stages_by_name(bucket.plan.algorithm)
        streams = []
        for stage in stages:
            if stage.scope == "node":
                streams.append(self._node)
            else:
                streams.append(self._network)
        streams[0].wait_event(events.ready)
        # The allocator must not reuse the memory before the last stream, which waits for the other stream, is done.
        flat.record_stream(streams[-1])
        ends: dict[Chunk, torch.cuda.Event] = {}
        for chunk, index in _in_order(bucket.chunks, streams):
            stage = stages[index]
            stream = streams[index]
            group = self._groups.by_stage[stages[index].name]
            bucket.stage = stage.name
            # Events cost the host some time, so the beginning of a stage is recorded only for a timeline.
            begin = None
            if self._keep_events:
                begin = new_event()
            end = new_event()
            if index and stream is not streams[index - 1]:
                # The stream waits only now, because it has run another chunk's stage in the meantime.
                stream.wait_event(ends[chunk])
            with torch.cuda.stream(stream):
                if begin is not None:
                    begin.record(stream)
                run_stage(stage, chunk.job, group)
                end.record(stream)
            ends[chunk] = end
            if group is not None:
                events.stages.append(
                    StageEvents(
                        chunk=chunk,
                        name=stage.name,
                        num_bytes=chunk.num_bytes,
                        begin=begin,
                        end=end,
                    )
                )
        bucket.stage = "finish"
        with torch.cuda.stream(streams[-1]):
            result = bucket.finish(flat)
            result.record_stream(streams[-1])
            events.record_done(streams[-1])
            future: Future[Tensor] = Future(devices=[self._device])
            # This records an event on the current stream. The streams of threads that wait for the future wait for the
            # event.
            future.set_result(result)
        return future


def _in_order(chunks: Sequence[Chunk], streams: Sequence[object]) -> Iterator[tuple[Chunk, int]]:
    """Yield (chunk, stage index) pairs in the order in which they are enqueued on the streams.

    If a chunk returns to a stream, the earlier stages of the next chunk come first. For example, the reduce of chunk b
    precedes the broadcast of chunk a on the node's stream, because the broadcast has to wait for the network.

    >>> [(chunk, index) for chunk, index in _in_order("ab", ["node", "network", "node"])]
    [('a', 0), ('a', 1), ('b', 0), ('b', 1), ('a', 2), ('b', 2)]
    >>> [(chunk, index) for chunk, index in _in_order("ab", ["network"])]
    [('a', 0), ('b', 0)]
    """
    # Stages that return to a stream run one slot later than the other stages of their chunk.
    is_back = [stream in streams[:index] for index, stream in enumerate(streams)]
    for slot in range(len(chunks) + 1):
        for index, late in enumerate(is_back):
            if 0 <= slot - late < len(chunks):
                yield chunks[slot - late], index
