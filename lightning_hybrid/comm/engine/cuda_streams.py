"""The stages of what was asked for by name on CUDA: hierarchies, codecs, Adasum, a shared update.

    network    [ring 0]    [ring 1]    [ring 2]
    node   [reduce 0] [reduce 1] [broadcast 0] [reduce 2] [broadcast 1] [broadcast 2]

What stays in the node has a stream, and so has what leaves it; chunks follow each other: one comes back into the node
while the next one is on the network. Both streams have high priority, as the few blocks of NCCL's kernels would else
queue behind thousands of backward's. Events alone order what is written and read:

    ready    recorded where the hook runs         the first stage's stream waits: the gradients are there
    end      of every stage of every chunk        the next stage's stream waits, where it is another one
    done     after the last, and `finish`         the future's own event follows it: who waits for it waits for all

What only two GPUs can show: that NCCL runs both streams' kernels at the same time, and that aborting its communicators
ends them. All else is tested with streams, events and communicators that only record what is asked of them.
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
    """The two streams of an engine, on which `put` runs a bucket's stages. `keep_events` records the begin of each."""

    def __init__(self, device: torch.device, groups: CommGroups, *, keep_events: bool) -> None:
        self._device = device
        self._groups = groups
        self._keep_events = keep_events
        self._network, self._node = (
            torch.cuda.Stream(device, priority=HIGH_PRIORITY) for _ in range(2)
        )

    def put(self, events: BucketEvents) -> Future[Tensor]:
        """Put all stages of a bucket on the streams. The future carries a CUDA event."""
        bucket = events.bucket
        flat = events.bucket.flat
        stages = stages_by_name(bucket.plan.algorithm)
        streams = [self._node if stage.scope == "node" else self._network for stage in stages]
        streams[0].wait_event(events.ready)
        flat.record_stream(
            streams[-1]
        )  # the allocator must not give it away before: that stream waits for the others
        ends: dict[Chunk, torch.cuda.Event] = {}
        for chunk, index in _in_order(bucket.chunks, streams):
            stage = stages[index]
            stream = streams[index]
            group = self._groups.by_stage[stages[index].name]
            bucket.stage = stage.name
            # An event costs the host some time: the begin of a stage is wanted for a timeline only.
            begin = new_event() if self._keep_events else None
            end = new_event()
            if index and stream is not streams[index - 1]:
                stream.wait_event(
                    ends[chunk]
                )  # now, and not before: another chunk's stage is between
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
            future.set_result(
                result
            )  # records an event on this stream; who waits makes its own stream wait for it
        return future


def _in_order(chunks: Sequence[Chunk], streams: Sequence[object]) -> Iterator[tuple[Chunk, int]]:
    """Yield chunks and indices of their stages in the order of issue.

    A stage that comes back to a stream lets the next chunk's earlier stages go first: in issue order, the reduce of
    chunk b is on the node's stream before the broadcast of chunk a, which waits for the network.

    >>> [(chunk, index) for chunk, index in _in_order("ab", ["node", "network", "node"])]
    [('a', 0), ('a', 1), ('b', 0), ('b', 1), ('a', 2), ('b', 2)]
    >>> [(chunk, index) for chunk, index in _in_order("ab", ["network"])]
    [('a', 0), ('b', 0)]
    """
    # A slot is the time of one chunk: the stages that come back to a stream run one slot later.
    is_back = [stream in streams[:index] for index, stream in enumerate(streams)]
    for slot in range(len(chunks) + 1):
        for index, late in enumerate(is_back):
            if 0 <= slot - late < len(chunks):
                yield chunks[slot - late], index
