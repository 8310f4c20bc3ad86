"""A GPU's streams on a CPU: nothing runs, but who must wait for whom is known, and who did not is told.

    with streams() as gpu:                              torch.cuda's streams and events are stand-ins; tensors are fake
        batch = torch.ones(3).to("cuda", non_blocking=True)
        ...                                             the code under test
        gpu.host_reads(copy)                            what the host does with memory by other means than torch's
    assert gpu.races == []

The host and every stream have a clock each, and know of the others' clocks what an event told them (vector clocks):

    an operation on a stream         knows what the host knew when it enqueued it, and is one tick of its stream
    `event.record`, `event.wait`     the waiting stream learns what the recording one knew
    `synchronize`, reads, copies     the host learns; copies with `non_blocking=True` teach it nothing

A race: memory is read that another stream (or the host) wrote, or is written that another reads or wrote, and nothing
tells that this was before. And: memory is given back, which another stream than the one that it was allocated on used
last; its allocator may hand it out again at once, unless `record_stream` told of the other one.

Operations on views of one memory count as on all of it. What the host does to memory of CPU tensors in torch is seen.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BLOCKING = frozenset({torch.ops.aten.copy_, torch.ops.aten._to_copy})
Clock = Counter  # ticks of each timeline, by its name


@dataclass
class Memory:
    """Who wrote it last, and who has read it since: timeline and tick. `owner`: where it was allocated."""

    reference: StorageWeakRef
    owner: str
    written: tuple[str, int]
    read: dict[str, int] = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)

    def uses(self) -> dict[str, int]:
        return self.read | {self.written[0]: max(self.written[1], self.read.get(self.written[0], 0))}


class Gpu(TorchDispatchMode):
    """Clocks, memories and the races that were found."""

    def __init__(self) -> None:
        super().__init__()
        self.clocks: dict[str, Clock] = {"host": Clock(), "default": Clock()}
        self.memories: dict[int, Memory] = {}
        self.current = "default"
        self.races: list[str] = []
        self.num_streams = 0

    # ---- clocks ----------------------------------------------------------------------------------------------------

    def new_stream(self) -> str:
        self.num_streams += 1
        name = f"stream {self.num_streams}"
        self.clocks[name] = Clock()
        return name

    def learn(self, who: str, told: Clock) -> None:
        self.sweep()
        self.clocks[who] |= told  # the larger of each

    def knows(self, who: str, of: str, tick: int) -> bool:
        return who == of or self.clocks[who][of] >= tick

    def _tick(self, who: str) -> int:
        self.clocks[who] |= self.clocks["host"]  # what is enqueued comes after all that the host knows
        self.clocks[who][who] += 1
        return self.clocks[who][who]

    # ---- memory ----------------------------------------------------------------------------------------------------

    def read(self, tensor: Tensor, who: str, tick: int) -> None:
        memory = self._memory(tensor, who, tick)
        self._check(memory, who, "reads", {memory.written[0]: memory.written[1]})
        memory.read[who] = tick

    def write(self, tensor: Tensor, who: str, tick: int) -> None:
        memory = self._memory(tensor, who, tick)
        self._check(memory, who, "writes", memory.uses())
        memory.written, memory.read = (who, tick), {}

    def _memory(self, tensor: Tensor, who: str, tick: int) -> Memory:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.memories:
            self.memories[storage._cdata] = Memory(StorageWeakRef(storage), who, (who, tick))
        return self.memories[storage._cdata]

    def _check(self, memory: Memory, who: str, does: str, used: dict[str, int]) -> None:
        for other, tick in used.items():
            if not self.knows(who, other, tick):
                self._tell(f"{who} {does} memory that {other} may still be at")

    def sweep(self) -> None:
        """What is no longer held is given back to the stream that it was allocated on."""
        for key, memory in list(self.memories.items()):
            if memory.reference.expired():
                del self.memories[key]
                for user, tick in memory.uses().items():
                    is_safe = memory.owner == "host" or user in memory.recorded or user == "host"
                    if not is_safe and not self.knows(memory.owner, user, tick):
                        self._tell(f"memory of {memory.owner} is given back while {user} may still be at it")

    def _tell(self, what: str) -> None:
        frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
        self.races.append(f"{what} ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})")

    def host_reads(self, tensor: Tensor) -> None:
        """By other means than torch's operations, such as a file that is written."""
        self.read(tensor, "host", self._tick("host"))

    def host_writes(self, tensor: Tensor) -> None:
        """As a loader that fills its buffer again."""
        self.write(tensor, "host", self._tick("host"))

    # ---- operations ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.sweep()
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given, made = _tensors((args, kwargs)), _tensors(result)
        written = [
            each
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for each in _tensors(value)
        ]
        of_given = {each.untyped_storage()._cdata for each in given}
        fresh = [each for each in made if each.untyped_storage()._cdata not in of_given]
        if not fresh and not written and made:
            return result  # a view
        is_device = any(each.device.type == "cuda" for each in (*given, *made))
        who = self.current if is_device else "host"
        tick = self._tick(who)
        for each in given:
            if not any(each is one for one in written):
                self.read(each, who, tick)
        for each in (*written, *fresh):
            self.write(each, who, tick)
        crosses = len({each.device.type for each in (*given, *made)}) > 1
        if is_device and crosses and func.overloadpacket in BLOCKING and not _is_non_blocking(func, args, kwargs):
            self.learn("host", self.clocks[who])
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def getitem(tensor: Tensor, index: Any) -> Tensor:
    """`tensor[begin:end]`, which torch's own does not do for "cuda" where it was built without."""
    if isinstance(index, slice) and tensor.device.type == "cuda":
        begin, end, _ = index.indices(tensor.shape[0])
        assert index.step is None
        return tensor.narrow(0, begin, max(0, end - begin))
    return _GETITEM(tensor, index)


_GETITEM = Tensor.__getitem__


def _is_non_blocking(func: Any, args: Any, kwargs: Any) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("non_blocking", False))


@contextlib.contextmanager
def streams() -> Iterator[Gpu]:
    """Fake tensors, on "cuda" too, and streams and events that keep clocks."""
    gpu = Gpu()

    class Stream:
        def __init__(self, device: Any = None, priority: int = 0, *, name: str | None = None) -> None:
            self.name, self.device, self.priority = name or gpu.new_stream(), device, priority

        def wait_stream(self, other: Stream) -> None:
            gpu.learn(self.name, gpu.clocks[other.name])

        def wait_event(self, event: Event) -> None:
            event.wait(self)

        def record_event(self, event: Event | None = None) -> Event:
            event = Event() if event is None else event
            event.record(self)
            return event

        def synchronize(self) -> None:
            gpu.learn("host", gpu.clocks[self.name])

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.name == self.name

        def __hash__(self) -> int:
            return hash(self.name)

        @contextlib.contextmanager
        def _as_current(self) -> Iterator[None]:
            before, gpu.current = gpu.current, self.name
            try:
                yield
            finally:
                gpu.current = before

    class Event:
        def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
            self.told: Clock | None = None

        def record(self, stream: Stream | None = None) -> None:
            name = gpu.current if stream is None else stream.name
            gpu.clocks[name] |= gpu.clocks["host"]
            self.told = gpu.clocks[name].copy()

        def wait(self, stream: Stream | None = None) -> None:
            if self.told is not None:  # what was never recorded holds nobody
                gpu.learn(gpu.current if stream is None else stream.name, self.told)

        def synchronize(self) -> None:
            if self.told is not None:
                gpu.learn("host", self.told)

        def query(self) -> bool:
            """Not yet: whoever asks and goes on without must be right."""
            return self.told is None

    def record_stream(tensor: Tensor, stream: Stream) -> None:
        gpu._memory(tensor, gpu.current, gpu.clocks[gpu.current][gpu.current]).recorded.add(stream.name)

    def synchronize(device: Any = None) -> None:
        for name in list(gpu.clocks):
            gpu.learn("host", gpu.clocks[name])

    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True), gpu:
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "stream", lambda stream: stream._as_current())
        patch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(device, name=gpu.current))
        patch.setattr(torch.cuda, "default_stream", lambda device=None: Stream(device, name="default"))
        patch.setattr(torch.cuda, "synchronize", synchronize)
        patch.setattr(Tensor, "record_stream", record_stream)
        patch.setattr(Tensor, "__getitem__", getitem)
        yield gpu
        gpu.sweep()
